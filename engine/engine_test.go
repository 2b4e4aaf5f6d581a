package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestObjectsThatExistBeforeTheStartAreReconciled(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.things.Set("a", 1)
		b.things.Set("b", 2)
		b.start()
		require.Equal(t, 2, b.rec.Count())
		require.Equal(t, engine.Resynced, b.rec.Last().Trigger())
		require.Equal(t, engine.PriorityList, b.rec.Last().Priority)
	})
}

func TestChangesAreReconciledWithTheirCause(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.start()
		for _, step := range []struct {
			do      func()
			trigger engine.Trigger
			op      engine.Operation
		}{
			{func() { b.things.Set("a", 1) }, engine.Created, engine.Put},
			{func() { b.things.Set("a", 2) }, engine.Updated, engine.Put},
			{func() { b.things.Remove("a") }, engine.Deleted, engine.Delete},
		} {
			step.do()
			synctest.Wait()
			cause := b.rec.Last().Causes.Newest()
			require.Equal(t, step.trigger, cause.Trigger)
			require.Equal(t, step.op, cause.Operation)
			require.Equal(t, b.things.Key("a"), cause.Key)
			require.NotEmpty(t, cause.Revision)
		}
		require.Equal(t, 3, b.rec.Count())
	})
}

func TestManyEventsOfARunningKeyBecomeOneRunWithTheirCausesJoined(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			time.Sleep(time.Second)
			return engine.Result{}, nil
		}
		b.start()
		b.things.Set("a", 0)
		synctest.Wait()
		for i := range 100 {
			b.things.Set("a", i)
		}
		b.Advance(5 * time.Second)
		require.Equal(t, 2, b.rec.Count())
		causes := b.rec.Last().Causes
		require.Equal(t, 100, causes.Count())
		require.Len(t, causes.All(), engine.MaxCauses)
		require.Equal(t, 92, causes.Dropped())
		require.True(t, causes.Complete())
		require.Equal(t, "2", causes.All()[0].Revision, "the first is kept")
		require.Equal(t, "101", causes.Newest().Revision, "and the newest")
	})
}

func TestOutcomes(t *testing.T) {
	type answers = []struct {
		res engine.Result
		err error
	}
	s := func(seconds ...float64) (out []time.Duration) {
		for _, x := range seconds {
			out = append(out, time.Duration(x*float64(time.Second)))
		}
		return out
	}
	for _, c := range []struct {
		name     string
		answers  answers
		times    []time.Duration
		attempts []int
	}{
		{"done", answers{{}}, s(0), []int{0}},
		{"errors back off from the initial wait, doubling", answers{{err: errBroken}, {err: errBroken}, {err: errBroken}, {}}, s(0, 1, 3, 7), []int{0, 1, 2, 3}},
		{"requeue after", answers{{res: engine.Result{RequeueAfter: 5 * time.Second}}, {}}, s(0, 5), []int{0, 0}},
		{"requeue resets the attempts", answers{{err: errBroken}, {res: engine.Result{RequeueAfter: 5 * time.Second}}, {err: errBroken}, {}}, s(0, 1, 6, 7), []int{0, 1, 0, 1}},
		{"defer keeps them", answers{{err: errBroken}, {res: engine.Result{Defer: 5 * time.Second}}, {err: errBroken}, {}}, s(0, 1, 6, 8), []int{0, 1, 1, 2}},
		{"backoff without an error", answers{{res: engine.Result{Backoff: true}}, {res: engine.Result{Backoff: true}}, {}}, s(0, 1, 3), []int{0, 1, 2}},
		{"terminal", answers{{err: engine.Terminal(errBroken)}}, s(0), []int{0}},
		{"terminal, wrapped", answers{{err: fmt.Errorf("x: %w", engine.Terminal(errBroken))}}, s(0), []int{0}},
		{"retry after is no sooner", answers{{err: engine.RetryAfter(errBroken, 30*time.Second)}, {}}, s(0, 30), []int{0, 1}},
		{"retry after is no later than backoff", answers{{err: engine.RetryAfter(errBroken, time.Millisecond)}, {}}, s(0, 1), []int{0, 1}},
		{"requeue as a wrapped error", answers{{err: fmt.Errorf("x: %w", engine.RequeueAfter(5*time.Second))}, {}}, s(0, 5), []int{0, 0}},
		{"requeue now", answers{{err: engine.RequeueNow()}, {err: engine.RequeueNow()}, {}}, s(0, 0, 0), []int{0, 0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(b *bundle) {
				n := 0
				b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
					n++
					return c.answers[n-1].res, c.answers[n-1].err
				}
				b.things.Set("a", 1)
				b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second}))
				b.Advance(time.Hour)
				require.Equal(t, c.times, b.rec.Times("a"))
				for i, x := range b.rec.Runs() {
					require.Equal(t, c.attempts[i], x.Request.Attempt)
				}
			})
		})
	}
}

