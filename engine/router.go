package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// router maps the events of one source for every controller that references it. Source and router share a process, so
// it maps inline and publishes the event for everyone else, marked as routed.
type router struct {
	engine *Engine
	source Source
	topic  string
	routes []route

	listing atomic.Bool // expected is being filled
	mu      sync.Mutex
	// While a list runs: expected are the keys per controller that own something, targets the recorded objects of this
	// source, both without those that were listed.
	expected map[*runner]map[Key]struct{}
	targets  map[Key]owner

	synced   chan struct{} // closed after the first list
	syncOnce sync.Once
	failure  error // of the last run, for readiness
}

// route leads from a source to a controller.
type route struct {
	to     *runner
	role   role
	mapper Mapper
}

type role uint8

const (
	primary role = iota
	owned
	watched
)

// emit is the Emit of this router's source, within Config.Emit.
func (r *router) emit(ctx context.Context, e Event) error {
	published := r.publish(&e)
	err := r.route(ctx, &e)
	if published != nil {
		err = errors.Join(err, <-published)
	}
	return err
}

// publish starts publishing the event and returns where the result will be, or nil if nobody wants it.
func (r *router) publish(e *Event) <-chan error {
	p := r.engine.publisher
	if p == nil || e.Operation != Put && e.Operation != Delete && e.Operation != Purge {
		return nil // a list tells nobody else anything
	}
	if w, ok := p.(interface{ Wants(topic string) bool }); ok && !w.Wants(r.topic) {
		return nil
	}
	done := make(chan error, 1)
	m, err := EncodeEvent(*e, r.engine.name)
	if err != nil {
		done <- err
		return done
	}
	go func(m *message.Message) { done <- p.Publish(r.topic, m) }(m)
	return done
}

func (r *router) route(ctx context.Context, e *Event) error {
	switch e.Operation {
	case ListStarted:
		r.listStarted()
		return nil
	case ListEnded:
		return r.listEnded(ctx)
	case Put, Resync:
		r.listed(e.Key)
	case Delete, Purge:
	}
	if f := r.engine.hooks.EventReceived; f != nil {
		f(*e)
	}
	var errs error
	for i := range r.routes {
		if err := r.routes[i].follow(ctx, e); err != nil {
			errs = errors.Join(errs, err)
		}
	}
	return errs
}

// follow adds what an event means to one controller.
func (r *route) follow(ctx context.Context, e *Event) error {
	c := r.to
	switch r.role {
	case primary:
		return c.add(ctx, Request{
			Controller: c.name, Key: e.Key, Priority: priorityOf(e, PriorityLive), Causes: causesOf(e, triggerOf(e)), now: e.Time.UnixNano(),
		})
	case owned:
		keys, changed := c.ownersOf(ctx, e)
		if changed {
			found := *e
			found.Operation = Put // a list found a change that no event told of
			e = &found
		}
		return c.enqueueMapped(ctx, e, keys)
	default:
		keys, err := protected(ctx, r.mapper, *e)
		if err != nil {
			return c.keepForMapper(ctx, *e, err)
		}
		return c.enqueueMapped(ctx, e, keys)
	}
}

func priorityOf(e *Event, p Priority) Priority {
	if e.Operation == Resync {
		return PriorityList
	}
	return p
}

func triggerOf(e *Event) Trigger {
	switch {
	case e.Operation == Resync:
		return Resynced
	case e.Operation != Put:
		return Deleted
	case e.Old == nil:
		return Created
	default:
		return Updated
	}
}

// causesOf returns an event as the only cause of a request.
func causesOf(e *Event, t Trigger) Causes {
	x := cause{
		trigger: t, operation: e.Operation, revision: e.Revision, incarnation: e.Incarnation,
		time: e.Time.UnixNano(), traceparent: e.Traceparent,
	}
	if t == Dependency {
		k := e.Key
		x.key = &k
	}
	return Causes{causes: &causes{first: x, n: 1}}
}

// ownersOf returns the keys that own the object of e: by its marks, or by the engine's records. Changed says that a
// listed object is not as the engine left it, which only the records can tell.
func (c *runner) ownersOf(ctx context.Context, e *Event) (keys []Key, changed bool) {
	if r, ok := c.engine.ownership.get(e.Key); ok {
		if r.Owner.Controller != c.name || c.engine.ownership.wrote(*e) {
			return nil, false
		}
		return []Key{r.Owner.Key}, e.Operation == Resync
	}
	keys, _ = MapOwner(ctx, *e) // it never fails
	return keys, false
}

// enqueueMapped adds a request for each key that is the controller's; others are dropped, counted and logged.
func (c *runner) enqueueMapped(ctx context.Context, e *Event, keys []Key) error {
	var errs error
	for _, k := range keys {
		if r, ok := c.primary.(Reader); ok && !r.Covers(k) {
			if f := c.engine.hooks.RequestDropped; f != nil {
				f(c.name, k)
			}
			c.log.WarnContext(ctx, "mapped key dropped: it is not of the controller's primary source",
				"source", e.Source, "key", k.String(), "event_key", e.Key.String(), "primary", c.primary.Name())
			continue
		}
		err := c.add(ctx, Request{
			Controller: c.name, Key: k, Priority: priorityOf(e, PriorityDependency), Causes: causesOf(e, Dependency),
		})
		errs = errors.Join(errs, err)
	}
	return errs
}

// add hands a request to the queue.
func (c *runner) add(ctx context.Context, req Request) error {
	trigger := req.Trigger() // the causes are the queue's from here on
	if err := c.queue.Enqueue(ctx, req); err != nil {
		return fmt.Errorf("controller %s: enqueue %s: %w", c.name, req.Key, err)
	}
	if f := c.engine.hooks.RequestAdded; f != nil {
		f(c.name, trigger)
	}
	return nil
}

func (r *router) listStarted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listing.Store(true)
	r.expected = make(map[*runner]map[Key]struct{})
	for _, route := range r.routes {
		if route.role == primary {
			r.expected[route.to] = r.engine.ownership.owners(route.to.name)
		}
	}
	if reader, ok := r.source.(Reader); ok {
		r.targets = r.engine.ownership.covered(reader)
	}
}

func (r *router) listed(key Key) {
	if !r.listing.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, keys := range r.expected {
		delete(keys, key)
	}
	delete(r.targets, key)
}

// listEnded asks for the owners that the list lacks, and for those of recorded objects that it lacks, so that a
// deletion missed while the engine was down is carried out or put right, and lets the controllers start.
func (r *router) listEnded(ctx context.Context) error {
	r.mu.Lock()
	owners, targets := r.expected, r.targets
	r.expected, r.targets = nil, nil
	r.listing.Store(false)
	r.mu.Unlock()
	missing := func(c *runner, key, deleted Key, t Trigger) error {
		cause := Cause{Trigger: t, Operation: Delete, Key: deleted, Time: time.Now()}
		return c.add(ctx, Request{Controller: c.name, Key: key, Priority: PriorityList, Causes: CausesOf(cause)})
	}
	for c, keys := range owners {
		for k := range keys {
			if err := missing(c, k, k, Deleted); err != nil {
				return err
			}
		}
	}
	for _, route := range r.routes {
		for target, o := range targets {
			if route.role == owned && route.to.name == o.Controller {
				if err := missing(route.to, o.Key, target, Dependency); err != nil {
					return err
				}
			}
		}
	}
	r.syncOnce.Do(func() { close(r.synced) })
	return nil
}
