package queue

import (
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bundle is a queue whose values are lists of words, in virtual time.
type bundle struct {
	*Queue[string, []string]
	t *testing.T
}

func bubble(t *testing.T, f func(b bundle)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := bundle{New[string](Config[string, []string]{
			Join:      func(into *[]string, from []string) { *into = append(*into, from...) },
			Revives:   func(_, added []string) bool { return !slices.Contains(added, "same") },
			Unchanged: func(_, listed []string) bool { return slices.Contains(listed, "same") },
		}), t}
		f(b)
		b.Close()
	})
}

func (b bundle) add(key string, words ...string) Added { return b.Add(key, words, Options{}) }

// next takes a key that must be ready.
func (b bundle) next() Run[string, []string] {
	b.t.Helper()
	require.NotEqual(b.t, [3]int{}, b.Stats().Ready, "nothing is ready")
	run, ok := b.Next()
	require.True(b.t, ok)
	return run
}

func (b bundle) end(run Run[string, []string], o Outcome[[]string]) {
	b.Finish(run, o)
	b.Release(run.Key)
}

func (b bundle) none() {
	b.t.Helper()
	require.Equal(b.t, [3]int{}, b.Stats().Ready)
}

func (b bundle) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestPendingKeyIsTakenOnceWithItsCausesJoined(t *testing.T) {
	bubble(t, func(b bundle) {
		require.Equal(t, Queued, b.add("k", "1"))
		require.Equal(t, Joined, b.add("k", "2"))
		require.Equal(t, []string{"1", "2"}, b.next().Value)
		b.none()
	})
}

func TestChangeDuringARunCausesExactlyOneMore(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		run := b.next()
		for range 100 {
			b.add("k", "more")
		}
		b.none()
		b.end(run, Outcome[[]string]{})
		run = b.next()
		require.Len(t, run.Value, 100)
		b.end(run, Outcome[[]string]{})
		b.none()
		require.Empty(t, b.Items(), "an idle key is forgotten")
	})
}

func TestRetryGrowsAndSuccessResets(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		for attempt := range 3 {
			run := b.next()
			require.Equal(t, attempt, run.Attempt)
			b.end(run, Outcome[[]string]{Verdict: Retry, After: time.Second, Value: run.Value})
			b.none()
			b.wait(time.Second)
		}
		run := b.next()
		require.Equal(t, 3, run.Attempt)
		b.end(run, Outcome[[]string]{})
		b.add("k", "2")
		require.Zero(t, b.next().Attempt)
	})
}

func TestEventDuringBackoffRunsAtOnceAndKeepsTheBudget(t *testing.T) {
	bubble(t, func(b bundle) {
		fail := Outcome[[]string]{Verdict: Retry, After: 10 * time.Second, Value: []string{"retry"}}
		b.add("k", "1")
		b.end(b.next(), fail)
		b.wait(4 * time.Second)
		b.add("k", "event")
		run := b.next()
		require.Equal(t, 1, run.Attempt)
		require.True(t, run.RetryPending)
		require.Equal(t, []string{"retry", "event"}, run.Value, "the retry's causes are dealt with too")
		b.end(run, fail)
		b.none()
		b.wait(6*time.Second - 1)
		b.none()
		b.wait(1)
		run = b.next() // the earlier time was kept
		require.Equal(t, 1, run.Attempt, "and so was the attempt")
		require.False(t, run.RetryPending)
	})
}

func TestEventRunThatOutlastsTheRetryTakesTheSameStepAgain(t *testing.T) {
	bubble(t, func(b bundle) {
		fail := Outcome[[]string]{Verdict: Retry, After: 10 * time.Second, Value: []string{"retry"}}
		b.add("k", "1")
		b.end(b.next(), fail)
		b.add("k", "event")
		run := b.next()
		b.wait(11 * time.Second)
		b.end(run, fail)
		b.wait(10*time.Second - 1)
		b.none()
		b.wait(1)
		require.Equal(t, 1, b.next().Attempt)
	})
}

func TestHardDelayHoldsEverythingButAManualRequest(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		b.end(b.next(), Outcome[[]string]{Verdict: Retry, After: time.Second, NotBefore: time.Minute})
		b.add("k", "event")
		b.wait(30 * time.Second)
		b.none()
		b.Add("k", []string{"manual"}, Options{Manual: true})
		require.Contains(t, b.next().Value, "manual")
	})
	bubble(t, func(b bundle) {
		b.add("k", "1")
		b.end(b.next(), Outcome[[]string]{Verdict: Retry, After: time.Second, NotBefore: time.Minute})
		b.add("k", "event")
		b.wait(time.Minute)
		require.Contains(t, b.next().Value, "event")
	})
}

