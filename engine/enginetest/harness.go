package enginetest

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

// Harness runs engines in virtual time. Its methods end the test if something goes wrong, and are for the test's own
// goroutine.
type Harness struct {
	T *testing.T
	// Config is what the next Start uses. It may be changed before it.
	Config engine.Config
	// Engine is the one that was started last.
	Engine *engine.Engine

	begin  time.Time
	cancel context.CancelFunc
	done   chan error
}

// Run calls f in a bubble of virtual time, which begins on 2000-01-01 and passes only while everything waits. An engine
// that f started is stopped at the end. All that f uses must be made within f.
func Run(t *testing.T, f func(h *Harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &Harness{T: t, begin: time.Now(), Config: engine.Config{Bus: engine.NewMemoryBus()}}
		if os.Getenv("WINDLASS_TEST_LOG") != "" {
			h.Config.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		f(h)
		h.Stop()
	})
}

// Start runs controllers until Stop, and waits until there is nothing to do. On the same bus it is the restart of what
// was stopped.
func (h *Harness) Start(controllers ...engine.Controller) {
	h.T.Helper()
	h.Config.Controllers = controllers
	e, err := engine.New(h.Config)
	if err != nil {
		h.T.Fatal(err)
	}
	h.Engine, h.done = e, make(chan error, 1)
	var ctx context.Context
	ctx, h.cancel = context.WithCancel(h.T.Context())
	go func() { h.done <- e.Run(ctx) }()
	synctest.Wait()
}

// Stop ends the engine as a shutdown does: running reconciles end first. It does nothing if none runs.
func (h *Harness) Stop() {
	h.T.Helper()
	if err := h.StopErr(); err != nil {
		h.T.Fatal(err)
	}
}

// StopErr is Stop for engines whose Run is expected to fail.
func (h *Harness) StopErr() error {
	if h.cancel == nil {
		return nil
	}
	h.cancel()
	h.cancel = nil
	return <-h.done
}

// Settle waits until there is nothing to do now.
func (h *Harness) Settle() { synctest.Wait() }

// Advance lets time pass, and then Settles.
func (h *Harness) Advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time.
	synctest.Wait()
}

// Elapsed is the virtual time since Run.
func (h *Harness) Elapsed() time.Duration { return time.Since(h.begin) }
