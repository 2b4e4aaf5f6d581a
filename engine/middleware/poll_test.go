package middleware_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/middleware"
	"github.com/windlass-dev/windlass/sources/memory"
)

func poll(h *enginetest.Harness, cfg middleware.PollConfig, answer engine.Handler) (*memory.Map[int], *enginetest.Recorder) {
	things, rec := memory.New[int]("things"), &enginetest.Recorder{Answer: answer}
	things.Set("a", 1)
	h.Start(engine.NewController("c").For(things).WithHandler(rec.Handle).WithMiddleware(middleware.Poll(cfg)))
	return things, rec
}

func TestPollRunsAgainAfterSuccessAndStopsWithTheObject(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		things, rec := poll(h, middleware.PollConfig{Interval: 5 * time.Second}, nil)
		h.Advance(11 * time.Second)
		require.Equal(t, []time.Duration{0, 5 * time.Second, 10 * time.Second}, rec.Times("a"))
		things.Remove("a")
		h.Advance(time.Minute)
		require.Len(t, rec.Times("a"), 4, "the deletion itself, and nothing after it")
	})
}

func TestPollLeavesFailuresAndOwnRequeuesAlone(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		n := 0
		_, rec := poll(h, middleware.PollConfig{Interval: time.Hour}, func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			switch n++; n {
			case 1:
				return engine.Result{}, errors.New("not yet")
			case 2:
				return engine.Result{RequeueAfter: time.Second}, nil
			}
			return engine.Result{}, nil
		})
		h.Advance(90 * time.Minute)
		first := 5 * time.Millisecond
		require.Equal(t, []time.Duration{0, first, first + time.Second, first + time.Second + time.Hour}, rec.Times("a"))
	})
}

func TestPollIsSpreadAndMayBeChanged(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		_, rec := poll(h, middleware.PollConfig{Interval: 5 * time.Second, Jitter: 0.2}, nil)
		h.Advance(time.Hour)
		times, distinct := rec.Times("a"), map[time.Duration]bool{}
		for i := 1; i < len(times); i++ {
			gap := times[i] - times[i-1]
			distinct[gap] = true
			require.GreaterOrEqual(t, gap, 4*time.Second)
			require.LessOrEqual(t, gap, 5*time.Second)
		}
		require.Greater(t, len(distinct), 100)
	})
	enginetest.Run(t, func(h *enginetest.Harness) {
		_, rec := poll(h, middleware.PollConfig{Interval: time.Minute, Hook: func(_ engine.Request, wait time.Duration) time.Duration {
			if rec := time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)); rec > time.Minute {
				return 0
			}
			return 2 * wait
		}}, nil)
		h.Advance(time.Hour)
		require.Equal(t, []time.Duration{0, 2 * time.Minute}, rec.Times("a"))
	})
}
