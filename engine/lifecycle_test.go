package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/sources/memory"
)

// replica runs an engine of its own beside the harness's until the returned function is called.
func replica(b *bundle, cfg engine.Config) (stop func()) {
	b.t.Helper()
	e, err := engine.New(cfg)
	require.NoError(b.t, err)
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	synctest.Wait()
	return func() {
		cancel()
		require.NoError(b.t, <-done)
	}
}

func TestSingletonRunsInOneReplicaAndTheOtherTakesOver(t *testing.T) {
	bubble(t, func(b *bundle) {
		leases := &lease.Memory{}
		recs := []*enginetest.Recorder{{}, {}}
		b.things.Set("before", 1)
		stops := make([]func(), 2)
		for i := range recs {
			c := engine.NewController("test").For(b.things).WithHandler(recs[i].Handle).WithPlacement(engine.Singleton)
			stops[i] = replica(b, engine.Config{Controllers: []engine.Controller{c}, Leases: leases, Replica: fmt.Sprint("r", i)})
		}
		require.Len(t, recs[0].Times("before"), 1, "what was there before the lease is reconciled")
		require.Zero(t, recs[1].Count())
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		require.Len(t, recs[0].Times("a"), 1)
		require.Zero(t, recs[1].Count())
		stops[0]()
		b.Advance(lease.DefaultTTL)
		require.Len(t, recs[1].Times("a"), 1, "the other takes over")
		require.Len(t, recs[1].Times("before"), 1)
		b.things.Set("c", 1)
		b.Advance(time.Second)
		require.Len(t, recs[1].Times("c"), 1)
		require.Empty(t, recs[0].Times("c"))
		stops[1]()
	})
}

func TestEachReplicaRunsWhatIsPlacedOnEach(t *testing.T) {
	bubble(t, func(b *bundle) {
		leases := &lease.Memory{}
		for i := range 2 {
			rec := &enginetest.Recorder{}
			c := engine.NewController("test").For(b.things).WithHandler(rec.Handle).WithPlacement(engine.Each)
			defer replica(b, engine.Config{Controllers: []engine.Controller{c}, Leases: leases, Replica: fmt.Sprint("r", i)})()
			defer func() { require.Len(t, rec.Times("a"), 1) }()
		}
		b.things.Set("a", 1)
		synctest.Wait()
	})
}

// switchable is a lease.Store that grants and takes away as a test says.
type switchable struct {
	mu     sync.Mutex
	grants bool
	epoch  uint64
	err    error
	hang   time.Duration
}

func (s *switchable) set(grants bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if grants && !s.grants {
		s.epoch++
	}
	s.grants = grants
}

func (s *switchable) Acquire(context.Context, string, string, time.Duration) (bool, uint64, error) {
	s.mu.Lock()
	hang := s.hang
	s.mu.Unlock()
	time.Sleep(hang)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.grants, s.epoch, s.err
}

func (s *switchable) Release(context.Context, string, string) error { return nil }

func (b *bundle) singleton(s lease.Store) engine.Controller {
	b.Config.Leases = s
	return b.controller().WithPlacement(engine.Singleton)
}

func TestNoRunStartsAfterTheLeaseIsLostAndNoneOverlapsWhenItIsRegained(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &switchable{grants: true, epoch: 1}
		var cause error
		b.rec.Answer = func(ctx context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "slow" && cause == nil {
				<-ctx.Done()
				cause = context.Cause(ctx)
				time.Sleep(40 * time.Second) // it does not look at its context
			}
			return engine.Result{}, nil
		}
		b.things.Set("slow", 1)
		b.start(b.singleton(s))
		require.Len(t, b.rec.Times("slow"), 1)
		for i := range 10 {
			b.things.Set(fmt.Sprint("ready", i), 1)
		}
		synctest.Wait()
		s.set(false)
		b.Advance(lease.DefaultTTL)
		require.ErrorIs(t, cause, engine.ErrLeaseLost)
		require.Equal(t, 1, b.rec.Count(), "what was ready does not start without the lease")
		s.set(true)
		b.Advance(10 * time.Second)
		require.Equal(t, 1, b.rec.Count(), "the former run has not ended: the next life waits for it")
		b.Advance(time.Minute)
		require.Equal(t, 1, b.rec.AtOnce())
		require.Len(t, b.rec.Times("slow"), 2)
		for i := range 10 {
			require.Len(t, b.rec.Times(fmt.Sprint("ready", i)), 1)
		}
	})
}

