package engine

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Runtime is what a handler works with. It is bound to one run: do not keep it. Its methods are safe for concurrent
// use, SetTraceparent excepted.
type Runtime struct {
	c           *runner
	req         Request
	traceparent string
	timedOut    bool

	mu sync.Mutex
	// What the handler read of its own key.
	revision, incarnation string
}

// Get returns the present object, or ErrNotFound. The key must belong to a source that the controller references.
func (rt *Runtime) Get(ctx context.Context, key Key) (Object, error) {
	r := rt.c.readerOf(key)
	if r == nil {
		return Object{}, Terminal(fmt.Errorf("%w: controller %s may not read %s: none of the sources that it references covers the key",
			ErrInvalid, rt.c.name, key))
	}
	ctx, end := rt.access(ctx, "get", key)
	o, err := r.Get(ctx, key)
	end(err)
	if err != nil {
		return Object{}, fmt.Errorf("get %s: %w", key, err)
	}
	if key == rt.req.Key {
		rt.mu.Lock()
		defer rt.mu.Unlock()
		rt.revision, rt.incarnation = o.Revision, o.Incarnation
	}
	return o, nil
}

// access tells the hooks of a read or write.
func (rt *Runtime) access(ctx context.Context, verb string, key Key) (context.Context, func(error)) {
	if f := rt.c.engine.hooks.Access; f != nil {
		return f(ctx, verb, key)
	}
	return ctx, func(error) {}
}

// Get returns the object of key, decoded.
func Get[T any](ctx context.Context, rt *Runtime, key Key) (T, error) {
	o, err := rt.Get(ctx, key)
	if err != nil {
		var none T
		return none, err
	}
	return As[T](o)
}

// List returns all objects of a source that the controller references.
func (rt *Runtime) List(ctx context.Context, source string) ([]Object, error) {
	for _, s := range rt.c.sources() {
		if r, ok := s.(Reader); ok && s.Name() == source {
			ctx, end := rt.access(ctx, "list", Key{Namespace: source})
			objects, err := r.List(ctx)
			end(err)
			return objects, err
		}
	}
	return nil, Terminal(fmt.Errorf("%w: controller %s references no source %q that can be read", ErrInvalid, rt.c.name, source))
}

// Apply makes an object as given, owned by the key of this run. It writes nothing if nothing differs. It refuses an
// object of that name that the key does not own with ErrResourceExists.
func (rt *Runtime) Apply(ctx context.Context, o Object) error {
	return rt.Do(ctx, Effect{Object: o})
}

// Delete removes an object that the key of this run owns, and does nothing if it owns none of that name.
func (rt *Runtime) Delete(ctx context.Context, key Key) error {
	return rt.Do(ctx, Effect{Verb: DeleteObject, Object: Object{Key: key}})
}

// Do carries out effects in their order and stops at the first that fails.
func (rt *Runtime) Do(ctx context.Context, effects ...Effect) error { return rt.do(ctx, effects) }

// Owned returns the keys in a sink that the key of this run owns.
func (rt *Runtime) Owned(ctx context.Context, sink string) ([]Key, error) {
	s := rt.c.sinkNamed(sink)
	if s == nil {
		return nil, Terminal(fmt.Errorf("%w: controller %s has no sink %q", ErrInvalid, rt.c.name, sink))
	}
	var keys []Key
	if r, ok := s.(Reader); ok && keepsOwner(s) {
		objects, err := r.List(ctx)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", sink, err)
		}
		for _, o := range objects {
			if o.Owner == rt.req.Key {
				keys = append(keys, o.Key)
			}
		}
		return keys, nil
	}
	for _, k := range rt.c.engine.ownership.of(owner{rt.c.name, rt.req.Key}) {
		if s.Covers(k) {
			keys = append(keys, k)
		}
	}
	return keys, nil
}

// Enqueue asks for a run of another key of this controller, after a while or, with zero, now.
func (rt *Runtime) Enqueue(ctx context.Context, key Key, after time.Duration) error {
	return rt.c.enqueue(ctx, key, after, Cause{
		Trigger: Dependency, Key: rt.req.Key, Time: time.Now(), Traceparent: rt.traceparent,
	})
}

// Log returns a logger that names the controller, the key, the attempt and the trigger.
func (rt *Runtime) Log() *slog.Logger {
	log := rt.logger().With("key", rt.req.Key.String(), "attempt", rt.req.Attempt, "trigger", rt.req.Trigger().String())
	if rt.traceparent != "" {
		log = log.With("trace_id", traceID(rt.traceparent))
	}
	return log
}

func (rt *Runtime) logger() *slog.Logger { return rt.c.log }

// Traceparent is the W3C trace context of this run, empty without tracing.
func (rt *Runtime) Traceparent() string { return rt.traceparent }

// SetTraceparent is for the tracing middleware: it names the span of this run, to which writes and delayed requests
// link.
func (rt *Runtime) SetTraceparent(tp string) { rt.traceparent = tp }

// traceID cuts the trace id out of a traceparent (version-traceid-spanid-flags).
func traceID(tp string) string {
	if len(tp) < 35 {
		return ""
	}
	return tp[3:35]
}
