package engine_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/internal/queue"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestSuspendedKeyWaitsAndSaysWhy(t *testing.T) {
	bubble(t, func(b *bundle) {
		ctx, key := b.t.Context(), b.things.Key("a")
		b.things.Set("a", 1)
		b.start()
		until := time.Now().Add(time.Hour)
		require.NoError(t, b.Engine.Suspend(ctx, "test", key, engine.Suspension{Until: until, Reason: "maintenance"}))
		b.things.Set("a", 2)
		b.things.Set("b", 1)
		synctest.Wait()
		require.Len(t, b.rec.Times("a"), 1)
		require.Len(t, b.rec.Times("b"), 1, "others go on")
		x, err := b.Engine.Explain("test", key)
		require.NoError(t, err)
		require.Equal(t, "paused", x.State)
		require.Equal(t, "it is suspended: maintenance", x.Reason)
		require.Equal(t, until.UnixNano(), x.Next.UnixNano())
		require.Equal(t, "2", x.Waiting[0].Revision)
		require.Contains(t, b.Engine.Suspensions("test"), key)
		require.NoError(t, b.Engine.Suspend(ctx, "test", key, engine.Suspension{Until: until, Reason: "longer maintenance"}))
		require.Equal(t, "longer maintenance", b.Engine.Suspensions("test")[key].Reason, "the second replaces the first")
		b.Advance(time.Hour)
		require.Len(t, b.rec.Times("a"), 2, "it ends by itself")
		require.Empty(t, b.Engine.Suspensions("test"))
	})
}

func TestDeletionPassesASuspensionUnlessSaidOtherwise(t *testing.T) {
	for _, held := range []bool{false, true} {
		bubble(t, func(b *bundle) {
			ctx := b.t.Context()
			b.things.Set("a", 1)
			b.things.Set("b", 1)
			b.start()
			require.NoError(t, b.Engine.Suspend(ctx, "test", engine.Key{}, engine.Suspension{Deletions: held}))
			b.things.Set("a", 2)
			b.things.Remove("b")
			synctest.Wait()
			require.Len(t, b.rec.Times("a"), 1)
			require.Len(t, b.rec.Times("b"), map[bool]int{false: 2, true: 1}[held])
			require.NoError(t, b.Engine.Resume(ctx, "test", engine.Key{}))
			synctest.Wait()
			require.Len(t, b.rec.Times("a"), 2)
			require.Len(t, b.rec.Times("b"), 2)
		})
	}
}

func TestSuspensionOutlivesARestart(t *testing.T) {
	bubble(t, func(b *bundle) {
		ctx := b.t.Context()
		b.things.Set("a", 1)
		b.things.Set("b", 1)
		b.start()
		require.NoError(t, b.Engine.Suspend(ctx, "test", b.things.Key("a"), engine.Suspension{}))
		b.Stop()
		b.start()
		require.Len(t, b.rec.Times("a"), 1)
		require.Len(t, b.rec.Times("b"), 2)
		require.NoError(t, b.Engine.Resume(ctx, "test", b.things.Key("a")))
		synctest.Wait()
		require.Len(t, b.rec.Times("a"), 2)
		b.Stop()
		b.start(b.controller().Suspended())
		require.ErrorContains(t, b.Engine.Resume(ctx, "test", engine.Key{}), "suspended in its configuration")
		require.Len(t, b.rec.Times("a"), 2)
	})
}

func TestReconcileNowEchoesItsToken(t *testing.T) {
	bubble(t, func(b *bundle) {
		ctx, key := b.t.Context(), b.things.Key("a")
		b.things.Set("a", 1)
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			time.Sleep(time.Second)
			if req.Trigger() == engine.Manual {
				return engine.Result{RequeueAfter: time.Hour}, nil
			}
			return engine.Result{}, engine.RetryAfter(errBroken, 24*time.Hour)
		}
		b.start()
		run, err := b.Engine.Reconcile(ctx, "test", key, "ticket 7")
		require.NoError(t, err)
		require.Equal(t, 2*time.Second, b.Elapsed(), "a run that began before does not count, and it passes Retry-After")
		require.Equal(t, "requeue", run.Outcome)
		tokens := ""
		for _, c := range run.Causes {
			tokens += c.Token
		}
		require.Equal(t, "ticket 7", tokens)
		_, err = b.Engine.Reconcile(ctx, "test", key, "")
		require.Error(t, err)
		require.NoError(t, b.Engine.Suspend(ctx, "test", key, engine.Suspension{}))
		short, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		_, err = b.Engine.Reconcile(short, "test", key, "ticket 8")
		require.ErrorContains(t, err, "not handled yet")
	})
}

