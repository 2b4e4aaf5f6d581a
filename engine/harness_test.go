package engine_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errBroken = errors.New("broken")

// recorder is a handler that remembers its runs and answers as told.
type recorder struct {
	answer func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error)

	mu   sync.Mutex
	runs []run
}

type run struct {
	at  time.Duration
	req engine.Request
}

func (r *recorder) handle(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
	r.mu.Lock()
	r.runs = append(r.runs, run{time.Since(epoch), req})
	r.mu.Unlock()
	if r.answer == nil {
		return engine.Result{}, nil
	}
	return r.answer(ctx, rt, req)
}

// epoch is when every bubble begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// times returns when a key ran.
func (r *recorder) times(name string) []time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []time.Duration
	for _, x := range r.runs {
		if x.req.Key.Name == name {
			out = append(out, x.at)
		}
	}
	return out
}

func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.runs)
}

func (r *recorder) last() engine.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.runs[len(r.runs)-1].req
}

// bundle is an engine with one controller over a map of numbers, in virtual time.
type bundle struct {
	t      *testing.T
	things *memory.Map[int]
	rec    *recorder
	config engine.Config
	engine *engine.Engine
	cancel context.CancelFunc
	done   chan error
}

// bubble runs f in virtual time, and the engine's end with it.
func bubble(t *testing.T, f func(b *bundle)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bundle{t: t, things: memory.New[int]("things"), rec: &recorder{}}
		f(b)
		if b.cancel != nil {
			b.stop()
		}
	})
}

// start runs controller c, or the recorder over things, and waits until it is idle.
func (b *bundle) start(cs ...engine.Controller) {
	b.t.Helper()
	if len(cs) == 0 {
		cs = []engine.Controller{b.controller()}
	}
	b.config.Controllers = cs
	if b.config.Bus == nil {
		b.config.Bus = engine.NewMemoryBus()
	}
	if os.Getenv("WINDLASS_TEST_LOG") != "" {
		b.config.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	var err error
	b.engine, err = engine.New(b.config)
	require.NoError(b.t, err)
	var ctx context.Context
	ctx, b.cancel = context.WithCancel(b.t.Context())
	b.done = make(chan error, 1)
	go func() { b.done <- b.engine.Run(ctx) }()
	synctest.Wait()
}

func (b *bundle) controller() engine.Controller {
	return engine.NewController("test").For(b.things).WithHandler(b.rec.handle)
}

func (b *bundle) stop() {
	b.t.Helper()
	b.cancel()
	require.NoError(b.t, <-b.done)
	b.cancel = nil
}

func (b *bundle) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// items returns the states of the test controller's keys by name.
func (b *bundle) items() map[string]engine.Item {
	b.t.Helper()
	items, err := b.engine.Items("test")
	require.NoError(b.t, err)
	out := make(map[string]engine.Item)
	for _, i := range items {
		out[i.Key.Name] = i
	}
	return out
}
