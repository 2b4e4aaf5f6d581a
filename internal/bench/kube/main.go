// Command kube times an engine on a real API server, on the work of the peers' program of that name: from process start until
// every ConfigMap with the label app=bench was reconciled once, the heap then, and the age of a change when its reconcile starts.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
)

func main() {
	start := time.Now()
	expect := flag.Int("expect", 10000, "objects to wait for")
	cache := flag.String("cache", k8s.CacheMetadata, "what is kept: metadata, fields or full")
	bus := flag.String("bus", "memory", "memory or nats")
	updates := flag.Int("updates", 500, "updates to time after the cold start")
	flag.Parse()
	if err := run(context.Background(), start, *expect, *updates, *cache, *bus); err != nil { //nolint:forbidigo // the process's own.
		fmt.Fprintln(os.Stderr, "kube:", err)
		os.Exit(1) //nolint:forbidigo // there is nothing to end first.
	}
}

// ages are how old changes were when their reconciles started.
type ages struct {
	mu      sync.Mutex
	written map[string]time.Time
	all     []time.Duration
}

func (a *ages) reconciled(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if at, ok := a.written[name]; ok {
		a.all = append(a.all, time.Since(at))
		delete(a.written, name)
	}
}

func run(ctx context.Context, start time.Time, expect, updates int, cache, bus string) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	conn, err := k8s.Connect(ctx, k8s.ConnectionConfig{QPS: -1})
	if err != nil {
		return err
	}
	maps, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap", LabelSelector: "app=bench", Cache: cache, Fields: fieldsOf(cache)})
	if err != nil {
		return err
	}
	changes, cold := &ages{written: make(map[string]time.Time)}, make(chan struct{})
	var n atomic.Int64
	cfg := engine.Config{Controllers: []engine.Controller{engine.NewController("bench").For(maps).WithConcurrency(8).
		WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			changes.reconciled(req.Key.Name)
			if n.Add(1) == int64(expect) {
				close(cold)
			}
			return engine.Result{}, nil
		})}}
	if bus == "nats" {
		b, end, err := jetStream(ctx)
		if err != nil {
			return err
		}
		defer end()
		cfg.Bus = b
	}
	e, err := engine.New(cfg)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	select {
	case <-cold:
	case err := <-ended:
		return err
	}
	took := time.Since(start)
	runtime.GC()
	var ms runtime.MemStats
	runtime.ReadMemStats(&ms)
	fmt.Fprintf(os.Stdout, "cold %d objects in %.2fs, heap %.1f MiB\n", expect, took.Seconds(), float64(ms.HeapAlloc)/(1<<20))
	for i := range updates {
		name := "bench-" + strconv.Itoa(i)
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"t":"%d"}}}`, time.Now().UnixNano())
		changes.mu.Lock()
		changes.written[name] = time.Now()
		changes.mu.Unlock()
		if _, err := maps.Patch(ctx, maps.Key("default/"+name), types.MergePatchType, patch); err != nil {
			return err
		}
	}
	time.Sleep(time.Second) //nolint:forbidigo // as the peers' program does.
	changes.mu.Lock()
	defer changes.mu.Unlock()
	slices.Sort(changes.all)
	fmt.Fprintf(os.Stdout, "updates %d, age at reconcile p50 %v p99 %v\n", len(changes.all), changes.all[len(changes.all)/2], changes.all[len(changes.all)*99/100])
	stop()
	return <-ended
}

func fieldsOf(cache string) []string {
	if cache == k8s.CacheFields {
		return []string{"immutable"}
	}
	return nil
}

// jetStream is a bus on an embedded server.
func jetStream(ctx context.Context) (engine.Bus, func(), error) {
	dir, err := os.MkdirTemp("", "windlass-bench-")
	if err != nil {
		return nil, nil, err
	}
	server, err := nats.StartServer(nats.ServerConfig{DataDir: dir, Sync: "interval"})
	if err != nil {
		return nil, nil, err
	}
	conn, err := server.Connect(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	bus, err := nats.NewBus(ctx, conn, nats.BusConfig{Engine: "bench", SoleServer: true})
	return bus, func() {
		bus.Close(ctx)
		conn.Close()
		server.Shutdown()
		_ = os.RemoveAll(dir)
	}, err
}
