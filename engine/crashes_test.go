package engine_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// deadly is a bus whose runs have ended so many processes.
type deadly struct {
	engine.Bus
	crashes int
}

type deadlyQueue struct {
	engine.Queue
	crashes int
}

func (d deadly) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	q, err := d.Bus.Queue(ctx, cfg)
	return deadlyQueue{q, d.crashes}, err
}

func (d deadlyQueue) Run(intake, work context.Context, newProcess func() engine.Process) error {
	return d.Queue.Run(intake, work, func() engine.Process {
		process := newProcess()
		return func(ctx context.Context, req engine.Request) engine.Outcome {
			req.Crashes = d.crashes
			return process(ctx, req)
		}
	})
}

func TestKeyThatEndedThreeProcessesIsParkedAndNotRun(t *testing.T) {
	for crashes, runs := range map[int]int{2: 1, 3: 0} {
		bubble(t, func(b *bundle) {
			b.Config.Bus = deadly{b.Config.Bus, crashes}
			var told error
			b.Config.Hooks.RunEnded = func(_ engine.Request, o engine.Outcome, _ time.Duration) { told = o.Err }
			b.things.Set("a", 1)
			b.start()
			synctest.Wait()
			require.Equal(t, runs, b.rec.Count())
			items, err := b.Engine.Items("test")
			require.NoError(t, err)
			if crashes < 3 {
				require.Empty(t, items)
				return
			}
			require.Equal(t, queue.Parked, items[0].Phase)
			require.Equal(t, "the key ends its process: it ran in 3 of them when they ended", items[0].Err)
			require.ErrorIs(t, told, engine.ErrEndsProcess)
		})
	}
}
