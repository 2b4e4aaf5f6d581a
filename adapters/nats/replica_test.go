package nats_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/internal/link"
)

// fleet are replicas of one engine, each with a connection of its own, and what they did.
type fleet struct {
	*bed

	mu       sync.Mutex
	ran      map[string]map[string]int // by key: how often which replica ran it
	running  map[string]context.Context
	overlaps int
	fences   map[string]uint64
}

type ship struct {
	name   string
	conn   *nats.Connection
	bus    *nats.Bus
	engine *engine.Engine
	stop   func()
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	return &fleet{bed: newBed(t), ran: map[string]map[string]int{}, running: map[string]context.Context{}, fences: map[string]uint64{}}
}

// launch starts a replica whose controllers c makes.
func (f *fleet) launch(name string, c func(orders, shipments *nats.Bucket) engine.Controller) *ship {
	f.t.Helper()
	s := &ship{name: name}
	var err error
	s.conn, err = f.server.Connect(f.t.Context(), "")
	require.NoError(f.t, err)
	s.bus, err = nats.NewBus(f.t.Context(), s.conn, nats.BusConfig{Engine: "shop"})
	require.NoError(f.t, err)
	orders, err := nats.NewBucket(f.t.Context(), s.conn, nats.BucketConfig{Bucket: "orders", Create: true})
	require.NoError(f.t, err)
	shipments, err := nats.NewBucket(f.t.Context(), s.conn, nats.BucketConfig{Bucket: "shipments", Create: true})
	require.NoError(f.t, err)
	e, stop := run(f.t, engine.Config{Name: "shop", Bus: s.bus, Controllers: []engine.Controller{c(orders, shipments)}})
	s.engine = e
	var once sync.Once
	s.stop = func() { once.Do(func() { stop(); s.bus.Close(context.Background()); s.conn.Close() }) }
	f.t.Cleanup(s.stop)
	return s
}

// noting is a handler that notes what a replica runs, for as long as its context lets it.
func (f *fleet) noting(name string, h engine.Handler) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		key := req.Key.Name
		f.mu.Lock()
		if other := f.running[key]; other != nil && other.Err() == nil {
			f.overlaps++
		}
		if req.Fence < f.fences[key] {
			f.t.Errorf("%s ran with fence %d after %d", key, req.Fence, f.fences[key])
		}
		f.running[key], f.fences[key] = ctx, req.Fence
		if f.ran[key] == nil {
			f.ran[key] = map[string]int{}
		}
		f.ran[key][name]++
		f.mu.Unlock()
		defer func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.running[key] == ctx {
				delete(f.running, key)
			}
		}()
		return h(ctx, rt, req)
	}
}

func (f *fleet) put(bucket, value string, keys ...string) {
	f.t.Helper()
	kv := f.kv(bucket)
	for _, k := range keys {
		_, err := kv.PutString(f.t.Context(), k, value)
		require.NoError(f.t, err)
	}
}

// runs is how many different keys a replica ran.
func (f *fleet) runs(name string) (keys int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, by := range f.ran {
		if by[name] > 0 {
			keys++
		}
	}
	return keys
}

func (f *fleet) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ran = map[string]map[string]int{}
}

func (f *fleet) seen() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.ran)
}

// untilAllWork returns once the replicas have shared the keys out.
func (f *fleet) untilAllWork(replicas ...string) {
	f.t.Helper()
	for i := 0; ; i++ {
		f.forget()
		f.put("orders", fmt.Sprint("round ", i), names("o", 40)...)
		eventually(f.t, "all run", func() bool { return f.seen() == 40 })
		if !slices.ContainsFunc(replicas, func(name string) bool { return f.runs(name) == 0 }) {
			return
		}
		require.Less(f.t, i, 100, "some do not work")
	}
}

func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(prefix, i)
	}
	return out
}

func TestReplicas(t *testing.T) { replicas(t, "interval") }

func TestReplicasThatCommitInGroups(t *testing.T) { replicas(t, "always") }

