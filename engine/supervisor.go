package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// SourceStatus is how a source fares.
type SourceStatus struct {
	Name string
	// Synced says that the first list has ended.
	Synced bool
	// Err is why the source is not running, if it is not.
	Err error
	// Standby says that another replica runs it for all.
	Standby bool
}

// BusStatus says why the bus does not work at present. It returns false if the bus cannot tell, as one in memory.
func (e *Engine) BusStatus() (known bool, err error) {
	if b, ok := e.cfg.Bus.(interface{ Status() error }); ok {
		return true, b.Status()
	}
	return false, nil
}

// Sources reports on the sources, for readiness.
func (e *Engine) Sources() []SourceStatus {
	e.mu.RLock()
	defer e.mu.RUnlock()
	out := make([]SourceStatus, 0, len(e.routers))
	for _, r := range e.routers {
		s := SourceStatus{Name: r.source.Name(), Standby: !r.leads.Load()}
		select {
		case <-r.synced:
			s.Synced = true
		default:
		}
		s.Err = r.lastFailure()
		if x, ok := r.source.(interface{ Status() error }); ok && s.Err == nil {
			s.Err = x.Status()
		}
		out = append(out, s)
	}
	return out
}

// The waits before a source is run again are those of Consul's controller supervisor: at once after a run of more than
// two seconds, else 500 ms, then 1 s doubling to 60 s, each up to a quarter longer.
const (
	goodRun     = 2 * time.Second
	firstWait   = 500 * time.Millisecond
	longestWait = 60 * time.Second
)

// start runs the source until the session's intake ends.
func (r *router) start(s *session) {
	ctx, halt := context.WithCancel(s.intake)
	r.halt = halt
	s.group.Go(func() {
		defer close(r.done)
		defer halt()
		if r.lease == nil {
			r.supervise(ctx)
		} else {
			r.takeTurns(ctx)
		}
	})
}

// takeTurns runs the source while this replica holds its lease. A source that every replica follows is run by the others
// too, and anew with each change, so that who takes it over lists everything.
func (r *router) takeTurns(ctx context.Context) {
	keep, stop := context.WithCancel(context.WithoutCancel(ctx))
	var keeper sync.WaitGroup
	keeper.Go(func() { r.lease.Run(keep) })
	defer keeper.Wait()
	defer stop()
	for ctx.Err() == nil {
		held, epoch := r.lease.Held(), r.lease.Epoch()
		turn, end := context.WithCancel(ctx)
		var watch sync.WaitGroup
		watch.Go(func() {
			defer end()
			for turn.Err() == nil && r.lease.Held() == held && (r.lease.Epoch() == epoch || !held && epoch != 0) {
				select {
				case <-r.lease.Changed():
				case <-turn.Done():
				}
			}
		})
		r.leads.Store(held)
		switch {
		case held, r.everywhere():
			r.supervise(turn)
		case epoch != 0:
			r.sync() // another replica runs it, and what is read is read in the system itself
			fallthrough
		default:
			<-turn.Done()
		}
		r.leads.Store(false)
		end()
		watch.Wait()
	}
}

func (r *router) lastFailure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failure
}

// supervise runs the source until ctx ends.
func (r *router) supervise(ctx context.Context) {
	crashes := 0
	for {
		start := time.Now()
		err := r.runSource(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it ended by itself")
		}
		if crashes++; time.Since(start) > goodRun {
			crashes = 0
		}
		wait := supervisorWait(crashes)
		r.fail(err)
		r.engine.cfg.Logger.ErrorContext(ctx, "source failed", "source", r.source.Name(), "err", err, "restart_in", wait)
		if f := r.engine.cfg.Hooks.SourceFailed; f != nil {
			f(r.source.Name(), err, wait)
		}
		pause(ctx, wait)
		if ctx.Err() != nil {
			return
		}
	}
}

func (r *router) runSource(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Value: p}
		}
	}()
	emit := Emit(r.emit)
	for _, v := range slices.Backward(r.engine.cfg.Emit) {
		emit = v(emit)
	}
	return r.source.Run(ctx, func(ctx context.Context, e Event) error {
		e.Source = r.source.Name()
		if e.Time.IsZero() {
			e.Time = time.Now()
		}
		err := emit(ctx, e)
		if err == nil && e.Operation == ListEnded {
			r.fail(nil)
		}
		return err
	})
}

func (r *router) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failure = err
}

func supervisorWait(crashes int) time.Duration {
	switch crashes {
	case 0:
		return 0
	case 1:
		return firstWait
	}
	wait := longestWait
	if n := crashes - 1; n < 7 {
		wait = min(firstWait<<n, longestWait)
	}
	return wait + time.Duration(rand.Int64N(int64(wait)/4+1)) //nolint:gosec // jitter is no secret.
}
