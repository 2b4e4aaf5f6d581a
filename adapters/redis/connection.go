package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/internal/oldest"
	"github.com/windlass-dev/windlass/internal/tlsfile"
)

// ConnectionConfig says how to reach Redis.
type ConnectionConfig struct {
	// Address is host:port; several, separated by commas, are nodes of a Cluster, or Sentinels if Master is set.
	Address string `yaml:"address"`
	// Master is the name by which Sentinels know the server.
	Master string `yaml:"master"`
	// Cluster says that a single address is a node of a Cluster.
	Cluster bool `yaml:"cluster"`
	// Database is the number of the database. A Cluster has only 0.
	Database int `yaml:"database"`
	// Username is that of an ACL user; PasswordFile holds the password, and is read again at every connection.
	Username     string        `yaml:"username"`
	PasswordFile string        `yaml:"passwordFile"`
	TLS          tlsfile.Files `yaml:"tls"`
	// Scope is the name of the connection.
	Scope string `yaml:"-"`
	// Logger is told what goes wrong. Nil is nowhere.
	Logger *slog.Logger `yaml:"-"`
}

// Validate returns everything that is wrong with the configuration; files are looked at when connecting.
func (c ConnectionConfig) Validate() error {
	errs := []error{c.TLS.Validate()}
	if c.Address == "" {
		errs = append(errs, errors.New("address: it is required, such as 127.0.0.1:6379"))
	}
	for _, a := range c.addresses() {
		if _, port, err := net.SplitHostPort(a); c.Address != "" && (err != nil || port == "") {
			errs = append(errs, fmt.Errorf("address: %q is not a host and a port, such as 127.0.0.1:6379; user and password do not belong here", redacted(a)))
		}
	}
	if c.Master != "" && c.Cluster {
		errs = append(errs, errors.New("master and cluster: Sentinel watches a single master, a Cluster has several; choose one"))
	}
	if c.Database < 0 {
		errs = append(errs, fmt.Errorf("database: %d is not a number of a database", c.Database))
	}
	if c.Database != 0 && c.cluster() {
		errs = append(errs, errors.New("database: a Cluster has only 0"))
	}
	return errors.Join(errs...)
}

// redacted hides what stands where a password would.
func redacted(address string) string {
	if _, host, ok := strings.Cut(address, "@"); ok {
		return "…@" + host
	}
	return address
}

func (c ConnectionConfig) addresses() []string {
	parts := strings.Split(c.Address, ",")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

func (c ConnectionConfig) cluster() bool {
	return c.Cluster || c.Master == "" && len(c.addresses()) > 1
}

// Connection is a pool of connections to Redis.
type Connection struct {
	scope   string
	address string
	client  goredis.UniversalClient
	single  bool // one server, that nothing replaces
	log     *slog.Logger
}

// oldestServer is the first version that has all that is used here.
const oldestServer = "6.2"

// Connect connects, and fails if no server answers, or one that is too old or may drop what it has accepted.
func Connect(ctx context.Context, cfg ConnectionConfig) (*Connection, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("connect to Redis: %w", err)
	}
	c := &Connection{scope: cfg.Scope, address: cfg.Address, log: cfg.Logger, single: cfg.Master == "" && !cfg.cluster()}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.log = c.log.With("connection", cfg.Scope)
	opts, err := cfg.options()
	if err != nil {
		return nil, fmt.Errorf("connect to Redis at %s: %w", cfg.Address, err)
	}
	c.client = goredis.NewUniversalClient(opts)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.inspect(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to Redis at %s: %w", cfg.Address, err)
	}
	return c, nil
}

func (c ConnectionConfig) options() (*goredis.UniversalOptions, error) {
	opts := &goredis.UniversalOptions{
		Addrs: c.addresses(), MasterName: c.Master, IsClusterMode: c.cluster(), DB: c.Database, ClientName: "windlass",
		ContextTimeoutEnabled: true, // or a deadline would not end a call
		MaxRetries:            1,    // for a pooled connection that has died since; all else is retried by who knows what it means
		DialTimeout:           requestTimeout, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		DisableIdentity: true,
	}
	if c.PasswordFile != "" {
		if _, err := os.Stat(c.PasswordFile); err != nil {
			return nil, fmt.Errorf("passwordFile: %w", err)
		}
	}
	if c.Username != "" || c.PasswordFile != "" {
		opts.CredentialsProvider = func() (username, password string) {
			if c.PasswordFile == "" {
				return c.Username, ""
			}
			b, _ := os.ReadFile(c.PasswordFile) // a file that has gone is answered by the server's refusal
			return c.Username, strings.TrimSpace(string(b))
		}
	}
	if c.TLS != (tlsfile.Files{}) {
		t, err := c.TLS.Config()
		if err != nil {
			return nil, err
		}
		opts.TLSConfig = t
	}
	return opts, nil
}

// inspect looks at what there is.
func (c *Connection) inspect(ctx context.Context) error {
	text, err := c.client.Info(ctx).Result()
	if err != nil {
		return fmt.Errorf("%w: %s", err, advice(err))
	}
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	if err := oldest.Check(info["redis_version"], oldestServer); err != nil {
		return err
	}
	if policy := info["maxmemory_policy"]; info["maxmemory"] != "0" && strings.HasPrefix(policy, "allkeys-") {
		return fmt.Errorf("maxmemory-policy is %s: when its memory is full, it would drop requests without a word; set it to noeviction", policy)
	}
	if info["aof_enabled"] == "0" {
		c.log.Warn("Redis writes no log of what it accepts (appendonly is off): what waits may be lost when it restarts")
	}
	return nil
}

// advice says what to do about a connection that cannot be made.
func advice(err error) string {
	var network *net.OpError
	switch text := err.Error(); {
	case strings.HasPrefix(text, "NOAUTH"), strings.HasPrefix(text, "WRONGPASS"):
		return "the server refuses the credentials; check username and passwordFile"
	case strings.HasPrefix(text, "NOPERM"):
		return "the user may not do that; see the documentation for the commands and keys that are needed"
	case strings.Contains(text, "cluster support disabled"):
		return "it is not a Cluster; give one address, without cluster"
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded):
		return "no server answers there; check the address and that it is running"
	default:
		return "check address, tls and the credentials"
	}
}

// Scope is the name of the connection.
func (c *Connection) Scope() string { return c.scope }

// Close ends the connections.
func (c *Connection) Close() { _ = c.client.Close() } // there is nothing left to lose

// LogTo makes the client library, which has one logger for the whole process, log there, as debug: what matters of it is told by
// the connections. It is for programs; a library had better leave it alone.
func LogTo(log *slog.Logger) { goredis.SetLogger(clientLog{log}) }

type clientLog struct{ log *slog.Logger }

// Printf implements the client library's logger.
func (c clientLog) Printf(ctx context.Context, format string, v ...any) {
	c.log.DebugContext(ctx, "the Redis client says", "text", fmt.Sprintf(format, v...))
}