func TestDeadLettersAreListedRedrivenAndDropped(t *testing.T) {
	bubble(t, func(b *bundle) {
		ctx, broken := b.t.Context(), true
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			if broken {
				return engine.Result{}, engine.Terminal(errBroken)
			}
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.things.Set("b", 1)
		b.start()
		dead, err := b.Engine.Dead("test")
		require.NoError(t, err)
		require.Len(t, dead, 2)
		require.Equal(t, b.things.Key("a"), dead[0].Key)
		require.Equal(t, "broken", dead[0].Err)
		require.Equal(t, 1, dead[0].Attempt)
		require.Equal(t, engine.Resynced, dead[0].Value.All()[0].Trigger)
		x, err := b.Engine.Explain("test", b.things.Key("a"))
		require.NoError(t, err)
		require.Equal(t, "parked", x.State)
		require.Equal(t, "broken", x.Error)

		require.NoError(t, b.Engine.Drop(ctx, "test", b.things.Key("b")))
		require.ErrorIs(t, b.Engine.Drop(ctx, "test", b.things.Key("b")), engine.ErrNotFound)
		broken = false
		require.NoError(t, b.Engine.Redrive(ctx, "test", b.things.Key("a")))
		synctest.Wait()
		require.Len(t, b.rec.Times("a"), 2)
		require.Len(t, b.rec.Times("b"), 1)
		require.ErrorIs(t, b.Engine.Redrive(ctx, "test", b.things.Key("a")), engine.ErrNotFound)
		dead, err = b.Engine.Dead("test")
		require.NoError(t, err)
		require.Empty(t, dead)
	})
}

func TestExplainTellsTheLastRuns(t *testing.T) {
	bubble(t, func(b *bundle) {
		n := 0
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			time.Sleep(time.Second)
			if n++; n == 12 {
				return engine.Result{}, errBroken
			}
			return engine.Result{}, nil
		}
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Minute}))
		for i := range 12 {
			b.things.Set("a", i)
			b.Advance(2 * time.Second)
		}
		x, err := b.Engine.Explain("test", b.things.Key("a"))
		require.NoError(t, err)
		require.Len(t, x.Runs, 10)
		require.Equal(t, "error", x.Runs[0].Outcome)
		require.Equal(t, "broken", x.Runs[0].Error)
		require.Equal(t, time.Second, x.Runs[0].Took)
		require.Equal(t, "12", x.Runs[0].Causes[0].Revision)
		require.Equal(t, b.things.Key("a"), x.Runs[0].Causes[0].Key)
		require.Equal(t, "done", x.Runs[1].Outcome)
		require.True(t, x.Runs[1].Next.IsZero())
		require.Equal(t, x.Next.UnixNano(), x.Runs[0].Next.UnixNano())
		require.Equal(t, "backoff", x.State)
		require.Equal(t, 1, x.Attempt)
		require.Equal(t, "broken", x.Error)
		require.Contains(t, x.String(), "of controller test is backoff: it failed 1 times")
		require.Contains(t, x.String(), "because  updated at revision 12")
		x, err = b.Engine.Explain("test", b.things.Key("nobody"))
		require.NoError(t, err)
		require.Equal(t, "idle", x.State)
		_, err = b.Engine.Explain("nobody", b.things.Key("a"))
		require.ErrorContains(t, err, `no controller "nobody"`)
	})
}

