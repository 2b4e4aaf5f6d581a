package engine

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
)

// chain wraps h so that the first middleware is the outermost.
func chain(h Handler, outermostFirst ...Middleware) Handler {
	for _, o := range slices.Backward(outermostFirst) {
		h = o(h)
	}
	return h
}

// logged reports what failed, one line a run. It is the only place where errors of reconciles are logged.
func logged(next Handler) Handler {
	return func(ctx context.Context, rt Runtime, req Request) (Result, error) {
		res, err := next(ctx, rt, req)
		switch {
		case err == nil:
			if log := rt.s.c.log; log.Enabled(ctx, slog.LevelDebug) {
				rt.Log().DebugContext(ctx, "reconciled", "requeue_after", res.RequeueAfter)
			}
		case context.Cause(ctx) != nil:
			rt.Log().InfoContext(ctx, "reconcile interrupted", "err", err)
		case IsTerminal(err):
			rt.Log().ErrorContext(ctx, "reconcile parked", "err", err)
		default:
			rt.Log().WarnContext(ctx, "reconcile failed", "err", err, "retry_in", res.retry)
		}
		return res, err
	}
}

// maxCrashes is how many processes a key may take with it.
const maxCrashes = 3

// spared parks a key that ends its process, before the next one.
func spared(next Handler) Handler {
	return func(ctx context.Context, rt Runtime, req Request) (Result, error) {
		if req.Crashes >= maxCrashes {
			return Result{}, Terminal(fmt.Errorf("%w: it ran in %d of them when they ended", ErrEndsProcess, req.Crashes))
		}
		return next(ctx, rt, req)
	}
}

// recovered turns a panic into an error. It stands next to the handler, so that all other middleware sees an ordinary
// failure.
func recovered(next Handler) Handler {
	return func(ctx context.Context, rt Runtime, req Request) (res Result, err error) {
		defer func() {
			if p := recover(); p != nil {
				res, err = Result{}, &PanicError{Value: p, Stack: debug.Stack()}
			}
		}()
		return understandRequeue(next(ctx, rt, req))
	}
}
