package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// seeds are the behaviours of the five systems that this engine takes over, by the rows of docs/seeds.md, each with the
// tests that show it. Rows that are shown elsewhere (package queue, cache, middleware, app) are named there.
var seeds = map[string][]func(*testing.T){
	"F01": {TestChangesAreReconciledWithTheirCause},
	"F02": {TestObjectsThatExistBeforeTheStartAreReconciled},
	"F03": {seedDeletionIsReconciledWithTheObjectAbsent},
	"F05": {TestManyEventsOfARunningKeyBecomeOneRunWithTheirCausesJoined},
	"F06": {seedKeysRunInParallelAndNoKeyTwice},
	"F07": {TestBackoffWaits, seedBackoffPerKeyAndResetBySuccess},
	"F08": {TestLinearBackoffAndNoRetry},
	"F09": {TestPoisonKeyIsParkedAfterItsAttemptsAndBlocksNobody, seedSixCallsThenParkedThenSixAgain},
	"F10": {TestLinearBackoffAndNoRetry},
	"F11": {seedRequeueAfterWrappedDelaysAndResets},
	"F12": {seedRequeueNowIsAtOnceAndStarvesNobody},
	"F13": {TestBackoffResultNeverParks},
	"F14": {seedEarliestDelayFiresAndOnlyOne},
	"F15": {TestEnqueueFromOutside},
	"F16": {TestPanicIsAnErrorWithItsStack},
	"F17": {TestMalformedMessagesAreToldFromGoodOnes},
	"F18": {TestWatchedSourceIsMapped, TestFailingMapperIsCalledAgainAndBlocksNobody, TestMappedKeyOfAnotherKindIsDroppedAndTold},
	"F19": {seedStockMappers, seedComposedMappers},
	"F20": {seedLabelAndAnnotationMapToTheOwner, TestHandMadeChangeIsPutRight},
	"F21": {TestDeletionMissedWhileDownIsCarriedOut, TestSourceThatBreaksIsListedAgainAndMissedDeletionsAreNoticed},
	"F22": {TestUnownedObjectIsRefusedUntilItGoesAway},
	"F23": {seedTertiarySourcesNeverTrigger},
	"F24": {seedCustomEventSource},
	"F25": {TestResyncReconcilesEveryKeyAgain},
	"F26": {TestResyncReconcilesEveryKeyAgain},
	"F29": {TestSourceThatBreaksIsListedAgainAndMissedDeletionsAreNoticed},
	"F30": {TestFailingSourceIsRunAgainAfterGrowingWaits, TestInitializerComesFirstAndIsTriedAgain},
	"F31": {TestSingletonRunsInOneReplicaAndTheOtherTakesOver, TestNoRunStartsAfterTheLeaseIsLostAndNoneOverlapsWhenItIsRegained},
	"F32": {TestEachReplicaRunsWhatIsPlacedOnEach},
	"F33": {TestRunCanBeCalledOnce, TestNewReportsEveryMistakeAtOnce},
	"F34": {TestInitializerComesFirstAndIsTriedAgain, TestStartAndStopAreTold},
	"F35": {TestNoReconcileBeforeEverySourceIsListed, TestSourceThatDoesNotSyncInTimeIsNamed},
	"F37": {TestBackgroundWorkLivesAsLongAsItsController, TestControllersNestAndChildrenStopFirst},
	"F38": {TestShutdownLetsRunningReconcilesFinish},
	"F56": {TestSharedRateLimitIsATokenBucketWhoseWaitersKeepTheirTurn},
	"F57": {TestHooksSeeTheWayOfAChange},
	"F58": {TestStringShowsEffectiveSettings, TestGraphFindsCyclesOfAnyLength},
	"F59": {TestReconcileAndMapOnceNeedNoEngine},

	"CN1":  {TestTwoControllersCanGrowFromOne},
	"CN2":  {TestNewReportsEveryMistakeAtOnce},
	"CN3":  {TestStringShowsEffectiveSettings},
	"CN6":  {TestControllersAreAddedChangedAndRemovedWhileRunning, TestNewReportsEveryMistakeAtOnce},
	"CN7":  {TestRunCanBeCalledOnce, TestShutdownLetsRunningReconcilesFinish},
	"CN8":  {TestSingletonRunsInOneReplicaAndTheOtherTakesOver},
	"CN9":  {TestEachReplicaRunsWhatIsPlacedOnEach},
	"CN10": {TestLeaseThatFlipsOftenEndsInItsLastState},
	"CN11": {TestNoRunStartsAfterTheLeaseIsLostAndNoneOverlapsWhenItIsRegained},
	"CN12": {TestNoRunStartsAfterTheLeaseIsLostAndNoneOverlapsWhenItIsRegained, TestDelaysOutliveALostLease},
	"CN13": {TestFailingSourceIsRunAgainAfterGrowingWaits},
	"CN14": {TestSourceThatBreaksIsListedAgainAndMissedDeletionsAreNoticed},
	"CN15": {seedKeysOfAnyScope},
	"CN16": {seedIncarnationIsNoPartOfTheKey},
	"CN17": {TestManyEventsOfARunningKeyBecomeOneRunWithTheirCausesJoined},
	"CN18": {seedRequeueAfterWrappedDelaysAndResets},
	"CN19": {seedRequeueNowIsAtOnceAndStarvesNobody},
	"CN20": {seedEarliestDelayFiresAndOnlyOne},
	"CN21": {seedBackoffPerKeyAndResetBySuccess},
	"CN22": {TestPanicIsAnErrorWithItsStack},
	"CN23": {TestFailingMapperIsCalledAgainAndBlocksNobody, TestMappedKeyOfAnotherKindIsDroppedAndTold},
	"CN24": {seedMapperThatFailsMissesNoOwner},
	"CN25": {seedStockMappers, TestOwnerBeforeAndAfterAreBothMapped},
	"CN26": {seedComposedMappers},
	"CN28": {TestNoReconcileBeforeEverySourceIsListed},
	"CN31": {seedCustomEventSource},
	"CN32": {TestInitializerComesFirstAndIsTriedAgain},
	"CN33": {TestStartAndStopAreTold},
	"CN35": {TestGraphFindsCyclesOfAnyLength},
	"CN36": {seedLogSaysWhichRunItIs},
	"CN37": {seedMappedKeysKeepTheirKinds},
	"CN38": {TestReconcileAndMapOnceNeedNoEngine},
	"CI8":  {TestLinearBackoffAndNoRetry},
	"CI15": {TestRemoveWaitsForRunningReconciles, TestControllersAreAddedChangedAndRemovedWhileRunning},
	"KR31": {TestSharedRateLimitIsATokenBucketWhoseWaitersKeepTheirTurn},
	"KU2":  {seedDeletionIsReconciledWithTheObjectAbsent},
	"KU4":  {TestMalformedMessagesAreToldFromGoodOnes},
	"KU6":  {TestShutdownLetsRunningReconcilesFinish},
	"KU9":  {seedLabelAndAnnotationMapToTheOwner},
	"KU12": {seedTertiarySourcesNeverTrigger},
	"KU14": {TestResyncReconcilesEveryKeyAgain},
	"KU15": {TestDeletionMissedWhileDownIsCarriedOut},
	"KU19": {TestStartAndStopAreTold},
	"CK2":  {TestObjectsThatExistBeforeTheStartAreReconciled},
	"CK4":  {seedDeletionIsReconciledWithTheObjectAbsent},
	"CK7":  {seedSixCallsThenParkedThenSixAgain},
	"CK9":  {TestBackgroundWorkLivesAsLongAsItsController},
	"CK10": {TestControllersNestAndChildrenStopFirst},
	"CK11": {TestSourceThatDoesNotSyncInTimeIsNamed},
	"CK16": {TestSourceThatBreaksIsListedAgainAndMissedDeletionsAreNoticed},
	"CK18": {TestDebounceWaitsForQuietAndNeverForARetry},
}