func TestSharedRateLimitIsATokenBucketWhoseWaitersKeepTheirTurn(t *testing.T) {
	bubble(t, func(b *bundle) {
		limit := engine.NewRateLimit(1, 3)
		second := &enginetest.Recorder{}
		b.start(b.controller().WithRateLimit(limit).WithConcurrency(4),
			engine.NewController("second").For(b.things).WithHandler(second.Handle).WithRateLimit(limit))
		for i := range 5 {
			b.things.Set(fmt.Sprint(i), 1)
		}
		synctest.Wait()
		require.Equal(t, 3, b.rec.Count()+second.Count(), "the burst")
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", b.things.Key("urgent"), 0))
		synctest.Wait()
		require.Len(t, b.rec.Times("urgent"), 1, "an operator passes")
		for i := range 7 {
			b.Advance(time.Second)
			require.Equal(t, 3+1+i+1, b.rec.Count()+second.Count(), "one a second after that")
		}
		b.Advance(time.Minute)
		require.Equal(t, 11, b.rec.Count()+second.Count(), "nothing is dropped")
	})
}

func TestDebounceWaitsForQuietAndNeverForARetry(t *testing.T) {
	bubble(t, func(b *bundle) {
		fail := false
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			if fail {
				fail = false
				return engine.Result{}, errBroken
			}
			return engine.Result{}, nil
		}
		b.start(b.controller().WithDebounce(engine.Debounce{After: time.Second, Max: 5 * time.Second}).
			WithBackoff(engine.Backoff{Initial: 500 * time.Millisecond}))
		for range 20 {
			b.things.Set("burst", 1)
			b.Advance(45 * time.Millisecond)
		}
		b.Advance(2 * time.Second)
		require.Equal(t, []time.Duration{19*45*time.Millisecond + time.Second}, b.rec.Times("burst"))
		require.Equal(t, 20, b.rec.Last().Causes.Count(), "with all that it waited for")

		begin := b.Elapsed()
		for range 40 {
			b.things.Set("steady", 1)
			b.Advance(500 * time.Millisecond)
		}
		b.Advance(5 * time.Second)
		steady := b.rec.Times("steady")
		require.Equal(t, 5*time.Second, steady[0]-begin, "and no longer than the maximum")
		require.Len(t, steady, 4)

		begin, fail = b.Elapsed(), true
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", b.things.Key("retry"), 0))
		synctest.Wait()
		require.Len(t, b.rec.Times("retry"), 1, "an operator does not wait")
		b.Advance(400 * time.Millisecond)
		b.things.Set("retry", 1)
		b.Advance(time.Minute)
		require.Equal(t, 500*time.Millisecond, b.rec.Times("retry")[1]-begin, "the retry comes in time and takes the event along")
		require.Len(t, b.rec.Times("retry"), 2)
	})
}

func TestLinearBackoffAndNoRetry(t *testing.T) {
	bubble(t, func(b *bundle) {
		fails := answers(engine.Result{}, errBroken)
		once := &enginetest.Recorder{Answer: fails}
		b.rec.Answer = fails
		b.things.Set("a", 1)
		b.start(b.controller().WithBackoff(engine.Backoff{Linear: true, Max: 3 * time.Second}),
			engine.NewController("once").For(b.things).WithHandler(once.Handle).WithBackoff(engine.Backoff{MaxAttempts: 1}))
		b.Advance(9 * time.Second)
		require.Equal(t, []time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second, 9 * time.Second}, b.rec.Times("a"))
		b.Advance(time.Hour)
		require.Len(t, once.Times("a"), 1)
		b.things.Set("a", 2)
		synctest.Wait()
		require.Len(t, once.Times("a"), 2, "until there is news")
	})
}

func TestHeartbeatsKeepALongRunAlive(t *testing.T) {
	bubble(t, func(b *bundle) {
		var causes []error
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			for range 10 {
				if req.Key.Name == "alive" {
					rt.Heartbeat()
				}
				select {
				case <-time.After(50 * time.Second):
				case <-ctx.Done():
					causes = append(causes, context.Cause(ctx))
					return engine.Result{}, engine.Terminal(ctx.Err())
				}
			}
			return engine.Result{}, nil
		}
		b.things.Set("alive", 1)
		b.things.Set("silent", 1)
		b.start(b.controller().WithTimeout(-1).WithHeartbeat(time.Minute).WithConcurrency(2))
		b.Advance(time.Hour)
		require.Len(t, causes, 1)
		require.ErrorIs(t, causes[0], engine.ErrNoHeartbeat)
		require.Equal(t, queue.Parked, b.items()["silent"].Phase)
		require.NotContains(t, b.items(), "alive")
	})
}