func TestRunSupersedesARequeue(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		b.end(b.next(), Outcome[[]string]{Verdict: Requeue, After: time.Minute, Value: []string{"requeue"}})
		b.add("k", "event")
		run := b.next()
		require.Equal(t, []string{"event"}, run.Value)
		b.end(run, Outcome[[]string]{})
		b.wait(time.Hour)
		b.none()
	})
}

func TestRequestForLaterOutlivesEarlierRuns(t *testing.T) {
	bubble(t, func(b bundle) {
		at := time.Now().Add(time.Minute).UnixNano()
		require.Equal(t, Delayed, b.Add("k", []string{"later"}, Options{Later: at}))
		require.Equal(t, Delayed, b.Add("k", []string{"latest"}, Options{Later: at + int64(time.Minute)}))
		b.add("k", "event")
		run := b.next()
		require.Equal(t, []string{"event"}, run.Value)
		b.end(run, Outcome[[]string]{})
		b.none()
		b.wait(time.Minute)
		require.Equal(t, []string{"later", "latest"}, b.next().Value, "the earlier time holds, for both")
	})
}

func TestRequestForLaterThatArrivesDuringItsOwnRunIsKept(t *testing.T) {
	bubble(t, func(b bundle) {
		b.Add("k", []string{"one"}, Options{Later: time.Now().Add(time.Second).UnixNano()})
		b.wait(time.Second)
		run := b.next()
		b.Add("k", []string{"two"}, Options{Later: time.Now().Add(time.Minute).UnixNano()})
		b.end(run, Outcome[[]string]{})
		b.wait(time.Minute)
		require.Contains(t, b.next().Value, "two")
	})
}

func TestClassesShareSixteenFourOne(t *testing.T) {
	bubble(t, func(b bundle) {
		for i := range 42 {
			for c := range Classes {
				b.Add(string(rune('a'+c))+string(rune('0'+i)), nil, Options{Class: c})
			}
		}
		var taken [Classes]int
		for range 42 {
			taken[b.next().Class]++
		}
		require.Equal(t, [Classes]int{32, 8, 2}, taken)
	})
}

func TestJoinMovesAKeyUpNeverDown(t *testing.T) {
	bubble(t, func(b bundle) {
		b.Add("k", nil, Options{Class: List})
		b.Add("k", nil, Options{Class: Live})
		b.Add("k", nil, Options{Class: List})
		require.Equal(t, [3]int{1, 0, 0}, b.Stats().Ready)
		require.Equal(t, Live, b.next().Class)
	})
}

func TestFirstInFirstOutWithinAClass(t *testing.T) {
	bubble(t, func(b bundle) {
		for _, k := range []string{"a", "b", "c"} {
			b.add(k)
		}
		b.add("a")
		for _, k := range []string{"a", "b", "c"} {
			require.Equal(t, k, b.next().Key)
		}
	})
}

func TestParkedKeyStaysUntilThereIsNews(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		b.end(b.next(), Outcome[[]string]{Verdict: Park, Err: "poison", Value: []string{"1"}})
		require.Equal(t, Stats{Parked: 1}, b.Stats())
		require.Equal(t, "poison", b.Items()[0].Err)
		require.Equal(t, Absorbed, b.add("k", "same"))
		b.none()
		require.Equal(t, Queued, b.add("k", "news"))
		require.Zero(t, b.next().Attempt, "attempts start afresh")
		require.Zero(t, b.Stats().Parked)
	})
}

func TestManualRequestRevivesWhateverItSays(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k")
		b.end(b.next(), Outcome[[]string]{Verdict: Park})
		b.Add("k", []string{"same"}, Options{Manual: true})
		b.next()
	})
}

func TestChangeDuringTheRunThatParksIsOwedOneMore(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k")
		run := b.next()
		b.add("k", "same")
		b.end(run, Outcome[[]string]{Verdict: Park})
		b.next()
	})
}

