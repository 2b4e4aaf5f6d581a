package engine_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/sources/memory"
)

// unmarked is a sink whose objects have no place for an owner mark, as a key-value bucket's. With marks it shows the
// intent of a write, without it shows nothing.
type unmarked struct {
	*memory.Map[[]byte]
	marks bool

	mu     sync.Mutex
	before func(o engine.Object) error // fails a write before it is made
	after  func(o engine.Object) error // fails it after it was made
	writes int
	hide   int // how many puts the watch does not show
}

func (u *unmarked) Run(ctx context.Context, emit engine.Emit) error {
	return u.Map.Run(ctx, func(ctx context.Context, e engine.Event) error {
		u.mu.Lock()
		hidden := e.Operation == engine.Put && u.hide > 0
		if hidden {
			u.hide--
		}
		u.mu.Unlock()
		if hidden {
			return nil
		}
		return emit(ctx, e)
	})
}

func (u *unmarked) KeepsOwner() bool { return false }

func (u *unmarked) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	u.mu.Lock()
	before, after := u.before, u.after
	u.writes++
	u.mu.Unlock()
	if before != nil {
		if err := before(o); err != nil {
			return "", err
		}
	}
	o.Owner = engine.Key{}
	if u.marks {
		o.Annotations = map[string]string{engine.IntentAnnotation: w.Intent}
	}
	revision, err := u.Map.Apply(ctx, o, w)
	if err == nil && after != nil {
		err = after(o)
	}
	return revision, err
}

func (u *unmarked) fail(before, after func(engine.Object) error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.before, u.after = before, after
}

func (u *unmarked) written() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.writes
}

func (u *unmarked) text(name string) string {
	v, _ := u.Value(name)
	return string(v)
}

// copying keeps in target what things say.
func copying(b *bundle, target engine.Source, key func(string) engine.Key) engine.Controller {
	b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		n, err := engine.Get[int](ctx, rt, req.Key)
		if engine.IsNotFound(err) {
			return engine.Result{}, rt.Delete(ctx, key(req.Key.Name))
		}
		if err != nil {
			return engine.Result{}, err
		}
		return engine.Result{}, rt.Apply(ctx, engine.Object{Key: key(req.Key.Name), Value: []byte(strings.Repeat("x", n))})
	}
	return b.controller().Owns(target).WithBackoff(engine.Backoff{Initial: time.Second})
}

func eachTarget(t *testing.T, f func(b *bundle, u *unmarked)) {
	t.Helper()
	for name, marks := range map[string]bool{"with marks": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(b *bundle) { f(b, &unmarked{Map: memory.New[[]byte]("target"), marks: marks}) })
		})
	}
}

func TestTargetIsCreatedUpdatedAndDeletedWithItsOwner(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 1)
		synctest.Wait()
		require.Equal(t, "x", u.text("a"))
		b.things.Set("a", 2)
		synctest.Wait()
		require.Equal(t, "xx", u.text("a"))
		require.Equal(t, 2, u.written())
		b.things.Set("a", 2)
		synctest.Wait()
		require.Equal(t, 2, u.written(), "what would change nothing is not written")
		b.things.Remove("a")
		synctest.Wait()
		require.Zero(t, u.Len())
		entries, err := b.Config.Bus.Store().List(b.t.Context(), "")
		require.NoError(t, err)
		require.Empty(t, entries, "no record is left")
	})
}

func TestOwnWritesCauseNoReconcile(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 1)
		b.things.Remove("a")
		b.things.Set("a", 2)
		b.Advance(time.Minute)
		for _, r := range b.rec.Runs() {
			if u.marks {
				require.NotEqual(t, engine.Dependency, r.Request.Trigger())
			}
		}
	})
}

func TestHandMadeChangeIsPutRight(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 3)
		synctest.Wait()
		u.Set("a", []byte("by hand"))
		synctest.Wait()
		require.Equal(t, "xxx", u.text("a"))
		require.Equal(t, engine.Dependency, b.rec.Last().Trigger())
		u.Remove("a")
		synctest.Wait()
		require.Equal(t, "xxx", u.text("a"))
	})
}