func replicas(t *testing.T, sync string) {
	t.Helper()
	t.Parallel() // they wait most of the time
	enginetest.TestReplicas(t, func(t *testing.T) enginetest.ReplicasFixture {
		b := newBedThat(t, sync)
		address := strings.TrimPrefix(b.server.URL(), "nats://")
		return enginetest.ReplicasFixture{
			TTL: 4 * time.Second,
			Restart: func(t *testing.T) {
				t.Helper()
				b.server.Shutdown()
				var err error
				b.server, err = nats.StartServer(nats.ServerConfig{DataDir: b.dir, Listen: address, Sync: b.sync, Logger: logger()})
				require.NoError(t, err)
			},
			Open: func(t *testing.T) enginetest.ReplicaFixture {
				t.Helper()
				l, err := link.New(context.Background(), address)
				require.NoError(t, err)
				conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: "nats://" + l.Address(), Logger: logger()})
				require.NoError(t, err)
				bus, err := nats.NewBus(t.Context(), conn, nats.BusConfig{Engine: "suite", GroupCommit: sync == "always"})
				require.NoError(t, err)
				return enginetest.ReplicaFixture{Bus: bus, Sever: l.Sever, Close: func() {
					bus.Close(context.Background())
					conn.Close()
					l.Close()
				}}
			},
		}
	})
}

func TestReplicasShareTheKeys(t *testing.T) {
	f := newFleet(t)
	launch := func(name string) *ship {
		return f.launch(name, func(orders, shipments *nats.Bucket) engine.Controller {
			return engine.NewController("shipping").For(orders).Owns(shipments).WithConcurrency(4).
				WithHandler(f.noting(name, copying(orders, shipments)))
		})
	}
	shipped := func(n int, value string) {
		t.Helper()
		kv := f.kv("shipments")
		eventually(t, fmt.Sprintf("%d shipments of %q", n, value), func() bool {
			keys, _ := kv.Keys(t.Context())
			ok := 0
			for _, k := range keys {
				if e, err := kv.Get(t.Context(), k); err == nil && string(e.Value()) == "shipped "+value {
					ok++
				}
			}
			return ok == n
		})
	}
	a := launch("a")
	f.put("orders", "1", names("o", 40)...)
	shipped(40, "1")
	require.Equal(t, 40, f.runs("a"), "alone")
	b, c := launch("b"), launch("c")
	f.untilAllWork("a", "b", "c")
	f.put("orders", "2", names("o", 40)...)
	shipped(40, "2")
	for _, s := range []*ship{a, b, c} {
		require.True(t, s.engine.Sources()[0].Synced, "%s", s.name)
	}

	a.stop()
	f.forget()
	f.put("orders", "3", names("o", 40)...)
	shipped(40, "3")
	require.Zero(t, f.runs("a"), "the one that left works no more, and who ran its sources is replaced")
	require.NotZero(t, f.runs("b"))
	require.NotZero(t, f.runs("c"))

	f.put("shipments", "by hand", "o7")
	shipped(40, "3")
	require.NoError(t, f.kv("orders").Delete(t.Context(), "o8"))
	shipped(39, "3")
	require.Zero(t, f.overlaps)
}

func TestReplicaWithoutConnectionIsReplacedAndStops(t *testing.T) {
	f := newFleet(t)
	late := make(chan string, 100)
	launch := func(name string) *ship {
		return f.launch(name, func(orders, _ *nats.Bucket) engine.Controller {
			return engine.NewController("c").For(orders).WithConcurrency(8).WithTimeout(time.Minute).WithHandler(
				func(ctx context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
					f.mu.Lock()
					if f.ran[req.Key.Name] == nil {
						f.ran[req.Key.Name] = map[string]int{}
					}
					f.ran[req.Key.Name][name]++
					f.mu.Unlock()
					if strings.HasPrefix(req.Key.Name, "long") && name == "a" {
						<-ctx.Done()
						late <- context.Cause(ctx).Error()
						return engine.Result{}, ctx.Err()
					}
					return engine.Result{}, nil
				})
		})
	}
	a := launch("a")
	f.put("orders", "1", names("long", 4)...)
	eventually(t, "a runs them", func() bool { return f.runs("a") == 4 })
	launch("b")
	a.conn.Close() // as if its cable had been pulled: it can tell nobody anything any more
	eventually(t, "b takes them over", func() bool { return f.runs("b") == 4 })
	for range 4 { // the runs of a have been cancelled
		require.Equal(t, engine.ErrLeaseLost.Error(), <-late)
	}
	f.put("orders", "2", names("new", 20)...)
	eventually(t, "b works on everything", func() bool { return f.runs("b") == 24 })
	require.Equal(t, 4, f.runs("a"))
}

