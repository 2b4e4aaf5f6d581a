// Package lease is the engine's seam to what grants one replica the right to do something: run a singleton, publish the
// events of a source. A Store keeps grants; a Lease holds one, renews it, and knows by its own clock when it has lost it.
//
// A grant carries an epoch that grows whenever the holder changes, so that a late write of a former holder can be told.
// A Lease never believes the store for longer than the grant's time to live, counted from before it asked: during an
// outage of the store it is lost in time, whatever the store thinks. Clocks need not agree, only run equally fast.
package lease

import (
	"context"
	"sync"
	"time"
)

// Store grants leases. Its methods are safe for concurrent use. A Kubernetes Lease object can be one.
type Store interface {
	// Acquire takes or renews the lease of a name for a holder. Held says whether the holder has it now, for ttl from
	// the call on. The epoch is that of the present holder; it grows by at least one whenever the holder changes. An
	// error means that nothing is known.
	Acquire(ctx context.Context, name, holder string, ttl time.Duration) (held bool, epoch uint64, err error)
	// Release gives the lease back, if the holder has it, so that another need not wait for its end.
	Release(ctx context.Context, name, holder string) error
}

// DefaultTTL is how long a grant lasts unless it is renewed. It bounds how long nobody works after a holder died.
const DefaultTTL = 15 * time.Second

// Lease is one name that one holder wants. Create it with New and run it with Run; its other methods are safe for
// concurrent use at any time.
type Lease struct {
	store        Store
	name, holder string
	ttl          time.Duration
	changed      chan struct{}

	mu    sync.Mutex
	until time.Time // by the own clock; zero: not held
	epoch uint64
	err   error
}

// New returns a lease that is not held. A ttl of 0 is what the store's method TTL() time.Duration says, if it has one, or
// DefaultTTL.
func New(store Store, name, holder string, ttl time.Duration) *Lease {
	if s, ok := store.(interface{ TTL() time.Duration }); ttl == 0 && ok {
		ttl = s.TTL()
	}
	if ttl == 0 {
		ttl = DefaultTTL
	}
	return &Lease{store: store, name: name, holder: holder, ttl: ttl, changed: make(chan struct{}, 1)}
}

// Held says whether the lease is held now, by the own clock.
func (l *Lease) Held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.until)
}

// Epoch is that of the last grant. It grows whenever the holder changes.
func (l *Lease) Epoch() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epoch
}

// Changed tells that Held may have changed. It never blocks the lease: several changes are one, so look at Held.
func (l *Lease) Changed() <-chan struct{} { return l.changed }

// Err is why the store could last not be asked, nil if it could.
func (l *Lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Await blocks until the lease is held. It returns false if ctx ended first.
func (l *Lease) Await(ctx context.Context) bool {
	for ctx.Err() == nil {
		if l.Held() {
			return true
		}
		select {
		case <-l.changed:
		case <-ctx.Done():
		}
	}
	return false
}

// AwaitLoss blocks until the lease is not held any more, or by another grant. It returns false if ctx ended first.
func (l *Lease) AwaitLoss(ctx context.Context) bool {
	epoch := l.Epoch()
	for {
		select {
		case <-l.changed:
			if !l.Held() || l.Epoch() != epoch {
				return true // another epoch means that it was lost and regained between two looks
			}
		case <-ctx.Done():
			return false
		}
	}
}

// Run takes the lease as soon as it can and renews it three times in its time to live, until ctx ends; then it gives it
// back.
func (l *Lease) Run(ctx context.Context) {
	for ctx.Err() == nil {
		wait := l.ask(ctx)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		l.expire()
	}
	l.set(time.Time{}, l.Epoch(), nil)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.ttl)
	defer cancel()
	_ = l.store.Release(last, l.name, l.holder) // it ends by itself otherwise
}

// ask takes or renews the lease and returns when to look again.
func (l *Lease) ask(ctx context.Context) time.Duration {
	before := time.Now()
	ask, cancel := context.WithTimeout(ctx, l.ttl/3)
	defer cancel()
	held, epoch, err := l.store.Acquire(ask, l.name, l.holder, l.ttl)
	l.mu.Lock()
	until := l.until
	l.mu.Unlock()
	switch {
	case err != nil:
		// What was granted last stays good until it ends.
	case held:
		until = before.Add(l.ttl)
	default:
		until = time.Time{}
	}
	l.set(until, epoch, err)
	wait := l.ttl / 3
	if err != nil || !held {
		wait = l.ttl / 10
	}
	if left := time.Until(until); left > 0 {
		wait = min(wait, left) // to tell in time that it is over
	}
	return wait
}

func (l *Lease) set(until time.Time, epoch uint64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := time.Now().Before(l.until)
	l.until, l.err = until, err
	moved := err == nil && epoch != l.epoch
	if err == nil {
		l.epoch = epoch
	}
	if before != time.Now().Before(l.until) || moved {
		l.tell()
	}
}

// expire tells that the lease has ended without anybody having said so.
func (l *Lease) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.until.IsZero() && !time.Now().Before(l.until) {
		l.until = time.Time{}
		l.tell()
	}
}

func (l *Lease) tell() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}
