// Package middleware has middleware that not every controller needs. Put it around a handler with
// Controller.WithMiddleware.
package middleware

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

// PollConfig says when a key that was reconciled well is reconciled again.
type PollConfig struct {
	// Interval is the wait after a reconcile that asked for nothing.
	Interval time.Duration
	// Jitter spreads it: the wait is up to this fraction of it shorter, so that keys which began together do not stay
	// together. Consul's forced reconcile uses 0.2.
	Jitter float64
	// Hook may change the wait of one request. 0 or less is no poll.
	Hook func(req engine.Request, wait time.Duration) time.Duration
}

// Poll reconciles each key again an interval after it was last reconciled well: for what changes without telling anybody.
// A failure, and a reconcile that asks for its next one itself, are left as they are; so is a key whose object is gone.
func Poll(cfg PollConfig) engine.Middleware {
	return func(next engine.Handler) engine.Handler {
		return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			res, err := next(ctx, rt, req)
			if err != nil || res != (engine.Result{}) {
				return res, err
			}
			wait := cfg.Interval
			if cfg.Jitter > 0 {
				wait -= time.Duration(rand.Float64() * min(cfg.Jitter, 1) * float64(wait)) //nolint:gosec // jitter is no secret.
			}
			if cfg.Hook != nil {
				wait = cfg.Hook(req, wait)
			}
			if wait <= 0 {
				return res, nil
			}
			if _, err := rt.Get(ctx, req.Key); engine.IsNotFound(err) {
				return res, nil
			}
			return engine.Result{RequeueAfter: wait}, nil
		}
	}
}