func TestPoisonKeyIsParkedAfterItsAttemptsAndBlocksNobody(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "poison" {
				return engine.Result{}, errBroken
			}
			return engine.Result{}, nil
		}
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second, MaxAttempts: 3}))
		b.things.Set("poison", 1)
		b.things.Set("good", 1)
		b.Advance(time.Hour)
		require.Equal(t, []time.Duration{0, time.Second, 3 * time.Second}, b.rec.Times("poison"))
		require.Len(t, b.rec.Times("good"), 1)
		item := b.items()["poison"]
		require.Equal(t, queue.Parked, item.Phase)
		require.Contains(t, item.Err, "given up after 3 attempts: broken")

		b.things.Set("poison", 2)
		synctest.Wait()
		require.Zero(t, b.rec.Last().Attempt, "news of it brings it back, with attempts afresh")
	})
}

func TestEventsDoNotBurnTheBudgetOfAttempts(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, errBroken
		}
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Minute, MaxAttempts: 2}))
		for i := range 10 {
			b.things.Set("a", i)
			synctest.Wait()
		}
		require.Equal(t, 10, b.rec.Count())
		require.Equal(t, 1, b.items()["a"].Attempt)
		b.Advance(time.Minute)
		require.Equal(t, queue.Parked, b.items()["a"].Phase, "the retry itself counts")
		require.Equal(t, []time.Duration{0, time.Minute}, []time.Duration{b.rec.Times("a")[9], b.rec.Times("a")[10]}, "and kept its time")
	})
}

func TestBackoffResultNeverParks(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{Backoff: true}, nil
		}
		b.things.Set("a", 1)
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second, Max: time.Second, MaxAttempts: 2}))
		b.Advance(10 * time.Second)
		require.Greater(t, b.rec.Count(), 5)
	})
}

func TestBackoffWaits(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, errBroken
		}
		b.things.Set("a", 1)
		b.start()
		b.Advance(6 * time.Hour)
		times := b.rec.Times("a")
		require.Equal(t, 5*time.Millisecond, times[1])
		require.Equal(t, 15*time.Millisecond, times[2])
		n := len(times)
		require.Equal(t, 1000*time.Second, times[n-1]-times[n-2], "the longest wait")
	})
}

func TestJitterSpreadsTheWait(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, errBroken
		}
		b.things.Set("a", 1)
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second, Multiplier: 1, Jitter: 0.5}))
		b.Advance(100 * time.Second)
		times := b.rec.Times("a")
		distinct := map[time.Duration]bool{}
		for i := 1; i < len(times); i++ {
			d := times[i] - times[i-1]
			require.InDelta(t, 1, d.Seconds(), 0.51)
			distinct[d] = true
		}
		require.Greater(t, len(distinct), 10)
	})
}

func TestDeadlineCancelsWithItsCause(t *testing.T) {
	bubble(t, func(b *bundle) {
		var cause error
		var at time.Duration
		var timedOut bool
		b.rec.Answer = func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
			<-ctx.Done()
			cause, at = context.Cause(ctx), time.Since(epoch)
			return engine.Result{}, ctx.Err()
		}
		b.Config.Hooks.RunEnded = func(_ engine.Request, o engine.Outcome, _ time.Duration) { timedOut = o.TimedOut }
		b.things.Set("a", 1)
		b.start()
		b.Advance(30 * time.Second)
		require.ErrorIs(t, cause, engine.ErrDeadline)
		require.Equal(t, 30*time.Second, at, "the default")
		require.True(t, timedOut)
		require.Equal(t, 1, b.items()["a"].Attempt, "and a failure")
	})
}

func TestPanicIsAnErrorWithItsStack(t *testing.T) {
	bubble(t, func(b *bundle) {
		var got error
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Attempt == 0 {
				panic("oh")
			}
			return engine.Result{}, nil
		}
		b.Config.Hooks.RunEnded = func(_ engine.Request, o engine.Outcome, _ time.Duration) { got = errors.Join(got, o.Err) }
		b.things.Set("a", 1)
		b.start()
		b.Advance(time.Second)
		var p *engine.PanicError
		require.ErrorAs(t, got, &p)
		require.Equal(t, "oh", p.Value)
		require.Contains(t, string(p.Stack), "engine_test.go")
		require.Equal(t, 2, b.rec.Count())
	})
}

