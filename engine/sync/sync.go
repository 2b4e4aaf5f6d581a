// Package sync is the handler for controllers without code: it keeps one object in a sink, or several, in step with each object of
// the primary source, by templates.
//
// At its heart is a pure function from an object to effects ([Sync.Effects]); reading and writing are the engine's.
// What cannot become right by itself (a value that is not JSON, an expression that fails, an object that the system
// will never take) parks the key until there is news of it.
package sync

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/expr"
)

// Config describes what is written. Expressions are CEL over object: key (kind, scope, namespace, name), revision,
// labels, annotations and data, the decoded value; and over with, which holds more objects of the same form.
type Config struct {
	// With are objects that are read besides, by the name that expressions call them by: with.NAME, null if there is none. The
	// controller must reference their sources; a source under reads causes no reconcile when it changes.
	With   map[string]Lookup `yaml:"with"`
	Output `yaml:",inline"`
	// Also are more objects that are written, in this order.
	Also []Output `yaml:"also"`
}

// Output describes one object that is kept for each object of the source.
type Output struct {
	// To is the name of the sink.
	To string `yaml:"to"`
	// When says whether the target exists at all. Empty: always.
	When string `yaml:"when"`
	// Name is the target's name. When it changes, the former target is deleted. Default: object.key.name.
	Name string `yaml:"name"`
	// Data is the target's value: a template in which ${…} are expressions, or one expression for the whole.
	Data any `yaml:"data"`
	// OnDelete is "delete", the default, or "orphan": what becomes of the target when the object has gone. It is the same for all outputs to one
	// sink.
	OnDelete string `yaml:"onDelete"`
	// OnConflict is "fail", the default, or "adopt": what becomes of an object of the wanted name that nobody owns.
	OnConflict string `yaml:"onConflict"`
}

// Sinks are the names of the sinks that are written, each once.
func (c Config) Sinks() (names []string) {
	for _, o := range append([]Output{c.Output}, c.Also...) {
		if o.To != "" && !slices.Contains(names, o.To) {
			names = append(names, o.To)
		}
	}
	return names
}

// Lookup names an object.
type Lookup struct {
	// Source is the name of the source that holds it.
	Source string `yaml:"source"`
	// Name is an expression over object.
	Name string `yaml:"name"`
}

// Target is a sink whose keys are made from names.
type Target interface {
	engine.Sink
	Key(name string) engine.Key
}

// Sync is a compiled Config.
type Sync struct {
	cfg     Config
	with    map[string]*expr.Program // the names of the objects that are read besides
	outputs []output
}

// output is a compiled Output.
type output struct {
	Output

	field string // in front of its fields' names in errors
	when  *expr.Program
	name  *expr.Program
	data  template
}

// Compile compiles the expressions and returns everything that is wrong, each with its field.
func Compile(cfg Config) (*Sync, error) {
	c, err := expr.NewCompiler("object", "with")
	if err != nil {
		return nil, err
	}
	alone, err := expr.NewCompiler("object")
	if err != nil {
		return nil, err
	}
	s := &Sync{cfg: cfg, with: make(map[string]*expr.Program)}
	var errs []error
	compiled := func(c *expr.Compiler, field, text string) *expr.Program {
		p, err := c.Compile(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", field, err))
		}
		return p
	}
	for name, l := range cfg.With {
		if l.Source == "" {
			errs = append(errs, fmt.Errorf("with.%s.source: the name of a source is required", name))
		}
		s.with[name] = compiled(alone, "with."+name+".name", cmp.Or(l.Name, "object.key.name"))
	}
	onDelete := make(map[string]string)
	for i, o := range append([]Output{cfg.Output}, cfg.Also...) {
		out := output{Output: o}
		if i > 0 {
			out.field = fmt.Sprintf("also.%d.", i-1)
		}
		compile := func(field, text string) *expr.Program { return compiled(c, out.field+field, text) }
		refuse := func(field, format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s%s: %s", out.field, field, fmt.Sprintf(format, args...)))
		}
		if o.To == "" {
			refuse("to", "the name of a sink is required")
		}
		if o.When != "" {
			out.when = compile("when", o.When)
		}
		out.name = compile("name", cmp.Or(o.Name, "object.key.name"))
		switch d := o.Data.(type) {
		case nil:
			refuse("data", "it is required; \"object.data\" copies the value")
		case string:
			out.data = expression{compile("data", strings.TrimSuffix(strings.TrimPrefix(d, "${"), "}"))}
		default:
			out.data = compileTemplate("data", d, compile)
		}
		if o.OnDelete != "" && o.OnDelete != "delete" && o.OnDelete != "orphan" {
			refuse("onDelete", "%q is neither delete nor orphan", o.OnDelete)
		}
		if o.OnConflict != "" && o.OnConflict != "fail" && o.OnConflict != "adopt" {
			refuse("onConflict", "%q is neither fail nor adopt", o.OnConflict)
		}
		now := cmp.Or(o.OnDelete, "delete")
		if before, ok := onDelete[o.To]; ok && before != now {
			refuse("onDelete", "it is %s, but %s for another output to %s", now, before, o.To)
		}
		onDelete[o.To] = now
		s.outputs = append(s.outputs, out)
	}
	return s, errors.Join(errs...)
}

// Named makes the keys of a source from names.
type Named interface{ Key(name string) engine.Key }

