package consul

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/tlsfile"
)

// ConnectionConfig says how to reach Consul. What is left out comes from the CONSUL_* variables.
type ConnectionConfig struct {
	// Address is host:port, a URL, or unix:///path. Default: $CONSUL_HTTP_ADDR, else 127.0.0.1:8500.
	Address string `yaml:"address"`
	// TokenFile holds the ACL token, and is read again when it changes.
	TokenFile string `yaml:"tokenFile"`
	// Datacenter is asked in the agent's place. Default: the agent's own.
	Datacenter string        `yaml:"datacenter"`
	TLS        tlsfile.Files `yaml:"tls"`
	// Namespace and Partition are of Consul Enterprise, which this is not tested with: they are refused.
	Namespace string `yaml:"namespace"`
	Partition string `yaml:"partition"`
	// Reads are default, stale (any server answers) or consistent (the leader confirms that it is one).
	Reads string `yaml:"reads"`
	// Scope is the name of the connection.
	Scope string `yaml:"-"`
	// Logger is told what goes wrong. Nil is nowhere.
	Logger *slog.Logger `yaml:"-"`
}

// Validate returns everything that is wrong with the configuration; files are looked at when connecting.
func (c ConnectionConfig) Validate() error {
	errs := []error{c.TLS.Validate()}
	if c.Namespace != "" {
		errs = append(errs, errors.New("namespace: it needs Consul Enterprise, which is not supported; leave it out"))
	}
	if c.Partition != "" {
		errs = append(errs, errors.New("partition: it needs Consul Enterprise, which is not supported; leave it out"))
	}
	if c.Reads != "" && c.Reads != "default" && c.Reads != "stale" && c.Reads != "consistent" {
		errs = append(errs, fmt.Errorf("reads: %q is none of default, stale, consistent", c.Reads))
	}
	return errors.Join(errs...)
}

// Connection is a connection to Consul. Its methods are safe for concurrent use.
type Connection struct {
	cfg       ConnectionConfig
	log       *slog.Logger
	client    *api.Client
	transport *http.Transport
	base      string // of the API's URLs, and what to ask it with where the client would decode too much
	http      *http.Client
	secret    string // the environment's token

	mu       sync.Mutex
	token    string
	modified time.Time // of the token's file
}

// Connect asks the agent who it is. Its errors say what to do.
func Connect(ctx context.Context, cfg ConnectionConfig) (*Connection, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("connect to Consul: %w", err)
	}
	c := &Connection{cfg: cfg, log: cfg.Logger}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	config := api.DefaultConfig()
	if cfg.Address != "" {
		config.Address = cfg.Address
	}
	config.Datacenter = cfg.Datacenter
	if path, ok := strings.CutPrefix(config.Address, "unix://"); ok {
		config.Address = "localhost" // what the request says; the connection goes to the socket
		config.Transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
	}
	if cfg.TLS != (tlsfile.Files{}) {
		t, err := cfg.TLS.Config()
		if err != nil {
			return nil, fmt.Errorf("connect to Consul at %s: %w", config.Address, err)
		}
		config.Transport.TLSClientConfig, config.Scheme = t, "https"
	}
	c.transport = config.Transport
	// An agent is near: to compress ten thousand keys takes longer than to send them.
	c.transport.DisableCompression = true
	var err error
	if config.HttpClient, err = api.NewHttpClient(config.Transport, config.TLSConfig); err != nil {
		return nil, fmt.Errorf("connect to Consul at %s: %w", config.Address, err)
	}
	if scheme, rest, ok := strings.Cut(config.Address, "://"); ok {
		config.Scheme, config.Address = scheme, rest
	}
	c.base, c.http, c.secret = config.Scheme+"://"+config.Address, config.HttpClient, config.Token
	if c.client, err = api.NewClient(config); err != nil {
		return nil, fmt.Errorf("connect to Consul at %s: %w", config.Address, err)
	}
	ask, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	// Any token may ask for the leader; whether there is one is another matter.
	opts, err := c.query(ask)
	if err == nil {
		_, err = c.client.Status().LeaderWithQueryOptions(opts)
	}
	if err = understood(err); err != nil && !errors.Is(err, errNoLeader) {
		return nil, fmt.Errorf("connect to Consul at %s: %w", config.Address, err)
	}
	return c, nil
}

