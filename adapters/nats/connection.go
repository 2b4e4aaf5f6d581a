package nats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/internal/oldest"
	"github.com/windlass-dev/windlass/internal/tlsfile"
)

// ConnectionConfig says how to reach a NATS server.
type ConnectionConfig struct {
	// URL is one address or several, separated by commas.
	URL string `yaml:"url"`
	// CredsFile holds a user's JWT and seed, TokenFile a token. At most one of them.
	CredsFile string `yaml:"credsFile"`
	TokenFile string `yaml:"tokenFile"`
	TLS       TLS    `yaml:"tls"`
	// Scope is the name of the connection, part of every key that is read or written through it.
	Scope string `yaml:"-"`
	// Logger is told of disconnections and returns. Nil is nowhere.
	Logger *slog.Logger `yaml:"-"`
}

// TLS are the files of a TLS connection.
type TLS = tlsfile.Files

// Validate returns everything that is wrong with the configuration; files are looked at when connecting.
func (c ConnectionConfig) Validate() error {
	var errs []error
	if c.URL == "" {
		errs = append(errs, errors.New("url: it is required, such as nats://127.0.0.1:4222"))
	}
	for u := range strings.SplitSeq(c.URL, ",") {
		if parsed, err := url.Parse(strings.TrimSpace(u)); c.URL != "" && (err != nil || parsed.Host == "") {
			errs = append(errs, fmt.Errorf("url: %q is not an address such as nats://127.0.0.1:4222", redacted(u)))
		}
	}
	if c.CredsFile != "" && c.TokenFile != "" {
		errs = append(errs, errors.New("credsFile and tokenFile: only one of them can be used"))
	}
	return errors.Join(append(errs, c.TLS.Validate())...)
}

// redacted prints addresses without their passwords.
func redacted(addresses string) string {
	parts := strings.Split(addresses, ",")
	for i, p := range parts {
		if u, err := url.Parse(strings.TrimSpace(p)); err == nil {
			parts[i] = u.Redacted()
		} else {
			parts[i] = "(unreadable address)"
		}
	}
	return strings.Join(parts, ",")
}

// Connection is a connection to a NATS server with JetStream. It reconnects without limit.
type Connection struct {
	scope string
	url   string
	nc    *natsgo.Conn
	js    jetstream.JetStream
	log   *slog.Logger
	// answers are to what is published.
	answers *answers

	// again makes another connection of the same kind; beside are those that were made.
	again  func(ctx context.Context) (*Connection, error)
	beside []*Connection

	// session is the lifetime of the present TCP session, which nothing else names.
	mu      sync.Mutex
	session context.Context
	ended   context.CancelFunc
	base    context.Context
}

// Connect connects, and fails if no server answers or it has no JetStream.
func Connect(ctx context.Context, cfg ConnectionConfig) (*Connection, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	opts, err := cfg.options()
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", redacted(cfg.URL), err)
	}
	return connect(ctx, cfg, redacted(cfg.URL), opts)
}

func (c ConnectionConfig) options() ([]natsgo.Option, error) {
	var opts []natsgo.Option
	if c.CredsFile != "" {
		if _, err := os.Stat(c.CredsFile); err != nil {
			return nil, fmt.Errorf("credsFile: %w", err)
		}
		opts = append(opts, natsgo.UserCredentials(c.CredsFile))
	}
	if c.TokenFile != "" {
		if _, err := os.Stat(c.TokenFile); err != nil {
			return nil, fmt.Errorf("tokenFile: %w", err)
		}
		// Read at every connection, so that a rotated token is picked up.
		opts = append(opts, natsgo.TokenHandler(func() string {
			b, _ := os.ReadFile(c.TokenFile) // a file that has gone is answered by the server's refusal
			return strings.TrimSpace(string(b))
		}))
	}
	if c.TLS != (TLS{}) {
		t, err := c.TLS.Config()
		if err != nil {
			return nil, err
		}
		opts = append(opts, natsgo.Secure(t))
	}
	return opts, nil
}

// oldestServer is the first version whose streams let messages end by themselves, as memberships and leases do.
const oldestServer = "2.11"

