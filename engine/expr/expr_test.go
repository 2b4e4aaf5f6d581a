package expr_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine/expr"
)

func eval(t *testing.T, text, object string) (string, error) {
	t.Helper()
	c, err := expr.NewCompiler("object")
	require.NoError(t, err)
	p, err := c.Compile(text)
	if err != nil {
		return "", err
	}
	o, err := expr.Decode([]byte(object))
	require.NoError(t, err)
	v, err := p.Eval(map[string]any{"object": o})
	if err != nil {
		return "", err
	}
	out, err := json.Marshal(v)
	require.NoError(t, err)
	return string(out), nil
}

func TestEval(t *testing.T) {
	for _, c := range []struct{ text, object, want string }{
		{`object.q * object.p`, `{"q":2,"p":3}`, `6`},
		{`object.q * object.p`, `{"q":3,"p":2.5}`, `7.5`},
		{`object.p * object.q`, `{"q":3,"p":2.5}`, `7.5`},
		{`object.q + 1 - 0.5`, `{"q":3}`, `3.5`},
		{`object.q / 2`, `{"q":7}`, `3`},
		{`object.q / 2.0`, `{"q":7}`, `3.5`},
		{`object.q % 4`, `{"q":7}`, `3`},
		{`-object.q`, `{"q":7}`, `-7`},
		{`object.q > 2.5 && object.q == 3.0`, `{"q":3}`, `true`},
		{`object.a + "-" + object.b`, `{"a":"x","b":"y"}`, `"x-y"`},
		{`[1] + object.l`, `{"l":[2,"x"]}`, `[1,2,"x"]`},
		{`has(object.missing) ? object.missing : "none"`, `{}`, `"none"`},
		{`object`, `{"n":9007199254740993,"f":0.1,"z":null,"l":[true]}`, `{"f":0.1,"l":[true],"n":9007199254740993,"z":null}`},
		{`object.l.map(x, x * 2)`, `{"l":[1,2.5]}`, `[2,5]`},
		{`timestamp("2026-01-01T00:00:00Z") + duration("1h")`, `{}`, `"2026-01-01T01:00:00Z"`},
	} {
		got, err := eval(t, c.text, c.object)
		require.NoError(t, err, c.text)
		require.Equal(t, c.want, got, c.text)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	for _, c := range []struct{ text, object, want string }{
		{`object.missing`, `{}`, "has()"},
		{`object.q *`, `{}`, "column 11"},
		{`objekt.q`, `{}`, "undeclared reference to 'objekt'"},
		{`"a" + 1`, `{}`, "no matching overload"},
		{`object.a + 1`, `{"a":"x"}`, "no such overload"},
		{`object.q / 0`, `{"q":1}`, "division by zero"},
		{`1.0 / object.q`, `{"q":0}`, "not a number of JSON"},
		{`9223372036854775807 + object.q`, `{"q":1}`, "overflow"},
	} {
		_, err := eval(t, c.text, c.object)
		require.ErrorContains(t, err, c.want, c.text)
	}
}

func TestDecodeRefusesWhatIsNotOneValue(t *testing.T) {
	for _, bad := range []string{"", "{", "{} {}", "nope", "\xff"} {
		_, err := expr.Decode([]byte(bad))
		require.ErrorContains(t, err, "not JSON", "%q", bad)
	}
}
