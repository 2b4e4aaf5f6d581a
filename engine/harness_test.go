package engine_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errBroken = errors.New("broken")

// epoch is when every bubble begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// bundle is a harness with a controller over a map of numbers.
type bundle struct {
	*enginetest.Harness

	t      *testing.T
	things *memory.Map[int]
	rec    *enginetest.Recorder
}

// bubble runs f in virtual time.
func bubble(t *testing.T, f func(b *bundle)) {
	t.Helper()
	enginetest.Run(t, func(h *enginetest.Harness) {
		f(&bundle{Harness: h, t: h.T, things: memory.New[int]("things"), rec: &enginetest.Recorder{}})
	})
}

// start runs controllers, or the recorder over things if there are none.
func (b *bundle) start(cs ...engine.Controller) {
	b.t.Helper()
	if len(cs) == 0 {
		cs = []engine.Controller{b.controller()}
	}
	b.Start(cs...)
}

func (b *bundle) controller() engine.Controller {
	return engine.NewController("test").For(b.things).WithHandler(b.rec.Handle)
}

// items returns the states of the test controller's keys by name.
func (b *bundle) items() map[string]engine.Item {
	b.t.Helper()
	items, err := b.Engine.Items("test")
	require.NoError(b.t, err)
	out := make(map[string]engine.Item)
	for _, i := range items {
		out[i.Key.Name] = i
	}
	return out
}

// answers returns a handler that answers one thing.
func answers(res engine.Result, err error) engine.Handler {
	return func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) { return res, err }
}
