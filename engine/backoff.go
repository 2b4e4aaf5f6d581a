package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Backoff is how long a failed request waits, and how often it is tried.
type Backoff struct {
	// Linear makes the n-th wait in a row n times Initial long, where the default is Multiplier times the last.
	Linear bool
	// Initial is the wait after the first failure. Default 5 ms, or 1 s if Linear.
	Initial time.Duration
	// Max bounds the wait. Default 1000 s.
	Max time.Duration
	// Multiplier is how much longer each wait is than the one before. Default 2.
	Multiplier float64
	// Jitter spreads each wait by this fraction of itself, up and down. Default 0.
	Jitter float64
	// MaxAttempts is how many times a request is tried before it is parked; 1 is no retry. Default 0: without end.
	MaxAttempts int
}

func (b Backoff) withDefaults() Backoff {
	if b.Initial == 0 {
		b.Initial = 5 * time.Millisecond
		if b.Linear {
			b.Initial = time.Second
		}
	}
	if b.Max == 0 {
		b.Max = 1000 * time.Second
	}
	if b.Multiplier == 0 {
		b.Multiplier = 2
	}
	return b
}

func (b Backoff) validate() error {
	switch {
	case b.Initial < 0 || b.Max < 0:
		return fmt.Errorf("initial %s and max %s must not be negative", b.Initial, b.Max)
	case b.Initial > b.Max:
		return fmt.Errorf("initial %s is longer than max %s", b.Initial, b.Max)
	case b.Multiplier < 1:
		return fmt.Errorf("multiplier %g is less than 1", b.Multiplier)
	case b.Jitter < 0 || b.Jitter > 1:
		return fmt.Errorf("jitter %g is not between 0 and 1", b.Jitter)
	case b.MaxAttempts < 0:
		return fmt.Errorf("maxAttempts %d is negative; 0 means without end", b.MaxAttempts)
	}
	return nil
}

// wait returns the wait after a failure that n failures precede. The policy is that of cenkalti/backoff, entered at
// its n-th step, since the attempt travels in the message and no policy object outlives a run.
func (b Backoff) wait(n int) time.Duration {
	factor := math.Pow(b.Multiplier, float64(n))
	if b.Linear {
		factor = float64(n + 1)
	}
	step := min(float64(b.Initial)*factor, float64(b.Max))
	if b.Jitter == 0 {
		return time.Duration(step)
	}
	p := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(time.Duration(step)),
		backoff.WithMaxInterval(b.Max),
		backoff.WithRandomizationFactor(b.Jitter),
		backoff.WithMaxElapsedTime(0),
	)
	return p.NextBackOff()
}

// String prints the effective values.
func (b Backoff) String() string {
	if b.Linear {
		return fmt.Sprintf("linear, initial=%s, max=%s, maxAttempts=%d", b.Initial, b.Max, b.MaxAttempts)
	}
	return fmt.Sprintf("initial=%s, max=%s, multiplier=%g, maxAttempts=%d", b.Initial, b.Max, b.Multiplier, b.MaxAttempts)
}

// middleware decides how long a failed run waits and when it is given up. It only decides: the queue makes the delayed
// request.
func (b Backoff) middleware(next Handler) Handler {
	return func(ctx context.Context, rt Runtime, req Request) (Result, error) {
		res, err := next(ctx, rt, req)
		if err == nil && !res.Backoff || IsTerminal(err) {
			return res, err
		}
		if err != nil && b.MaxAttempts > 0 && !req.RetryPending && req.Attempt+1 >= b.MaxAttempts {
			return res, Terminal(fmt.Errorf("given up after %d attempts: %w", req.Attempt+1, err))
		}
		step := req.Attempt
		if req.RetryPending {
			step = max(step-1, 0)
		}
		res.retry = b.wait(step)
		if ra, ok := errors.AsType[*retryAfterError](err); ok {
			res.retry = max(res.retry, ra.after) // what is reported must be what happens
		}
		return res, err
	}
}