func TestOrderOfTheMiddleware(t *testing.T) {
	bubble(t, func(b *bundle) {
		var seen []string
		note := func(name string) engine.Middleware {
			return func(next engine.Handler) engine.Handler {
				return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
					_, deadline := ctx.Deadline()
					seen = append(seen, fmt.Sprintf("%s in, deadline %t", name, deadline))
					res, err := next(ctx, rt, req)
					seen = append(seen, fmt.Sprintf("%s out, retry %s, err %t", name, res.Retry(), err != nil))
					return res, err
				}
			}
		}
		n := 0
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			if n++; n == 1 {
				panic("inside")
			}
			return engine.Result{}, nil
		}
		b.Config.Middleware = []engine.Middleware{note("trace"), note("metrics")}
		b.things.Set("a", 1)
		b.start(b.controller().WithMiddleware(note("yours")).WithTimeout(time.Minute))
		require.Equal(t, []string{
			"trace in, deadline false", "metrics in, deadline false", "yours in, deadline true",
			// recover stands between the deadline and yours, so yours sees the panic go by and has no "out".
			"metrics out, retry 5ms, err true", "trace out, retry 5ms, err true",
		}, seen)
	})
}

func TestDelayedRequestsAreInspectable(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			switch req.Key.Name {
			case "later":
				return engine.Result{RequeueAfter: time.Minute}, nil
			case "failing":
				return engine.Result{}, errBroken
			case "parked":
				return engine.Result{}, engine.Terminal(errBroken)
			default:
				time.Sleep(time.Minute)
				return engine.Result{}, nil
			}
		}
		for _, name := range []string{"later", "failing", "parked", "running"} {
			b.things.Set(name, 1)
		}
		b.start(b.controller().WithConcurrency(4).WithBackoff(engine.Backoff{Initial: time.Minute}))
		items := b.items()
		require.Equal(t, queue.Requeued, items["later"].Phase)
		require.Equal(t, queue.Backoff, items["failing"].Phase)
		require.Equal(t, queue.Parked, items["parked"].Phase)
		require.Equal(t, queue.Running, items["running"].Phase)
		require.Equal(t, epoch.Add(time.Minute).UnixNano(), items["later"].Due)
		require.Equal(t, queue.Stats{Running: 1, Delayed: 2, Parked: 1}, b.Engine.Stats()["test"].Stats)
		_, err := b.Engine.Items("nobody")
		require.ErrorContains(t, err, `no controller "nobody"`)
	})
}

func TestEnqueueFromOutside(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, engine.Terminal(errBroken)
		}
		b.start()
		key := b.things.Key("a")
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", key, 0))
		synctest.Wait()
		require.Equal(t, engine.Manual, b.rec.Last().Trigger())
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", key, 0))
		synctest.Wait()
		require.Equal(t, 2, b.rec.Count(), "a parked key comes back")
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", key, time.Minute))
		b.Advance(time.Minute - 1)
		require.Equal(t, 2, b.rec.Count())
		b.Advance(1)
		require.Equal(t, 3, b.rec.Count())
		err := b.Engine.Enqueue(b.t.Context(), "test", engine.Key{Kind: engine.KindOf("x"), Name: "y"}, 0)
		require.ErrorIs(t, err, engine.ErrInvalid)
	})
}

func TestResyncReconcilesEveryKeyAgain(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.things.Set("a", 1)
		b.things.Set("b", 1)
		b.start(b.controller().WithResync(time.Minute))
		b.Advance(time.Minute)
		require.Equal(t, []time.Duration{0, time.Minute}, b.rec.Times("a"))
		require.Equal(t, []time.Duration{0, time.Minute}, b.rec.Times("b"))
	})
}

func TestShutdownLetsRunningReconcilesFinish(t *testing.T) {
	bubble(t, func(b *bundle) {
		finished := 0
		b.rec.Answer = func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
			select {
			case <-time.After(10 * time.Second):
				finished++
			case <-ctx.Done():
			}
			return engine.Result{}, ctx.Err()
		}
		for _, name := range []string{"a", "b", "c"} {
			b.things.Set(name, 1)
		}
		b.start()
		b.Advance(time.Second)
		b.Stop()
		require.Equal(t, 10*time.Second, time.Since(epoch))
		require.Equal(t, 1, finished, "what runs ends well")
		require.Equal(t, 1, b.rec.Count(), "and nothing new starts")
	})
}

