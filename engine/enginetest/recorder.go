package enginetest

import (
	"context"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

// Recorder is a handler that remembers its runs. Its zero value answers that all is well. It is safe for concurrent use.
type Recorder struct {
	// Answer is called for each run, after it was recorded. Set it before the engine starts.
	Answer engine.Handler

	mu      sync.Mutex
	runs    []Recorded
	running map[engine.Key]int
	most    map[engine.Key]int
}

// Recorded is one run.
type Recorded struct {
	At      time.Time
	Request engine.Request
}

// Handle is the engine.Handler.
func (r *Recorder) Handle(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
	r.mu.Lock()
	if r.running == nil {
		r.running, r.most = make(map[engine.Key]int), make(map[engine.Key]int)
	}
	r.runs = append(r.runs, Recorded{time.Now(), req})
	r.running[req.Key]++
	r.most[req.Key] = max(r.most[req.Key], r.running[req.Key])
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running[req.Key]--
	}()
	if r.Answer == nil {
		return engine.Result{}, nil
	}
	return r.Answer(ctx, rt, req)
}

// Runs returns the runs of the keys with this name, in the order in which they began; without a name, all.
func (r *Recorder) Runs(names ...string) (runs []Recorded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.runs {
		if len(names) == 0 || x.Request.Key.Name == names[0] {
			runs = append(runs, x)
		}
	}
	return runs
}

// Times returns when the keys with this name ran, counted from the first moment of a bubble.
func (r *Recorder) Times(name string) (times []time.Duration) {
	for _, x := range r.Runs(name) {
		times = append(times, x.At.Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
	}
	return times
}

// Count is how many runs there were.
func (r *Recorder) Count() int { return len(r.Runs()) }

// Last returns the newest run's request, the zero one if there was none.
func (r *Recorder) Last() engine.Request {
	if runs := r.Runs(); len(runs) > 0 {
		return runs[len(runs)-1].Request
	}
	return engine.Request{}
}

// AtOnce is how many runs of one key there were at once, at most. More than 1 is a broken promise.
func (r *Recorder) AtOnce() (most int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.most {
		most = max(most, n)
	}
	return most
}

// FailFor returns a handler that fails the first n runs of each key with err.
func FailFor(n int, err error) engine.Handler {
	var mu sync.Mutex
	failed := make(map[engine.Key]int)
	return func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
		mu.Lock()
		defer mu.Unlock()
		if failed[req.Key]++; failed[req.Key] <= n {
			return engine.Result{}, err
		}
		return engine.Result{}, nil
	}
}

// BlockUntil returns a handler that blocks until release is closed or its context ends.
func BlockUntil(release <-chan struct{}) engine.Handler {
	return func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
		select {
		case <-release:
			return engine.Result{}, nil
		case <-ctx.Done():
			return engine.Result{}, context.Cause(ctx)
		}
	}
}
