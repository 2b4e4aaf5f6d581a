package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/admin"
)

// Metrics serves /metrics.
type Metrics = http.Handler

// serve starts the health, admin and metrics servers. They stop when ctx ends.
func (p *Plan) serve(ctx context.Context, group *errgroup.Group, e *engine.Engine, metrics Metrics, log *slog.Logger) error {
	health := http.NewServeMux()
	alive := func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") }
	health.HandleFunc("/healthz", alive)
	health.HandleFunc("/livez", alive)
	health.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) { ready(w, r, e) })
	if err := listen(ctx, group, "server.health", p.Config.Server.Health, health, log); err != nil {
		return err
	}
	admins := p.Config.Server.Admin
	if err := listen(ctx, group, "server.admin.address", admins.Address, admin.Handler(e, admins.TokenFile), log); err != nil {
		return err
	}
	if metrics == nil {
		return nil
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", metrics)
	return listen(ctx, group, "server.metrics", p.Config.Server.Metrics, mux, log)
}

// listen serves h on address until ctx ends. It returns once the address is taken, or an error that says which setting
// would help.
func listen(ctx context.Context, group *errgroup.Group, setting, address string, h http.Handler, log *slog.Logger) error {
	if address == "off" {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w: choose another address, or \"off\"", setting, err)
	}
	log.InfoContext(ctx, "listening", "setting", setting, "address", l.Addr().String())
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	group.Go(func() error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("%s: %w", setting, err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if err := s.Shutdown(stop); err != nil {
			return s.Close()
		}
		return nil
	})
	return nil
}

// ready answers whether the bus works and every source has been listed and runs; ?verbose says it of each.
func ready(w http.ResponseWriter, r *http.Request, e *engine.Engine) {
	var b strings.Builder
	ok := true
	if known, err := e.BusStatus(); err != nil {
		ok = false
		fmt.Fprintf(&b, "[-] bus: %s\n", err)
	} else if known {
		fmt.Fprintln(&b, "[+] bus")
	}
	for _, s := range e.Sources() {
		switch {
		case s.Err != nil:
			ok = false
			fmt.Fprintf(&b, "[-] source %s: %s\n", s.Name, s.Err)
		case !s.Synced:
			ok = false
			fmt.Fprintf(&b, "[-] source %s: its first list has not ended\n", s.Name)
		case s.Standby:
			fmt.Fprintf(&b, "[+] source %s: run by another replica\n", s.Name)
		default:
			fmt.Fprintf(&b, "[+] source %s\n", s.Name)
		}
	}
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	if _, verbose := r.URL.Query()["verbose"]; verbose {
		_, _ = fmt.Fprint(w, b.String())
	}
	if ok {
		_, _ = fmt.Fprintln(w, "ok")
	} else {
		_, _ = fmt.Fprintln(w, "not ready")
	}
}
