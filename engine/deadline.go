package engine

import (
	"context"
	"errors"
	"sync"
	"time"
)

// deadline cancels a reconcile that takes longer than d, with ErrDeadline as the cause.
func deadline(d time.Duration) Middleware {
	return func(next Handler) Handler {
		if d <= 0 {
			return next
		}
		return func(ctx context.Context, rt *Runtime, req Request) (Result, error) {
			lazy := &lazyDeadline{Context: ctx, at: time.Now().Add(d)}
			defer lazy.cancel()
			res, err := next(lazy, rt, req)
			rt.timedOut = err != nil && errors.Is(context.Cause(lazy), ErrDeadline)
			return res, err
		}
	}
}

// lazyDeadline is context.WithDeadlineCause, made when somebody first asks whether it has ended. Most reconciles end
// before they wait for anything, and a timer and its context cost more than the rest of the middleware together.
type lazyDeadline struct {
	context.Context

	at time.Time

	mu    sync.Mutex
	armed context.Context
	stop  context.CancelFunc
	ended bool
}

// Deadline implements context.Context.
func (l *lazyDeadline) Deadline() (time.Time, bool) {
	if outer, ok := l.Context.Deadline(); ok && outer.Before(l.at) {
		return outer, true
	}
	return l.at, true
}

func (l *lazyDeadline) arm() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.armed == nil {
		l.armed, l.stop = context.WithDeadlineCause(l.Context, l.at, ErrDeadline)
		if l.ended {
			l.stop() // whoever kept the context of a run beyond its end finds it ended
		}
	}
	return l.armed
}

// Done implements context.Context.
func (l *lazyDeadline) Done() <-chan struct{} { return l.arm().Done() }

// Err implements context.Context.
func (l *lazyDeadline) Err() error {
	l.mu.Lock()
	unasked := l.armed == nil && !l.ended
	l.mu.Unlock()
	if unasked && time.Now().Before(l.at) {
		return l.Context.Err()
	}
	return l.arm().Err()
}

// Value implements context.Context. Once armed it must answer as the real context does: the context package finds a
// parent to be cancelled with, and its cause, through Value.
func (l *lazyDeadline) Value(key any) any {
	l.mu.Lock()
	armed := l.armed
	l.mu.Unlock()
	if armed == nil {
		if !time.Now().Before(l.at) {
			return l.arm().Value(key)
		}
		return l.Context.Value(key)
	}
	return armed.Value(key)
}

func (l *lazyDeadline) cancel() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	if l.stop != nil {
		l.stop()
	}
}
