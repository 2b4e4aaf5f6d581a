package enginetest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// story runs the same things on a fault bus and tells what ran when. No two things happen at one instant.
func story(t *testing.T, seed uint64) string {
	t.Helper()
	var b strings.Builder
	enginetest.Run(t, func(h *enginetest.Harness) {
		faults := enginetest.AllFaults
		faults.Crash = 0
		h.Config.Bus = enginetest.NewFaultBus(h.T, seed, faults)
		things := memory.New[int]("things")
		rec := &enginetest.Recorder{Answer: enginetest.FailFor(2, errors.New("not yet"))}
		h.Start(engine.NewController("c").For(things).WithHandler(rec.Handle).WithBackoff(engine.Backoff{Initial: 1009 * time.Millisecond}))
		for i := range 20 {
			things.Set(fmt.Sprint("k", i%4), i)
			h.Advance(307 * time.Millisecond)
		}
		h.Advance(time.Minute)
		for _, r := range rec.Runs() {
			fmt.Fprintln(&b, r.At.Format("05.000"), r.Request.Key.Name, r.Request.Attempt)
		}
	})
	return b.String()
}

func TestTheSameSeedDoesTheSameAgain(t *testing.T) {
	different := false
	for seed := range uint64(20) {
		first := story(t, seed)
		if again := story(t, seed); again != first {
			t.Fatalf("seed %d: first\n%s\nthen\n%s", seed, first, again)
		}
		different = different || first != story(t, seed+100)
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