// TestSeeds runs what shows each row: go test ./engine -run TestSeeds/CN11.
func TestSeeds(t *testing.T) {
	doc, err := os.ReadFile("../docs/seeds.md")
	require.NoError(t, err)
	for row, tests := range seeds {
		t.Run(row, func(t *testing.T) {
			require.Contains(t, string(doc), "| "+row+" |", "docs/seeds.md lists the row")
			for _, test := range tests {
				t.Run("", test)
			}
		})
	}
	for line := range strings.Lines(string(doc)) {
		if cells := strings.Split(line, "|"); len(cells) > 3 && strings.Contains(cells[3], "TestSeeds/") {
			require.Contains(t, seeds, strings.TrimSpace(cells[1]), "what docs/seeds.md says is run is run")
		}
	}
}

func seedDeletionIsReconciledWithTheObjectAbsent(t *testing.T) {
	bubble(t, func(b *bundle) {
		release := make(chan struct{})
		var found []error
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "block" {
				<-release
				return engine.Result{}, nil
			}
			_, err := rt.Get(ctx, req.Key)
			found = append(found, err)
			return engine.Result{}, nil
		}
		b.things.Set("block", 1)
		b.start()
		// What is true when the key's turn comes decides, not what happened on the way.
		b.things.Set("a", 1)
		b.things.Set("a", 2)
		b.things.Remove("a")
		synctest.Wait()
		close(release)
		synctest.Wait()
		require.Len(t, found, 1)
		require.ErrorIs(t, found[0], engine.ErrNotFound)
		require.Equal(t, engine.Deleted, b.rec.Last().Trigger())
		require.Equal(t, engine.Delete, b.rec.Last().Causes.Newest().Operation)
		b.things.Set("a", 3)
		synctest.Wait()
		require.NoError(t, found[1])
	})
}

