package enginetest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// bed is a queue with a script for its runs.
type bed struct {
	t     *testing.T
	queue engine.Queue

	mu     sync.Mutex
	script func(ctx context.Context, req engine.Request) engine.Outcome
	ran    []engine.Request
	busy   map[engine.Key]bool
	stop   func()
}

var kind = engine.KindOf("enginetest")

func keyOf(name string) engine.Key { return engine.Key{Kind: kind, Namespace: "ns", Name: name} }

// work opens a queue on a bus and runs the script for its requests.
func work(ctx context.Context, t *testing.T, bus engine.Bus, workers int, script func(ctx context.Context, req engine.Request) engine.Outcome) *bed {
	t.Helper()
	q, err := bus.Queue(ctx, engine.QueueConfig{Engine: "suite", Controller: "suite", Workers: workers})
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, queue: q, script: script, busy: make(map[engine.Key]bool)}
	intake, stop := context.WithCancel(ctx)
	runs, kill := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- q.Run(intake, runs, func() engine.Process { return b.process }) }()
	b.stop = sync.OnceFunc(func() {
		t.Helper()
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		kill()
	})
	t.Cleanup(b.stop)
	return b
}

func (b *bed) process(ctx context.Context, req engine.Request) engine.Outcome {
	b.mu.Lock()
	if b.busy[req.Key] {
		b.t.Errorf("%s runs twice at once", req.Key)
	}
	b.busy[req.Key] = true
	b.ran = append(b.ran, req)
	script := b.script
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.busy[req.Key] = false
	}()
	if script == nil {
		return engine.Outcome{}
	}
	return script(ctx, req)
}

func (b *bed) runs(name string) (out []engine.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.ran {
		if r.Key == keyOf(name) {
			out = append(out, r)
		}
	}
	return out
}

func (b *bed) add(ctx context.Context, req engine.Request) {
	b.t.Helper()
	req.Controller = "suite"
	if req.Causes.Count() == 0 {
		req.Causes = requestFor(req.Key).Causes
	}
	eventually(b.t, "the bus accepts a request for "+req.Key.String(), func() bool { return b.queue.Enqueue(ctx, req) == nil })
}

func requestFor(k engine.Key) engine.Request {
	return engine.Request{
		Controller: "suite", Key: k, Causes: engine.CausesOf(engine.Cause{Trigger: engine.Updated, Operation: engine.Put, Time: time.Now()}),
	}
}

func (b *bed) live(ctx context.Context, name string) {
	b.t.Helper()
	b.add(ctx, engine.Request{Key: keyOf(name)})
}

func (b *bed) ranTimes(name string, n int) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("%s ran %d times", name, n), func() bool { return len(b.runs(name)) >= n })
}

func (b *bed) state(name string) queue.Phase {
	it, ok := b.queue.Item(keyOf(name))
	if !ok {
		return 255
	}
	return it.Phase
}

func (b *bed) reaches(name string, p queue.Phase) {
	b.t.Helper()
	eventually(b.t, name+" is "+p.String(), func() bool { return b.state(name) == p })
}

func (b *bed) idle(name string) {
	b.t.Helper()
	eventually(b.t, name+" is idle", func() bool { return b.state(name) == 255 })
}
