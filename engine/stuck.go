package engine

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strconv"
	"time"
)

// heartbeat cancels a reconcile that is silent for longer than d, with ErrNoHeartbeat as the cause.
func heartbeat(d time.Duration) Middleware {
	return func(next Handler) Handler {
		if d <= 0 {
			return next
		}
		return func(ctx context.Context, rt Runtime, req Request) (Result, error) {
			ctx, cancel := context.WithCancelCause(ctx)
			defer cancel(nil)
			timer := time.AfterFunc(d, func() { cancel(ErrNoHeartbeat) })
			defer timer.Stop()
			rt.s.mu.Lock()
			rt.s.beat = func() {
				timer.Reset(d)
				rt.s.beaten.Store(time.Now().UnixNano())
			}
			rt.s.mu.Unlock()
			res, err := next(ctx, rt, req)
			rt.s.timedOut = rt.s.timedOut || err != nil && errors.Is(context.Cause(ctx), ErrNoHeartbeat)
			return res, err
		}
	}
}

// stuckGrace is how long a run may take to notice that its context has ended before it is reported.
const stuckGrace = 10 * time.Second

// patience is for how long a run may show no sign of life before it is reported, 0 if it may forever.
func (c *runner) patience() time.Duration {
	switch {
	case c.heartbeat > 0:
		return c.heartbeat + stuckGrace
	case c.timeout > 0:
		return c.timeout + stuckGrace
	default:
		return 0
	}
}

// watch has the workers looked at when the oldest run that is under way may have become stuck. There is a timer only
// while something runs.
func (c *runner) watch(after time.Duration) {
	if after <= 0 || c.watching.Swap(true) {
		return
	}
	time.AfterFunc(after, c.lookForStuck)
}

func (c *runner) lookForStuck() {
	c.watching.Store(false)
	patience, soonest := c.patience(), time.Duration(0)
	c.workersMu.Lock()
	defer c.workersMu.Unlock()
	for _, w := range c.workers {
		since := w.since.Load()
		if since == 0 || since == w.reported.Load() {
			continue
		}
		age := time.Since(time.Unix(0, since))
		silent := age
		if s := w.state.Load(); s != nil {
			if beaten := s.beaten.Load(); beaten > since {
				silent = time.Since(time.Unix(0, beaten))
			}
		}
		if silent < patience {
			if left := patience - silent; soonest == 0 || left < soonest {
				soonest = left
			}
			continue
		}
		c.report(w, since, age)
	}
	c.watch(soonest)
}

// report tells of a run that is stuck.
func (c *runner) report(w *worker, since int64, age time.Duration) {
	s := w.state.Load()
	if s == nil {
		return
	}
	// Held on to, the state is not used for another run while it is looked at.
	s.users.Add(1)
	defer s.users.Add(-1)
	if w.since.Load() != since {
		return
	}
	w.reported.Store(since)
	key := s.req.Key
	c.log.Error("a reconcile goes on although its time is over; its key stays locked until it returns",
		"key", key.String(), "age", age, "stack", stackOf(w.goroutine))
	if f := c.engine.cfg.Hooks.RunStuck; f != nil {
		f(c.name, key, age)
	}
}

// goroutineID is the number of the calling goroutine, as stacks show it. The runtime tells it nowhere else.
func goroutineID() int64 {
	var buf [64]byte
	fields := bytes.Fields(buf[:runtime.Stack(buf[:], false)])
	if len(fields) < 2 {
		return 0
	}
	id, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return id
}

// stackOf returns the stack of a goroutine, empty if it is not found.
func stackOf(id int64) string {
	buf := make([]byte, 1<<20)
	for stack := range bytes.SplitSeq(buf[:runtime.Stack(buf, true)], []byte("\n\n")) {
		if bytes.HasPrefix(stack, []byte("goroutine "+strconv.FormatInt(id, 10)+" ")) {
			return string(stack)
		}
	}
	return ""
}