func seedKeysRunInParallelAndNoKeyTwice(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			time.Sleep(time.Second)
			return engine.Result{}, nil
		}
		b.start(b.controller().WithConcurrency(4))
		for range 3 {
			for i := range 4 {
				b.things.Set(fmt.Sprint(i), 1)
			}
			synctest.Wait()
		}
		require.Equal(t, 4, b.rec.Count(), "all at once")
		b.Advance(time.Minute)
		require.Equal(t, 8, b.rec.Count(), "and each once more")
		require.Equal(t, 1, b.rec.AtOnce())
	})
}

func seedBackoffPerKeyAndResetBySuccess(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = enginetest.FailFor(3, errBroken)
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second}))
		b.things.Set("a", 1)
		b.Advance(500 * time.Millisecond)
		b.things.Set("b", 1)
		b.Advance(time.Minute)
		require.Equal(t, []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}, b.rec.Times("a"))
		half := 500 * time.Millisecond
		require.Equal(t, []time.Duration{half, half + time.Second, half + 3*time.Second, half + 7*time.Second}, b.rec.Times("b"))
		require.Equal(t, 3, b.rec.Last().Attempt)
		b.things.Set("a", 2)
		synctest.Wait()
		require.Equal(t, 0, b.rec.Last().Attempt)
	})
}

func seedSixCallsThenParkedThenSixAgain(t *testing.T) {
	bubble(t, func(b *bundle) {
		b.rec.Answer = answers(engine.Result{}, errBroken)
		b.start(b.controller().WithBackoff(engine.Backoff{MaxAttempts: 6}))
		ms := time.Millisecond
		b.things.Set("a", 1)
		b.Advance(time.Hour)
		require.Equal(t, []time.Duration{0, 5 * ms, 15 * ms, 35 * ms, 75 * ms, 155 * ms}, b.rec.Times("a"))
		dead, err := b.Engine.Dead("test")
		require.NoError(t, err)
		require.Len(t, dead, 1)
		b.things.Set("a", 2)
		b.Advance(time.Hour)
		require.Len(t, b.rec.Times("a"), 12)
	})
}

func seedRequeueAfterWrappedDelaysAndResets(t *testing.T) {
	bubble(t, func(b *bundle) {
		n := 0
		b.rec.Answer = func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			switch n++; n {
			case 1, 3:
				return engine.Result{}, errBroken
			case 2:
				return engine.Result{}, fmt.Errorf("wrapped: %w", engine.RequeueAfter(time.Second))
			}
			return engine.Result{}, nil
		}
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: 10 * time.Millisecond}))
		b.things.Set("a", 1)
		b.Advance(time.Minute)
		ms := time.Millisecond
		require.Equal(t, []time.Duration{0, 10 * ms, 1010 * ms, 1020 * ms}, b.rec.Times("a"), "the next failure begins at the base")
		require.Equal(t, "requeue at 1s", engine.RequeueAfter(time.Second).Error())
	})
}

