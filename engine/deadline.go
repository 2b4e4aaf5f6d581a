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
			lazy := &lazyContext{Context: ctx, at: rt.s.start.Add(d)}
			defer lazy.cancel()
			res, err := next(lazy, rt, req)
			rt.s.timedOut = err != nil && errors.Is(context.Cause(lazy), ErrDeadline)
			return res, err
		}
	}
}

// lazyContext is context.WithDeadlineCause, or without a deadline context.WithCancel, made when somebody first asks whether
// it has ended. Most reconciles end before they wait for anything, and a timer and its context cost more than the rest of
// the middleware together.
type lazyContext struct {
	context.Context

	at    time.Time // zero: no deadline
	armed atomic.Pointer[armedContext]
}

type armedContext struct {
	context.Context

	stop context.CancelFunc
}

// Deadline implements context.Context.
func (l *lazyContext) Deadline() (time.Time, bool) {
	outer, ok := l.Context.Deadline()
	if ok && outer.Before(l.at) || l.at.IsZero() {
		return outer, ok
	}
	return l.at, true
}

func (l *lazyContext) arm() *armedContext {
	if a := l.armed.Load(); a != nil {
		return a
	}
	a := &armedContext{}
	if l.at.IsZero() {
		a.Context, a.stop = context.WithCancel(l.Context)
	} else {
		a.Context, a.stop = context.WithDeadlineCause(l.Context, l.at, ErrDeadline)
	}
	if !l.armed.CompareAndSwap(nil, a) {
		a.stop()
		return l.armed.Load()
	}
	return a
}

// lasts says that the deadline has not passed.
func (l *lazyContext) lasts() bool { return l.at.IsZero() || time.Now().Before(l.at) }

// Done implements context.Context.
func (l *lazyContext) Done() <-chan struct{} { return l.arm().Done() }

// Err implements context.Context.
func (l *lazyContext) Err() error {
	if l.armed.Load() == nil && l.lasts() {
		return l.Context.Err()
	}
	return l.arm().Err()
}

// Value implements context.Context. Once armed it must answer as the real context does: the context package finds a
// parent to be cancelled with, and its cause, through Value.
func (l *lazyContext) Value(key any) any {
	if l.armed.Load() == nil && l.lasts() {
		return l.Context.Value(key)
	}
	return l.arm().Value(key)
}

// spent is what is armed in the context of a run that nobody looked at: whoever kept it finds it ended.
var spent = func() *armedContext {
	ctx, stop := context.WithCancel(context.Background()) //nolint:forbidigo // it has ended.
	stop()
	return &armedContext{ctx, stop}
}()

func (l *lazyContext) cancel() {
	if !l.armed.CompareAndSwap(nil, spent) {
		l.armed.Load().stop()
	}
}
