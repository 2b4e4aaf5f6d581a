package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/adapters/redis"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/metrics"
	"github.com/windlass-dev/windlass/sources/topic"
	"github.com/windlass-dev/windlass/tracing"
	"github.com/windlass-dev/windlass/tracing/otlp"
)

// bench is one measurement of the whole path: event, mapping, queue, default middleware, metrics, handler.
type bench struct {
	workload string
	path     string
	bus      string
	sync     string
	redis    string
	publish  bool
	events   int
	workers  int
	output   string
	profile  string
	tracing  string
}

// benchResult is what -o json prints.
type benchResult struct {
	Workload            string  `json:"workload"`
	Path                string  `json:"path"`
	Bus                 string  `json:"bus"`
	Events              int     `json:"events"`
	Workers             int     `json:"workers"`
	Seconds             float64 `json:"seconds"`
	Reconciles          int64   `json:"reconciles"`
	EventsPerSecond     float64 `json:"events_per_s"`
	ReconcilesPerSecond float64 `json:"reconciles_per_s"`
	AllocsPerEvent      float64 `json:"allocs_per_event"`
	BytesPerEvent       float64 `json:"bytes_per_event"`
	P50                 float64 `json:"p50_us"`
	P99                 float64 `json:"p99_us"`
	// BytesPerKey is what a pending key takes beyond its own bytes.
	BytesPerKey float64 `json:"bytes_per_key,omitempty"`
}

func benchCommand() *cobra.Command {
	var b bench
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure the engine on this machine", Args: noArgs,
		Long: `bench pushes events through the whole path of a change, with the default middleware, metrics on,
spans through the tracing API and a handler that does nothing, and prints what it measured.

  distinct     every event has a key of its own
  coalesce     ten events a key, as fast as they go
  drain        as distinct, but no key is worked on before all events were accepted; what is measured
               begins then
  latency      10,000 events a second; the waits are from the event to its handler
  coldstart    a list of all keys, and a change of one of a thousand of them while it is worked off;
               the waits are those of the changes
  delay        one delayed request a key; then 10,000 fall due within a second, on NATS and Redis
               within ten, and the waits are how late they ran
  pending      keys that wait, for what they take of memory
  pending-dep  the same, with causes that name another key`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.validate(); err != nil {
				return usageError{err}
			}
			r, err := b.measure(cmd.Context())
			if err != nil {
				return err
			}
			return r.print(cmd.OutOrStdout(), b.output)
		},
	}
	cmd.Flags().StringVar(&b.workload, "workload", "distinct", "distinct, coalesce, drain, latency, coldstart, delay, pending or pending-dep")
	cmd.Flags().StringVar(&b.path, "path", "native", "native, or wire: the events travel as messages of a topic")
	cmd.Flags().StringVar(&b.bus, "bus", "memory", "memory, nats (an embedded server) or redis; the latter with 64 events on their way at once")
	cmd.Flags().StringVar(&b.sync, "sync", "interval", "when the embedded server syncs its disk: interval or always")
	cmd.Flags().BoolVar(&b.publish, "publish", false, "publish the events too, on NATS and Redis")
	cmd.Flags().StringVar(&b.redis, "redis", "127.0.0.1:6379", "the address of Redis")
	cmd.Flags().StringVar(&b.tracing, "tracing", "api", "off, api, or sdk: one span in ten is recorded, and thrown away")
	cmd.Flags().IntVar(&b.events, "events", 1_000_000, "how many events")
	cmd.Flags().IntVar(&b.workers, "workers", 8, "how many keys at once")
	cmd.Flags().StringVar(&b.profile, "cpuprofile", "", "write a CPU profile to this file")
	cmd.Flags().StringVarP(&b.output, "output", "o", "table", "table or json")
	return cmd
}

func (b bench) validate() error {
	oneOf := func(flag, value string, known ...string) error {
		if slices.Contains(known, value) {
			return nil
		}
		return fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(known, ", "))
	}
	var few error
	if b.bus != "memory" && (b.path != "native" || !slices.Contains([]string{"distinct", "coalesce", "drain", "delay", "coldstart"}, b.workload)) {
		few = errors.New("--bus nats and redis go with --path native and the workloads distinct, coalesce, drain, delay and coldstart")
	}
	if b.events < 10 || b.workers < 1 {
		few = errors.New("--events must be 10 at least, --workers 1")
	}
	return cmp.Or(
		oneOf("workload", b.workload, "distinct", "coalesce", "drain", "latency", "coldstart", "delay", "pending", "pending-dep"),
		oneOf("path", b.path, "native", "wire"), oneOf("bus", b.bus, "memory", "nats", "redis"), oneOf("sync", b.sync, "interval", "always"), oneOf("tracing", b.tracing, "off", "api", "sdk"),
		oneOf("output", b.output, "table", "json"), few,
	)
}

