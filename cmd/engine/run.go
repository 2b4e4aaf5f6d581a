package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/term"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/app"
	"github.com/windlass-dev/windlass/engine/metrics"
	"github.com/windlass-dev/windlass/tracing"
	"github.com/windlass-dev/windlass/tracing/otlp"
)

// configFlag adds -c.
func configFlag(cmd *cobra.Command, files *[]string) {
	cmd.Flags().StringSliceVarP(files, "config", "c", nil, "config `file`, or a directory of them; may be repeated")
}

// load loads the config, and reports what is wrong with it on w.
func load(w io.Writer, files []string) (*app.Plan, error) {
	if len(files) == 0 {
		return nil, usageError{errors.New("no config: say which with -c")}
	}
	plan, err := app.Load(files, components())
	if problems, ok := errors.AsType[app.Problems](err); ok {
		for _, p := range problems {
			fmt.Fprintln(w, p)
		}
		fmt.Fprintf(w, "%d problem(s) found\n", len(problems))
		return nil, errProblem
	}
	return plan, err
}

func checkCommand() *cobra.Command {
	var files []string
	cmd := &cobra.Command{
		Use: "check -c FILE", Short: "Report every problem of a config, with its line", Args: noArgs,
		Long: "check reads and checks a config without connecting to anything.\nIt exits 1 if it finds a problem.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := load(cmd.OutOrStdout(), files)
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "ok: engine %q with %d controller(s)\n", plan.Config.Metadata.Name, len(plan.Config.Controllers))
			}
			return err
		},
	}
	configFlag(cmd, &files)
	return cmd
}

// runFlags are the flags of run; they win over the environment, which wins over the file.
type runFlags struct {
	files       []string
	logLevel    string
	logFormat   string
	traceStdout bool
}

func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use: "run -c FILE", Short: "Run the controllers of a config", Args: noArgs,
		Long: `run runs the controllers of a config until SIGINT or SIGTERM, and then lets the running
reconciles finish (shutdown.drainTimeout). A second signal leaves at once.

Environment: WINDLASS_LOG_LEVEL, WINDLASS_LOG_FORMAT, and OpenTelemetry's OTEL_* variables,
OTEL_EXPORTER_OTLP_ENDPOINT above all.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context()) },
	}
	configFlag(cmd, &f.files)
	cmd.Flags().StringVar(&f.logLevel, "log-level", "", "debug, info, warn or error")
	cmd.Flags().StringVar(&f.logFormat, "log-format", "", "json, text, or auto: text on a terminal")
	cmd.Flags().BoolVar(&f.traceStdout, "trace-stdout", false, "print spans on standard output")
	return cmd
}

func (f runFlags) run(ctx context.Context) error {
	plan, err := load(os.Stderr, f.files)
	if err != nil {
		return err
	}
	cfg := plan.Config
	log, err := newLogger(os.Stderr, cmp.Or(f.logLevel, os.Getenv("WINDLASS_LOG_LEVEL"), cfg.Log.Level),
		cmp.Or(f.logFormat, os.Getenv("WINDLASS_LOG_FORMAT"), cfg.Log.Format))
	if err != nil {
		return usageError{err}
	}
	log = log.With("engine", cfg.Metadata.Name)
	provider, err := f.tracerProvider(ctx, cfg)
	if err != nil {
		return err
	}
	if provider != nil {
		defer func() {
			stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			if err := provider.Shutdown(stop); err != nil {
				log.Warn("some spans were not sent", "err", err)
			}
		}()
	}
	log.Info("starting", "version", version, "controllers", len(cfg.Controllers))
	err = plan.Run(ctx, options(cfg, log, provider))
	if err != nil && (ctx.Err() == nil || !errors.Is(err, context.Canceled)) {
		return err
	}
	log.Info("stopped")
	return nil
}

func (f runFlags) tracerProvider(ctx context.Context, cfg app.Config) (*sdktrace.TracerProvider, error) {
	ratio := 1.0
	if r := cfg.Tracing.SampleRatio; r != nil {
		ratio = *r
	}
	var stdout io.Writer
	if f.traceStdout {
		stdout = os.Stdout
	}
	return otlp.New(ctx, otlp.Config{
		Endpoint: cfg.Tracing.OTLP.Endpoint, Protocol: cfg.Tracing.OTLP.Protocol, SampleRatio: ratio,
		Stdout: stdout, Service: "windlass-" + cfg.Metadata.Name, Version: version,
	})
}

// options puts metrics and, with a provider, tracing around a plan.
func options(cfg app.Config, log *slog.Logger, provider *sdktrace.TracerProvider) app.Options {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	countKubernetes(registry)
	m := metrics.New(registry)
	with := engine.Config{Hooks: m.Hooks()}
	if provider != nil {
		system := "nats"
		switch {
		case cfg.Bus != nil && cfg.Bus.Type == "memory":
			system = "in_memory"
		case cfg.Bus != nil:
			system = cfg.Bus.Type
		}
		tracing.New(tracing.Config{TracerProvider: provider, System: system, Parent: cfg.Tracing.Causality == "parent"}).Install(&with)
	}
	return app.Options{
		Logger: log, Middleware: with.Middleware, Emit: with.Emit, Hooks: with.Hooks,
		Started: func(e *engine.Engine) http.Handler {
			m.Observe(e)
			return promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry})
		},
	}
}

func newLogger(w *os.File, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q is none of debug, info, warn, error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch {
	case format == "text", format == "auto" && term.IsTerminal(int(w.Fd())):
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case format == "json", format == "auto":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q is none of auto, json, text", format)
	}
}
