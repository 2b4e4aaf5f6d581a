package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Result is what a reconcile that did not fail asks for. At most one of its fields is looked at, in their order.
type Result struct {
	// RequeueAfter asks for another run after this time. It is not a failure, and attempts start afresh.
	RequeueAfter time.Duration
	// Defer asks for another run after this time and keeps the attempts: not ready yet, or rate limited.
	Defer time.Duration
	// Backoff asks for another run with backoff: an attempt more, but never parked.
	Backoff bool

	// retry is the wait that the backoff middleware decided on.
	retry time.Duration
	// now tells RequeueNow from a Result that asks for nothing.
	now bool
}

// Retry is how long a failed run waits before the next one, as the backoff middleware decided. Middleware outside of
// it may look.
func (r Result) Retry() time.Duration { return r.retry }

// Handler reconciles one key: it reads what should be and what is, and writes what differs. It must be right whatever
// caused it, and right when called twice.
type Handler func(ctx context.Context, rt Runtime, req Request) (Result, error)

// Reconciler is Handler as an interface.
type Reconciler interface {
	Reconcile(ctx context.Context, rt Runtime, req Request) (Result, error)
}

// Middleware wraps a handler.
type Middleware func(Handler) Handler

// terminalError is what Terminal makes.
type terminalError struct{ err error }

func (e *terminalError) Error() string { return e.err.Error() }
func (e *terminalError) Unwrap() error { return e.err }

// Terminal says that trying again is useless: the key is parked until there is news of it. Terminal(nil) is nil.
func Terminal(err error) error {
	if err == nil {
		return nil
	}
	return &terminalError{err}
}

// IsTerminal says whether err, or what it wraps, was made by Terminal.
func IsTerminal(err error) bool {
	var t *terminalError
	return errors.As(err, &t)
}

// retryAfterError is what RetryAfter makes.
type retryAfterError struct {
	err   error
	after time.Duration
}

func (e *retryAfterError) Error() string {
	return fmt.Sprintf("%s (not to be tried again within %s)", e.err, e.after)
}
func (e *retryAfterError) Unwrap() error { return e.err }

// RetryAfter says that this failure must not be tried again within d, as a server's Retry-After does. Only a manual
// request comes sooner. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, d}
}

// requeueError is what RequeueAfter and RequeueNow make.
type requeueError struct{ after time.Duration }

func (e *requeueError) Error() string { return fmt.Sprintf("requeue at %s", e.after) }

// RequeueAfter is Result{RequeueAfter: d} as an error, for code that can only return one. Wrapping keeps its meaning.
// A d of zero or less means at once.
func RequeueAfter(d time.Duration) error { return &requeueError{max(d, 0)} }

// RequeueNow asks for another run at once, behind those that are ready already.
func RequeueNow() error { return RequeueAfter(0) }

// understandRequeue turns the errors of RequeueAfter and RequeueNow into results. It is the outermost thing that is
// done with what a controller returned, so that middleware sees no failure where there is none.
func understandRequeue(res Result, err error) (Result, error) {
	var r *requeueError
	if err != nil && errors.As(err, &r) {
		return Result{RequeueAfter: r.after, now: r.after == 0}, nil
	}
	return res, err
}

// Outcome is what came of one run. Buses hand it to AfterRun.
type Outcome struct {
	Result Result
	Err    error
	// Interrupted says that the run was cut short by a shutdown or a lost lease: it counts for nothing.
	Interrupted bool
	// TimedOut says that the run failed after its deadline.
	TimedOut bool
	// Traceparent is the trace context of the run.
	Traceparent string
	// Revision and Incarnation are those of the request's own object as the run read it; empty if it did not.
	Revision, Incarnation string

	ended time.Time
	// Of a run that asked to be repeated at once.
	by     *ancestry
	slowed time.Duration
}

// AfterRun tells a queue what to do with a request after its run. It is for the buses of this module.
func AfterRun(req *Request, o Outcome) queue.Outcome[Causes] {
	if o.Err == nil && o.Result == (Result{}) && !o.Interrupted {
		return queue.Outcome[Causes]{Verdict: queue.Done}
	}
	next := func(t Trigger) cause {
		c := cause{trigger: t, time: time.Now().UnixNano(), revision: o.Revision, incarnation: o.Incarnation}.withMore(causeMore{traceparent: o.Traceparent})
		if v := req.Causes.version(); v != nil && c.revision == "" {
			c.revision, c.incarnation = v.revision, v.incarnation
		}
		return c
	}
	fresh := func(t Trigger) (c Causes) {
		c.add(next(t))
		return c
	}
	after := func(t Trigger) Causes {
		c := req.Causes.clone().of(nil)
		// One cause speaks for all tries: those of the tries before are in the spans that they link to.
		if last := c.newest(); c.Count() > 1 && last.trigger == t {
			*last = next(t)
		} else {
			c.add(next(t))
		}
		return c
	}
	res := o.Result
	switch {
	case o.Interrupted:
		return queue.Outcome[Causes]{Verdict: queue.Interrupt, Value: req.Causes.of(nil)}
	case IsTerminal(o.Err):
		return queue.Outcome[Causes]{Verdict: queue.Park, Value: after(Retried), Err: o.Err.Error()}
	case o.Err != nil:
		out := queue.Outcome[Causes]{Verdict: queue.Retry, After: res.retry, Value: after(Retried), Err: o.Err.Error()}
		if ra, ok := errors.AsType[*retryAfterError](o.Err); ok {
			out.NotBefore = ra.after
		}
		return out
	case res.RequeueAfter > 0 || res.now:
		out := queue.Outcome[Causes]{Verdict: queue.Requeue, After: res.RequeueAfter, Value: fresh(Requeued)}
		out.Value.first = out.Value.first.withMore(causeMore{traceparent: o.Traceparent, by: o.by})
		out.After = max(out.After, o.slowed)
		return out
	case res.Defer > 0:
		return queue.Outcome[Causes]{Verdict: queue.Defer, After: res.Defer, Value: fresh(Requeued)}
	case res.Backoff:
		return queue.Outcome[Causes]{Verdict: queue.Retry, After: res.retry, Value: after(Retried)}
	default:
		return queue.Outcome[Causes]{Verdict: queue.Done}
	}
}
