package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/windlass-dev/windlass/engine/lease"
)

// runner is a controller at work.
//
// It lives while its lease is held: opens its queue, initializes, waits for its sources, and works until the lease is
// lost or the engine stops. A life has ended when its last reconcile has: the next one begins after that, so that no key
// is ever reconciled by two lives. One goroutine runs the lives of a controller, one after the other.
type runner struct {
	Controller

	engine  *Engine
	log     *slog.Logger
	chain   Handler
	sources []Source // that it references
	routers []*router
	lease   *lease.Lease // nil: always held
	late    bool         // it was added while its sources may have run already
	mapping *runner      // of failed mappings; nil where no mapper can fail
	tracked *reads       // nil: reads are not tracked

	queue atomic.Pointer[openQueue] // nil while there is none: nothing is added then, the next life lists it
	halt  context.CancelFunc
	done  chan struct{} // closed when its goroutine has ended

	workersMu sync.Mutex
	workers   []*worker
	hired     int // how many of them work

	watching atomic.Bool // runs are looked at when they may have become stuck

	waiters sync.Map     // token to chan Run
	waiting atomic.Int32 // how many waiters
}

type openQueue struct{ Queue }

func newRunner(e *Engine, c Controller) *runner {
	log := e.cfg.Logger
	if c.logger != nil {
		log = c.logger
	}
	r := &runner{Controller: c, engine: e, log: log.With("controller", c.name), sources: c.sources(), done: make(chan struct{}), halt: func() {}}
	// What a handler read is remembered in one process: on a shared bus, the one that runs it.
	if e.cfg.Leases != nil && (c.placement == Singleton || c.tracksReads && e.shared) {
		r.lease = lease.New(e.cfg.Leases, e.cfg.Name+"/controller/"+c.name, e.cfg.Replica, 0)
	}
	if c.tracksReads {
		r.tracked = &reads{}
	}
	if len(c.watches) > 0 {
		r.mapping = mappingOf(r)
		r.mapping.build()
	}
	r.build()
	return r
}

func (c *runner) build() {
	own := []Middleware{logged, c.backoff.withDefaults().middleware, spared, deadline(c.timeout), heartbeat(c.heartbeat), recovered}
	c.chain = chain(chain(c.handler, c.middleware...), append(append([]Middleware(nil), c.engine.cfg.Middleware...), own...)...)
}

// bus is where the controller's queue is.
func (c *runner) bus() Bus {
	if c.placement == Each {
		return c.engine.local
	}
	return c.engine.cfg.Bus
}

// open opens the queue, and that of failed mappings.
func (c *runner) open(ctx context.Context) error {
	for _, r := range []*runner{c, c.mapping} {
		if r == nil || r.queue.Load() != nil {
			continue
		}
		q, err := c.bus().Queue(ctx, QueueConfig{
			Engine: c.engine.cfg.Name, Controller: r.name, Workers: r.concurrency, Malformed: c.engine.malformed,
			Debounce: r.debounce, Limit: r.limit.take(), Standby: c.lease != nil,
		})
		if err != nil {
			return fmt.Errorf("open the queue of controller %s: %w", r.name, err)
		}
		c.engine.pauses.apply(r, q)
		r.queue.Store(&openQueue{q})
	}
	return nil
}

// start runs the controller until the session's intake ends.
func (c *runner) start(s *session) {
	intake, halt := context.WithCancel(s.intake)
	c.halt = halt
	s.group.Go(func() {
		defer close(c.done)
		defer halt()
		var keeper sync.WaitGroup
		if c.lease != nil {
			keep, stop := context.WithCancel(context.WithoutCancel(intake))
			keeper.Go(func() { c.lease.Run(keep) })
			defer keeper.Wait()
			defer stop() // the lease is kept until the last reconcile has ended
		}
		if err := c.run(intake, s.work); err != nil {
			s.stop(fmt.Errorf("controller %s: %w", c.name, err))
		}
	})
}

// run lives one life after the other until intake ends.
func (c *runner) run(intake, work context.Context) error {
	for crashes := 0; c.awaitLease(intake); {
		life, end := context.WithCancelCause(intake)
		runs, cancel := context.WithCancelCause(work)
		var watch sync.WaitGroup
		watch.Go(func() {
			if c.lostLease(life) {
				end(ErrLeaseLost)
				cancel(ErrLeaseLost)
			}
		})
		err := c.live(life, runs) // what it failed with at the end of intake is the end's doing
		lost := errors.Is(context.Cause(life), ErrLeaseLost)
		end(nil)
		watch.Wait()
		cancel(nil)
		var setup *setupError
		switch {
		case intake.Err() != nil:
			return nil //nolint:nilerr // see above.
		case lost:
			c.log.WarnContext(intake, "lease lost; the controller has stopped")
			crashes = 0
		case errors.As(err, &setup):
			crashes++
			wait := supervisorWait(crashes)
			c.log.ErrorContext(intake, "controller cannot start", "err", err, "restart_in", wait)
			pause(intake, wait)
		default:
			return err
		}
	}
	return nil
}

