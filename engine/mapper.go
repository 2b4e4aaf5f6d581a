package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
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

// MapOwnerOf is MapOwner for owners of one kind; objects of others concern nobody.
func MapOwnerOf(kind Kind) Mapper {
	return func(ctx context.Context, e Event) ([]Key, error) {
		keys, err := MapOwner(ctx, e)
		return slices.DeleteFunc(keys, func(k Key) bool { return k.Kind != kind }), err
	}
}

// MapToKind maps an object to the key of the same scope, namespace and name, and another kind.
func MapToKind(kind Kind) Mapper {
	return func(_ context.Context, e Event) ([]Key, error) {
		k := e.Key
		k.Kind = kind
		return []Key{k}, nil
	}
}

// MapLabel maps an object to the key that the value of a label names, before the change and after it. The value is a name
// or namespace/name; kind, scope and a namespace that it does not say are those of like, and if like has no namespace
// either, that of the object. An object without the label concerns nobody.
func MapLabel(label string, like Key) Mapper {
	return mapText(like, func(m *Meta) string { return m.Labels[label] })
}

// MapAnnotation is MapLabel for an annotation.
func MapAnnotation(annotation string, like Key) Mapper {
	return mapText(like, func(m *Meta) string { return m.Annotations[annotation] })
}

// MapField is MapLabel for a field that the source was told to put into its events.
func MapField(field string, like Key) Mapper {
	return mapText(like, func(m *Meta) string { return m.Fields[field] })
}

func mapText(like Key, text func(*Meta) string) Mapper {
	return func(_ context.Context, e Event) ([]Key, error) {
		var keys []Key
		for _, m := range []*Meta{e.New, e.Old} {
			if m == nil || text(m) == "" {
				continue
			}
			k := like
			k.Namespace = cmp.Or(k.Namespace, e.Key.Namespace)
			k.Name = text(m)
			if namespace, name, ok := strings.Cut(k.Name, "/"); ok {
				k.Namespace, k.Name = namespace, name
			}
			if !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
		return keys, nil
	}
}

// MapAll maps an object to the keys of all the mappers, each once. If one fails, there are none: all are tried again.
func MapAll(mappers ...Mapper) Mapper {
	return func(ctx context.Context, e Event) ([]Key, error) {
		var all []Key
		for _, m := range mappers {
			keys, err := m(ctx, e)
			if err != nil {
				return nil, err
			}
			for _, k := range keys {
				if !slices.Contains(all, k) {
					all = append(all, k)
				}
			}
		}
		return all, nil
	}
}

// MapVia turns an event into others before it is mapped: an object into those that it refers to. If the transform or
// one mapping fails, there are no keys and all is tried again. Transforms chain: MapVia(a, MapVia(b, mapper)).
func MapVia(transform func(ctx context.Context, e Event) ([]Event, error), mapper Mapper) Mapper {
	return func(ctx context.Context, e Event) ([]Key, error) {
		events, err := transform(ctx, e)
		if err != nil {
			return nil, err
		}
		var all []Key
		for _, x := range events {
			keys, err := mapper(ctx, x)
			if err != nil {
				return nil, err
			}
			all = append(all, keys...)
		}
		return all, nil
	}
}

// MapObject maps by the object itself, decoded. It is the newest there is, which may be newer than the event. One that
// cannot be decoded is a failed mapping. One that is gone concerns nobody: what must know of deletions needs a mapper of
// the event's metadata beside this one.
func MapObject[T any](from Reader, f func(ctx context.Context, object T, e Event) ([]Key, error)) Mapper {
	return func(ctx context.Context, e Event) ([]Key, error) {
		o, err := from.Get(ctx, e.Key)
		if IsNotFound(err) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		v, err := As[T](o)
		if err != nil {
			return nil, err
		}
		return f(ctx, v, e)
	}
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

// mappingSuffix follows the name of a controller in that of the queue of its failed mappings.
const mappingSuffix = ".mapping"

// mappingOf describes the queue of a controller's failed mappings.
func mappingOf(c *runner) *runner {
	m := &runner{Controller: NewController(c.name).WithTimeout(c.timeout).WithBackoff(c.backoff), engine: c.engine, log: c.log, lease: c.lease}
	m.name = c.name + mappingSuffix
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
	if f := c.engine.cfg.Hooks.MappingFailed; f != nil {
		f(c.name, e, cause)
	}
	c.log.WarnContext(ctx, "mapper failed; the event is kept and mapped again", "source", e.Source, "key", e.Key.String(), "err", cause)
	key, err := mappingKey(e)
	if err != nil {
		return err
	}
	return c.mapping.add(ctx, Request{
		Controller: c.mapping.name, Key: key, Priority: PriorityDependency, Due: time.Now().Add(c.backoff.withDefaults().wait(0)),
		Causes: CausesOf(Cause{Trigger: Dependency, Operation: e.Operation, Key: e.Key, Revision: e.Revision, Time: e.Time, Traceparent: e.Traceparent}),
	})
}
