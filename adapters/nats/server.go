package nats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
)

// ServerConfig describes a server embedded in the process.
type ServerConfig struct {
	// DataDir is where it keeps its files. It belongs to one process at a time.
	DataDir string `yaml:"dataDir"`
	// Listen is an address for other NATS clients. Empty: only this process reaches the server. Port 0 or -1 is a free one.
	Listen string `yaml:"listen"`
	// Sync is "always", the default: what was acknowledged is on disk; or "interval": it is there within
	// SyncInterval, and a crash of the machine (not of the process) may lose what was acknowledged since.
	Sync string `yaml:"sync"`
	// SyncInterval is that of sync: interval. Default 1 s.
	SyncInterval time.Duration `yaml:"syncInterval"`
	// Logger is told what the server reports. Nil is nowhere.
	Logger *slog.Logger `yaml:"-"`
}

// Validate returns everything that is wrong with the configuration.
func (c ServerConfig) Validate() error {
	var errs []error
	if c.Sync != "" && c.Sync != "always" && c.Sync != "interval" {
		errs = append(errs, fmt.Errorf("sync: %q is neither always nor interval", c.Sync))
	}
	if c.SyncInterval < 0 || c.SyncInterval > 0 && c.Sync != "interval" {
		errs = append(errs, errors.New("syncInterval: it goes with sync: interval and is not negative"))
	}
	if c.Listen != "" {
		if _, _, err := hostPort(c.Listen); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func hostPort(listen string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(listen)
	if err == nil {
		port, err = strconv.Atoi(p)
	}
	if err != nil || port < -1 || port > 65535 {
		return "", 0, fmt.Errorf("listen: %q is not an address such as 127.0.0.1:4222", listen)
	}
	if port == 0 {
		port = natsserver.RANDOM_PORT
	}
	return host, port, nil
}

// Server is a NATS server within this process.
type Server struct {
	server *natsserver.Server
	lock   *os.File
	log    *slog.Logger
}

// ErrDataDirInUse says that another process has the data directory.
var ErrDataDirInUse = errors.New("the data directory is in use by another engine")

// StartServer starts a server and returns once it takes connections.
func StartServer(cfg ServerConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	if cfg.DataDir == "" {
		cfg.DataDir = "data"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	lock, err := lockDir(cfg.DataDir)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	opts := &natsserver.Options{
		ServerName: "windlass", JetStream: true, StoreDir: cfg.DataDir, NoSigs: true, DontListen: cfg.Listen == "",
		JetStreamMaxMemory: -1, JetStreamMaxStore: -1, SyncAlways: cfg.Sync != "interval",
	}
	if cfg.Sync == "interval" {
		opts.SyncInterval = cmp.Or(cfg.SyncInterval, time.Second)
	}
	if cfg.Listen != "" {
		opts.Host, opts.Port, _ = hostPort(cfg.Listen) // validated above
	}
	s := &Server{lock: lock, log: cfg.Logger}
	if s.server, err = natsserver.NewServer(opts); err != nil {
		s.unlock()
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	logger := &serverLog{log: cfg.Logger}
	s.server.SetLoggerV2(logger, false, false, false)
	s.server.Start()
	if !s.server.ReadyForConnections(20 * time.Second) {
		s.Shutdown()
		if fatal := logger.fatal.Load(); fatal != nil {
			return nil, fmt.Errorf("embedded NATS: %s", *fatal)
		}
		return nil, fmt.Errorf("embedded NATS: it is not ready after 20 s; its files are in %s", cfg.DataDir)
	}
	return s, nil
}

// lockDir makes the directory this process's own. The lock ends with the process, however it ends.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("dataDir: %w", err)
	}
	name := filepath.Join(dir, "windlass.lock")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("dataDir: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(name) // an unreadable file only makes the message poorer
		_ = f.Close()
		return nil, fmt.Errorf("%w: %s is held by process %s: stop it, or choose another dataDir",
			ErrDataDirInUse, dir, strings.TrimSpace(string(holder)))
	}
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteString(strconv.Itoa(os.Getpid()) + "\n") // only for the message above
	}
	return f, nil
}

func (s *Server) unlock() { _ = s.lock.Close() }

// Connect connects to the server within the process, without a socket.
func (s *Server) Connect(ctx context.Context, scope string) (*Connection, error) {
	cfg := ConnectionConfig{Scope: scope, Logger: s.log}
	return connect(ctx, cfg, "the embedded server", []natsgo.Option{natsgo.InProcessServer(s.server)})
}

// URL is where other clients reach the server; empty if it does not listen.
func (s *Server) URL() string {
	if s.server.Addr() == nil {
		return ""
	}
	return s.server.ClientURL()
}

// Shutdown stops the server and frees its directory.
func (s *Server) Shutdown() {
	s.server.Shutdown()
	s.server.WaitForShutdown()
	s.unlock()
}

// serverLog passes on what the server reports.
type serverLog struct {
	log   *slog.Logger
	fatal atomic.Pointer[string]
}

func (l *serverLog) Noticef(format string, v ...any) {
	l.log.Debug("nats: " + fmt.Sprintf(format, v...))
}

func (l *serverLog) Warnf(format string, v ...any) { l.log.Debug("nats: " + fmt.Sprintf(format, v...)) }

func (l *serverLog) Errorf(format string, v ...any) { l.log.Warn("nats: " + fmt.Sprintf(format, v...)) }
func (l *serverLog) Debugf(string, ...any)          {}
func (l *serverLog) Tracef(string, ...any)          {}
func (l *serverLog) Fatalf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	l.fatal.Store(&text)
	l.log.Error("nats: " + text)
}
