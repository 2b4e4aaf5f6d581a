package engine

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Runtime is what a handler works with. It is bound to one run: once that has ended, its methods return ErrRunEnded and
// touch nothing. They are safe for concurrent use.
type Runtime struct {
	s *runState
	n uint64 // the run's number
}

// runState is what a worker keeps of its run. It is used again for the next run, unless somebody looks at it just then.
type runState struct {
	c           *runner
	req         Request
	start       time.Time
	traceparent string
	timedOut    bool

	mu sync.Mutex
	// What the handler read of its own key, and what else it read if that is tracked.
	revision, incarnation string
	seen                  []seen

	lineage *ancestry // made when it is needed
	beat    func()    // nil: nobody waits for heartbeats
	beaten  atomic.Int64

	work  context.Context //nolint:containedctx // the run's own, whatever a handler passes on.
	n     atomic.Uint64   // the number of the run under way; another one: it has ended
	users atomic.Int32    // calls of Runtime's methods under way
}

// use holds on to the state of the run for a call, unless the run has ended.
func (rt Runtime) use() (*runState, error) {
	rt.s.users.Add(1)
	if rt.s.n.Load() != rt.n {
		rt.s.users.Add(-1)
		return nil, ErrRunEnded
	}
	return rt.s, nil
}

func (s *runState) done() { s.users.Add(-1) }

// begin makes s the state of a new run.
func (s *runState) begin(req Request) Runtime {
	s.req, s.start, s.traceparent, s.timedOut, s.revision, s.incarnation = req, req.taken, "", false, "", ""
	s.seen, s.lineage, s.beat = s.seen[:0], nil, nil
	if s.start.IsZero() {
		s.start = time.Now()
	}
	s.req.Causes.own = &s.req.Key
	return Runtime{s, s.n.Load()}
}

// end ends the run. It returns false if somebody holds on to s, which must not be used again then.
func (s *runState) end() bool {
	s.n.Add(1)
	return s.users.Load() == 0
}

// Get returns the present object, or ErrNotFound. The key must belong to a source that the controller references.
func (rt Runtime) Get(ctx context.Context, key Key) (Object, error) {
	s, err := rt.use()
	if err != nil {
		return Object{}, err
	}
	defer s.done()
	r := s.c.readerOf(key)
	if r == nil {
		return Object{}, Terminal(fmt.Errorf("%w: controller %s may not read %s: none of the sources that it references covers the key",
			ErrInvalid, s.c.name, key))
	}
	ctx, end := s.access(ctx, "get", key)
	o, err := s.read(ctx, r, key)
	end(err)
	if err == nil || IsNotFound(err) {
		s.readBy(reading{key: key}, o.Revision)
	}
	if err != nil {
		return Object{}, fmt.Errorf("get %s: %w", key, err)
	}
	if key == s.req.Key {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.revision, s.incarnation = o.Revision, o.Incarnation
	}
	return o, nil
}

// access tells the hooks of a read or write.
func (s *runState) access(ctx context.Context, verb string, key Key) (context.Context, func(error)) {
	if f := s.c.engine.cfg.Hooks.Access; f != nil {
		return f(ctx, verb, key)
	}
	return ctx, func(error) {}
}

// Get returns the object of key, decoded.
func Get[T any](ctx context.Context, rt Runtime, key Key) (T, error) {
	o, err := rt.Get(ctx, key)
	if err != nil {
		var none T
		return none, err
	}
	return As[T](o)
}

// List returns all objects of a source that the controller references.
func (rt Runtime) List(ctx context.Context, source string) ([]Object, error) {
	s, err := rt.use()
	if err != nil {
		return nil, err
	}
	defer s.done()
	for _, x := range s.c.sources {
		if r, ok := x.(Reader); ok && x.Name() == source {
			ctx, end := s.access(ctx, "list", Key{Namespace: source})
			objects, err := r.List(ctx)
			end(err)
			s.readBy(reading{source: source}, "")
			return objects, err
		}
	}
	return nil, Terminal(fmt.Errorf("%w: controller %s references no source %q that can be read", ErrInvalid, s.c.name, source))
}