// TestChangeThatKeptTheMarkIsNotTakenForTheEcho changes what was just written, before its writer knows that it was, in
// a system whose watch shows only the last of the two and whose objects keep the mark.
func TestChangeThatKeptTheMarkIsNotTakenForTheEcho(t *testing.T) {
	bubble(t, func(b *bundle) {
		u := &unmarked{Map: memory.New[[]byte]("target"), marks: true, hide: 1}
		once := true
		u.fail(nil, func(engine.Object) error {
			if once {
				once = false
				u.Set("a", []byte("by hand"))
				time.Sleep(time.Second) // the watch shows it before the write returns
			}
			return nil
		})
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 3)
		b.Advance(time.Minute)
		require.Equal(t, "xxx", u.text("a"))
	})
}

func TestUnownedObjectIsRefusedUntilItGoesAway(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		var last error
		b.Config.Hooks.RunEnded = func(_ engine.Request, o engine.Outcome, _ time.Duration) { last = o.Err }
		u.Set("a", []byte("theirs"))
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 1)
		synctest.Wait()
		require.ErrorIs(t, last, engine.ErrResourceExists)
		require.False(t, engine.IsTerminal(last), "it is tried again")
		require.Equal(t, "theirs", u.text("a"))
		b.things.Remove("a")
		b.Advance(time.Minute)
		require.Equal(t, "theirs", u.text("a"), "nor is it deleted")
		b.things.Set("a", 1)
		u.Remove("a")
		b.Advance(time.Minute)
		require.Equal(t, "x", u.text("a"))
	})
}

func TestUnownedObjectIsTakenOverOnRequest(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		u.Set("a", []byte("theirs"))
		c := copying(b, u, u.Key)
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			return engine.Result{}, rt.Do(ctx, engine.Effect{Adopt: true, Object: engine.Object{Key: u.Key("a"), Value: []byte("mine")}})
		}
		b.things.Set("a", 1)
		b.start(c)
		require.Equal(t, "mine", u.text("a"))
	})
}

func TestTwoControllersThatClaimOneTarget(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		var log bytes.Buffer
		handler := func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			return engine.Result{}, rt.Apply(ctx, engine.Object{Key: u.Key("one"), Value: []byte(req.Controller)})
		}
		first := engine.NewController("first").For(b.things).Owns(u).WithHandler(handler)
		second := engine.NewController("second").For(memory.New[int]("others")).Owns(u).WithHandler(handler).
			WithBackoff(engine.Backoff{Initial: time.Hour, Max: time.Hour})
		b.Config.Logger = newLogger(&log)
		b.things.Set("a", 1)
		b.start(first, second)
		require.NoError(t, b.Engine.Enqueue(b.t.Context(), "second", memory.New[int]("others").Key("b"), 0))
		b.Advance(time.Second)
		require.Equal(t, "first", u.text("one"))
		require.Contains(t, log.String(), `msg="reconcile failed" controller=second`)
		require.Contains(t, log.String(), "it belongs to controller first for memory:things/a")
		require.Contains(t, log.String(), `msg="another controller claims an object of this one" controller=first`)
	})
}

func TestFormerTargetIsReleasedOrDeleted(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		c := copying(b, u, u.Key)
		b.things.Set("a", 1)
		b.start(c)
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			owned, err := rt.Owned(ctx, "target")
			if err != nil || len(owned) != 1 {
				return engine.Result{}, errors.Join(err, errBroken)
			}
			return engine.Result{}, rt.Do(ctx, engine.Effect{Verb: engine.ReleaseObject, Object: engine.Object{Key: owned[0]}})
		}
		b.things.Set("a", 2)
		synctest.Wait()
		require.Equal(t, "x", u.text("a"))
		u.Remove("a")
		b.Advance(time.Hour)
		require.Zero(t, u.Len(), "a released object is nobody's")
	})
}