// benchRun is one measurement under way.
type benchRun struct {
	bench

	keys   []engine.Key
	waits  []int64 // one a run
	runs   atomic.Int64
	done   chan struct{} // closed when every key ran once
	gate   chan struct{} // no run goes on before it is closed
	source *benchSource
	memory *engine.MemoryBus
	close  func(context.Context) // ends the bus
	engine *engine.Engine
	stop   func() error
	before runtime.MemStats
	start  time.Time
}

// measure sets an engine up, lets the workload use it and adds up what came of it.
func (b bench) measure(ctx context.Context) (benchResult, error) {
	keys := b.events
	if b.workload == "coalesce" {
		keys = b.events / 10
	}
	r := &benchRun{bench: b, done: make(chan struct{}), gate: make(chan struct{}), waits: make([]int64, 2*b.events), source: newBenchSource(b.spread()), memory: engine.NewMemoryBus()}
	r.keys = make([]engine.Key, keys)
	if b.workload != "drain" {
		close(r.gate)
	}
	if b.profile != "" {
		f, err := os.Create(b.profile)
		if err != nil {
			return benchResult{}, fmt.Errorf("--cpuprofile: %w", err)
		}
		defer func() { _ = f.Close() }()
		if err := pprof.StartCPUProfile(f); err != nil {
			return benchResult{}, fmt.Errorf("--cpuprofile: %w", err)
		}
		defer pprof.StopCPUProfile()
	}
	if err := r.begin(ctx); err != nil {
		return benchResult{}, err
	}
	result, err := map[string]func(context.Context) (benchResult, error){
		"distinct": r.burst, "coalesce": r.burst, "drain": r.drain, "latency": r.paced, "coldstart": r.coldStart, "delay": r.delayed, "pending": r.pending, "pending-dep": r.pending,
	}[b.workload](ctx)
	return result, errors.Join(err, r.stop())
}

func (r *benchRun) begin(ctx context.Context) error {
	seen := make([]atomic.Bool, len(r.keys))
	var distinct atomic.Int64
	var primary engine.Source = r.source
	if r.path == "wire" {
		var err error
		if primary, err = topic.New(topic.Config{Name: "bench", Subscriber: r.memory.Subscriber("bench")}); err != nil {
			return err
		}
	}
	c := engine.NewController("bench").For(primary).Watches(r.source.other(), engine.MapToKind(benchKind)).WithConcurrency(r.workers).WithHandler(
		func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			<-r.gate
			wait := int64(req.Waited)
			if r.workload == "delay" {
				// A request for a time is ready from then on; its cause knows the time.
				wait = int64(time.Since(req.Causes.Newest().Time.Add(r.source.delayOf(req.Key))))
			}
			n := r.runs.Add(1) - 1
			switch {
			case r.workload != "coldstart":
				r.waits[n] = wait
			case req.Priority == engine.PriorityLive:
				r.waits[n] = int64(time.Since(req.Causes.Newest().Time)) // the key may have waited before, listed
			}
			i, err := strconv.Atoi(req.Key.Name)
			if err != nil {
				return engine.Result{}, engine.Terminal(err)
			}
			if !seen[i].Swap(true) && distinct.Add(1) == int64(len(r.keys)) {
				close(r.done)
			}
			return engine.Result{}, nil
		})
	m := metrics.New(prometheus.NewRegistry())
	bus, err := r.openBus(ctx)
	if err != nil {
		return err
	}
	cfg := engine.Config{Name: "bench", Controllers: []engine.Controller{c}, Hooks: m.Hooks(), Bus: bus}
	switch r.tracing {
	case "api":
		tracing.New(tracing.Config{TracerProvider: otel.GetTracerProvider(), System: "in_memory"}).Install(&cfg)
	case "sdk":
		tracing.New(tracing.Config{TracerProvider: otlp.Discard(0.1), System: "in_memory"}).Install(&cfg)
	}
	if r.engine, err = engine.New(cfg); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	runtime.GC()
	runtime.ReadMemStats(&r.before)
	r.start = time.Now()
	go func() { stopped <- r.engine.Run(ctx) }()
	r.stop = func() error {
		cancel()
		err := <-stopped
		r.close(context.WithoutCancel(ctx))
		return err
	}
	if r.path == "wire" {
		r.source.emit = r.publish
		for !r.engine.Sources()[0].Synced {
			if err := nap(ctx); err != nil {
				return err
			}
		}
	} else {
		r.source.emit = <-r.source.running
	}
	for i := range r.keys {
		r.keys[i] = engine.Key{Kind: benchKind, Namespace: "default", Name: strconv.Itoa(i)}
	}
	return nil
}

func (r *benchRun) openBus(ctx context.Context) (engine.Bus, error) {
	switch r.bus {
	case "nats":
		return r.openNATS(ctx)
	case "redis":
		return r.openRedis(ctx)
	default:
		r.close = func(context.Context) {}
		return r.memory, nil
	}
}

// spread is the time within which delayed requests fall due.
func (b bench) spread() time.Duration {
	if b.bus == "memory" {
		return time.Second
	}
	return 10 * time.Second
}