// Close ends the connections that are idle.
func (c *Connection) Close() { c.transport.CloseIdleConnections() }

// tokenNow returns the token of the file, "" if there is none: then that of the environment is used.
func (c *Connection) tokenNow() (string, error) {
	if c.cfg.TokenFile == "" {
		return "", nil
	}
	info, err := os.Stat(c.cfg.TokenFile)
	if err != nil {
		return "", fmt.Errorf("tokenFile: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !info.ModTime().Equal(c.modified) {
		text, err := os.ReadFile(c.cfg.TokenFile)
		if err != nil {
			return "", fmt.Errorf("tokenFile: %w", err)
		}
		c.token, c.modified = strings.TrimSpace(string(text)), info.ModTime()
	}
	return c.token, nil
}

func (c *Connection) query(ctx context.Context) (*api.QueryOptions, error) {
	token, err := c.tokenNow()
	opts := &api.QueryOptions{Token: token, AllowStale: c.cfg.Reads == "stale", RequireConsistent: c.cfg.Reads == "consistent"}
	return opts.WithContext(ctx), err
}

func (c *Connection) writes(ctx context.Context) (*api.WriteOptions, error) {
	token, err := c.tokenNow()
	opts := &api.WriteOptions{Token: token}
	return opts.WithContext(ctx), err
}

// keys asks for all keys under a prefix, as text. None is no text. Last is how long the last answer was.
func (c *Connection) keys(ctx context.Context, prefix string, last int, opts *api.QueryOptions) ([]byte, *api.QueryMeta, error) {
	query := url.Values{"recurse": {""}, "index": {strconv.FormatUint(opts.WaitIndex, 10)}, "wait": {opts.WaitTime.Round(time.Second).String()}}
	for name, set := range map[string]bool{"stale": opts.AllowStale, "consistent": opts.RequireConsistent} {
		if set {
			query.Set(name, "")
		}
	}
	if c.cfg.Datacenter != "" {
		query.Set("dc", c.cfg.Datacenter)
	}
	at := c.base + "/v1/kv/" + (&url.URL{Path: prefix}).EscapedPath() + "?" + query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, nil, err
	}
	if token := cmp.Or(opts.Token, c.secret); token != "" {
		req.Header.Set("X-Consul-Token", token)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	var text bytes.Buffer
	text.Grow(last + last/8) // it is as long as the last one, nearly
	_, err = text.ReadFrom(res.Body)
	body := text.Bytes()
	switch {
	case err != nil:
		return nil, nil, err
	case res.StatusCode == http.StatusNotFound:
		body = nil
	case res.StatusCode != http.StatusOK:
		return nil, nil, api.StatusError{Code: res.StatusCode, Body: string(body)}
	}
	index, err := strconv.ParseUint(res.Header.Get("X-Consul-Index"), 10, 64)
	if err != nil {
		return nil, nil, fmt.Errorf("the answer's index: %w", err)
	}
	return body, &api.QueryMeta{LastIndex: index}, nil
}

// errRight says that the token may not do it.
var errRight = errors.New("a right is missing: give the token a policy that has it")

// errNoLeader says that the cluster has no leader at present: a server is being replaced, or too few are there.
var errNoLeader = errors.New("the cluster has no leader at present")

// understood joins an error of the client with what it means to the engine and what to do about it.
func understood(err error) error {
	var status api.StatusError
	var op *net.OpError
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &status):
		switch body := status.Body; {
		case strings.Contains(body, "No cluster leader"):
			return fmt.Errorf("%w: %w", errNoLeader, err)
		case strings.Contains(body, "ACL not found"):
			return fmt.Errorf("the token is not known to Consul: renew tokenFile or $CONSUL_HTTP_TOKEN: %w", err)
		case status.Code == http.StatusForbidden:
			return fmt.Errorf("%w: %w", errRight, err)
		case status.Code == http.StatusTooManyRequests:
			return engine.RetryAfter(err, time.Second)
		}
		return err
	case strings.Contains(err.Error(), "too large, max size"): // of a transaction, without a code
		return fmt.Errorf("%w: larger than Consul takes in a transaction (512 KiB of text, a value of about 380 KiB): %w", engine.ErrInvalid, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: the agent has closed the connection", err)
	case errors.As(err, &op), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: no agent answers there: check the address and that it is running", err)
	default:
		return err
	}
}