// TestCrashBetweenIntentAndCreate ends an engine in the middle of a create and starts another on the same store.
func TestCrashBetweenIntentAndCreate(t *testing.T) {
	for _, c := range []struct {
		name  string
		after bool   // the create was made, its answer lost
		hand  string // what somebody else makes meanwhile
		want  string
	}{
		{"never created", false, "", "xx"},
		{"created, not confirmed", true, "", "xx"},
		{"somebody else came first", false, "theirs", "theirs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachTarget(t, func(b *bundle, u *unmarked) {
				bus := &sharedStore{MemoryBus: engine.NewMemoryBus()}
				b.Config.Bus = bus
				crash := func(engine.Object) error { return errBroken }
				if c.after {
					u.fail(nil, crash)
				} else {
					u.fail(crash, nil)
				}
				b.things.Set("a", 2)
				b.start(copying(b, u, u.Key))
				b.Stop()
				u.fail(nil, nil)
				if c.hand != "" {
					u.Set("a", []byte(c.hand))
				}
				b.Config.Bus = &sharedStore{MemoryBus: engine.NewMemoryBus(), store: bus.Store()}
				b.start(copying(b, u, u.Key))
				b.Advance(time.Minute)
				require.Equal(t, c.want, u.text("a"))
				if c.hand == "" {
					u.Set("a", []byte("by hand"))
					synctest.Wait()
					require.Equal(t, "xx", u.text("a"), "it is owned")
				}
			})
		})
	}
}

// sharedStore is a bus on the store of another.
type sharedStore struct {
	*engine.MemoryBus
	store kv.Store
}

func (s *sharedStore) Store() kv.Store {
	if s.store == nil {
		return s.MemoryBus.Store()
	}
	return s.store
}

// slowStore is one whose deletions take a while.
type slowStore struct{ kv.Store }

func (s slowStore) Delete(ctx context.Context, key, revision string) error {
	time.Sleep(time.Second)
	return s.Store.Delete(ctx, key, revision)
}

func TestOwnDeletionIsNoNewsHoweverSlowTheStoreIs(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		b.Config.Bus = &sharedStore{MemoryBus: engine.NewMemoryBus(), store: slowStore{engine.NewMemoryBus().Store()}}
		b.start(copying(b, u, u.Key))
		b.things.Set("a", 1)
		synctest.Wait()
		before := b.rec.Count()
		b.things.Remove("a")
		b.Advance(time.Minute)
		require.Zero(t, u.Len())
		require.Equal(t, before+1, b.rec.Count())
	})
}

func TestDeletionMissedWhileDownIsCarriedOut(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		bus := engine.NewMemoryBus()
		b.Config.Bus = bus
		b.things.Set("a", 1)
		b.things.Set("b", 1)
		b.start(copying(b, u, u.Key))
		b.Stop()
		b.things.Remove("a")
		b.Config.Bus = &sharedStore{MemoryBus: engine.NewMemoryBus(), store: bus.Store()}
		b.start(copying(b, u, u.Key))
		require.Equal(t, 1, u.Len())
		require.Equal(t, "x", u.text("b"))
	})
}

func TestMarkedTargetsNeedNoRecords(t *testing.T) {
	bubble(t, func(b *bundle) {
		target := memory.New[[]byte]("target")
		b.start(copying(b, target, target.Key))
		b.things.Set("a", 1)
		synctest.Wait()
		o, err := target.Get(b.t.Context(), target.Key("a"))
		require.NoError(t, err)
		require.Equal(t, b.things.Key("a"), o.Owner)
		target.Set("a", []byte("by hand"))
		synctest.Wait()
		v, _ := target.Value("a")
		require.Equal(t, "x", string(v))
		entries, err := b.Config.Bus.Store().List(b.t.Context(), "")
		require.NoError(t, err)
		require.Empty(t, entries)
		b.things.Remove("a")
		synctest.Wait()
		require.Zero(t, target.Len())
		target.Set("b", []byte("theirs"))
		b.things.Set("b", 1)
		synctest.Wait()
		v, _ = target.Value("b")
		require.Equal(t, "theirs", string(v), "what is not marked is not touched")
	})
}

func TestDryRunWritesNothing(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		var log bytes.Buffer
		b.Config.Logger = newLogger(&log)
		b.things.Set("a", 1)
		b.start(copying(b, u, u.Key).WithDryRun())
		require.Zero(t, u.Len())
		require.Contains(t, log.String(), `msg="dry run" controller=test key=memory:things/a attempt=0 trigger=resync would=apply target=memory:target/a`)
	})
}

// doubted is a bus that may no longer trust its membership, once something has been read.
type doubted struct {
	engine.Bus
	trusted *atomic.Bool
}

func (d doubted) Trusted() bool { return d.trusted.Load() }

// doubting is a target in whose Get time passes, as when the process is stopped and goes on.
type doubting struct {
	*unmarked
	bus doubted
}