func TestRunThatIgnoresItsContextIsReportedAndItsKeyStaysLocked(t *testing.T) {
	bubble(t, func(b *bundle) {
		var log strings.Builder
		var stuck []string
		b.Config.Logger = newLogger(&log)
		b.Config.Hooks.RunStuck = func(controller string, key engine.Key, age time.Duration) {
			stuck = append(stuck, fmt.Sprint(controller, " ", key.Name, " ", age))
		}
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "deaf" {
				time.Sleep(time.Hour)
			}
			return engine.Result{}, nil
		}
		b.things.Set("deaf", 1)
		b.start(b.controller().WithTimeout(time.Minute).WithConcurrency(2))
		b.things.Set("deaf", 2)
		b.Advance(2 * time.Minute)
		require.Equal(t, []string{"test deaf 1m10s"}, stuck, "once")
		require.Contains(t, log.String(), "TestRunThatIgnoresItsContextIsReported", "the log shows where it hangs")
		require.Equal(t, 1, b.Engine.Stats()["test"].Stuck)
		require.Len(t, b.rec.Times("deaf"), 1)
		b.Advance(2 * time.Hour)
		require.Equal(t, []time.Duration{0, time.Hour}, b.rec.Times("deaf"))
		require.Len(t, stuck, 2, "the second run was one of its own")
		require.Zero(t, b.Engine.Stats()["test"].Stuck)
	})
}

func TestKeyThatCausesItselfIsSlowedAndAChangeFromOutsideIsNot(t *testing.T) {
	for _, way := range []string{"writes itself", "asks for itself", "at once again", "through another"} {
		bubble(t, func(b *bundle) {
			slowed := 0
			b.Config.Hooks.KeySlowed = func(string, engine.Key, time.Duration) { slowed++ }
			other := memory.New[int]("other")
			n := 0
			b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
				n++
				switch way {
				case "writes itself":
					return engine.Result{}, rt.Apply(ctx, b.things.Object(req.Key.Name, n))
				case "asks for itself":
					return engine.Result{}, rt.Enqueue(ctx, req.Key, 0)
				case "at once again":
					return engine.Result{}, engine.RequeueNow()
				default:
					return engine.Result{}, rt.Apply(ctx, other.Object(req.Key.Name, n))
				}
			}
			back := engine.NewController("back").For(other).WritesTo(b.things).WithHandler(
				func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
					return engine.Result{}, rt.Do(ctx, engine.Effect{Object: b.things.Object(req.Key.Name, 1000+n), Adopt: true})
				})
			c := b.controller().WritesTo(b.things).WritesTo(other)
			if way == "writes itself" {
				c = b.controller().WritesTo(b.things).WithHandler(func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
					_, err := b.rec.Handle(ctx, rt, req)
					if err != nil {
						n++
						return engine.Result{}, rt.Do(ctx, engine.Effect{Object: b.things.Object(req.Key.Name, n), Adopt: true})
					}
					return engine.Result{}, nil
				})
			}
			b.things.Set("a", 0)
			b.start(c, back)
			b.Advance(time.Hour)
			require.Positive(t, slowed, way)
			require.Less(t, b.rec.Count(), 200, "%s: an hour of it", way)
			require.Greater(t, b.rec.Count(), 40, "%s: slowed, not stopped", way)
			before := len(b.rec.Times("a"))
			b.things.Set("a", -1)
			b.Advance(time.Millisecond)
			require.Greater(t, len(b.rec.Times("a")), before, "%s: a change from outside runs at once", way)
		})
	}
}

func TestKeyThatIsChangedOftenIsNotSlowed(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.Config.Hooks.KeySlowed = func(string, engine.Key, time.Duration) { t.Error("slowed") }
		target := memory.New[int]("target")
		n := 0
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			n++
			return engine.Result{}, rt.Apply(ctx, target.Object(req.Key.Name, n))
		}
		b.start(b.controller().WritesTo(target))
		for i := range 1000 {
			b.things.Set("a", i)
			b.Advance(time.Millisecond)
		}
		require.Len(t, b.rec.Times("a"), 1000)
	})
}