// published says whether events are.
func (b bench) published() string {
	if b.publish {
		return "on"
	}
	return "off"
}

// openRedis uses a server that is there, under a name that nobody else has.
func (r *benchRun) openRedis(ctx context.Context) (engine.Bus, error) {
	conn, err := redis.Connect(ctx, redis.ConnectionConfig{Address: r.redis})
	if err != nil {
		return nil, err
	}
	bus, err := redis.NewBus(ctx, conn, redis.BusConfig{Engine: "bench-" + strconv.Itoa(os.Getpid()), Events: r.published()})
	if err != nil {
		return nil, err
	}
	r.close = func(ctx context.Context) {
		bus.Close(ctx)
		conn.Close()
	}
	return bus, nil
}

// openNATS starts a server.
func (r *benchRun) openNATS(ctx context.Context) (engine.Bus, error) {
	dir, err := os.MkdirTemp("", "windlass-bench-")
	if err != nil {
		return nil, err
	}
	server, err := nats.StartServer(nats.ServerConfig{DataDir: dir, Sync: r.sync})
	if err != nil {
		return nil, err
	}
	conn, err := server.Connect(ctx, "")
	if err != nil {
		return nil, err
	}
	bus, err := nats.NewBus(ctx, conn, nats.BusConfig{Engine: "bench", Events: r.published(), SoleServer: true, GroupCommit: r.sync == "always"})
	if err != nil {
		return nil, err
	}
	r.close = func(ctx context.Context) {
		bus.Close(ctx)
		conn.Close()
		server.Shutdown()
		_ = os.RemoveAll(dir)
	}
	return bus, nil
}

// publish sends an event the way of the wire.
func (r *benchRun) publish(_ context.Context, e engine.Event) error {
	e.Source, e.Time = "bench", time.Now()
	m, err := engine.EncodeEvent(e, "")
	if err != nil {
		return err
	}
	return r.memory.Publisher().Publish("events.bench", m)
}

var benchMeta = &engine.Meta{}

func (r *benchRun) put(ctx context.Context, i int) error {
	return r.source.emit(ctx, engine.Event{Operation: engine.Put, Key: r.keys[i%len(r.keys)], Revision: "1", Old: benchMeta, New: benchMeta})
}

// nap waits a little. The queue is polled, as the peers' are.
func nap(ctx context.Context) error {
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// finish waits until nothing is left.
func (r *benchRun) finish(ctx context.Context) (benchResult, error) {
	select {
	case <-r.done:
	case <-ctx.Done():
		return benchResult{}, ctx.Err()
	}
	for s := r.engine.Stats()["bench"]; s.Ready != [3]int{} || s.Running != 0; s = r.engine.Stats()["bench"] {
		if err := nap(ctx); err != nil {
			return benchResult{}, err
		}
	}
	return r.result(time.Since(r.start)), nil
}

func (r *benchRun) result(elapsed time.Duration) benchResult {
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	n := r.runs.Load()
	res := benchResult{
		Workload: r.workload, Path: r.path, Bus: r.bus, Events: r.events, Workers: r.workers, Seconds: elapsed.Seconds(), Reconciles: n,
		EventsPerSecond: float64(r.events) / elapsed.Seconds(), ReconcilesPerSecond: float64(n) / elapsed.Seconds(),
		AllocsPerEvent: float64(after.Mallocs-r.before.Mallocs) / float64(r.events),
		BytesPerEvent:  float64(after.TotalAlloc-r.before.TotalAlloc) / float64(r.events),
	}
	if n > 0 {
		sorted := slices.Sorted(slices.Values(r.waits[:n]))
		if r.workload == "coldstart" {
			sorted = slices.DeleteFunc(sorted, func(wait int64) bool { return wait == 0 }) // of what was listed
		}
		if n := len(sorted); n > 0 {
			res.P50, res.P99 = float64(sorted[n/2])/1e3, float64(sorted[n*99/100])/1e3
		}
	}
	return res
}

func (r benchResult) print(w io.Writer, output string) error {
	if output == "json" {
		return json.NewEncoder(w).Encode(r)
	}
	_, err := fmt.Fprintf(w, `%s, %s path, %s bus, %d workers: %d events, %d reconciles in %.2f s
  events/s       %12.0f
  reconciles/s   %12.0f
  allocs/event   %12.1f
  bytes/event    %12.0f
  wait p50, p99  %10.1f µs, %.1f µs
`, r.Workload, r.Path, r.Bus, r.Workers, r.Events, r.Reconciles, r.Seconds,
		r.EventsPerSecond, r.ReconcilesPerSecond, r.AllocsPerEvent, r.BytesPerEvent, r.P50, r.P99)
	if err == nil && r.BytesPerKey > 0 {
		_, err = fmt.Fprintf(w, "  bytes/key      %12.0f\n", r.BytesPerKey)
	}
	return err
}