// awaitLease blocks until the lease is held. It returns false if ctx ended first.
func (c *runner) awaitLease(ctx context.Context) bool {
	if c.lease == nil {
		return ctx.Err() == nil
	}
	return c.lease.Await(ctx)
}

// lostLease blocks until the lease is not held, or ctx ends.
func (c *runner) lostLease(ctx context.Context) bool {
	if c.lease == nil {
		<-ctx.Done()
		return false
	}
	return c.lease.AwaitLoss(ctx)
}

// setupError is why a life did not begin. It is tried again.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// live is one life.
func (c *runner) live(life, runs context.Context) error {
	again := c.queue.Load() == nil || c.tracked != nil && c.engine.shared
	if err := c.open(life); err != nil {
		return err
	}
	if c.initializer != nil {
		if err := guarded(func() error { return c.initializer(life) }); err != nil {
			return &setupError{fmt.Errorf("initializer: %w", err)}
		}
	}
	if err := c.awaitSources(life); err != nil || life.Err() != nil {
		return err
	}
	if again || c.late {
		if err := c.catchUp(life); err != nil {
			return &setupError{err}
		}
		c.late = false
	}
	if c.onStart != nil {
		if err := guarded(func() error { c.onStart(life); return nil }); err != nil {
			return &setupError{fmt.Errorf("on start: %w", err)}
		}
	}
	c.log.InfoContext(life, "controller started", "for", c.primary.Name(), "concurrency", c.concurrency)
	life, end := context.WithCancel(life)
	defer end()
	var group sync.WaitGroup
	var mappingErr error
	if c.mapping != nil {
		group.Go(func() {
			mappingErr = c.mapping.queue.Load().Run(life, runs, c.mapping.newProcess)
			end()
		})
	}
	if c.resync > 0 {
		group.Go(func() { c.resyncEvery(life, c.resync) })
	}
	for _, f := range c.background {
		group.Go(func() { c.inBackground(life, f) })
	}
	err := c.queue.Load().Run(life, runs, c.newProcess)
	end()
	group.Wait()
	c.queue.Store(nil)
	if c.mapping != nil {
		c.mapping.queue.Store(nil)
	}
	if c.lease != nil && c.engine.shared && errors.Is(context.Cause(life), ErrLeaseLost) {
		// Another replica works on what the sources of this one ask for.
		if err := c.open(context.WithoutCancel(life)); err != nil {
			c.log.WarnContext(runs, "the queue cannot be opened", "err", err)
		}
	}
	c.workersMu.Lock()
	c.hired = 0
	c.workersMu.Unlock()
	if c.onStop != nil {
		// Not cancelled yet: what it does may take until the drain timeout.
		if err := guarded(func() error { c.onStop(runs); return nil }); err != nil {
			c.log.ErrorContext(runs, "on stop", "err", err)
		}
	}
	return errors.Join(err, mappingErr)
}

// warnEvery is how often a controller says that it still waits for its sources.
const warnEvery = 30 * time.Second

// awaitSources blocks until every source that the controller references has ended its first list, or ctx ends.
func (c *runner) awaitSources(ctx context.Context) error {
	begin := time.Now()
	for _, r := range c.routers {
		if err := c.awaitSource(ctx, r, begin); err != nil {
			return err
		}
	}
	return nil
}