func TestWhatARunReadIsADependency(t *testing.T) {
	bubble(t, func(b *bundle) {
		flags, parts := memory.New[string]("flags"), memory.New[int]("parts")
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			which, err := engine.Get[string](ctx, rt, flags.Key("which"))
			if engine.IsNotFound(err) {
				which, err = "none", nil
			}
			_, _ = rt.Get(ctx, parts.Key(which))
			if which == "all" {
				_, err = rt.List(ctx, "parts")
			}
			return engine.Result{}, err
		}
		b.things.Set("a", 1)
		b.start(b.controller().Reads(flags).Reads(parts).TracksReads())
		runs := func() int { synctest.Wait(); return len(b.rec.Times("a")) }
		require.Equal(t, 1, runs())
		flags.Set("which", "p")
		require.Equal(t, 2, runs(), "what was looked for and not found")
		require.Equal(t, engine.Dependency, b.rec.Last().Trigger())
		require.Equal(t, flags.Key("which"), b.rec.Last().Causes.Newest().Key)
		parts.Set("p", 1)
		require.Equal(t, 3, runs())
		parts.Set("q", 1)
		require.Equal(t, 3, runs(), "what it does not read is nothing to it")
		flags.Set("which", "q")
		require.Equal(t, 4, runs())
		parts.Set("p", 2)
		require.Equal(t, 4, runs(), "nor is what it no longer reads")
		flags.Set("which", "all")
		require.Equal(t, 5, runs())
		parts.Set("new", 2)
		require.Equal(t, 6, runs(), "a list depends on all")
		parts.Remove("q")
		require.Equal(t, 7, runs())
	})
}

func TestWhatARunReadIsRememberedUpToABound(t *testing.T) {
	bubble(t, func(b *bundle) {
		var log strings.Builder
		b.Config.Logger = newLogger(&log)
		parts := memory.New[int]("parts")
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			for i := range 600 {
				_, _ = rt.Get(ctx, parts.Key(fmt.Sprint(i)))
			}
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.start(b.controller().Reads(parts).TracksReads())
		require.Contains(t, log.String(), "a run reads more objects than are remembered")
		parts.Set("599", 1)
		synctest.Wait()
		require.Equal(t, 1, b.rec.Count())
		parts.Set("511", 1)
		synctest.Wait()
		require.Equal(t, 2, b.rec.Count())
	})
}

// lagging is a reader that shows the past for a while.
type lagging struct {
	*memory.Map[int]

	behind time.Duration
	last   map[string]engine.Object
	since  map[string]time.Time
}

func (l *lagging) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	o, err := l.Map.Get(ctx, key)
	if old, ok := l.last[key.Name]; ok && old.Revision != o.Revision && time.Since(l.since[key.Name]) < l.behind {
		if old.Revision == "" {
			return engine.Object{}, engine.ErrNotFound
		}
		return old, nil
	}
	return o, err
}

func (l *lagging) CompareRevisions(a, b string) (int, error) {
	return strings.Compare(fmt.Sprintf("%9s", a), fmt.Sprintf("%9s", b)), nil
}

func (l *lagging) set(name string, v int) {
	l.last[name], _ = l.Map.Get(context.Background(), l.Key(name))
	l.since[name] = time.Now()
	l.Set(name, v)
}

func TestReadOlderThanItsCauseIsRetriedAndThenFails(t *testing.T) {
	for _, c := range []struct {
		behind  time.Duration
		attempt int
	}{{0, 0}, {600 * time.Millisecond, 0}, {time.Minute, 1}} {
		bubble(t, func(b *bundle) {
			l := &lagging{memory.New[int]("lagging"), c.behind, map[string]engine.Object{}, map[string]time.Time{}}
			type read struct {
				v       int
				err     error
				attempt int
			}
			var reads []read
			b.start(engine.NewController("test").For(l).WithBackoff(engine.Backoff{Initial: 2 * time.Minute}).WithHandler(
				func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
					v, err := engine.Get[int](ctx, rt, req.Key)
					if err == nil {
						reads = append(reads, read{v, err, req.Attempt})
					}
					require.False(t, engine.IsNotFound(err), "what lags is not gone")
					return engine.Result{}, err
				}))
			l.set("a", 1)
			b.Advance(time.Hour)
			l.set("a", 2)
			b.Advance(time.Hour)
			require.Len(t, reads, 2)
			require.Equal(t, 2, reads[1].v, "never the old one")
			require.Equal(t, c.attempt, reads[1].attempt)
		})
	}
}

