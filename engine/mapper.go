package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"time"
)

func isNil(v any) bool {
	if v == nil {
		return true
	}
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Func, reflect.Interface, reflect.Slice, reflect.Chan:
		return r.IsNil()
	default:
		return false
	}
}

// MapOwner maps an object to the key that its owner mark names, before the change and after it.
func MapOwner(_ context.Context, e Event) ([]Key, error) {
	var keys []Key
	for _, m := range []*Meta{e.New, e.Old} {
		if m != nil && !m.Owner.IsZero() && (len(keys) == 0 || keys[0] != m.Owner) {
			keys = append(keys, m.Owner)
		}
	}
	return keys, nil
}

// MapSameName maps an object to the key of the same name where like says: its kind, scope and namespace.
func MapSameName(like Key) Mapper {
	return func(_ context.Context, e Event) ([]Key, error) {
		like.Name = e.Key.Name
		return []Key{like}, nil
	}
}

// protected calls a mapper and turns its panic into an error.
func protected(ctx context.Context, m Mapper, e Event) (keys []Key, err error) {
	defer func() {
		if p := recover(); p != nil {
			keys, err = nil, &PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	return m(ctx, e)
}

// An event whose mapper failed becomes a request of its own, in a queue beside the controller's: retried with backoff,
// as durable as the bus, and in nobody's way. The key of such a request is the event itself, so that two events are
// two requests and none is forgotten.
var mappingKind = KindOf("windlass/event")

func mappingKey(e Event) (Key, error) {
	event, err := json.Marshal(e)
	if err != nil {
		return Key{}, fmt.Errorf("keep the event of %s for its mapper: %w", e.Key, err)
	}
	return Key{Kind: mappingKind, Namespace: e.Source, Name: string(event)}, nil
}

// mappingOf describes the queue of a controller's failed mappings.
func mappingOf(c *runner) *runner {
	m := &runner{Controller: NewController(c.name).WithTimeout(c.timeout).WithBackoff(c.backoff), engine: c.engine, log: c.log}
	m.name = c.name + ".mapping"
	m.handler = func(ctx context.Context, rt Runtime, req Request) (Result, error) {
		var e Event
		if err := json.Unmarshal([]byte(req.Key.Name), &e); err != nil {
			return Result{}, Terminal(fmt.Errorf("%w: %w", ErrMalformed, err))
		}
		var errs []error
		for _, w := range c.watches {
			if w.source.Name() != e.Source {
				continue
			}
			keys, err := protected(ctx, w.mapper, e)
			if err != nil {
				errs = append(errs, fmt.Errorf("map %s: %w", e.Key, err))
				continue
			}
			errs = append(errs, c.enqueueMapped(ctx, &e, keys))
		}
		return Result{}, errors.Join(errs...)
	}
	return m
}

// keepForMapper stores an event whose mapper failed.
func (c *runner) keepForMapper(ctx context.Context, e Event, cause error) error {
	if f := c.engine.hooks.MappingFailed; f != nil {
		f(c.name, e, cause)
	}
	c.log.WarnContext(ctx, "mapper failed; the event is kept and mapped again", "source", e.Source, "key", e.Key.String(), "err", cause)
	key, err := mappingKey(e)
	if err != nil {
		return err
	}
	return c.mapping.queue.Enqueue(ctx, Request{
		Controller: c.mapping.name, Key: key, Priority: PriorityDependency, Due: time.Now().Add(c.backoff.withDefaults().wait(0)),
		Causes: CausesOf(Cause{Trigger: Dependency, Operation: e.Operation, Key: e.Key, Revision: e.Revision, Time: e.Time, Traceparent: e.Traceparent}),
	})
}