func (c *runner) awaitSource(ctx context.Context, r *router, begin time.Time) error {
	for limit := c.engine.cfg.SyncTimeout; ; {
		wait := warnEvery
		if limit > 0 {
			wait = max(min(wait, limit-time.Since(begin)), 0)
		}
		timer := time.NewTimer(wait)
		select {
		case <-r.synced:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		if limit > 0 && time.Since(begin) >= limit {
			return fmt.Errorf("%w: %q has not ended its first list within %s%s", ErrNotSynced, r.source.Name(), limit, because(r.lastFailure()))
		}
		c.log.WarnContext(ctx, "waiting for a source", "source", r.source.Name(), "since", begin, "err", r.lastFailure())
	}
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// inBackground runs f for as long as the controller lives, again after a while if it fails.
func (c *runner) inBackground(ctx context.Context, f func(ctx context.Context) error) {
	for crashes := 0; ctx.Err() == nil; {
		start := time.Now()
		err := guarded(func() error { return f(ctx) })
		if err == nil || ctx.Err() != nil {
			return
		}
		if crashes++; time.Since(start) > goodRun {
			crashes = 0
		}
		wait := supervisorWait(crashes)
		c.log.ErrorContext(ctx, "background work failed", "err", err, "restart_in", wait)
		pause(ctx, wait)
	}
}

// guarded calls f and turns its panic into an error.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// followsAlone says that the controller depends on what this replica itself sees of its sources, not on the one that runs
// them for all: because each replica has it, or because only this one knows what was read.
func (c *runner) followsAlone() bool { return c.placement == Each || c.tracked != nil }

// catchUp asks for everything that the sources hold, as their first lists did before this controller was there.
func (c *runner) catchUp(ctx context.Context) error {
	for _, r := range c.routers {
		reader, ok := r.source.(Reader)
		if !ok || !r.leads.Load() && !c.followsAlone() {
			continue
		}
		routes := r.routesTo(c)
		counts := censusOf(routes, r.source)
		objects, err := reader.List(ctx)
		if err != nil {
			return fmt.Errorf("list %s: %w", r.source.Name(), err)
		}
		for _, o := range objects {
			counts.seen(o.Key)
			e := Event{
				Source: r.source.Name(), Key: o.Key, Operation: Resync, Revision: o.Revision, Incarnation: o.Incarnation,
				Old: &o.Meta, New: &o.Meta, Time: time.Now(),
			}
			for _, route := range routes {
				if err := route.follow(ctx, &e); err != nil {
					return err
				}
			}
		}
		if err := counts.missing(ctx); err != nil {
			return err
		}
	}
	return nil
}

// resyncEvery asks for every key of the primary source at an interval, and for what its owners lost.
func (c *runner) resyncEvery(ctx context.Context, interval time.Duration) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		if !c.routers[0].leads.Load() && c.placement != Each {
			continue // the replica that runs the source asks for all
		}
		objects, err := c.primary.(Reader).List(ctx)
		if err != nil {
			c.log.WarnContext(ctx, "resync skipped: the source cannot be listed", "source", c.primary.Name(), "err", err)
			continue
		}
		counts := censusOf([]*route{{to: c, role: primary}}, c.primary)
		for _, o := range objects {
			counts.seen(o.Key)
			x := cause{trigger: Resynced, operation: Resync, revision: o.Revision, incarnation: o.Incarnation, time: time.Now().UnixNano()}
			if err := c.add(ctx, Request{Controller: c.name, Key: o.Key, Priority: PriorityList, Causes: causesOf(x)}); err != nil {
				c.log.WarnContext(ctx, "resync cut short", "err", err)
				break
			}
		}
		if err := counts.missing(ctx); err != nil {
			c.log.WarnContext(ctx, "resync cut short", "err", err)
		}
	}
}

// add hands a request to the queue.
func (c *runner) add(ctx context.Context, req Request) error {
	q := c.queue.Load()
	if q == nil {
		if c.engine.shared {
			return fmt.Errorf("controller %s: enqueue %s: %w", c.name, req.Key, ErrNotRunning)
		}
		return nil // the next life lists everything
	}
	newest := req.Causes.newest()
	trigger := newest.trigger // the causes are the queue's from here on
	if by := newest.by(); by != nil && req.Due.IsZero() {
		if wait := c.slow(ctx, req.Key, by); wait > 0 {
			req.quiet = time.Now().Add(wait).UnixNano()
		}
	}
	if err := q.Enqueue(ctx, req); err != nil {
		return fmt.Errorf("controller %s: enqueue %s: %w", c.name, req.Key, err)
	}
	if f := c.engine.cfg.Hooks.RequestAdded; f != nil {
		f(c.name, trigger)
	}
	return nil
}

func (c *runner) enqueue(ctx context.Context, key Key, after time.Duration, x cause) error {
	if r, ok := c.primary.(Reader); ok && !r.Covers(key) {
		return fmt.Errorf("%w: %s is not a key of source %s, which controller %s is for", ErrInvalid, key, c.primary.Name(), c.name)
	}
	if c.queue.Load() == nil {
		return fmt.Errorf("controller %s: %w", c.name, ErrNotRunning)
	}
	req := Request{Controller: c.name, Key: key, Priority: PriorityLive, Causes: causesOf(x), Manual: x.trigger == Manual && after <= 0}
	if after > 0 {
		req.Due = time.Unix(0, x.time).Add(after)
	}
	return c.add(ctx, req)
}

func (c *runner) readerOf(key Key) Reader {
	for _, s := range c.sources {
		if r, ok := s.(Reader); ok && r.Covers(key) {
			return r
		}
	}
	return nil
}