func TestLeaseThatFlipsOftenEndsInItsLastState(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &switchable{}
		b.start(b.singleton(s))
		for i := range 1000 {
			s.set(i%2 == 0)
			b.Advance(10 * time.Millisecond)
		}
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		require.Zero(t, b.rec.Count(), "it is not held")
		s.set(true)
		b.Advance(time.Minute)
		require.Len(t, b.rec.Times("a"), 1)
	})
}

func TestLeaseIsLostByTheOwnClockWhenItsStoreIsAway(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &switchable{grants: true, epoch: 1}
		b.start(b.singleton(s))
		s.mu.Lock()
		s.err = errBroken
		s.mu.Unlock()
		b.Advance(lease.DefaultTTL)
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		require.Zero(t, b.rec.Count())
		x, err := b.Engine.Explain("test", b.things.Key("a"))
		require.NoError(t, err)
		require.Contains(t, x.Reason, "does not hold its lease: broken", "and why")
		s.mu.Lock()
		s.err = nil
		s.mu.Unlock()
		b.Advance(time.Minute)
		require.Len(t, b.rec.Times("a"), 1)
	})
}

func TestNothingStartsWhileTheStoreOfTheLeaseHangs(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &switchable{grants: true, epoch: 1}
		b.start(b.singleton(s))
		s.mu.Lock()
		s.hang = 5 * time.Minute
		s.mu.Unlock()
		b.Advance(time.Minute)
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		require.Zero(t, b.rec.Count(), "by the own clock the lease has run out")
		s.mu.Lock()
		s.hang = 0
		s.mu.Unlock()
		b.Advance(10 * time.Minute)
		require.NotZero(t, b.rec.Count())
	})
}

func TestDelaysOutliveALostLease(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &switchable{grants: true, epoch: 1}
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Trigger() == engine.Created {
				return engine.Result{RequeueAfter: time.Hour}, nil
			}
			return engine.Result{}, nil
		}
		b.start(b.singleton(s))
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		s.set(false)
		b.Advance(time.Minute)
		s.set(true)
		b.Advance(time.Minute)
		b.Advance(2 * time.Hour)
		times := b.rec.Times("a")
		require.Equal(t, time.Hour, times[len(times)-1], "%v", times)
	})
}

func TestInitializerComesFirstAndIsTriedAgain(t *testing.T) {
	bubble(t, func(b *bundle) {
		var calls []time.Duration
		b.things.Set("a", 1)
		b.start(b.controller().WithInitializer(func(context.Context) error {
			require.Zero(t, b.rec.Count())
			calls = append(calls, b.Elapsed())
			switch len(calls) {
			case 1:
				return errBroken
			case 2:
				panic("broken too")
			}
			return nil
		}))
		b.Advance(time.Minute)
		require.Len(t, calls, 3)
		require.Equal(t, 500*time.Millisecond, calls[1])
		require.GreaterOrEqual(t, calls[2]-calls[1], time.Second)
		require.LessOrEqual(t, calls[2]-calls[1], 1250*time.Millisecond)
		require.Len(t, b.rec.Times("a"), 1)
	})
}

func TestStartAndStopAreTold(t *testing.T) {
	bubble(t, func(b *bundle) {
		var seen []string
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			seen = append(seen, "run")
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.start(b.controller().
			WithInitializer(func(context.Context) error { seen = append(seen, "init"); return nil }).
			OnStart(func(context.Context) { seen = append(seen, "start") }).
			OnStop(func(ctx context.Context) {
				seen = append(seen, fmt.Sprint("stop, context ", ctx.Err()))
				o, err := b.things.Get(ctx, b.things.Key("a"))
				require.NoError(t, err, "sources can still be read")
				require.NotEmpty(t, o.Revision)
			}))
		b.Stop()
		require.Equal(t, []string{"init", "start", "run", "stop, context <nil>"}, seen)
	})
}