func connect(ctx context.Context, cfg ConnectionConfig, shown string, opts []natsgo.Option) (*Connection, error) {
	c := &Connection{scope: cfg.Scope, url: shown, log: cfg.Logger}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.log = c.log.With("connection", cfg.Scope)
	c.base = context.WithoutCancel(ctx)
	c.session, c.ended = context.WithCancel(c.base)
	quiet, same := cfg, slices.Clip(opts)
	quiet.Logger = nil // this one tells of the link
	c.again = func(ctx context.Context) (*Connection, error) { return connect(ctx, quiet, shown, same) }
	opts = append(same,
		natsgo.Name("windlass"),
		natsgo.MaxReconnects(-1),
		natsgo.ReconnectWait(250*time.Millisecond),
		natsgo.ReconnectBufSize(-1), // what is written while there is no connection must not arrive when the writer is fenced
		natsgo.ReconnectJitter(100*time.Millisecond, time.Second),
		natsgo.Timeout(5*time.Second),
		natsgo.PingInterval(10*time.Second),
		natsgo.DisconnectErrHandler(func(_ *natsgo.Conn, err error) {
			if err != nil {
				c.log.Warn("connection to NATS lost; reconnecting", "err", err)
			}
			c.renewSession()
		}),
		natsgo.ReconnectHandler(func(*natsgo.Conn) {
			c.log.Info("connected to NATS again")
			c.renewSession()
		}),
		natsgo.ErrorHandler(func(_ *natsgo.Conn, _ *natsgo.Subscription, err error) {
			c.log.Warn("NATS reports", "err", err)
		}),
	)
	nc, err := natsgo.Connect(cfg.URL, opts...)
	if err != nil {
		c.ended()
		return nil, connectError(shown, err)
	}
	c.nc = nc
	if c.answers, err = newAnswers(nc); err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to NATS at %s: %w", shown, err)
	}
	if err := oldest.Check(nc.ConnectedServerVersion(), oldestServer); err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to NATS at %s: %w", shown, err)
	}
	if c.js, err = jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(4000)); err == nil {
		probe, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = c.js.AccountInfo(probe)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to NATS at %s: JetStream does not answer: %w: enable it in the server and for the account", shown, err)
	}
	return c, nil
}

// renewSession ends what waits on the server since before a disconnection: a pull that the server has forgotten would
// wait for its heartbeat.
func (c *Connection) renewSession() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended()
	c.session, c.ended = context.WithCancel(c.base)
}

// during returns a context that ends with ctx and with the present session. It has no deadline, whatever ctx has: a
// fetch must not be shorter than its heartbeat.
func (c *Connection) during(ctx context.Context) (context.Context, context.CancelFunc) {
	c.mu.Lock()
	session := c.session
	c.mu.Unlock()
	either, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stopCtx, stopSession := context.AfterFunc(ctx, cancel), context.AfterFunc(session, cancel)
	return either, func() { stopCtx(); stopSession(); cancel() }
}

// requestTimeout is how long the server may take to answer.
const requestTimeout = 5 * time.Second

// errNoAnswer says that a request may have been heard, or not.
var errNoAnswer = errors.New("NATS did not answer")

// ask makes a request of the server. An answer is lost with the connection that it would have come on, and the client would
// wait for it all the same, as long as ctx lasts.
func ask[T any](ctx context.Context, c *Connection, request func(ctx context.Context) (T, error)) (T, error) {
	session, cancel := c.during(ctx)
	defer cancel()
	session, stop := context.WithTimeout(session, requestTimeout)
	defer stop()
	answer, err := request(session)
	if err != nil && session.Err() != nil && ctx.Err() == nil {
		return answer, errNoAnswer // and not that a context has ended, for the caller's has not
	}
	return answer, err
}

// last returns the newest message of a subject, and ErrNotFound if there is none.
func (c *Connection) last(ctx context.Context, stream jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	m, err := ask(ctx, c, func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return stream.GetLastMsgForSubject(ctx, subject)
	})
	return m, understood(err)
}

// readAtLeader makes reads of a replicated stream go to its leader. Any of its servers answers a direct one, also one that has just come back and
// knows only what was: what a key was changed to would not be seen, and nobody would look again. Call it before the stream is shared.
func readAtLeader(s jetstream.Stream) jetstream.Stream {
	if cfg := &s.CachedInfo().Config; cfg.Replicas > 1 {
		cfg.AllowDirect = false // to this client; the stream is as it was
	}
	return s
}

// Scope is the name of the connection.
func (c *Connection) Scope() string { return c.scope }

// Conn returns the client's own connection.
func (c *Connection) Conn() *natsgo.Conn { return c.nc }

// Connected says whether the server is reachable now.
func (c *Connection) Connected() bool { return c.nc.IsConnected() }

// Close ends the connection.
func (c *Connection) Close() {
	c.nc.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended()
	for _, b := range c.beside {
		b.Close()
	}
}

// another opens a second connection, which is closed with this one at the latest: what must not wait behind the rest goes
// through it.
func (c *Connection) another(ctx context.Context) (*Connection, error) {
	b, err := c.again(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.beside = append(c.beside, b)
	return b, nil
}