// Apply makes an object as given, owned by the key of this run. It writes nothing if nothing differs. It refuses an
// object of that name that the key does not own with ErrResourceExists.
func (rt Runtime) Apply(ctx context.Context, o Object) error {
	return rt.Do(ctx, Effect{Object: o})
}

// Delete removes an object that the key of this run owns, and does nothing if it owns none of that name.
func (rt Runtime) Delete(ctx context.Context, key Key) error {
	return rt.Do(ctx, Effect{Verb: DeleteObject, Object: Object{Key: key}})
}

// Do carries out effects in their order and stops at the first that fails. Those that follow one another into a sink that is a [Batcher] are
// written together.
func (rt Runtime) Do(ctx context.Context, effects ...Effect) error {
	s, err := rt.use()
	if err != nil {
		return err
	}
	defer s.done()
	return s.do(ctx, effects)
}

// Owned returns the keys in a sink that the key of this run owns.
func (rt Runtime) Owned(ctx context.Context, sink string) ([]Key, error) {
	s, err := rt.use()
	if err != nil {
		return nil, err
	}
	defer s.done()
	to := s.c.sinkNamed(sink)
	if to == nil {
		return nil, Terminal(fmt.Errorf("%w: controller %s has no sink %q", ErrInvalid, s.c.name, sink))
	}
	var keys []Key
	if o, ok := to.(interface {
		Owned(ctx context.Context, owner Key) ([]Key, error)
	}); ok {
		if keys, err = o.Owned(ctx, s.req.Key); err != nil {
			return nil, fmt.Errorf("list what %s owns in %s: %w", s.req.Key, sink, err)
		}
		return keys, nil
	}
	if r, ok := to.(Reader); ok && keepsOwner(to) {
		objects, err := r.List(ctx)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", sink, err)
		}
		for _, o := range objects {
			if o.Owner == s.req.Key {
				keys = append(keys, o.Key)
			}
		}
		return keys, nil
	}
	for _, k := range s.c.engine.ownership.of(owner{s.c.name, s.req.Key}) {
		if to.Covers(k) {
			keys = append(keys, k)
		}
	}
	return keys, nil
}

// Enqueue asks for a run of another key of this controller, after a while or, with zero, now.
func (rt Runtime) Enqueue(ctx context.Context, key Key, after time.Duration) error {
	s, err := rt.use()
	if err != nil {
		return err
	}
	defer s.done()
	return s.c.enqueue(ctx, key, after, cause{trigger: Dependency, time: time.Now().UnixNano()}.withMore(causeMore{
		key: s.req.Key, traceparent: s.traceparent, by: s.descendLocked(),
	}))
}

// Heartbeat says that the run makes progress. A controller with WithHeartbeat cancels a run that is silent for too long.
func (rt Runtime) Heartbeat() {
	s, err := rt.use()
	if err != nil {
		return
	}
	defer s.done()
	s.mu.Lock()
	beat := s.beat
	s.mu.Unlock()
	if beat != nil {
		beat()
	}
}

// Log returns a logger that names the controller, the key, the attempt and the trigger. It goes on working when the run
// has ended.
func (rt Runtime) Log() *slog.Logger {
	s, err := rt.use()
	if err != nil {
		return rt.s.c.log
	}
	defer s.done()
	return s.log()
}

func (s *runState) log() *slog.Logger {
	log := s.c.log.With("key", s.req.Key.String(), "attempt", s.req.Attempt, "trigger", s.req.Trigger().String())
	if s.traceparent != "" {
		log = log.With("trace_id", traceID(s.traceparent))
	}
	return log
}

// Traceparent is the W3C trace context of this run, empty without tracing.
func (rt Runtime) Traceparent() string {
	s, err := rt.use()
	if err != nil {
		return ""
	}
	defer s.done()
	return s.traceparent
}

// SetTraceparent is for the tracing middleware: it names the span of this run, to which writes and delayed requests
// link. It must come before the handler.
func (rt Runtime) SetTraceparent(tp string) { rt.s.traceparent = tp }

// traceID cuts the trace id out of a traceparent (version-traceid-spanid-flags).
func traceID(tp string) string {
	if len(tp) < 35 {
		return ""
	}
	return tp[3:35]
}
