// Package expr evaluates CEL expressions over JSON values.
//
// Numbers are those of JSON: an integer is an int, any other a double, and arithmetic between the two works, which
// standard CEL refuses. A field that is missing is an error that names has().
package expr

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/env"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
	"cel.dev/cel-go/ext"
)

// Program is a compiled expression. It is safe for concurrent use.
type Program struct {
	text    string
	program cel.Program
}

// Compiler compiles expressions over a fixed set of variables.
type Compiler struct{ env *cel.Env }

// NewCompiler returns a compiler of expressions over these variables, each of which may hold any JSON value.
func NewCompiler(variables ...string) (*Compiler, error) {
	opts := []cel.EnvOption{
		cel.StdLib(cel.StdLibSubset(&env.LibrarySubset{ExcludeFunctions: []*env.Function{
			{Name: "_+_"}, {Name: "_-_"}, {Name: "_*_"}, {Name: "_/_"}, {Name: "_%_"},
		}})),
		cel.CrossTypeNumericComparisons(true),
		ext.Strings(), ext.Math(), ext.Lists(), ext.Encoders(),
	}
	opts = append(opts, arithmetic()...)
	for _, v := range variables {
		opts = append(opts, cel.Variable(v, cel.DynType))
	}
	e, err := cel.NewCustomEnv(opts...)
	if err != nil {
		return nil, fmt.Errorf("expressions: %w", err)
	}
	return &Compiler{e}, nil
}

// costLimit bounds what one evaluation may do, so that no expression can hold a worker.
const costLimit = 1_000_000

// Compile compiles one expression. The error shows where it is wrong.
func (c *Compiler) Compile(text string) (*Program, error) {
	ast, issues := c.env.Compile(text)
	if issues.Err() != nil {
		var lines []string
		for _, e := range issues.Errors() {
			lines = append(lines, fmt.Sprintf("column %d: %s", e.Location.Column()+1, e.Message))
		}
		return nil, fmt.Errorf("expression %q: %s", text, strings.Join(lines, "; "))
	}
	p, err := c.env.Program(ast, cel.CostLimit(costLimit))
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", text, err)
	}
	return &Program{text, p}, nil
}

// Eval evaluates the expression and returns a JSON value: nil, bool, int64, float64, string, []any or map[string]any.
func (p *Program) Eval(variables map[string]any) (any, error) {
	v, _, err := p.program.Eval(variables)
	if err == nil {
		var out any
		if out, err = native(v); err == nil {
			return out, nil
		}
	}
	if strings.HasPrefix(err.Error(), "no such key") {
		return nil, fmt.Errorf("expression %q: %w: if the field may be missing, test it with has()", p.text, err)
	}
	return nil, fmt.Errorf("expression %q: %w", p.text, err)
}

// String evaluates the expression, which must come to a string.
func (p *Program) String(variables map[string]any) (string, error) {
	v, err := p.Eval(variables)
	if err != nil {
		return "", err
	}
	s, ok := v.(string)
	if !ok {
		return "", fmt.Errorf("expression %q: it comes to %s, not to text", p.text, describe(v))
	}
	return s, nil
}

// Bool evaluates the expression, which must come to true or false.
func (p *Program) Bool(variables map[string]any) (bool, error) {
	v, err := p.Eval(variables)
	if err != nil {
		return false, err
	}
	b, ok := v.(bool)
	if !ok {
		return false, fmt.Errorf("expression %q: it comes to %s, not to true or false", p.text, describe(v))
	}
	return b, nil
}

// Strings evaluates the expression, which must come to a list of texts.
func (p *Program) Strings(variables map[string]any) ([]string, error) {
	v, err := p.Eval(variables)
	if err != nil {
		return nil, err
	}
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("expression %q: it comes to %s, not to a list of texts", p.text, describe(v))
	}
	out := make([]string, len(list))
	for i, x := range list {
		if out[i], ok = x.(string); !ok {
			return nil, fmt.Errorf("expression %q: element %d is %s, not text", p.text, i, describe(x))
		}
	}
	return out, nil
}

func describe(v any) string {
	b, err := json.Marshal(v)
	if err != nil || len(b) > 60 {
		return fmt.Sprintf("a %T", v)
	}
	return string(b)
}

// Decode reads one JSON value as expressions see it.
func Decode(data []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("not JSON: something follows the value")
	}
	return numbers(v), nil
}

// numbers turns json.Number into int64 where it is one, else float64.
func numbers(v any) any {
	switch v := v.(type) {
	case json.Number:
		if i, err := v.Int64(); err == nil {
			return i
		}
		f, err := v.Float64()
		if err != nil {
			return v.String() // out of every range: kept to the letter
		}
		return f
	case []any:
		for i := range v {
			v[i] = numbers(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = numbers(v[k])
		}
	}
	return v
}

// native turns a CEL value into a JSON value.
func native(v ref.Val) (any, error) {
	switch v := v.(type) {
	case types.Null:
		return nil, nil
	case types.Bool:
		return bool(v), nil
	case types.Int:
		return int64(v), nil
	case types.Uint:
		if uint64(v) > math.MaxInt64 {
			return nil, fmt.Errorf("%d is too large for JSON", uint64(v))
		}
		return int64(v), nil //nolint:gosec // looked at above.
	case types.Double:
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return nil, fmt.Errorf("%g is not a number of JSON", f)
		}
		return float64(v), nil
	case types.String:
		return string(v), nil
	case types.Bytes:
		return []byte(v), nil
	case types.Timestamp:
		return v.Format(time.RFC3339Nano), nil
	case types.Duration:
		return v.String(), nil
	case *types.Err:
		return nil, v
	case traits.Lister:
		out := []any{}
		for it := v.Iterator(); it.HasNext() == types.True; {
			x, err := native(it.Next())
			if err != nil {
				return nil, err
			}
			out = append(out, x)
		}
		return out, nil
	case traits.Mapper:
		return nativeMap(v)
	default:
		return nil, fmt.Errorf("a %s has no form in JSON", v.Type().TypeName())
	}
}

func nativeMap(m traits.Mapper) (any, error) {
	out := map[string]any{}
	for it := m.Iterator(); it.HasNext() == types.True; {
		k := it.Next()
		name, ok := k.(types.String)
		if !ok {
			return nil, fmt.Errorf("a map's key must be text for JSON, not %s", k.Type().TypeName())
		}
		x, err := native(m.Get(k))
		if err != nil {
			return nil, err
		}
		out[string(name)] = x
	}
	return out, nil
}