func TestReconcileThatOutlastsTheDrainIsInterruptedNotFailed(t *testing.T) {
	bubble(t, func(b *bundle) {
		var outcome engine.Outcome
		var cause error
		b.rec.Answer = func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return engine.Result{}, ctx.Err()
		}
		b.Config.DrainTimeout = 5 * time.Second
		b.Config.Hooks.RunEnded = func(_ engine.Request, o engine.Outcome, _ time.Duration) { outcome = o }
		b.things.Set("a", 1)
		b.start(b.controller().WithTimeout(-1))
		b.Stop()
		require.Equal(t, 5*time.Second, time.Since(epoch))
		require.ErrorIs(t, cause, engine.ErrShutdown)
		require.True(t, outcome.Interrupted)
	})
}

func TestRunCanBeCalledOnce(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.start()
		require.ErrorIs(t, b.Engine.Run(b.t.Context()), engine.ErrAlreadyRan)
	})
}

func TestNoReconcileBeforeEverySourceIsListed(t *testing.T) {
	bubble(t, func(b *bundle) {
		slow := &slowSource{Map: memory.New[int]("slow"), wait: time.Minute}
		b.things.Set("a", 1)
		b.start(b.controller().Reads(slow))
		b.Advance(time.Minute - 1)
		require.Zero(t, b.rec.Count())
		require.Contains(t, b.Engine.Sources(), engine.SourceStatus{Name: "slow"})
		b.Advance(1)
		require.Equal(t, 1, b.rec.Count())
		slow.Set("x", 1)
		synctest.Wait()
		require.Equal(t, 1, b.rec.Count(), "what is only read triggers nothing")
	})
}

// slowSource takes its time before the first list.
type slowSource struct {
	*memory.Map[int]
	wait time.Duration
}

func (s *slowSource) Run(ctx context.Context, emit engine.Emit) error {
	time.Sleep(s.wait)
	return s.Map.Run(ctx, emit)
}

// failingSource ends again and again.
type failingSource struct {
	*memory.Map[int]
	starts []time.Duration
	end    func(n int) error
}

func (s *failingSource) Run(ctx context.Context, _ engine.Emit) error {
	s.starts = append(s.starts, time.Since(epoch))
	if err := s.end(len(s.starts)); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func TestFailingSourceIsRunAgainAfterGrowingWaits(t *testing.T) {
	bubble(t, func(b *bundle) {
		src := &failingSource{Map: memory.New[int]("failing"), end: func(n int) error {
			if n == 2 {
				panic("oh")
			}
			return errBroken
		}}
		b.start(b.controller().Reads(src))
		b.Advance(20 * time.Minute)
		waits := make([]float64, 0, len(src.starts))
		for i := 1; i < len(src.starts); i++ {
			waits = append(waits, (src.starts[i] - src.starts[i-1]).Seconds())
		}
		for i, want := range []float64{0.5, 1, 2, 4, 8, 16, 32, 60, 60} {
			require.InDelta(t, want*1.125, waits[i], want*0.1251, "wait %d", i)
		}
		require.InDelta(t, 0.5, waits[0], 0, "the first has no jitter")
		for _, s := range b.Engine.Sources() {
			if s.Name == "failing" {
				require.ErrorIs(t, s.Err, errBroken)
			}
		}
	})
}

func TestHooksSeeTheWayOfAChange(t *testing.T) {
	bubble(t, func(b *bundle) {
		var mu sync.Mutex
		counts := map[string]int{}
		count := func(what string) {
			mu.Lock()
			defer mu.Unlock()
			counts[what]++
		}
		b.Config.Hooks = engine.JoinHooks(engine.Hooks{
			EventReceived: func(e engine.Event) { count("event " + e.Source) },
			RequestAdded:  func(string, engine.Trigger) { count("added") },
		}, engine.Hooks{
			RunStarted:    func(engine.Request) { count("started") },
			RunEnded:      func(engine.Request, engine.Outcome, time.Duration) { count("ended") },
			EventReceived: func(engine.Event) { count("event") },
		})
		b.start()
		b.things.Set("a", 1)
		synctest.Wait()
		require.Equal(t, map[string]int{"event": 1, "event things": 1, "added": 1, "started": 1, "ended": 1}, counts)
	})
}
