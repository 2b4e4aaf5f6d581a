package main

import (
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
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/metrics"
)

// bench is one measurement of the whole path: event, mapping, queue, default middleware, metrics, handler.
type bench struct {
	workload string
	path     string
	bus      string
	events   int
	workers  int
	output   string
	profile  string
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
}

func benchCommand() *cobra.Command {
	var b bench
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure the engine on this machine", Args: noArgs,
		Long: `bench pushes events through the whole path of a change, with metrics on and a handler that
does nothing, and prints what it measured.

  distinct   every event has a key of its own
  coalesce   ten events a key, as fast as they go`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.validate(); err != nil {
				return usageError{err}
			}
			r, err := b.run(cmd.Context())
			if err != nil {
				return err
			}
			return r.print(cmd.OutOrStdout(), b.output)
		},
	}
	cmd.Flags().StringVar(&b.workload, "workload", "distinct", "distinct or coalesce")
	cmd.Flags().StringVar(&b.path, "path", "native", "native")
	cmd.Flags().StringVar(&b.bus, "bus", "memory", "memory")
	cmd.Flags().IntVar(&b.events, "events", 1_000_000, "how many events")
	cmd.Flags().IntVar(&b.workers, "workers", 8, "how many keys at once")
	cmd.Flags().StringVar(&b.profile, "cpuprofile", "", "write a CPU profile to this file")
	cmd.Flags().StringVarP(&b.output, "output", "o", "table", "table or json")
	return cmd
}

func (b bench) validate() error {
	switch {
	case b.workload != "distinct" && b.workload != "coalesce":
		return fmt.Errorf("--workload %q is none of distinct, coalesce", b.workload)
	case b.path != "native":
		return fmt.Errorf("--path %q: only native can be measured", b.path)
	case b.bus != "memory":
		return fmt.Errorf("--bus %q: only memory can be measured", b.bus)
	case b.events < 10 || b.workers < 1:
		return errors.New("--events must be 10 at least, --workers 1")
	case b.output != "table" && b.output != "json":
		return fmt.Errorf("--output %q is none of table, json", b.output)
	}
	return nil
}

func (b bench) run(ctx context.Context) (benchResult, error) {
	keys := b.events
	if b.workload == "coalesce" {
		keys = b.events / 10
	}
	src := &benchSource{events: b.events, keys: keys, synced: make(chan struct{})}
	seen := make([]atomic.Bool, keys)
	waits := make([]int64, b.events) // at most one run an event
	var runs, distinct atomic.Int64
	done := make(chan struct{})
	c := engine.NewController("bench").For(src).WithConcurrency(b.workers).WithHandler(
		func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			waits[runs.Add(1)-1] = int64(req.Waited)
			i, err := strconv.Atoi(req.Key.Name)
			if err != nil {
				return engine.Result{}, engine.Terminal(err)
			}
			if !seen[i].Swap(true) && distinct.Add(1) == int64(keys) {
				close(done)
			}
			return engine.Result{}, nil
		})
	m := metrics.New(prometheus.NewRegistry())
	e, err := engine.New(engine.Config{Name: "bench", Controllers: []engine.Controller{c}, Hooks: m.Hooks()})
	if err != nil {
		return benchResult{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	runtime.GC()
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
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- e.Run(ctx) }()
	select {
	case <-done:
	case <-ctx.Done():
		return benchResult{}, ctx.Err()
	}
	<-src.synced
	for !idle(e) {
		time.Sleep(time.Millisecond) //nolint:forbidigo // the queue is polled, as the peers' are.
	}
	elapsed := time.Since(start)
	runtime.ReadMemStats(&after)
	cancel()
	if err := <-stopped; err != nil {
		return benchResult{}, err
	}
	n := runs.Load()
	sorted := slices.Sorted(slices.Values(waits[:n]))
	return benchResult{
		Workload: b.workload, Path: b.path, Bus: b.bus, Events: b.events, Workers: b.workers,
		Seconds: elapsed.Seconds(), Reconciles: n,
		EventsPerSecond: float64(b.events) / elapsed.Seconds(), ReconcilesPerSecond: float64(n) / elapsed.Seconds(),
		AllocsPerEvent: float64(after.Mallocs-before.Mallocs) / float64(b.events),
		BytesPerEvent:  float64(after.TotalAlloc-before.TotalAlloc) / float64(b.events),
		P50:            float64(sorted[n/2]) / 1e3, P99: float64(sorted[n*99/100]) / 1e3,
	}, nil
}

func idle(e *engine.Engine) bool {
	s := e.Stats()["bench"]
	return s.Ready == [3]int{} && s.Running == 0
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
	return err
}

// benchSource emits a fixed number of events.
type benchSource struct {
	events, keys int
	synced       chan struct{} // closed after the last event
}

func (s *benchSource) Name() string { return "bench" }

// Run implements engine.Source.
func (s *benchSource) Run(ctx context.Context, emit engine.Emit) error {
	for _, op := range []engine.Operation{engine.ListStarted, engine.ListEnded} {
		if err := emit(ctx, engine.Event{Operation: op}); err != nil {
			return err
		}
	}
	kind, meta := engine.KindOf("bench"), &engine.Meta{}
	keys := make([]engine.Key, s.keys)
	for i := range keys {
		keys[i] = engine.Key{Kind: kind, Namespace: "default", Name: strconv.Itoa(i)}
	}
	for i := range s.events {
		if err := emit(ctx, engine.Event{Operation: engine.Put, Key: keys[i%s.keys], Revision: "1", Old: meta, New: meta}); err != nil {
			return err
		}
	}
	close(s.synced)
	<-ctx.Done()
	return nil
}
