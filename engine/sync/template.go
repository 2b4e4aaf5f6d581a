package sync

import (
	"encoding/json"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/windlass-dev/windlass/engine/expr"
)

// template is a JSON value with expressions in it.
type template interface {
	render(variables map[string]any) (any, error)
}

type (
	constant   struct{ value any }
	expression struct{ program *expr.Program }
	// text is constants and expressions in turn, joined into one string.
	text   []template
	list   []field
	object []field
	field  struct {
		name, path string
		value      template
	}
)

func (c constant) render(map[string]any) (any, error) { return c.value, nil }

func (e expression) render(variables map[string]any) (any, error) { return e.program.Eval(variables) }

func (t text) render(variables map[string]any) (any, error) {
	var b strings.Builder
	for _, part := range t {
		v, err := part.render(variables)
		if err != nil {
			return nil, err
		}
		if s, ok := v.(string); ok {
			b.WriteString(s)
			continue
		}
		j, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("part of a text: %w", err)
		}
		b.Write(j)
	}
	return b.String(), nil
}

func (l list) render(variables map[string]any) (any, error) {
	out := make([]any, len(l))
	for i, f := range l {
		v, err := f.render(variables)
		if err != nil {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}

func (o object) render(variables map[string]any) (any, error) {
	out := make(map[string]any, len(o))
	for _, f := range o {
		v, err := f.render(variables)
		if err != nil {
			return nil, err
		}
		out[f.name] = v
	}
	return out, nil
}

func (f field) render(variables map[string]any) (any, error) {
	v, err := f.value.render(variables)
	if err != nil {
		if _, leaf := f.value.(expression); !leaf {
			if _, leaf := f.value.(text); !leaf {
				return nil, err // it names the inner field already
			}
		}
		return nil, fmt.Errorf("%s: %w", f.path, err)
	}
	return v, nil
}

// compileTemplate compiles a decoded YAML value. compile reports what is wrong under the path of its field.
func compileTemplate(path string, v any, compile func(path, text string) *expr.Program) template {
	switch v := v.(type) {
	case map[string]any:
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		sort.Strings(names)
		out := make(object, 0, len(v))
		for _, name := range names {
			p := path + "." + name
			out = append(out, field{name, p, compileTemplate(p, v[name], compile)})
		}
		return out
	case []any:
		out := make(list, 0, len(v))
		for i, x := range v {
			p := path + "." + strconv.Itoa(i)
			out = append(out, field{"", p, compileTemplate(p, x, compile)})
		}
		return out
	case string:
		return compileText(path, v, compile)
	default:
		return constant{v}
	}
}

// compileText compiles a string: ${…} alone is its value as it is, ${…} within text is joined to it, $${ is ${.
func compileText(path, s string, compile func(path, text string) *expr.Program) template {
	var parts text
	var plain strings.Builder
	flush := func() {
		if plain.Len() > 0 {
			parts = append(parts, constant{plain.String()})
			plain.Reset()
		}
	}
	for i := 0; i < len(s); {
		switch {
		case strings.HasPrefix(s[i:], "$${"):
			plain.WriteString("${")
			i += 3
		case strings.HasPrefix(s[i:], "${"):
			end := closing(s[i+2:])
			if end < 0 {
				compile(path, s[i+2:]+" <- the } that ends ${ is missing")
				return constant{s}
			}
			flush()
			parts = append(parts, expression{compile(path, s[i+2:i+2+end])})
			i += 2 + end + 1
		default:
			plain.WriteByte(s[i])
			i++
		}
	}
	flush()
	switch {
	case len(parts) == 0:
		return constant{""}
	case len(parts) == 1:
		return parts[0]
	default:
		return parts
	}
}

// closing returns where the brace is that ends an expression: braces nest, and those in quotes do not count.
func closing(s string) int {
	depth := 0
	var quote byte
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quote != 0 && c == '\\':
			i++
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case c == '{':
			depth++
		case c == '}' && depth == 0:
			return i
		case c == '}':
			depth--
		}
	}
	return -1
}
