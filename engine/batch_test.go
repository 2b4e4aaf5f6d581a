package engine_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

// batching writes four objects in one step.
type batching struct {
	*unmarked

	steps   [][]string // the names of each
	refuse  func(name string) error
	crashes int // how many steps are carried out and answered with an error
}

var errCrash = errors.New("the answer was lost")

func (b *batching) Batch(ctx context.Context, changes []engine.Change) (revisions []string, err error) {
	for len(changes) > 0 {
		step := changes[:min(4, len(changes))]
		var names []string
		for _, c := range step {
			have, err := b.Get(ctx, c.Object.Key)
			if c.Write.Absent && err == nil || have.Revision != c.Write.Revision {
				return revisions, engine.ErrConflict
			}
			if b.refuse != nil {
				if err := b.refuse(c.Object.Key.Name); err != nil {
					return revisions, err
				}
			}
			names = append(names, c.Object.Key.Name)
		}
		b.steps = append(b.steps, names)
		var done []string
		for _, c := range step {
			revision := ""
			if c.Delete {
				err = b.Delete(ctx, c.Object.Key, c.Write)
			} else {
				revision, err = b.Apply(ctx, c.Object, c.Write)
			}
			if err != nil {
				return revisions, err
			}
			done = append(done, revision)
		}
		if b.crashes > 0 {
			b.crashes--
			return revisions, errCrash
		}
		revisions, changes = append(revisions, done...), changes[len(step):]
	}
	return revisions, nil
}

// spreading keeps as many targets as a thing says, and none when it has gone.
func spreading(b *bundle, target *batching) engine.Controller {
	b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		n, err := engine.Get[int](ctx, rt, req.Key)
		if err != nil && !engine.IsNotFound(err) {
			return engine.Result{}, err
		}
		effects := make([]engine.Effect, 10)
		for i := range effects {
			effects[i].Object = engine.Object{Key: target.Key(fmt.Sprint(i)), Value: []byte("x")}
			if i >= n {
				effects[i].Verb = engine.DeleteObject
			}
		}
		return engine.Result{}, rt.Do(ctx, effects...)
	}
	return b.controller().Owns(target).WithBackoff(engine.Backoff{Initial: time.Second})
}

func eachBatching(t *testing.T, f func(b *bundle, u *batching)) {
	t.Helper()
	eachTarget(t, func(b *bundle, u *unmarked) { f(b, &batching{unmarked: u}) })
}

func TestEffectsAreWrittenTogetherWhereTheSinkCan(t *testing.T) {
	eachBatching(t, func(b *bundle, u *batching) {
		b.start(spreading(b, u))
		b.things.Set("a", 10)
		synctest.Wait()
		require.Equal(t, [][]string{{"0", "1", "2", "3"}, {"4", "5", "6", "7"}, {"8", "9"}}, u.steps)
		u.steps = nil
		b.things.Set("a", 7)
		synctest.Wait()
		require.Equal(t, [][]string{{"7", "8", "9"}}, u.steps, "what does not differ is not written")
		u.Set("1", []byte("by hand"))
		synctest.Wait()
		require.Equal(t, "x", u.text("1"))
		b.things.Remove("a")
		synctest.Wait()
		require.Zero(t, u.Len())
		entries, err := b.Config.Bus.Store().List(b.t.Context(), "")
		require.NoError(t, err)
		require.Empty(t, entries, "no record is left")
		if u.marks {
			require.Len(t, b.rec.Runs(), 4, "one for each change: their own writes cause none")
		}
	})
}

func TestStepThatFailsIsDoneAgainAndNothingElse(t *testing.T) {
	eachBatching(t, func(b *bundle, u *batching) {
		u.refuse = func(name string) error {
			if name == "5" && time.Since(epoch) < time.Second {
				return errors.New("not now")
			}
			return nil
		}
		b.start(spreading(b, u))
		b.things.Set("a", 10)
		synctest.Wait()
		require.Equal(t, 4, u.Len())
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, [][]string{{"0", "1", "2", "3"}, {"4", "5", "6", "7"}, {"8", "9"}}, u.steps)
		require.Equal(t, 10, u.Len())
	})
}

func TestStepWhoseAnswerWasLostIsRecognised(t *testing.T) {
	eachBatching(t, func(b *bundle, u *batching) {
		u.crashes = 1
		b.start(spreading(b, u))
		b.things.Set("a", 10)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, 10, u.Len())
		require.Equal(t, 10, u.written(), "what is there is not written again")
		b.things.Remove("a")
		synctest.Wait()
		require.Zero(t, u.Len(), "all of them were its own")
	})
}

func TestWhatIsNeverTakenLeavesNoClaim(t *testing.T) {
	eachBatching(t, func(b *bundle, u *batching) {
		u.refuse = func(name string) error {
			if name == "5" {
				return engine.ErrInvalid
			}
			return nil
		}
		b.start(spreading(b, u))
		b.things.Set("a", 10)
		synctest.Wait()
		entries, err := b.Config.Bus.Store().List(b.t.Context(), "owner/")
		require.NoError(t, err)
		require.Len(t, entries, 4, "those of the first step")
	})
}

func TestEffectsKeepTheirOrderAcrossSinksAndTargets(t *testing.T) {
	bubble(t, func(b *bundle) {
		var order []string
		together := &batching{unmarked: &unmarked{Map: memory.New[[]byte]("together"), marks: true}}
		alone := &unmarked{Map: memory.New[[]byte]("alone"), marks: true}
		together.fail(func(o engine.Object) error { order = append(order, "together "+o.Key.Name); return nil }, nil)
		alone.fail(func(o engine.Object) error { order = append(order, "alone "+o.Key.Name); return nil }, nil)
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			apply := func(key engine.Key, text string) engine.Effect {
				return engine.Effect{Object: engine.Object{Key: key, Value: []byte(text)}}
			}
			return engine.Result{}, rt.Do(ctx, apply(together.Key("1"), "x"), apply(together.Key("2"), "x"), apply(alone.Key("3"), "x"),
				apply(together.Key("4"), "x"), engine.Effect{Verb: engine.DeleteObject, Object: engine.Object{Key: together.Key("4")}},
				apply(b.things.Key("5"), "nobody's"))
		}
		b.start(b.controller().Owns(together).Owns(alone))
		b.things.Set("a", 1)
		synctest.Wait()
		require.Equal(t, []string{"together 1", "together 2", "alone 3", "together 4"}, order)
		require.Equal(t, [][]string{{"1", "2"}, {"4"}, {"4"}}, together.steps)
		require.Equal(t, 2, together.Len())
	})
}
