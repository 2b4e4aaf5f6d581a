// Package cache keeps what a source holds in memory, indexed: for sources whose own reads are slow, and for handlers and
// mappers that ask for objects by something else than their key.
//
// A [Cache] stands in a source's place: it is a source of the same name, and a reader. It takes an event's object before
// it passes the event on, so that whoever is told of a change finds it there. It is filled anew with every list: what the
// list lacks is gone from it when the list has ended. Whatever it hands out is a copy.
package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"

	"github.com/windlass-dev/windlass/engine"
)

// Index finds objects by the values that a function draws from each. An object may have several values, or none.
type Index func(o engine.Object) ([]string, error)

// Query is a named question to a cache.
type Query func(c *Cache, args ...any) ([]engine.Object, error)

// Config describes a cache.
type Config struct {
	// Source is what is cached. It must be an engine.Reader too.
	Source engine.Source
	// Indexes are the indexes by name.
	Indexes map[string]Index
	// Queries are the queries by name.
	Queries map[string]Query
	// Clone copies a value deeply. Default: bytes, text, numbers and values without pointers are copied by themselves, and
	// others must have a method Clone or DeepCopy that returns their own type; JSON trees are walked.
	Clone func(value any) any
}

// Cache is a source, a reader, and an index. Create it with New.
type Cache struct {
	cfg    Config
	reader engine.Reader

	mu      sync.RWMutex
	objects map[engine.Key]entry
	indexes map[string]map[string]map[engine.Key]struct{} // by name and value
	listed  map[engine.Key]struct{}                       // while a list runs
}

type entry struct {
	object engine.Object
	values map[string][]string // by index
}

var (
	_ engine.Source = (*Cache)(nil)
	_ engine.Reader = (*Cache)(nil)
)

// The errors of questions that cannot be answered.
var (
	// ErrNoIndex says that there is no index of this name.
	ErrNoIndex = errors.New("no such index")
	// ErrNoQuery says that there is no query of this name.
	ErrNoQuery = errors.New("no such query")
)

// New returns an empty cache.
func New(cfg Config) (*Cache, error) {
	reader, ok := cfg.Source.(engine.Reader)
	if !ok {
		return nil, fmt.Errorf("cache: source %q cannot be read", cfg.Source.Name())
	}
	c := &Cache{cfg: cfg, reader: reader, objects: make(map[engine.Key]entry), indexes: make(map[string]map[string]map[engine.Key]struct{})}
	for name := range cfg.Indexes {
		c.indexes[name] = make(map[string]map[engine.Key]struct{})
	}
	return c, nil
}

// Name implements engine.Source: it is the source's own.
func (c *Cache) Name() string { return c.cfg.Source.Name() }

// Covers implements engine.Reader.
func (c *Cache) Covers(key engine.Key) bool { return c.reader.Covers(key) }

// Cached says that every replica of an engine has a cache of its own, and follows the source to fill it.
func (c *Cache) Cached() bool { return true }

// Run implements engine.Source.
func (c *Cache) Run(ctx context.Context, emit engine.Emit) error {
	return c.cfg.Source.Run(ctx, func(ctx context.Context, e engine.Event) error {
		if err := c.take(ctx, e); err != nil {
			return err
		}
		return emit(ctx, e)
	})
}

// take brings the cache up to an event.
func (c *Cache) take(ctx context.Context, e engine.Event) error {
	switch e.Operation {
	case engine.ListStarted:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.listed = make(map[engine.Key]struct{})
		return nil
	case engine.ListEnded:
		c.mu.Lock()
		defer c.mu.Unlock()
		for key := range c.objects {
			if _, there := c.listed[key]; !there && c.listed != nil {
				c.removeLocked(key)
			}
		}
		c.listed = nil
		return nil
	case engine.Delete, engine.Purge:
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listed, e.Key)
		c.removeLocked(e.Key)
		return nil
	case engine.Put, engine.Resync:
	}
	o, err := c.reader.Get(ctx, e.Key)
	if engine.IsNotFound(err) {
		return nil // gone meanwhile: its deletion is on the way, or the list will lack it
	}
	if err != nil {
		return fmt.Errorf("cache: get %s: %w", e.Key, err)
	}
	return c.put(o)
}