func TestInterruptedRunCountsForNothing(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k", "1")
		b.end(b.next(), Outcome[[]string]{Verdict: Retry, After: time.Second, Value: []string{"1"}})
		b.wait(time.Second)
		run := b.next()
		require.Equal(t, 1, run.Attempt)
		b.end(run, Outcome[[]string]{Verdict: Interrupt, Value: run.Value})
		require.Equal(t, 1, b.next().Attempt)
	})
}

func TestNothingStartsAfterClose(t *testing.T) {
	bubble(t, func(b bundle) {
		for _, k := range []string{"a", "b", "c"} {
			b.add(k)
		}
		run := b.next()
		b.Close()
		_, ok := b.Next()
		require.False(t, ok, "what is ready is not handed out any more")
		b.end(run, Outcome[[]string]{})
	})
}

func TestRestoredKeysAreNotDisturbedByAList(t *testing.T) {
	bubble(t, func(b bundle) {
		due := time.Now().Add(time.Minute).UnixNano()
		b.Restore(State[string, []string]{Key: "delayed", Attempt: 3, Due: due, Retry: true, Value: []string{"old"}})
		b.Restore(State[string, []string]{Key: "parked", Attempt: 5, Parked: true, Err: "x"})
		for _, k := range []string{"delayed", "parked"} {
			require.Equal(t, Absorbed, b.Add(k, []string{"same"}, Options{Class: List}), k)
		}
		b.Restore(State[string, []string]{Key: "changed", Attempt: 1, Due: due + int64(time.Hour), Retry: true})
		b.Add("changed", []string{"new revision"}, Options{Class: List})
		require.Equal(t, "changed", b.next().Key, "what changed meanwhile is caught up")
		b.none()
		b.wait(time.Minute)
		run := b.next()
		require.Equal(t, 3, run.Attempt)
		require.Equal(t, []string{"old"}, run.Value)
		b.end(run, Outcome[[]string]{Verdict: Requeue, After: time.Hour})
		b.Add("delayed", []string{"same"}, Options{Class: List})
		require.Equal(t, "delayed", b.next().Key, "a later list is no restart's, and reconciles")
	})
}

func TestRestoreAfterTheListJudgesWhatWaits(t *testing.T) {
	bubble(t, func(b bundle) {
		b.Add("k", []string{"same"}, Options{Class: List})
		b.Restore(State[string, []string]{Key: "k", Attempt: 5, Parked: true})
		b.none()
		require.Equal(t, 1, b.Stats().Parked)
	})
}

func TestOverdueStateIsReadyAtOnce(t *testing.T) {
	bubble(t, func(b bundle) {
		b.Restore(State[string, []string]{Key: "k", Attempt: 2, Due: time.Now().Add(-time.Hour).UnixNano(), Retry: true})
		require.Equal(t, 2, b.next().Attempt)
	})
}

func TestStateDuringARunSaysWhatACrashWouldNeed(t *testing.T) {
	bubble(t, func(b bundle) {
		b.add("k")
		b.end(b.next(), Outcome[[]string]{Verdict: Retry, After: time.Second, Value: []string{"retry"}})
		b.wait(time.Second)
		b.next()
		s := b.Items()[0]
		require.Equal(t, Running, s.Phase)
		require.Equal(t, 1, s.Attempt)
		require.NotZero(t, s.Due)
		require.Equal(t, []string{"retry"}, s.Value)
	})
}

func TestHeldKeyDoesNotRunUntilItIsReleased(t *testing.T) {
	bubble(t, func(b bundle) {
		_, ok := b.Hold("k")
		require.False(t, ok, "there is nothing to know of it")
		b.Add("k", []string{"later"}, Options{Later: time.Now().Add(time.Second).UnixNano()})
		s, ok := b.Hold("k")
		require.True(t, ok)
		require.Equal(t, []string{"later"}, s.LaterValue)
		_, ok = b.Hold("k")
		require.False(t, ok)
		b.add("k", "event")
		b.wait(time.Minute)
		b.none()
		b.Release("k")
		require.Equal(t, []string{"event", "later"}, b.next().Value)
	})
}

