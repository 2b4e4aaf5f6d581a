// Package memory has a typed map that is a source, a reader and a sink: for tests, examples and programs that keep
// their state to themselves.
package memory

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

var kind = engine.KindOf("memory")

// Map holds values of one type by name. Its methods are safe for concurrent use. It hands out values as they are: if T
// holds pointers, slices or maps, treat them as read-only.
type Map[T any] struct {
	name string

	mu      sync.Mutex
	objects map[string]entry[T]
	last    uint64
	feeds   map[*feed]struct{}
}

type entry[T any] struct {
	value    T
	meta     *engine.Meta
	revision string
}

// feed is what one Run has still to emit.
type feed struct {
	events []engine.Event
	more   chan struct{}
}

var (
	_ engine.Source = (*Map[int])(nil)
	_ engine.Reader = (*Map[int])(nil)
	_ engine.Sink   = (*Map[int])(nil)
)

// New returns an empty map. The name is that of the source and the namespace of its keys.
func New[T any](name string) *Map[T] {
	return &Map[T]{name: name, objects: make(map[string]entry[T]), feeds: make(map[*feed]struct{})}
}

// Name implements engine.Source and engine.Sink.
func (m *Map[T]) Name() string { return m.name }

// Key returns the key of the value called name.
func (m *Map[T]) Key(name string) engine.Key {
	return engine.Key{Kind: kind, Namespace: m.name, Name: name}
}

// Object returns an object that makes the value called name be v when it is applied.
func (m *Map[T]) Object(name string, v T) engine.Object {
	return engine.Object{Key: m.Key(name), Value: v}
}

// Covers implements engine.Reader and engine.Sink.
func (m *Map[T]) Covers(key engine.Key) bool {
	return key.Kind == kind && key.Scope == "" && key.Namespace == m.name
}

// KeepsOwner says that objects carry owner marks.
func (m *Map[T]) KeepsOwner() bool { return true }

// Set makes the value called name be v, as somebody other than a controller would: the owner mark stays.
func (m *Map[T]) Set(name string, v T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	meta := &engine.Meta{}
	if have, ok := m.objects[name]; ok {
		meta = have.meta
	}
	m.putLocked(name, v, meta, "")
}

// Remove deletes the value called name, as somebody other than a controller would.
func (m *Map[T]) Remove(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.removeLocked(name, "")
}

// Value returns the value called name.
func (m *Map[T]) Value(name string) (T, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.objects[name]
	return e.value, ok
}

// Len is how many values there are.
func (m *Map[T]) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.objects)
}

// Get implements engine.Reader.
func (m *Map[T]) Get(_ context.Context, key engine.Key) (engine.Object, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.objects[key.Name]
	if !ok || !m.Covers(key) {
		return engine.Object{}, engine.ErrNotFound
	}
	return e.object(key), nil
}

// List implements engine.Reader.
func (m *Map[T]) List(context.Context) ([]engine.Object, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]engine.Object, 0, len(m.objects))
	for name, e := range m.objects {
		out = append(out, e.object(m.Key(name)))
	}
	return out, nil
}

// Apply implements engine.Sink.
func (m *Map[T]) Apply(_ context.Context, o engine.Object, w engine.Write) (string, error) {
	v, err := engine.As[T](o)
	if err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	have, exists := m.objects[o.Key.Name]
	if w.Absent && exists || w.Revision != "" && have.revision != w.Revision {
		return "", engine.ErrConflict
	}
	meta := o.Meta
	return m.putLocked(o.Key.Name, v, &meta, w.Traceparent), nil
}

// Delete implements engine.Sink.
func (m *Map[T]) Delete(_ context.Context, key engine.Key, w engine.Write) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	have, exists := m.objects[key.Name]
	if !exists {
		return engine.ErrNotFound
	}
	if w.Revision != "" && have.revision != w.Revision {
		return engine.ErrConflict
	}
	m.removeLocked(key.Name, w.Traceparent)
	return nil
}

// Run implements engine.Source.
func (m *Map[T]) Run(ctx context.Context, emit engine.Emit) error {
	f := &feed{more: make(chan struct{}, 1)}
	m.mu.Lock()
	m.feeds[f] = struct{}{}
	f.events = append(f.events, engine.Event{Operation: engine.ListStarted})
	for _, name := range slices.Sorted(maps.Keys(m.objects)) {
		e := m.objects[name]
		f.events = append(f.events, engine.Event{Operation: engine.Resync, Key: m.Key(name), Revision: e.revision, Old: e.meta, New: e.meta})
	}
	f.events = append(f.events, engine.Event{Operation: engine.ListEnded})
	f.more <- struct{}{}
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.feeds, f)
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.more:
		}
		m.mu.Lock()
		events := f.events
		f.events = nil
		m.mu.Unlock()
		for _, e := range events {
			if err := deliver(ctx, emit, e); err != nil {
				return nil
			}
		}
	}
}

// deliver emits e until it is accepted or ctx ends.
func deliver(ctx context.Context, emit engine.Emit, e engine.Event) error {
	for {
		if err := emit(ctx, e); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("emit %s: %w", e.Key, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (m *Map[T]) putLocked(name string, v T, meta *engine.Meta, traceparent string) string {
	m.last++
	have, existed := m.objects[name]
	e := entry[T]{value: v, meta: meta, revision: strconv.FormatUint(m.last, 10)}
	m.objects[name] = e
	event := engine.Event{Operation: engine.Put, Key: m.Key(name), Revision: e.revision, New: meta, Traceparent: traceparent}
	if existed {
		event.Old = have.meta
	}
	m.tellLocked(event)
	return e.revision
}

func (m *Map[T]) removeLocked(name, traceparent string) {
	have, ok := m.objects[name]
	if !ok {
		return
	}
	m.last++
	delete(m.objects, name)
	m.tellLocked(engine.Event{
		Operation: engine.Delete, Key: m.Key(name), Revision: strconv.FormatUint(m.last, 10), Old: have.meta, Traceparent: traceparent,
	})
}

func (m *Map[T]) tellLocked(e engine.Event) {
	e.Time = time.Now()
	for f := range m.feeds {
		f.events = append(f.events, e)
		select {
		case f.more <- struct{}{}:
		default:
		}
	}
}

func (e entry[T]) object(key engine.Key) engine.Object {
	return engine.Object{Key: key, Revision: e.revision, Meta: *e.meta, Value: e.value}
}
