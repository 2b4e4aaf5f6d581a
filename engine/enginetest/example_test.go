package enginetest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// TestHundredDays is what a user's test looks like: a hundred days of daily requeues with a dependency that fails every
// third time, in a few milliseconds.
func TestHundredDays(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		calls := 0
		rec := &enginetest.Recorder{Answer: func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			if calls++; calls%3 == 0 {
				return engine.Result{}, errors.New("the dependency is away")
			}
			return engine.Result{RequeueAfter: 24 * time.Hour}, nil
		}}
		reports := memory.New[string]("reports")
		reports.Set("sales", "daily")
		h.Start(engine.NewController("reports").For(reports).WithHandler(rec.Handle).
			WithBackoff(engine.Backoff{Initial: time.Minute}))

		h.Advance(100 * 24 * time.Hour)

		days, retries := 0, 0
		for _, run := range rec.Runs("sales") {
			if run.Request.Trigger() == engine.Retried {
				retries++
			} else {
				days++
			}
		}
		if days != 100 {
			t.Errorf("%d daily runs, want 100: each retry succeeded a minute later, and the next day is counted from there", days)
		}
		if retries < 45 {
			t.Errorf("%d retries: a failing dependency is tried again", retries)
		}
	})
}