func TestBackgroundWorkLivesAsLongAsItsController(t *testing.T) {
	bubble(t, func(b *bundle) {
		var order []string
		crashes := 0
		b.start(b.controller().
			WithBackground(func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(200 * time.Millisecond)
				order = append(order, "background")
				return nil
			}).
			WithBackground(func(context.Context) error {
				if crashes++; crashes < 3 {
					return errBroken
				}
				return nil
			}).
			OnStop(func(context.Context) { order = append(order, "stop") }))
		b.Advance(time.Minute)
		require.Equal(t, 3, crashes)
		b.Stop()
		require.Equal(t, []string{"background", "stop"}, order, "stop waits for it")
	})
}

func TestControllersNestAndChildrenStopFirst(t *testing.T) {
	bubble(t, func(b *bundle) {
		var order []string
		var nest func(level int) engine.Controller
		nest = func(level int) engine.Controller {
			c := engine.NewController(fmt.Sprint("level-", level)).For(memory.New[int](fmt.Sprint("things-", level))).
				WithHandler(b.rec.Handle).OnStop(func(context.Context) { order = append(order, fmt.Sprint(level)) })
			if level == 3 {
				return c
			}
			return c.WithBackground(func(ctx context.Context) error {
				child, err := engine.New(engine.Config{Controllers: []engine.Controller{nest(level + 1)}})
				if err != nil {
					return err
				}
				return child.Run(ctx)
			})
		}
		b.start(nest(1))
		b.Advance(time.Second)
		b.Stop()
		require.Equal(t, []string{"3", "2", "1"}, order)
	})
}

func TestControllersAreAddedChangedAndRemovedWhileRunning(t *testing.T) {
	bubble(t, func(b *bundle) {
		ctx := b.t.Context()
		require.ErrorIs(t, mustNew(t, b.controller()).Add(ctx, b.controller()), engine.ErrNotRunning)
		b.things.Set("a", 1)
		b.start()
		parts := memory.New[int]("parts")
		parts.Set("p", 1)
		second := &enginetest.Recorder{}
		c := engine.NewController("second").For(parts).WithHandler(second.Handle).Watches(b.things, engine.MapSameName(parts.Key("")))
		require.NoError(t, b.Engine.Add(ctx, c))
		synctest.Wait()
		require.Len(t, second.Times("p"), 1, "a new source is listed")
		require.Len(t, second.Times("a"), 1, "one that runs already is caught up with")
		require.ErrorContains(t, b.Engine.Add(ctx, c), "two of this name")
		require.Contains(t, b.Engine.Controllers(), "second")
		b.things.Set("b", 1)
		synctest.Wait()
		require.Len(t, second.Times("b"), 1)
		require.Len(t, b.rec.Times("b"), 1)

		third := &enginetest.Recorder{}
		require.NoError(t, b.Engine.Replace(ctx, engine.NewController("second").For(parts).WithHandler(third.Handle)))
		synctest.Wait()
		parts.Set("p", 2)
		b.things.Set("b", 2)
		synctest.Wait()
		require.Len(t, third.Times("p"), 2)
		require.Empty(t, third.Times("b"))
		require.Len(t, second.Times("p"), 1)
		require.Error(t, b.Engine.Replace(ctx, engine.NewController("second")))
		require.Contains(t, b.Engine.Controllers(), "second", "what is replaced by something invalid goes on")

		require.NoError(t, b.Engine.Remove(ctx, "second"))
		require.NotContains(t, b.Engine.Controllers(), "second")
		require.Len(t, b.Engine.Sources(), 1, "a source that nobody references is stopped")
		parts.Set("p", 3)
		b.things.Set("c", 1)
		synctest.Wait()
		require.Len(t, third.Times("p"), 2)
		require.Len(t, b.rec.Times("c"), 1)
		require.ErrorContains(t, b.Engine.Remove(ctx, "second"), `no controller "second"`)
	})
}