// put stores an object in all indexes or, if one of them fails, in none.
func (c *Cache) put(o engine.Object) error {
	value, err := c.clone(o.Value)
	if err != nil {
		return err
	}
	o.Value = value
	x := entry{object: o, values: make(map[string][]string)}
	for name, index := range c.cfg.Indexes {
		if x.values[name], err = index(o); err != nil {
			return fmt.Errorf("cache: index %s of %s: %w", name, o.Key, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeLocked(o.Key)
	c.objects[o.Key] = x
	for name, values := range x.values {
		for _, v := range values {
			if c.indexes[name][v] == nil {
				c.indexes[name][v] = make(map[engine.Key]struct{})
			}
			c.indexes[name][v][o.Key] = struct{}{}
		}
	}
	if c.listed != nil {
		c.listed[o.Key] = struct{}{}
	}
	return nil
}

func (c *Cache) removeLocked(key engine.Key) {
	x, ok := c.objects[key]
	if !ok {
		return
	}
	delete(c.objects, key)
	for name, values := range x.values {
		for _, v := range values {
			delete(c.indexes[name][v], key)
			if len(c.indexes[name][v]) == 0 {
				delete(c.indexes[name], v)
			}
		}
	}
}

// Get implements engine.Reader.
func (c *Cache) Get(_ context.Context, key engine.Key) (engine.Object, error) {
	c.mu.RLock()
	x, ok := c.objects[key]
	c.mu.RUnlock()
	if !ok {
		return engine.Object{}, engine.ErrNotFound
	}
	return c.copied(x.object)
}

// List implements engine.Reader.
func (c *Cache) List(context.Context) ([]engine.Object, error) {
	c.mu.RLock()
	keys := slices.Collect(maps.Keys(c.objects))
	c.mu.RUnlock()
	return c.all(keys)
}

// By returns the objects for which an index has a value, in the order of their keys.
func (c *Cache) By(index, value string) ([]engine.Object, error) {
	c.mu.RLock()
	values, ok := c.indexes[index]
	keys := slices.Collect(maps.Keys(values[value]))
	c.mu.RUnlock()
	if !ok {
		return nil, fmt.Errorf("%w: %q of source %s; there are %v", ErrNoIndex, index, c.Name(), slices.Sorted(maps.Keys(c.cfg.Indexes)))
	}
	return c.all(keys)
}

// Query answers a named query.
func (c *Cache) Query(name string, args ...any) ([]engine.Object, error) {
	q, ok := c.cfg.Queries[name]
	if !ok {
		return nil, fmt.Errorf("%w: %q of source %s; there are %v", ErrNoQuery, name, c.Name(), slices.Sorted(maps.Keys(c.cfg.Queries)))
	}
	return q(c, args...)
}

// Map returns a mapper of other sources' events: to the keys of the objects for which an index has one of the values that
// values draws from the event.
func (c *Cache) Map(index string, values func(e engine.Event) []string) engine.Mapper {
	return func(_ context.Context, e engine.Event) ([]engine.Key, error) {
		var keys []engine.Key
		for _, v := range values(e) {
			objects, err := c.By(index, v)
			if err != nil {
				return nil, err
			}
			for _, o := range objects {
				if !slices.Contains(keys, o.Key) {
					keys = append(keys, o.Key)
				}
			}
		}
		return keys, nil
	}
}

func (c *Cache) all(keys []engine.Key) ([]engine.Object, error) {
	slices.SortFunc(keys, func(a, b engine.Key) int { return bytes.Compare([]byte(a.String()), []byte(b.String())) })
	out := make([]engine.Object, 0, len(keys))
	for _, k := range keys {
		c.mu.RLock()
		x, ok := c.objects[k]
		c.mu.RUnlock()
		if !ok {
			continue // gone meanwhile
		}
		o, err := c.copied(x.object)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

func (c *Cache) copied(o engine.Object) (engine.Object, error) {
	value, err := c.clone(o.Value)
	o.Value = value
	o.Labels, o.Annotations, o.Fields = maps.Clone(o.Labels), maps.Clone(o.Annotations), maps.Clone(o.Fields)
	return o, err
}

// clone copies a value deeply.
func (c *Cache) clone(value any) (any, error) {
	if c.cfg.Clone != nil {
		return c.cfg.Clone(value), nil
	}
	switch v := value.(type) {
	case nil:
		return nil, nil
	case []byte:
		return bytes.Clone(v), nil
	case map[string]any, []any:
		return tree(v), nil
	}
	r := reflect.ValueOf(value)
	for _, name := range []string{"DeepCopy", "Clone"} {
		if m := r.MethodByName(name); m.IsValid() && m.Type().NumIn() == 0 && m.Type().NumOut() == 1 && m.Type().Out(0) == r.Type() {
			return m.Call(nil)[0].Interface(), nil
		}
	}
	if flat(r.Type()) {
		return value, nil
	}
	return nil, fmt.Errorf("cache: a %T holds pointers and has neither DeepCopy nor Clone: set Config.Clone", value)
}

// tree copies a decoded JSON value.
func tree(value any) any {
	switch v := value.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, x := range v {
			m[k] = tree(x)
		}
		return m
	case []any:
		s := make([]any, len(v))
		for i, x := range v {
			s[i] = tree(x)
		}
		return s
	default:
		return value
	}
}

// flat says that an assignment copies all of a value.
func flat(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Interface, reflect.Chan, reflect.Func, reflect.UnsafePointer:
		return false
	case reflect.Array:
		return flat(t.Elem())
	case reflect.Struct:
		for f := range t.Fields() {
			if !flat(f.Type) {
				return false
			}
		}
	}
	return true
}
