package engine

import (
	"fmt"
	"time"

	"golang.org/x/time/rate"
)

// RateLimit is a token bucket: reconciles start at this rate, and up to Burst of them at once after a pause. Controllers
// that are given the same RateLimit share it. Keys that wait for it wait in the queue; no worker does. Who has waited has
// its permission kept: it need not ask again. Manual requests pass it.
type RateLimit struct {
	perSecond float64
	burst     int
	limiter   *rate.Limiter
}

// NewRateLimit returns a limit of so many reconciles a second, and so many at once.
func NewRateLimit(perSecond float64, burst int) *RateLimit {
	return &RateLimit{perSecond, burst, rate.NewLimiter(rate.Limit(perSecond), burst)}
}

func (l *RateLimit) validate() error {
	if l.perSecond <= 0 || l.burst < 1 {
		return fmt.Errorf("%g a second and bursts of %d would let nothing through; both must be above 0", l.perSecond, l.burst)
	}
	return nil
}

// take returns what a queue calls for each permission: it takes one, and returns from when on it is good. Nil without a
// limit.
func (l *RateLimit) take() func(now int64) int64 {
	if l == nil {
		return nil
	}
	return func(now int64) int64 {
		t := time.Unix(0, now)
		return now + int64(l.limiter.ReserveN(t, 1).DelayFrom(t))
	}
}

// Debounce waits until a key has been quiet.
type Debounce struct {
	// After is how long nothing must have been asked for the key before it is reconciled. 0 is off.
	After time.Duration
	// Max bounds the wait, from the first request on. Default: ten times After.
	Max time.Duration
}

func (d Debounce) validate() error {
	if d.After < 0 || d.Max < 0 || d.Max > 0 && d.Max < d.After {
		return fmt.Errorf("after %s and max %s: neither may be negative, nor max shorter than after", d.After, d.Max)
	}
	return nil
}
