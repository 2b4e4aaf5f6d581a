package engine

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// worker is where a worker of a controller shows what it does.
type worker struct {
	state     atomic.Pointer[runState]
	since     atomic.Int64 // when its run began, 0: it has none
	reported  atomic.Int64 // since, of the run that was last reported as stuck
	goroutine int64

	history history
}

// newProcess returns what one worker calls for each of its requests.
func (c *runner) newProcess() Process {
	w := c.newWorker()
	w.goroutine = goroutineID()
	return func(ctx context.Context, req Request) Outcome { return c.process(ctx, w, req) }
}

// newWorker returns a worker, one of an earlier life if there is one: its history goes on.
func (c *runner) newWorker() *worker {
	c.workersMu.Lock()
	defer c.workersMu.Unlock()
	if c.hired == len(c.workers) {
		w := &worker{}
		w.history.size = max(historySize/c.concurrency, explainedRuns)
		c.workers = append(c.workers, w)
	}
	c.hired++
	return c.workers[c.hired-1]
}

// lostPause is how long a worker waits before it looks again at a lease that has run out.
const lostPause = 100 * time.Millisecond

// process runs the chain for one request.
func (c *runner) process(ctx context.Context, w *worker, req Request) Outcome {
	if c.lease != nil && !c.lease.Held() {
		// No run starts after the lease was lost, however many are ready, and whether or not its store has said so yet.
		pause(ctx, lostPause)
		return Outcome{Interrupted: true}
	}
	s := w.state.Load()
	if s == nil {
		s = &runState{c: c}
		w.state.Store(s)
	}
	rt := s.begin(req)
	s.work = ctx
	w.since.Store(s.start.UnixNano())
	if !c.watching.Load() {
		c.watch(c.patience())
	}
	hooks := &c.engine.cfg.Hooks
	if hooks.RunStarted != nil {
		hooks.RunStarted(s.req)
	}
	res, err := c.chain(ctx, rt, s.req)
	o := Outcome{
		Result: res, Err: err, Interrupted: err != nil && ctx.Err() != nil, TimedOut: err != nil && s.timedOut, Traceparent: s.traceparent,
	}
	s.mu.Lock()
	o.Revision, o.Incarnation = s.revision, s.incarnation
	if c.tracked != nil && !o.Interrupted {
		c.tracked.keep(req.Key, s.seen)
	}
	if res.now {
		o.by = s.descend()
		o.slowed = c.slow(ctx, req.Key, o.by)
	}
	s.mu.Unlock()
	o.ended = time.Now()
	w.since.Store(0)
	past := pastRun{
		key: req.Key, causes: req.Causes, started: s.start.UnixNano(), waited: int64(req.Waited), took: int64(o.ended.Sub(s.start)),
		attempt: int32(req.Attempt), wait: -1, outcome: "done", traceparent: s.traceparent, //nolint:gosec // a count of attempts.
	}
	if err != nil || res != (Result{}) {
		past.err, past.outcome, past.wait = err, outcomeName(&res, err, o.Interrupted), o.wait()
	}
	w.history.add(&past)
	c.echo(&past)
	if hooks.RunEnded != nil {
		hooks.RunEnded(s.req, o, o.ended.Sub(s.start))
	}
	if !s.end() {
		w.state.Store(nil)
	}
	return o
}

// Stats counts the keys of one controller.
type Stats struct {
	queue.Stats
	// Busy is how long the running reconciles have run, added up; Longest is that of the one that has run longest.
	Busy, Longest time.Duration
	// Stuck are the reconciles that go on although their context has ended.
	Stuck int
}

// Stats counts the keys of each controller; before Run has opened the queues there are none.
func (e *Engine) Stats() map[string]Stats {
	stats := make(map[string]Stats)
	e.each(func(c *runner) {
		if q := c.queue.Load(); q != nil {
			stats[c.name] = c.stats(q)
		}
	})
	return stats
}

func (c *runner) stats(q Queue) Stats {
	s := Stats{Stats: q.Stats()}
	c.workersMu.Lock()
	defer c.workersMu.Unlock()
	for _, w := range c.workers {
		if since := w.since.Load(); since != 0 {
			age := max(time.Since(time.Unix(0, since)), 0)
			s.Busy += age
			s.Longest = max(s.Longest, age)
			if since == w.reported.Load() {
				s.Stuck++
			}
		}
	}
	return s
}