func TestRuntimeOfAnEndedRunTouchesNothing(t *testing.T) {
	bubble(t, func(b *bundle) {
		var kept engine.Runtime
		b.rec.Answer = func(_ context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "a" {
				kept = rt
			}
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.start(b.controller().WritesTo(b.things))
		b.things.Set("b", 1)
		synctest.Wait()
		ctx := b.t.Context()
		_, err := kept.Get(ctx, b.things.Key("a"))
		require.ErrorIs(t, err, engine.ErrRunEnded)
		_, err = kept.List(ctx, "things")
		require.ErrorIs(t, err, engine.ErrRunEnded)
		_, err = kept.Owned(ctx, "things")
		require.ErrorIs(t, err, engine.ErrRunEnded)
		require.ErrorIs(t, kept.Apply(ctx, b.things.Object("x", 1)), engine.ErrRunEnded)
		require.ErrorIs(t, kept.Enqueue(ctx, b.things.Key("x"), 0), engine.ErrRunEnded)
		kept.Heartbeat()
		kept.Log().Info("still a logger", slog.Int("n", 1))
		require.Equal(t, 2, b.things.Len())
	})
}

func TestGraphFindsCyclesOfAnyLength(t *testing.T) {
	maps := map[string]*memory.Map[int]{}
	m := func(name string) *memory.Map[int] {
		if maps[name] == nil {
			maps[name] = memory.New[int](name)
		}
		return maps[name]
	}
	c := func(name, from, to string) engine.Controller {
		return engine.NewController(name).For(m(from)).WritesTo(m(to)).WithHandler(answers(engine.Result{}, nil))
	}
	e, err := engine.New(engine.Config{Controllers: []engine.Controller{
		c("one", "a", "b"), c("two", "b", "a"), c("three", "b", "c"), c("four", "c", "a"),
		engine.NewController("owner").For(m("x")).Owns(m("y")).WithHandler(answers(engine.Result{}, nil)),
	}})
	require.NoError(t, err)
	require.Equal(t, [][]string{{"a", "b", "a"}, {"a", "b", "c", "a"}}, e.Graph().Cycles())
	require.Equal(t, `flowchart TD
    a -- one --> b
    b -- two --> a
    b -- three --> c
    c -- four --> a
    x -- owner --> y
`, e.Graph().Mermaid())
}

func TestReconcileAndMapOnceNeedNoEngine(t *testing.T) {
	things, parts := memory.New[int]("things"), memory.New[int]("parts")
	things.Set("a", 2)
	c := engine.NewController("c").For(things).Owns(parts).Watches(parts, engine.MapSameName(things.Key(""))).WithHandler(
		func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			v, err := engine.Get[int](ctx, rt, req.Key)
			if err != nil {
				return engine.Result{}, err
			}
			return engine.Result{RequeueAfter: time.Minute}, rt.Apply(ctx, parts.Object(req.Key.Name, 10*v))
		})
	o, err := c.ReconcileOnce(t.Context(), things.Key("a"))
	require.NoError(t, err)
	require.NoError(t, o.Err)
	require.Equal(t, time.Minute, o.Result.RequeueAfter)
	v, _ := parts.Value("a")
	require.Equal(t, 20, v)
	o, err = c.ReconcileOnce(t.Context(), things.Key("gone"))
	require.NoError(t, err)
	require.ErrorIs(t, o.Err, engine.ErrNotFound)
	require.Equal(t, 5*time.Millisecond, o.Result.Retry(), "the whole chain was run")

	keys, err := c.MapOnce(t.Context(), engine.Event{Source: "parts", Key: parts.Key("p"), New: &engine.Meta{Owner: things.Key("o")}})
	require.NoError(t, err)
	require.Equal(t, []engine.Key{things.Key("o"), things.Key("p")}, keys)
	_, err = c.MapOnce(t.Context(), engine.Event{Source: "nobody"})
	require.ErrorContains(t, err, `references no source "nobody"`)
}