func seedRequeueNowIsAtOnceAndStarvesNobody(t *testing.T) {
	bubble(t, func(b *bundle) {
		n := 0
		b.rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "again" {
				if n++; n <= 3 {
					return engine.Result{}, engine.RequeueNow()
				}
			}
			return engine.Result{}, nil
		}
		for _, name := range []string{"again", "x", "y", "z"} {
			b.things.Set(name, 1)
		}
		b.start()
		require.Equal(t, []time.Duration{0, 0, 0, 0}, b.rec.Times("again"))
		require.Equal(t, 7, b.rec.Count())
		require.NotEqual(t, "again", b.rec.Runs()[3].Request.Key.Name+b.rec.Runs()[2].Request.Key.Name+b.rec.Runs()[1].Request.Key.Name)
		for _, r := range b.rec.Runs("again") {
			require.Zero(t, r.Request.Attempt)
		}
	})
}

func seedEarliestDelayFiresAndOnlyOne(t *testing.T) {
	for _, order := range [][]time.Duration{{10 * time.Second, 2 * time.Second}, {2 * time.Second, 10 * time.Second}} {
		bubble(t, func(b *bundle) {
			b.start()
			for _, after := range order {
				require.NoError(t, b.Engine.Enqueue(b.t.Context(), "test", b.things.Key("a"), after))
			}
			b.Advance(time.Minute)
			require.Equal(t, []time.Duration{2 * time.Second}, b.rec.Times("a"))
		})
	}
}

func seedIncarnationIsNoPartOfTheKey(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &channelSource{events: make(chan engine.Event)}
		b.start(engine.NewController("test").For(s).WithHandler(b.rec.Handle).WithDebounce(engine.Debounce{After: time.Second}))
		key := engine.Key{Kind: engine.KindOf("k"), Name: "a"}
		for _, uid := range []string{"", "1", "2"} {
			s.events <- engine.Event{Operation: engine.Put, Key: key, Incarnation: uid}
		}
		b.Advance(time.Minute)
		require.Equal(t, 1, b.rec.Count())
		require.Equal(t, "2", b.rec.Last().Causes.Newest().Incarnation)
	})
}

// channelSource emits what a channel holds. It cannot be read.
type channelSource struct{ events chan engine.Event }

func (s *channelSource) Name() string { return "channel" }

