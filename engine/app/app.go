package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/expr"
)

// Options are what a program adds to a plan.
type Options struct {
	Logger *slog.Logger
	// Middleware, Emit and Hooks go to the engine: tracing and metrics.
	Middleware []engine.Middleware
	Emit       []func(engine.Emit) engine.Emit
	Hooks      engine.Hooks
	// Started is called with the engine before it runs. It may return what serves /metrics.
	Started func(e *engine.Engine) Metrics
}

// env is what the components of the plan are built in, and what ends them.
func (p *Plan) env(ctx context.Context, log *slog.Logger) (env *Env, end func()) {
	env = &Env{
		Engine: p.Config.Metadata.Name, Logger: log, connections: make(map[string]Closer),
		sinks: make(map[string]engine.Sink), sources: make(map[string]engine.Source),
	}
	return env, func() {
		for _, f := range slices.Backward(env.cleanup) {
			f(context.WithoutCancel(ctx))
		}
	}
}

// WithBus connects, calls f with the engine's bus, and disconnects. No engine is run.
func (p *Plan) WithBus(ctx context.Context, log *slog.Logger, f func(ctx context.Context, bus engine.Bus) error) error {
	env, end := p.env(ctx, log)
	defer end()
	bus, err := p.openBus(ctx, env)
	if err != nil {
		return err
	}
	return f(ctx, bus)
}

// Run connects, builds and runs the engine until ctx ends. It returns once everything that it started has ended.
func (p *Plan) Run(ctx context.Context, opts Options) error {
	env, end := p.env(ctx, opts.Logger)
	defer end()
	e, err := p.build(ctx, env, opts)
	if err != nil {
		return err
	}
	var metrics Metrics
	if opts.Started != nil {
		metrics = opts.Started(e)
	}
	group, ctx := errgroup.WithContext(ctx)
	servers, stopServers := context.WithCancel(context.WithoutCancel(ctx))
	if err := p.serve(servers, group, e, metrics, opts.Logger); err != nil {
		stopServers()
		return errors.Join(err, group.Wait())
	}
	group.Go(func() error {
		defer stopServers()
		return e.Run(ctx)
	})
	return group.Wait()
}

func (p *Plan) openBus(ctx context.Context, env *Env) (engine.Bus, error) {
	for name, c := range p.connections {
		conn, err := c.build(ctx, env, name)
		if err != nil {
			return nil, fmt.Errorf("connection %s: %w", name, err)
		}
		env.connections[name] = conn
		env.OnClose(func(context.Context) { conn.Close() })
	}
	bus, err := p.bus.build(ctx, env, "")
	if err != nil {
		return nil, fmt.Errorf("bus: %w", err)
	}
	return bus, nil
}

func (p *Plan) build(ctx context.Context, env *Env, opts Options) (*engine.Engine, error) {
	bus, err := p.openBus(ctx, env)
	if err != nil {
		return nil, err
	}
	for _, s := range p.sources {
		if env.sources[s.name], err = s.build(ctx, env, s.name); err != nil {
			return nil, fmt.Errorf("source %s: %w", s.name, err)
		}
	}
	for _, s := range p.sinks {
		if env.sinks[s.name], err = s.build(ctx, env, s.name); err != nil {
			return nil, fmt.Errorf("sink %s: %w", s.name, err)
		}
		if source, ok := env.sinks[s.name].(engine.Source); ok {
			env.sources[s.name] = source
		}
	}
	controllers := make([]engine.Controller, 0, len(p.Config.Controllers))
	for i := range p.Config.Controllers {
		c, err := p.controller(ctx, env, i)
		if err != nil {
			return nil, err
		}
		controllers = append(controllers, c)
	}
	return engine.New(engine.Config{
		Name: p.Config.Metadata.Name, Controllers: controllers, Bus: bus, Logger: opts.Logger, Hooks: opts.Hooks,
		Middleware: opts.Middleware, Emit: opts.Emit, DrainTimeout: p.Config.Shutdown.DrainTimeout,
	})
}

func (p *Plan) controller(ctx context.Context, env *Env, i int) (engine.Controller, error) {
	cfg := &p.Config.Controllers[i]
	primary := env.sources[cfg.For]
	c := cfg.settings(engine.NewController(cfg.Name)).For(primary)
	for _, name := range slices.Compact(slices.Sorted(slices.Values(append(slices.Clip(cfg.Owns), p.handlers[i].owns...)))) {
		if source, ok := env.sources[name]; ok {
			c = c.Owns(source)
		} else {
			c = c.WritesTo(env.sinks[name])
		}
	}
	for _, name := range cfg.Reads {
		c = c.Reads(env.sources[name])
	}
	for j, w := range cfg.Watches {
		mapper, err := mapperOf(w, p.mappers[i][j], primary)
		if err != nil {
			return c, fmt.Errorf("controller %s: watches %s: %w", cfg.Name, w.Source, err)
		}
		c = c.Watches(env.sources[w.Source], mapper)
	}
	h, err := p.handlers[i].build(ctx, env, cfg.Name)
	if err != nil {
		return c, fmt.Errorf("controller %s: handler: %w", cfg.Name, err)
	}
	return c.WithHandler(h), nil
}

// mapperOf makes the mapper of a watch. Names become keys of the primary source.
func mapperOf(w WatchConfig, program *expr.Program, primary engine.Source) (engine.Mapper, error) {
	if w.Map.Type == "owner" {
		return engine.MapOwner, nil
	}
	keys, ok := primary.(interface{ Key(name string) engine.Key })
	if !ok {
		return nil, fmt.Errorf("the keys of source %q cannot be made from names; map by owner", primary.Name())
	}
	switch like := keys.Key(""); w.Map.Type {
	case "sameName":
		return engine.MapSameName(like), nil
	case "label":
		return engine.MapLabel(w.Map.Arg, like), nil
	case "annotation":
		return engine.MapAnnotation(w.Map.Arg, like), nil
	case "field":
		return engine.MapField(w.Map.Arg, like), nil
	}
	return func(_ context.Context, e engine.Event) ([]engine.Key, error) {
		names, err := program.Strings(map[string]any{"event": viewOf(e)})
		if err != nil {
			return nil, err
		}
		out := make([]engine.Key, len(names))
		for i, name := range names {
			out[i] = keys.Key(name)
		}
		return out, nil
	}, nil
}

// viewOf is what the expression of a mapper sees of an event.
func viewOf(e engine.Event) map[string]any {
	meta := func(m *engine.Meta) any {
		if m == nil {
			return nil
		}
		return map[string]any{"labels": m.Labels, "annotations": m.Annotations, "fields": m.Fields}
	}
	return map[string]any{
		"key":       map[string]any{"kind": e.Key.Kind.String(), "scope": e.Key.Scope, "namespace": e.Key.Namespace, "name": e.Key.Name},
		"operation": e.Operation.String(), "revision": e.Revision, "source": e.Source,
		"old": meta(e.Old), "new": meta(e.New), "time": e.Time.Format(time.RFC3339Nano),
	}
}
