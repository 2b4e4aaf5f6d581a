package app

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/nearest"
)

// Components are the systems that a program knows, by the name that selects them in a config.
type Components struct {
	Connections map[string]Factory[Closer]
	Buses       map[string]Factory[engine.Bus]
	Sources     map[string]Factory[engine.Source]
	Sinks       map[string]Factory[engine.Sink]
	Handlers    map[string]Factory[engine.Handler]
	// DefaultBus is used where the config names none.
	DefaultBus string
}

// Closer is a connection.
type Closer interface{ Close() }

// Factory makes a component from its part of the config. Make one with New.
type Factory[T any] struct {
	decode func(d *decoder, n *yaml.Node, path string) planned[T]
}

// planned is a component that was decoded and checked, and not yet built.
type planned[T any] struct {
	build func(ctx context.Context, env *Env, name string) (T, error)
	// owns are the sinks that a handler writes and therefore owns.
	owns []string
	// reads are the sources that a handler reads.
	reads []string
	// connection is the one that the component asks for by name.
	connection string
	// config is the decoded config.
	config any
}

// New returns a factory whose config is a C, decoded strictly. If C has a method Validate() error, its errors are
// reported with their lines; each should begin with the field and a colon. A C with Owns() []string names the sinks
// that a handler owns; with Reads() []string the sources that its controller must reference; with ConnectionName() string the
// connection that it needs.
func New[C, T any](build func(ctx context.Context, env *Env, name string, cfg C) (T, error)) Factory[T] {
	return Factory[T]{decode: func(d *decoder, n *yaml.Node, path string) planned[T] {
		var cfg C
		before := len(d.problems)
		if n != nil {
			d.decode(n, reflect.ValueOf(&cfg).Elem(), path)
		}
		if v, ok := any(cfg).(interface{ Validate() error }); ok && len(d.problems) == before {
			if err := v.Validate(); err != nil {
				d.invalid(n, path, err)
			}
		}
		p := planned[T]{config: cfg, build: func(ctx context.Context, env *Env, name string) (T, error) { return build(ctx, env, name, cfg) }}
		if o, ok := any(cfg).(interface{ Owns() []string }); ok {
			p.owns = o.Owns()
		}
		if r, ok := any(cfg).(interface{ Reads() []string }); ok {
			p.reads = r.Reads()
		}
		if c, ok := any(cfg).(interface{ ConnectionName() string }); ok {
			p.connection = c.ConnectionName()
		}
		return p
	}}
}

// Component is a part of the config in which one key names a type and holds its settings, beside a name.
type Component struct {
	Name string
	Type string

	node *yaml.Node // of the settings
	line *yaml.Node
	path string
	file string
}

func (c *Component) decodeSection(d *decoder, n *yaml.Node, path string) {
	c.line, c.path, c.file = n, path, d.file
	if n.Kind == yaml.ScalarNode {
		c.Type = n.Value
		return
	}
	d.fields(n, path, func(key, value *yaml.Node) {
		switch {
		case key.Value == "name" && value.Kind == yaml.ScalarNode:
			c.Name = value.Value
		case c.Type != "":
			d.fail(key, path, "%q and %q are two types for one thing; choose one", c.Type, key.Value)
		default:
			c.Type, c.node, c.path = key.Value, value, at(path, key.Value)
		}
	})
}

// plan decodes a component with the factory of its type.
func plan[T any](d *decoder, what string, c Component, factories map[string]Factory[T]) (planned[T], bool) {
	if c.file != "" {
		d.file = c.file
	}
	f, ok := factories[c.Type]
	if !ok {
		names := make([]string, 0, len(factories))
		for name := range factories {
			names = append(names, name)
		}
		if c.Type == "" {
			slices.Sort(names)
			d.fail(c.line, c.path, "the %s has no type; one of the keys %v is needed", what, names)
		} else {
			d.fail(c.line, c.path, "unknown type of %s %q%s", what, c.Type, nearest.Hint(c.Type, names))
		}
		return planned[T]{}, false
	}
	return f.decode(d, c.node, c.path), true
}

// Env is what a component may ask for while it is built.
type Env struct {
	// Engine is the engine's name.
	Engine string
	Logger *slog.Logger

	connections map[string]Closer
	shared      Closer
	sinks       map[string]engine.Sink
	sources     map[string]engine.Source
	cleanup     []func(ctx context.Context)
}

// OnClose runs f when the engine has stopped, in reverse order.
func (e *Env) OnClose(f func(ctx context.Context)) { e.cleanup = append(e.cleanup, f) }

// Share makes a connection, usually the bus's, the one that components of its type use unless they name another.
func (e *Env) Share(c Closer) { e.shared = c }

// Connection returns the connection of this name; without a name, the shared one or the only one of type T.
func Connection[T Closer](env *Env, name string) (T, error) {
	var none T
	if name != "" {
		c, ok := env.connections[name]
		if !ok {
			return none, fmt.Errorf("there is no connection %q", name)
		}
		t, ok := c.(T)
		if !ok {
			return none, fmt.Errorf("connection %q is to another system", name)
		}
		return t, nil
	}
	if t, ok := env.shared.(T); ok {
		return t, nil
	}
	var found []T
	for _, c := range env.connections {
		if t, ok := c.(T); ok {
			found = append(found, t)
		}
	}
	if len(found) != 1 {
		return none, fmt.Errorf("connection: there are %d that could be meant; name one", len(found))
	}
	return found[0], nil
}

// Sink returns the sink of this name as a T.
func Sink[T engine.Sink](env *Env, name string) (T, error) {
	t, ok := env.sinks[name].(T)
	if !ok {
		return t, fmt.Errorf("sink %q cannot be used here", name)
	}
	return t, nil
}

// Source returns the source, or the sink that is one, of this name as a T.
func Source[T any](env *Env, name string) (T, error) {
	t, ok := env.sources[name].(T)
	if !ok {
		return t, fmt.Errorf("source %q cannot be used here", name)
	}
	return t, nil
}