func (s *channelSource) Run(ctx context.Context, emit engine.Emit) error {
	for _, op := range []engine.Operation{engine.ListStarted, engine.ListEnded} {
		if err := emit(ctx, engine.Event{Operation: op}); err != nil {
			return err
		}
	}
	for {
		select {
		case e, open := <-s.events:
			if !open {
				<-ctx.Done() // no more will come, and that is no failure
				return nil
			}
			if err := emit(ctx, e); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func seedCustomEventSource(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &channelSource{events: make(chan engine.Event)}
		b.start(b.controller().Watches(s, engine.MapSameName(b.things.Key(""))))
		for _, name := range []string{"a", "b"} {
			s.events <- engine.Event{Operation: engine.Put, Key: engine.Key{Kind: engine.KindOf("tick"), Name: name}}
		}
		close(s.events)
		synctest.Wait()
		require.Equal(t, 2, b.rec.Count())
		b.things.Set("c", 1)
		synctest.Wait()
		require.Len(t, b.rec.Times("c"), 1, "the controller goes on without the source")
	})
}

func seedKeysOfAnyScope(t *testing.T) {
	bubble(t, func(b *bundle) {
		s := &channelSource{events: make(chan engine.Event)}
		b.start(engine.NewController("test").For(s).WithHandler(b.rec.Handle))
		var want []engine.Key
		for _, scope := range []string{"", "east"} {
			for _, namespace := range []string{"", "shop"} {
				key := engine.Key{Kind: engine.KindOf("tick"), Scope: scope, Namespace: namespace, Name: "a"}
				want = append(want, key)
				s.events <- engine.Event{Operation: engine.Put, Key: key}
			}
		}
		close(s.events)
		synctest.Wait()
		var got []engine.Key
		for _, r := range b.rec.Runs() {
			got = append(got, r.Request.Key)
		}
		require.ElementsMatch(t, want, got)
	})
}

func seedLogSaysWhichRunItIs(t *testing.T) {
	bubble(t, func(b *bundle) {
		var text strings.Builder
		b.Config.Logger = slog.New(slog.NewTextHandler(&text, nil))
		b.rec.Answer = func(_ context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			rt.Log().Info("from the handler")
			return engine.Result{}, errBroken
		}
		parts := memory.New[int]("parts")
		b.start(b.controller().Watches(parts, func(context.Context, engine.Event) ([]engine.Key, error) { return nil, errBroken }))
		b.things.Set("a", 1)
		parts.Set("p", 1)
		b.Advance(5 * time.Millisecond)
		b.Stop()
		require.Regexp(t, `msg="from the handler" .*controller=test .*key=memory:things/a attempt=0 trigger=created`, text.String())
		require.Regexp(t, `level=WARN .*controller=test .*memory:parts/p`, text.String(), "mappings too")
		require.Regexp(t, `msg="from the handler" .*controller=test .*key=memory:things/a attempt=1 trigger=retry`, text.String())
	})
}

func seedMappedKeysKeepTheirKinds(t *testing.T) {
	x, y := engine.Key{Kind: engine.KindOf("x"), Name: "a"}, engine.Key{Kind: engine.KindOf("y"), Name: "b"}
	owners := func(_ context.Context, e engine.Event) (out []engine.Event, _ error) {
		for _, owner := range []engine.Key{x, y} {
			out = append(out, engine.Event{Key: e.Key, New: &engine.Meta{Owner: owner}})
		}
		return out, nil
	}
	keys, err := engine.MapVia(owners, engine.MapOwner)(t.Context(), engine.Event{})
	require.NoError(t, err)
	require.Equal(t, []engine.Key{x, y}, keys)
	none := func(context.Context, engine.Event) ([]engine.Event, error) { return nil, nil }
	keys, err = engine.MapVia(none, engine.MapOwner)(t.Context(), engine.Event{})
	require.NoError(t, err)
	require.Empty(t, keys)
}

func seedMapperThatFailsMissesNoOwner(t *testing.T) {
	bubble(t, func(b *bundle) {
		parts := memory.New[int]("parts")
		var works atomic.Bool
		b.start(b.controller().Watches(parts, func(ctx context.Context, e engine.Event) ([]engine.Key, error) {
			if !works.Load() {
				return nil, errBroken
			}
			return engine.MapLabel("owner", b.things.Key(""))(ctx, e)
		}))
		emitOwner := func(owner string) {
			_, err := parts.Apply(b.t.Context(), engine.Object{
				Key: parts.Key("p"), Value: 1, Meta: engine.Meta{Labels: map[string]string{"owner": owner}},
			}, engine.Write{})
			require.NoError(t, err)
			synctest.Wait()
		}
		emitOwner("A")
		emitOwner("B")
		works.Store(true)
		b.Advance(time.Minute)
		require.NotEmpty(t, b.rec.Times("A"))
		require.NotEmpty(t, b.rec.Times("B"), "the newer version is mapped too")
	})
}

func seedStockMappers(t *testing.T) {
	x, y := engine.KindOf("x"), engine.KindOf("y")
	ofX := &engine.Meta{Owner: engine.Key{Kind: x, Namespace: "n", Name: "o"}}
	ofY := &engine.Meta{Owner: engine.Key{Kind: y, Namespace: "n", Name: "o"}}
	at := engine.Key{Kind: x, Scope: "s", Namespace: "n", Name: "a"}
	for _, c := range []struct {
		name   string
		mapper engine.Mapper
		event  engine.Event
		want   []engine.Key
	}{
		{"no owner", engine.MapOwner, engine.Event{Key: at, New: &engine.Meta{}}, nil},
		{"owner of the kind", engine.MapOwnerOf(x), engine.Event{Key: at, New: ofX}, []engine.Key{ofX.Owner}},
		{"owner of another kind", engine.MapOwnerOf(x), engine.Event{Key: at, New: ofY}, nil},
		{"owner changed its kind", engine.MapOwnerOf(x), engine.Event{Key: at, Old: ofX, New: ofY}, []engine.Key{ofX.Owner}},
		{"another kind", engine.MapToKind(y), engine.Event{Key: at}, []engine.Key{{Kind: y, Scope: "s", Namespace: "n", Name: "a"}}},
		{
			"field", engine.MapField("spec.node", engine.Key{Kind: y}),
			engine.Event{Key: at, New: &engine.Meta{Fields: map[string]string{"spec.node": "one"}}},
			[]engine.Key{{Kind: y, Namespace: "n", Name: "one"}},
		},
	} {
		got, err := c.mapper(t.Context(), c.event)
		require.NoError(t, err, c.name)
		require.ElementsMatch(t, c.want, got, c.name)
	}
}

func seedComposedMappers(t *testing.T) {
	one := engine.MapSameName(engine.Key{Kind: engine.KindOf("one")})
	fails := func(context.Context, engine.Event) ([]engine.Key, error) {
		return []engine.Key{{Name: "never"}}, errBroken
	}
	twice := func(_ context.Context, e engine.Event) ([]engine.Event, error) {
		other := e
		other.Key.Name += "'"
		return []engine.Event{e, other}, nil
	}
	e := engine.Event{Key: engine.Key{Kind: engine.KindOf("k"), Name: "a"}}
	keys, err := engine.MapAll(one, one, engine.MapToKind(engine.KindOf("two")))(t.Context(), e)
	require.NoError(t, err)
	require.Equal(t, []engine.Key{{Kind: engine.KindOf("one"), Name: "a"}, {Kind: engine.KindOf("two"), Name: "a"}}, keys, "each once")
	keys, err = engine.MapVia(twice, engine.MapVia(twice, one))(t.Context(), e)
	require.NoError(t, err)
	require.Len(t, keys, 4)
	for _, m := range []engine.Mapper{
		engine.MapAll(one, fails), engine.MapVia(twice, fails),
		engine.MapVia(func(context.Context, engine.Event) ([]engine.Event, error) { return nil, errBroken }, one),
	} {
		keys, err := m(t.Context(), e)
		require.ErrorIs(t, err, errBroken)
		require.Empty(t, keys, "no requests of half a mapping")
	}

	parts := memory.New[int]("parts")
	parts.Set("p", 7)
	byValue := engine.MapObject(parts, func(_ context.Context, v int, _ engine.Event) ([]engine.Key, error) {
		return []engine.Key{{Name: fmt.Sprint(v)}}, nil
	})
	keys, err = byValue(t.Context(), engine.Event{Key: parts.Key("p")})
	require.NoError(t, err)
	require.Equal(t, []engine.Key{{Name: "7"}}, keys)
	keys, err = byValue(t.Context(), engine.Event{Key: parts.Key("gone")})
	require.NoError(t, err)
	require.Empty(t, keys)
	_, err = engine.MapObject(parts, func(context.Context, string, engine.Event) ([]engine.Key, error) { return nil, nil })(t.Context(), engine.Event{Key: parts.Key("p")})
	require.Error(t, err, "what cannot be decoded is a failed mapping")
}

func seedLabelAndAnnotationMapToTheOwner(t *testing.T) {
	like := engine.Key{Kind: engine.KindOf("k"), Scope: "s"}
	long := strings.Repeat("n", 100)
	for _, c := range []struct {
		mapper engine.Mapper
		meta   engine.Meta
		want   []engine.Key
	}{
		{engine.MapLabel("owner", like), engine.Meta{Labels: map[string]string{"owner": "o"}}, []engine.Key{{Kind: like.Kind, Scope: "s", Namespace: "here", Name: "o"}}},
		{
			engine.MapAnnotation("owner", like),
			engine.Meta{Annotations: map[string]string{"owner": "there/" + long}},
			[]engine.Key{{Kind: like.Kind, Scope: "s", Namespace: "there", Name: long}},
		},
		{engine.MapLabel("owner", like), engine.Meta{Annotations: map[string]string{"owner": "o"}}, nil},
	} {
		e := engine.Event{Key: engine.Key{Namespace: "here", Name: "x"}, New: &c.meta}
		got, err := c.mapper(t.Context(), e)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
		e.Old, e.New = e.New, nil
		got, err = c.mapper(t.Context(), e)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "a deletion concerns the former owner")
	}
}

func seedTertiarySourcesNeverTrigger(t *testing.T) {
	bubble(t, func(b *bundle) {
		flags := memory.New[string]("flags")
		flags.Set("f", "on")
		var seen string
		b.rec.Answer = func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			v, err := engine.Get[string](ctx, rt, flags.Key("f"))
			seen = v
			return engine.Result{}, errors.Join(err, refused(rt.Apply(ctx, flags.Object("f", "mine"))))
		}
		b.things.Set("a", 1)
		b.start(b.controller().Reads(flags))
		require.Equal(t, "on", seen, "it is synced before the first run")
		flags.Set("f", "off")
		b.Advance(time.Hour)
		require.Equal(t, 1, b.rec.Count())
		v, _ := flags.Value("f")
		require.Equal(t, "off", v, "and cannot be written")
	})
}

// refused is nil if err says that the engine refused something.
func refused(err error) error {
	if errors.Is(err, engine.ErrInvalid) {
		return nil
	}
	return fmt.Errorf("not refused: %w", err)
}
