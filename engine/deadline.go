package engine

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// deadline cancels a reconcile that takes longer than d, with ErrDeadline as the cause.
func deadline(d time.Duration) Middleware {
	return func(next Handler) Handler {
		if d <= 0 {
			return next
		}
		return func(ctx context.Context, rt Runtime, req Request) (Result, error) {
			lazy := &lazyDeadline{Context: ctx, at: rt.s.start.Add(d)}
			defer lazy.cancel()
			res, err := next(lazy, rt, req)
			rt.s.timedOut = err != nil && errors.Is(context.Cause(lazy), ErrDeadline)
			return res, err
		}
	}
}

// lazyDeadline is context.WithDeadlineCause, made when somebody first asks whether it has ended. Most reconciles end
// before they wait for anything, and a timer and its context cost more than the rest of the middleware together.
type lazyDeadline struct {
	context.Context

	at    time.Time
	armed atomic.Pointer[armedDeadline]
}

type armedDeadline struct {
	context.Context

	stop context.CancelFunc
}

// Deadline implements context.Context.
func (l *lazyDeadline) Deadline() (time.Time, bool) {
	if outer, ok := l.Context.Deadline(); ok && outer.Before(l.at) {
		return outer, true
	}
	return l.at, true
}

func (l *lazyDeadline) arm() *armedDeadline {
	if a := l.armed.Load(); a != nil {
		return a
	}
	ctx, stop := context.WithDeadlineCause(l.Context, l.at, ErrDeadline)
	a := &armedDeadline{ctx, stop}
	if !l.armed.CompareAndSwap(nil, a) {
		stop()
		return l.armed.Load()
	}
	return a
}

// Done implements context.Context.
func (l *lazyDeadline) Done() <-chan struct{} { return l.arm().Done() }

// Err implements context.Context.
func (l *lazyDeadline) Err() error {
	if l.armed.Load() == nil && time.Now().Before(l.at) {
		return l.Context.Err()
	}
	return l.arm().Err()
}

// Value implements context.Context. Once armed it must answer as the real context does: the context package finds a
// parent to be cancelled with, and its cause, through Value.
func (l *lazyDeadline) Value(key any) any {
	if l.armed.Load() == nil && time.Now().Before(l.at) {
		return l.Context.Value(key)
	}
	return l.arm().Value(key)
}

// spent is what is armed in the context of a run that nobody looked at: whoever kept it finds it ended.
var spent = func() *armedDeadline {
	ctx, stop := context.WithCancel(context.Background()) //nolint:forbidigo // it has ended.
	stop()
	return &armedDeadline{ctx, stop}
}()

func (l *lazyDeadline) cancel() {
	if !l.armed.CompareAndSwap(nil, spent) {
		l.armed.Load().stop()
	}
}
