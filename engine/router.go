package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine/lease"
)

// router maps the events of one source for every controller that references it. Source and router share a process, so
// it maps inline and publishes the event for everyone else, marked as routed.
type router struct {
	engine *Engine
	source Source
	topic  string
	// published says that the source's events are on a topic already.
	published bool
	routes    atomic.Pointer[[]*route] // replaced, never changed

	counts atomic.Pointer[census] // of the list under way

	lease *lease.Lease // to run the source for all replicas; nil: this process is the only one
	leads atomic.Bool  // this replica does

	halt     context.CancelFunc
	done     chan struct{} // closed when the source has ended for good
	synced   chan struct{} // closed after the first list
	syncOnce sync.Once
	mu       sync.Mutex
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
	tracked // by what the handler read
)

func newRouter(e *Engine, s Source) *router {
	r := &router{engine: e, source: s, topic: EventTopic(s.Name()), synced: make(chan struct{}), done: make(chan struct{}), halt: func() {}}
	r.routes.Store(&[]*route{})
	p, ok := s.(interface{ Published() bool })
	r.published = ok && p.Published()
	if e.shared {
		r.lease = lease.New(e.cfg.Leases, e.cfg.Name+"/source/"+s.Name(), e.cfg.Replica, 0)
	}
	r.leads.Store(r.lease == nil)
	return r
}

func (r *router) add(x *route) {
	changed := append(slices.Clone(*r.routes.Load()), x)
	r.routes.Store(&changed)
}

func (r *router) remove(c *runner) {
	changed := slices.DeleteFunc(slices.Clone(*r.routes.Load()), func(x *route) bool { return x.to == c })
	r.routes.Store(&changed)
}

func (r *router) routesTo(c *runner) []*route {
	return slices.DeleteFunc(slices.Clone(*r.routes.Load()), func(x *route) bool { return x.to != c })
}

// emit is the Emit of this router's source, within Config.Emit.
func (r *router) emit(ctx context.Context, e Event) error {
	if !r.leads.Load() {
		return r.standBy(ctx, &e)
	}
	published := r.publish(&e)
	err := r.route(ctx, &e)
	if published != nil {
		err = errors.Join(err, <-published)
	}
	return err
}

// standBy follows the events of a source that another replica runs: into the caches of this one, which have them by now,
// to the keys that were read here, and to controllers that each replica has.
func (r *router) standBy(ctx context.Context, e *Event) error {
	switch e.Operation {
	case ListEnded:
		r.sync()
	case Put, Delete, Purge, Resync:
		for _, route := range *r.routes.Load() {
			if route.to.placement == Each || route.role == tracked && e.Operation != Resync {
				if err := route.follow(ctx, e); err != nil {
					return err
				}
			}
		}
	case ListStarted:
	}
	return nil
}

func (r *router) sync() { r.syncOnce.Do(func() { close(r.synced) }) }

// everywhere says whether every replica follows the source, and not only the one that runs it for all.
func (r *router) everywhere() bool {
	cached, ok := r.source.(interface{ Cached() bool })
	return ok && cached.Cached() || slices.ContainsFunc(*r.routes.Load(), func(x *route) bool {
		return x.role == tracked || x.to.placement == Each
	})
}

// publish starts publishing the event and returns where the result will be, or nil if nobody wants it.
func (r *router) publish(e *Event) <-chan error {
	p := r.engine.publisher
	if p == nil || r.published || e.Operation != Put && e.Operation != Delete && e.Operation != Purge {
		return nil // a list tells nobody else anything
	}
	if w, ok := p.(interface{ Wants(topic string) bool }); ok && !w.Wants(r.topic) {
		return nil
	}
	done := make(chan error, 1)
	m, err := EncodeEvent(*e, r.engine.cfg.Name)
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
		r.counts.Store(censusOf(*r.routes.Load(), r.source))
		return nil
	case ListEnded:
		if counts := r.counts.Swap(nil); counts != nil {
			if err := counts.missing(ctx); err != nil {
				return err
			}
		}
		r.sync()
		return nil
	case Put, Resync:
		if counts := r.counts.Load(); counts != nil {
			counts.seen(e.Key)
		}
	case Delete, Purge:
	}
	if f := r.engine.cfg.Hooks.EventReceived; f != nil {
		f(*e)
	}
	var errs error
	for _, route := range *r.routes.Load() {
		if err := route.follow(ctx, e); err != nil {
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
			Controller: c.name, Key: e.Key, Priority: priorityOf(e, PriorityLive), Causes: causesOf(c.causeOf(e, triggerOf(e))), now: e.Time.UnixNano(),
			Deletion: e.Operation == Delete || e.Operation == Purge,
		})
	case owned:
		keys, changed, err := c.ownersOf(ctx, e)
		if err != nil {
			return err
		}
		if changed {
			found := *e
			found.Operation = Put // a list found a change that no event told of
			e = &found
		}
		return c.enqueueMapped(ctx, e, keys)
	case tracked:
		return c.followReads(ctx, e)
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

// causeOf returns an event as the cause of a request.
func (c *runner) causeOf(e *Event, t Trigger) cause {
	x := cause{trigger: t, operation: e.Operation, revision: e.Revision, incarnation: e.Incarnation, time: e.Time.UnixNano()}
	var by *ancestry
	if c.engine.lineage.noted.Load() && e.Operation != Resync {
		by = c.engine.lineage.of(e)
	}
	switch {
	case t == Dependency:
		x.more = &causeMore{e.Key, e.Traceparent, by}
	case e.Traceparent != "" || by != nil:
		x.more = &causeMore{traceparent: e.Traceparent, by: by}
	}
	return x
}

// causesOf returns one cause.
func causesOf(x cause) Causes { return Causes{causes: &causes{first: x, n: 1}} }

// ownersOf returns the keys that own the object of e: by its marks, or by the engine's records. Changed says that a
// listed object is not as the engine left it, which only the records can tell.
func (c *runner) ownersOf(ctx context.Context, e *Event) (keys []Key, changed bool, err error) {
	own := c.engine.ownership
	r, echo, ok := own.echoed(e, c.name)
	if !ok {
		if keys, _ = MapOwner(ctx, *e); len(keys) > 0 || !c.engine.shared { // it never fails
			return keys, false, nil
		}
		// Another replica may have written the record a moment ago.
		if _, ok, err = own.refresh(ctx, e.Key); !ok || err != nil {
			return nil, false, err
		}
		r, echo, _ = own.echoed(e, c.name)
	}
	if r.Owner.Controller != c.name || echo {
		return nil, false, nil
	}
	return []Key{r.Owner.Key}, e.Operation == Resync, nil
}

// enqueueMapped adds a request for each key that is the controller's; others are dropped, counted and logged.
func (c *runner) enqueueMapped(ctx context.Context, e *Event, keys []Key) error {
	var errs error
	for _, k := range keys {
		if r, ok := c.primary.(Reader); ok && !r.Covers(k) {
			if f := c.engine.cfg.Hooks.RequestDropped; f != nil {
				f(c.name, k)
			}
			c.log.WarnContext(ctx, "mapped key dropped: it is not of the controller's primary source",
				"source", e.Source, "key", k.String(), "event_key", e.Key.String(), "primary", c.primary.Name())
			continue
		}
		err := c.add(ctx, Request{
			Controller: c.name, Key: k, Priority: priorityOf(e, PriorityDependency), Causes: causesOf(c.causeOf(e, Dependency)),
		})
		errs = errors.Join(errs, err)
	}
	return errs
}
