package enginetest_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// decisions are what a bus of this seed makes of ten requests for each key, handed over in this order of keys: per key, one
// letter a request, r if it was refused.
func decisions(t *testing.T, seed uint64, order []int) map[string]string {
	t.Helper()
	told := make(map[string]string)
	q, err := enginetest.NewFaultBus(t, seed, enginetest.AllFaults).Queue(t.Context(), engine.QueueConfig{Engine: "e", Controller: "c"})
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range order {
		key := engine.Key{Kind: engine.KindOf("things"), Name: fmt.Sprint("k", i)}
		letter := "a"
		if err := q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: key}); err != nil {
			letter = "r"
		}
		told[key.Name] += letter
	}
	return told
}

// What an engine makes of the faults depends on what its goroutines do first at one instant; what goes wrong does not.
func TestTheSameSeedDoesTheSameAgain(t *testing.T) {
	var order []int
	for i := range 100 {
		order = append(order, i%10)
	}
	different := false
	for seed := range uint64(20) {
		first := decisions(t, seed, order)
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		if again := decisions(t, seed, order); !maps.Equal(again, first) {
			t.Fatalf("seed %d: first\n%v\nthen, in another order of keys\n%v", seed, first, again)
		}
		different = different || !maps.Equal(first, decisions(t, seed+100, order))
	}
	if !different {
		t.Error("all seeds do the same")
	}
}

func TestBlockUntilEndsWithItsContextToo(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		release := make(chan struct{})
		rec := &enginetest.Recorder{Answer: enginetest.BlockUntil(release)}
		things := memory.New[int]("things")
		things.Set("a", 1)
		h.Start(engine.NewController("c").For(things).WithHandler(rec.Handle).WithTimeout(time.Minute).
			WithBackoff(engine.Backoff{MaxAttempts: 1}))
		h.Advance(time.Hour)
		dead, err := h.Engine.Dead("c")
		if err != nil || len(dead) != 1 || !strings.Contains(dead[0].Err, engine.ErrDeadline.Error()) {
			t.Errorf("dead letters %v, %v: want the run cut off by its deadline", dead, err)
		}
		close(release)
		things.Set("a", 2)
		h.Settle()
		if dead, err = h.Engine.Dead("c"); err != nil || len(dead) != 0 {
			t.Errorf("dead letters %v, %v: want none once it is released", dead, err)
		}
	})
}