func TestSuspensionHoldsOnAllReplicas(t *testing.T) {
	f := newFleet(t)
	launch := func(name string) *ship {
		return f.launch(name, func(orders, _ *nats.Bucket) engine.Controller {
			return engine.NewController("c").For(orders).WithConcurrency(4).WithHandler(f.noting(name, nop))
		})
	}
	a, b := launch("a"), launch("b")
	f.untilAllWork("a", "b")
	require.NoError(t, a.engine.Suspend(t.Context(), "c", engine.Key{}, engine.Suspension{Reason: "inspection"}))
	eventually(t, "b knows", func() bool { return len(b.engine.Suspensions("c")) == 1 })
	f.forget()
	f.put("orders", "1", names("o", 20)...)
	time.Sleep(300 * time.Millisecond)
	require.Zero(t, f.seen(), "%v", f.ran)
	require.NoError(t, b.engine.Resume(t.Context(), "c", engine.Key{}))
	eventually(t, "what waited is reconciled", func() bool { return f.seen() == 20 })
	require.Empty(t, a.engine.Suspensions("c"))
}

func TestControllerPlacedEachRunsEveryKeyInEveryReplica(t *testing.T) {
	f := newFleet(t)
	launch := func(name string) *ship {
		return f.launch(name, func(orders, _ *nats.Bucket) engine.Controller {
			return engine.NewController("c").For(orders).WithPlacement(engine.Each).WithHandler(
				func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
					f.mu.Lock()
					defer f.mu.Unlock()
					if f.ran[req.Key.Name] == nil {
						f.ran[req.Key.Name] = map[string]int{}
					}
					f.ran[req.Key.Name][name]++
					return engine.Result{}, nil
				})
		})
	}
	a := launch("a")
	f.put("orders", "1", names("o", 10)...)
	eventually(t, "a runs all", func() bool { return f.runs("a") == 10 })
	launch("b")
	eventually(t, "b lists all", func() bool { return f.runs("b") == 10 })
	f.forget()
	f.put("orders", "2", names("o", 10)...)
	eventually(t, "both run all", func() bool { return f.runs("a") == 10 && f.runs("b") == 10 })
	a.stop()
	f.forget()
	f.put("orders", "3", names("o", 10)...)
	eventually(t, "b goes on", func() bool { return f.runs("b") == 10 })
}

func TestSingletonRunsInOneReplicaWhoeverRunsItsSource(t *testing.T) {
	f := newFleet(t)
	var started [2]atomic.Int32
	launch := func(i int, name string) *ship {
		return f.launch(name, func(orders, _ *nats.Bucket) engine.Controller {
			return engine.NewController("c").For(orders).WithPlacement(engine.Singleton).WithHandler(f.noting(name, nop)).
				OnStart(func(context.Context) { started[i].Add(1) })
		})
	}
	a := launch(0, "a")
	eventually(t, "a has started", func() bool { return started[0].Load() == 1 })
	launch(1, "b")
	f.put("orders", "1", names("o", 10)...)
	eventually(t, "all run", func() bool { return f.seen() == 10 })
	require.Equal(t, 10, f.runs("a"))
	require.Zero(t, started[1].Load())
	a.stop()
	f.forget()
	f.put("orders", "2", names("o", 10)...)
	eventually(t, "b runs all", func() bool { return f.runs("b") == 10 })
	require.EqualValues(t, 1, started[1].Load())
	require.Zero(t, f.runs("a"))
}

// What one replica made and removed, another that takes its keys over makes again, whatever it has heard of that.
func TestTargetsOutliveTheirReplicas(t *testing.T) {
	f := newFleet(t)
	launch := func(name string) *ship {
		return f.launch(name, func(orders, shipments *nats.Bucket) engine.Controller {
			return engine.NewController("shipping").For(orders).Owns(shipments).WithConcurrency(4).
				WithBackoff(engine.Backoff{Initial: time.Hour, Max: time.Hour}).WithHandler(f.noting(name, copying(orders, shipments)))
		})
	}
	shipments := func(want string, keys ...string) {
		t.Helper()
		for _, k := range keys {
			eventually(t, k, func() bool { return value(f.kv("shipments"), k) == want })
		}
	}
	keys := names("o", 16)
	next := launch("0")
	for i := range 4 {
		f.put("orders", fmt.Sprint(i), keys...)
		shipments(fmt.Sprint("shipped ", i), keys...)
		for _, k := range keys[:8] {
			require.NoError(t, f.kv("orders").Delete(t.Context(), k))
		}
		shipments("", keys[:8]...)
		last := next
		next = launch(fmt.Sprint(i + 1))
		last.stop()
	}
	require.Zero(t, f.overlaps)
}
