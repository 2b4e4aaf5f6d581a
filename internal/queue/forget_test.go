package queue_test

import (
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/internal/queue"
)

// forgetting returns a queue with one key in every place, by the name of the place.
func forgetting(t *testing.T) (*queue.Queue[string, int], queue.Run[string, int]) {
	t.Helper()
	q := queue.New(queue.Config[string, int]{Join: func(into *int, from int) { *into += from }, Revives: func(_, _ int) bool { return false }})
	now := time.Now()
	q.Restore(queue.State[string, int]{Key: "parked", Parked: true, Attempt: 1})
	q.Restore(queue.State[string, int]{Key: "delayed", Due: now.Add(time.Hour).UnixNano(), Value: 1})
	q.Restore(queue.State[string, int]{Key: "running", Later: now.Add(time.Hour).UnixNano(), LaterValue: 7})
	q.Add("running", 1, queue.Options{})
	run, ok := q.Next()
	require.True(t, ok)
	require.Equal(t, "running", run.Key)
	q.Add("running", 2, queue.Options{})
	q.Add("ready", 3, queue.Options{})
	q.Add("manual", 4, queue.Options{Manual: true})
	return q, run
}

func dropped(into map[string]int) func(string, int) {
	return func(key string, value int) { into[key] = value }
}

func all(string) bool { return true }

func TestForgottenKeysLeaveNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, run := forgetting(t)
		got := map[string]int{}
		q.Forget(all, true, dropped(got))
		require.Equal(t, map[string]int{"running": 2, "ready": 3, "manual": 4}, got)
		require.Equal(t, queue.Stats{Running: 1}, q.Stats())
		q.Add("running", 5, queue.Options{})
		q.Release(run.Key)
		again, ok := q.Next()
		require.True(t, ok)
		require.Equal(t, 5, again.Value, "what it was asked for since, and nothing else")
		require.Zero(t, q.Finish(again, queue.Outcome[int]{}).Later)
		q.Release(again.Key)
		require.Empty(t, q.Items())
		time.Sleep(2 * time.Hour)
		require.Empty(t, q.Items(), "no timer brings anything back")
		q.Close()
	})
}

func TestForgettingLeavesWhatALockedKeyHasToWriteDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, run := forgetting(t)
		q.Forget(all, false, dropped(map[string]int{}))
		s := q.Finish(run, queue.Outcome[int]{Verdict: queue.Requeue, After: time.Minute, Value: 9})
		require.NotZero(t, s.Due)
		require.Equal(t, 7, s.LaterValue)
		q.Abandon(run.Key)
		require.Empty(t, q.Items())
		require.Equal(t, queue.Stats{}, q.Stats())
		q.Close()
	})
}

func TestForgettingSomeLeavesTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := forgetting(t)
		q.Forget(func(key string) bool { return key == "ready" || key == "delayed" }, true, dropped(map[string]int{}))
		left := map[string]bool{}
		for _, it := range q.Items() {
			left[it.Key] = true
		}
		require.ElementsMatch(t, []string{"parked", "running", "manual"}, slices.Collect(maps.Keys(left)))
		require.Equal(t, 1, q.Stats().Parked)
		q.Close()
	})
}