// TestNeverTwiceAtOnce runs many workers against many producers in real time, for the race detector.
func TestNeverTwiceAtOnce(t *testing.T) {
	const keys, perKey = 50, 400
	// Few hashes, so that keys share them.
	q := New[int](Config[int, int]{Join: func(into *int, from int) { *into += from }, Hash: func(k int) uint64 { return uint64(k % 7) }})
	var busy [keys]atomic.Bool
	var seen [keys]atomic.Int64
	var workers, producers sync.WaitGroup
	for i := range 8 {
		workers.Go(func() {
			run, ok := q.Next()
			for ok {
				if busy[run.Key].Swap(true) {
					t.Errorf("key %d runs twice at once", run.Key)
				}
				seen[run.Key].Add(int64(run.Value))
				busy[run.Key].Store(false)
				if i%2 == 0 {
					ok = q.FinishNext(&run, &Outcome[int]{}, time.Now().UnixNano())
					continue
				}
				q.Finish(run, Outcome[int]{})
				q.Release(run.Key)
				run, ok = q.Next()
			}
		})
	}
	for p := range 4 {
		producers.Go(func() {
			for i := range keys * perKey / 4 {
				if p%2 == 0 {
					q.Put(i%keys, 1, Options{Class: Class(i % 3)})
				} else {
					q.Add(i%keys, 1, Options{Class: Class(i % 3)})
				}
			}
		})
	}
	producers.Wait()
	require.Eventually(t, func() bool { return len(q.Items()) == 0 }, 10*time.Second, time.Millisecond)
	q.Close()
	workers.Wait()
	total := int64(0)
	for k := range keys {
		total += seen[k].Load()
	}
	require.EqualValues(t, keys*perKey, total, "no cause is lost")
}

// TestNoRequestIsLeftInTheInbox puts requests one at a time, each when all workers have gone to sleep or are about to.
func TestNoRequestIsLeftInTheInbox(t *testing.T) {
	q := New[int](Config[int, int]{Join: func(into *int, from int) { *into += from }})
	var workers sync.WaitGroup
	ran := make(chan int, 1)
	for range 4 {
		workers.Go(func() {
			run, ok := q.Next()
			for ok {
				ran <- run.Key
				ok = q.FinishNext(&run, &Outcome[int]{}, time.Now().UnixNano())
			}
		})
	}
	for i := range 20000 {
		q.Put(i, 1, Options{})
		select {
		case k := <-ran:
			require.Equal(t, i, k)
		case <-time.After(10 * time.Second):
			t.Fatalf("request %d was never taken", i)
		}
	}
	q.Close()
	workers.Wait()
}

// A worker whose runs were short is counted on to be back. When its next run takes long, the others are woken for what
// comes meanwhile.
func TestOneSlowRunAfterQuickOnesHoldsUpNothing(t *testing.T) {
	bubble(t, func(b bundle) {
		b.crew.enough = 1 // as on one processor: none is woken beside a quick one
		var workers sync.WaitGroup
		started := make(map[string]time.Time)
		var mu sync.Mutex
		for range 3 {
			workers.Go(func() {
				run, ok := b.Next()
				for ok {
					mu.Lock()
					started[run.Key] = time.Now()
					mu.Unlock()
					if run.Key[0] == 's' {
						time.Sleep(time.Minute)
					}
					ok = b.FinishNext(&run, &Outcome[[]string]{}, time.Now().UnixNano())
				}
			})
		}
		// The worker that has done the short ones takes the first slow one, and is counted on to be back.
		for i := range 100 {
			b.Put(strconv.Itoa(i), nil, Options{})
		}
		for _, k := range []string{"slow 1", "slow 2", "slow 3"} {
			b.Put(k, nil, Options{})
			synctest.Wait()
		}
		begin := time.Now()
		b.wait(10 * watchEvery)
		for _, k := range []string{"slow 1", "slow 2", "slow 3"} {
			require.Contains(t, started, k)
			require.LessOrEqual(t, started[k].Sub(begin), 4*watchEvery, k)
		}
		b.wait(time.Minute)
		b.Close()
		workers.Wait()
	})
}

func BenchmarkAddNext(b *testing.B) {
	q := New[int](Config[int, int]{Join: func(into *int, from int) { *into += from }})
	b.ReportAllocs()
	for i := range b.N {
		q.Add(i, 1, Options{})
		run, _ := q.Next()
		q.Finish(run, Outcome[int]{})
		q.Release(run.Key)
	}
}

func BenchmarkAddLater(b *testing.B) {
	q := New[int](Config[int, int]{Join: func(into *int, from int) { *into += from }})
	defer q.Close()
	at := time.Now().Add(time.Hour).UnixNano()
	b.ReportAllocs()
	for i := range b.N {
		q.Add(i, 1, Options{Later: at + int64(i%1000)*int64(time.Millisecond)})
	}
}
