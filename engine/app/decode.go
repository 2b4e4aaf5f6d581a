package app

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/internal/nearest"
)

// Problem is one thing that is wrong with a configuration, and where.
type Problem struct {
	File    string
	Line    int
	Path    string
	Message string
}

// String prints the problem as compilers do.
func (p Problem) String() string {
	where := p.File
	if p.Line > 0 {
		where += ":" + strconv.Itoa(p.Line)
	}
	if p.Path != "" {
		where += ": " + p.Path
	}
	return where + ": " + p.Message
}

// Problems are all of them. It is an error if there are any.
type Problems []Problem

func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, x := range p {
		lines[i] = x.String()
	}
	return strings.Join(lines, "\n")
}

// decoder decodes YAML strictly: unknown and repeated keys and wrong types are problems, and it goes on after each.
type decoder struct {
	file     string
	problems Problems
}

func (d *decoder) fail(n *yaml.Node, path, format string, args ...any) {
	line := 0
	if n != nil {
		line = n.Line
	}
	path = index.ReplaceAllString(path, "[$1]")
	d.problems = append(d.problems, Problem{d.file, line, path, fmt.Sprintf(format, args...)})
}

// index is an element of a list in a dotted path.
var index = regexp.MustCompile(`\.(\d+)\b`)

// section is a value that keeps its node: a component whose type decides how it is decoded.
type section interface {
	decodeSection(d *decoder, n *yaml.Node, path string)
}

func at(path, field string) string {
	if path == "" {
		return field
	}
	return path + "." + field
}

// decode fills v, a pointer's target, from n.
func (d *decoder) decode(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if s, ok := reflect.TypeAssert[section](v.Addr()); ok {
		s.decodeSection(d, n, path)
		return
	}
	if o, ok := reflect.TypeAssert[interface {
		decodeOrigin(d *decoder, n *yaml.Node, path string)
	}](v.Addr()); ok {
		o.decodeOrigin(d, n, path)
	}
	if n.Tag == "!!null" && v.Kind() != reflect.Interface {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(n, v, path)
	case reflect.Map:
		d.decodeMap(n, v, path)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			d.fail(n, path, "want a list, got %s", shape(n))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, x := range n.Content {
			d.decode(x, v.Index(i), fmt.Sprintf("%s[%d]", path, i))
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.decode(n, v.Elem(), path)
	default:
		d.decodeScalar(n, v, path)
	}
}

func (d *decoder) decodeScalar(n *yaml.Node, v reflect.Value, path string) {
	if v.Type() == reflect.TypeFor[time.Duration]() {
		dur, err := time.ParseDuration(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil {
			d.fail(n, path, "want a duration such as 30s or 1m30s, got %s", shape(n))
			return
		}
		v.SetInt(int64(dur))
		return
	}
	if v.Kind() != reflect.Interface && n.Kind != yaml.ScalarNode {
		d.fail(n, path, "want %s, got %s", wanted(v), shape(n))
		return
	}
	// Text is what is written, whatever YAML would make of it: a name may be 42.
	if v.Kind() == reflect.String {
		v.SetString(n.Value)
		return
	}
	if err := n.Decode(v.Addr().Interface()); err != nil {
		d.fail(n, path, "want %s, got %s", wanted(v), shape(n))
	}
}

func wanted(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	case reflect.Float64:
		return "a number"
	default:
		return "a whole number"
	}
}

func shape(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	default:
		return strconv.Quote(n.Value)
	}
}

func (d *decoder) decodeMap(n *yaml.Node, v reflect.Value, path string) {
	v.Set(reflect.MakeMap(v.Type()))
	d.fields(n, path, func(key, value *yaml.Node) {
		x := reflect.New(v.Type().Elem()).Elem()
		d.decode(value, x, at(path, key.Value))
		v.SetMapIndex(reflect.ValueOf(key.Value), x)
	})
}

func (d *decoder) decodeStruct(n *yaml.Node, v reflect.Value, path string) {
	known := fieldsOf(v)
	d.fields(n, path, func(key, value *yaml.Node) {
		field, ok := known[key.Value]
		if !ok {
			names := make([]string, 0, len(known))
			for name := range known {
				names = append(names, name)
			}
			d.fail(key, path, "unknown key %q%s", key.Value, nearest.Hint(key.Value, names))
			return
		}
		d.decode(value, field, at(path, key.Value))
	})
}

// fields calls f for each key of a mapping, once.
func (d *decoder) fields(n *yaml.Node, path string, f func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "want a mapping, got %s", shape(n))
		return
	}
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if line, twice := seen[key.Value]; twice {
			d.fail(key, path, "key %q is there twice, first in line %d", key.Value, line)
			continue
		}
		seen[key.Value] = key.Line
		value := n.Content[i+1]
		if value.Kind == yaml.AliasNode {
			value = value.Alias
		}
		f(key, value)
	}
}

// fieldsOf returns the fields of a struct by their YAML names, those of inlined structs too.
func fieldsOf(v reflect.Value) map[string]reflect.Value {
	out := make(map[string]reflect.Value)
	for i := range v.NumField() {
		name, opts, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		switch {
		case opts == "inline":
			maps.Copy(out, fieldsOf(v.Field(i)))
		case name != "-" && name != "":
			out[name] = v.Field(i)
		}
	}
	return out
}

// invalid reports the errors of a Validate method under the fields that they begin with.
func (d *decoder) invalid(n *yaml.Node, path string, err error) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			d.invalid(n, path, e)
		}
		return
	}
	field, message, ok := strings.Cut(err.Error(), ": ")
	where, found := find(n, field)
	if !ok || !found && strings.ContainsAny(field, " \"") {
		d.fail(n, path, "%s", err)
		return
	}
	d.fail(where, at(path, field), "%s", message)
}

// find returns the node of a dotted field below n, or the nearest one above it. A component that is just a word has
// no node.
func find(n *yaml.Node, path string) (*yaml.Node, bool) {
	if n == nil {
		return nil, false
	}
	for name := range strings.SplitSeq(path, ".") {
		next := (*yaml.Node)(nil)
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		switch n.Kind {
		case yaml.MappingNode:
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == name {
					next = n.Content[i+1]
				}
			}
		case yaml.SequenceNode:
			if i, err := strconv.Atoi(name); err == nil && i < len(n.Content) {
				next = n.Content[i]
			}
		}
		if next == nil {
			return n, false
		}
		n = next
	}
	return n, true
}