func mustNew(t *testing.T, c engine.Controller) *engine.Engine {
	t.Helper()
	e, err := engine.New(engine.Config{Controllers: []engine.Controller{c}})
	require.NoError(t, err)
	return e
}

func TestReplacedControllerKeepsDelaysAndParkedKeys(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "parked" {
				return engine.Result{}, engine.Terminal(errBroken)
			}
			return engine.Result{RequeueAfter: time.Hour}, nil
		}
		b.things.Set("parked", 1)
		b.things.Set("delayed", 1)
		b.start()
		second := &enginetest.Recorder{}
		require.NoError(t, b.Engine.Replace(b.t.Context(), engine.NewController("test").For(b.things).WithHandler(second.Handle)))
		b.Advance(time.Minute)
		require.Zero(t, second.Count(), "nothing has changed")
		b.Advance(time.Hour)
		require.Equal(t, []time.Duration{time.Hour}, second.Times("delayed"))
		require.Empty(t, second.Times("parked"))
	})
}

func TestRemoveWaitsForRunningReconciles(t *testing.T) {
	bubble(t, func(b *bundle) {
		var ended atomic.Bool
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			time.Sleep(time.Second)
			ended.Store(true)
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.start(b.controller(), engine.NewController("other").For(b.things).WithHandler(answers(engine.Result{}, nil)))
		require.NoError(t, b.Engine.Remove(b.t.Context(), "test"))
		require.True(t, ended.Load())
	})
}

// quietSource never ends its first list.
type quietSource struct{ failing bool }

func (s *quietSource) Name() string { return "quiet" }
func (s *quietSource) Run(ctx context.Context, _ engine.Emit) error {
	if s.failing {
		return errors.New("no route to host")
	}
	<-ctx.Done()
	return nil
}

func TestSourceThatDoesNotSyncInTimeIsNamed(t *testing.T) {
	for _, failing := range []bool{false, true} {
		bubble(t, func(b *bundle) {
			b.Config.SyncTimeout = time.Minute
			b.start(b.controller().Reads(&quietSource{failing}))
			b.Advance(2 * time.Minute)
			err := b.StopErr()
			require.ErrorIs(t, err, engine.ErrNotSynced)
			require.ErrorContains(t, err, `"quiet" has not ended its first list within 1m0s`)
			if failing {
				require.ErrorContains(t, err, "no route to host")
			}
			require.Zero(t, b.rec.Count())
		})
	}
}

// breakable is a source over a map that breaks when told to.
type breakable struct {
	*memory.Map[int]

	broken chan struct{}
}

func (s *breakable) Run(ctx context.Context, emit engine.Emit) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.broken:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := s.Map.Run(ctx, emit); err != nil {
		return err
	}
	return errBroken
}

func TestSourceThatBreaksIsListedAgainAndMissedDeletionsAreNoticed(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &breakable{memory.New[int]("breakable"), make(chan struct{})}
		target := memory.New[int]("target")
		copies := func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			v, err := engine.Get[int](ctx, rt, req.Key)
			if engine.IsNotFound(err) {
				return engine.Result{}, rt.Delete(ctx, target.Key(req.Key.Name))
			}
			if err != nil {
				return engine.Result{}, err
			}
			return engine.Result{}, rt.Apply(ctx, target.Object(req.Key.Name, v))
		}
		b.start(engine.NewController("test").For(s).Owns(target).WithHandler(copies))
		s.Set("stays", 1)
		s.Set("goes", 1)
		synctest.Wait()
		require.Equal(t, 2, target.Len())
		s.broken <- struct{}{}
		synctest.Wait()
		require.Error(t, b.Engine.Sources()[0].Err)
		s.Remove("goes")
		s.Set("comes", 1)
		b.Advance(time.Second)
		require.NoError(t, b.Engine.Sources()[0].Err)
		_, there := target.Value("goes")
		require.False(t, there, "its deletion was missed and is carried out")
		_, there = target.Value("comes")
		require.True(t, there)
	})
}