// Handler returns the handler that writes to targets. From are the sources of the objects that are read besides. Both are by their names.
func (s *Sync) Handler(targets map[string]Target, from map[string]Named) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		var object *engine.Object
		o, err := rt.Get(ctx, req.Key)
		switch {
		case err == nil:
			object = &o
		case !engine.IsNotFound(err):
			return engine.Result{}, err
		}
		with, err := s.read(ctx, rt, object, from)
		if err != nil {
			return engine.Result{}, err
		}
		state := make(map[string]State, len(targets))
		for name, target := range targets {
			owned, err := rt.Owned(ctx, target.Name())
			if err != nil {
				return engine.Result{}, err
			}
			state[name] = State{owned, target.Key}
		}
		effects, err := s.Effects(object, with, state)
		if err != nil {
			return engine.Result{}, engine.Terminal(err)
		}
		if err := rt.Do(ctx, effects...); errors.Is(err, engine.ErrInvalid) {
			return engine.Result{}, engine.Terminal(err)
		} else if err != nil {
			return engine.Result{}, err
		}
		return engine.Result{}, nil
	}
}

// read gets the objects that are read besides, without those that are not there.
func (s *Sync) read(ctx context.Context, rt engine.Runtime, object *engine.Object, from map[string]Named) (map[string]engine.Object, error) {
	if object == nil || len(s.with) == 0 {
		return nil, nil
	}
	view, err := viewOf(*object)
	if err != nil {
		return nil, engine.Terminal(err)
	}
	with := make(map[string]engine.Object, len(s.with))
	for name, program := range s.with {
		called, err := program.String(map[string]any{"object": view})
		if err != nil {
			return nil, engine.Terminal(prefixed("with."+name+".name", err))
		}
		o, err := rt.Get(ctx, from[s.cfg.With[name].Source].Key(called))
		if engine.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		with[name] = o
	}
	return with, nil
}

// State is what Effects must know of a sink.
type State struct {
	// Owned is what the object owns there now.
	Owned []engine.Key
	// Key makes the sink's keys.
	Key func(name string) engine.Key
}

// Effects returns what must be written so that the sinks, by their names, hold what they should for object, nil if it has gone, given their
// state and what else was read. It has no side effects. Its errors do not become right by trying again.
func (s *Sync) Effects(object *engine.Object, with map[string]engine.Object, state map[string]State) ([]engine.Effect, error) {
	var effects []engine.Effect
	wanted := make(map[engine.Key]bool, len(s.outputs))
	if object != nil {
		variables, err := s.variables(*object, with)
		if err != nil {
			return nil, err
		}
		for _, o := range s.outputs {
			want, err := o.want(variables, state[o.To].Key)
			if err != nil {
				return nil, err
			}
			if want == nil {
				continue
			}
			if wanted[want.Key] {
				return nil, fmt.Errorf("%sname: two outputs make %s", o.field, want.Key)
			}
			wanted[want.Key] = true
			effects = append(effects, engine.Effect{Object: *want, Adopt: o.OnConflict == "adopt"})
		}
	}
	looked := make(map[string]bool, len(state))
	for _, o := range s.outputs {
		if looked[o.To] {
			continue
		}
		looked[o.To] = true
		verb := engine.DeleteObject
		if object == nil && o.OnDelete == "orphan" {
			verb = engine.ReleaseObject
		}
		for _, k := range state[o.To].Owned {
			if !wanted[k] {
				effects = append(effects, engine.Effect{Verb: verb, Object: engine.Object{Key: k}})
			}
		}
	}
	return effects, nil
}

// variables are what expressions see.
func (s *Sync) variables(object engine.Object, with map[string]engine.Object) (map[string]any, error) {
	view, err := viewOf(object)
	if err != nil {
		return nil, err
	}
	others := make(map[string]any, len(s.with))
	for name := range s.with {
		others[name] = nil
		if o, ok := with[name]; ok {
			if others[name], err = viewOf(o); err != nil {
				return nil, prefixed("with."+name, err)
			}
		}
	}
	return map[string]any{"object": view, "with": others}, nil
}

// want returns the target that the variables call for, nil if none.
func (o *output) want(variables map[string]any, key func(name string) engine.Key) (*engine.Object, error) {
	if o.when != nil {
		if yes, err := o.when.Bool(variables); err != nil || !yes {
			return nil, prefixed(o.field+"when", err)
		}
	}
	name, err := o.name.String(variables)
	if err != nil {
		return nil, prefixed(o.field+"name", err)
	}
	if name == "" {
		return nil, fmt.Errorf("%sname: the expression comes to an empty name", o.field)
	}
	data, err := o.data.render(variables)
	if err != nil {
		return nil, fmt.Errorf("%s%w", o.field, err)
	}
	value, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("%sdata: %w", o.field, err)
	}
	return &engine.Object{Key: key(name), Value: value}, nil
}

func prefixed(field string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", field, err)
}

// viewOf returns what expressions see of an object.
func viewOf(o engine.Object) (map[string]any, error) {
	value, ok := o.Value.([]byte)
	if !ok {
		var err error
		if value, err = json.Marshal(o.Value); err != nil {
			return nil, fmt.Errorf("%s: %w", o.Key, err)
		}
	}
	data, err := expr.Decode(value)
	if err != nil {
		return nil, fmt.Errorf("the value of %s is %w", o.Key, err)
	}
	return map[string]any{
		"key":      map[string]any{"kind": o.Key.Kind.String(), "scope": o.Key.Scope, "namespace": o.Key.Namespace, "name": o.Key.Name},
		"revision": o.Revision, "labels": anyMap(o.Labels), "annotations": anyMap(o.Annotations), "data": data,
	}, nil
}

func anyMap(m map[string]string) map[string]any {
	out := make(map[string]any, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}