func (d doubting) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	d.bus.trusted.Store(false)
	return d.unmarked.Get(ctx, key)
}

// doubtingBatch is one that writes several objects in one step.
type doubtingBatch struct {
	doubting
	steps batching
}

func (d *doubtingBatch) Batch(ctx context.Context, changes []engine.Change) ([]string, error) {
	return d.steps.Batch(ctx, changes)
}

func TestNothingIsWrittenOnceAnotherReplicaMayHaveTakenOver(t *testing.T) {
	for _, together := range []bool{false, true} {
		eachTarget(t, func(b *bundle, u *unmarked) {
			bus := doubted{b.Config.Bus, &atomic.Bool{}}
			bus.trusted.Store(true)
			b.Config.Bus = bus
			b.things.Set("a", 1)
			var target engine.Source = &doubting{u, bus}
			if together {
				target = &doubtingBatch{doubting{u, bus}, batching{unmarked: u}}
			}
			c, answer := copying(b, target, u.Key), b.rec.Answer
			var refused error
			b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
				var res engine.Result
				res, refused = answer(ctx, rt, req)
				return res, refused
			}
			b.start(c)
			require.Zero(t, u.written())
			require.ErrorIs(t, refused, engine.ErrLeaseLost)
		})
	}
}

func TestHandlerThatIgnoresItsContextWritesNothingAfterItsEnd(t *testing.T) {
	eachTarget(t, func(b *bundle, u *unmarked) {
		var late error
		b.things.Set("a", 1)
		c := copying(b, u, u.Key)
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			<-ctx.Done()
			time.Sleep(time.Minute) // it does not look at its context
			late = rt.Apply(context.WithoutCancel(ctx), engine.Object{Key: u.Key("a"), Value: []byte("late")})
			return engine.Result{}, late
		}
		b.start(c.WithTimeout(-1))
		b.Stop()
		require.ErrorContains(t, late, "engine shut down")
		require.Zero(t, u.written())
	})
}

func TestRuntimeSaysWhatItMayNotDo(t *testing.T) {
	bubble(t, func(b *bundle) {
		foreign := memory.New[int]("foreign")
		for name, f := range map[string]func(ctx context.Context, rt engine.Runtime) error{
			`none of the sources that it references covers the key`: func(ctx context.Context, rt engine.Runtime) error {
				_, err := rt.Get(ctx, foreign.Key("x"))
				return err
			},
			`no sink that it Owns or WritesTo covers the key`: func(ctx context.Context, rt engine.Runtime) error {
				return rt.Apply(ctx, foreign.Object("x", 1))
			},
			`references no source "foreign"`: func(ctx context.Context, rt engine.Runtime) error {
				_, err := rt.List(ctx, "foreign")
				return err
			},
			`has no sink "foreign"`: func(ctx context.Context, rt engine.Runtime) error {
				_, err := rt.Owned(ctx, "foreign")
				return err
			},
			`is not a key of source things`: func(ctx context.Context, rt engine.Runtime) error {
				return rt.Enqueue(ctx, foreign.Key("x"), 0)
			},
		} {
			bb := &bundle{Harness: &enginetest.Harness{T: b.t}, t: b.t, things: memory.New[int]("things"), rec: &enginetest.Recorder{}}
			var got error
			bb.rec.Answer = func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
				got = f(ctx, rt)
				return engine.Result{}, nil
			}
			bb.things.Set("a", 1)
			bb.start()
			bb.Stop()
			require.ErrorIs(t, got, engine.ErrInvalid)
			require.ErrorContains(t, got, name)
		}
	})
}

func TestRuntimeListsAndEnqueues(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name != "a" {
				return engine.Result{}, nil
			}
			objects, err := rt.List(ctx, "things")
			if err != nil || len(objects) != 2 {
				return engine.Result{}, errBroken
			}
			return engine.Result{}, errors.Join(rt.Enqueue(ctx, b.things.Key("now"), 0), rt.Enqueue(ctx, b.things.Key("later"), time.Minute))
		}
		b.things.Set("a", 1)
		b.things.Set("b", 1)
		b.start()
		require.Len(t, b.rec.Times("now"), 1)
		b.Advance(time.Minute)
		require.Equal(t, []time.Duration{time.Minute}, b.rec.Times("later"))
	})
}
