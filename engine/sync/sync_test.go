package sync_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/sync"
)

func target(name string) engine.Key {
	return engine.Key{Kind: engine.KindOf("nats/kv"), Namespace: "shipments", Name: name}
}

func order(value string) *engine.Object {
	return &engine.Object{
		Key:   engine.Key{Kind: engine.KindOf("nats/kv"), Namespace: "orders", Name: "o1"},
		Value: []byte(value),
	}
}

func effects(t *testing.T, cfg sync.Config, o *engine.Object, owned ...engine.Key) ([]engine.Effect, error) {
	t.Helper()
	cfg.To = "shipments"
	s, err := sync.Compile(cfg)
	require.NoError(t, err)
	return s.Effects(o, nil, owned, target)
}

func TestTemplates(t *testing.T) {
	for _, c := range []struct {
		data any
		want string
	}{
		{"object.data", `{"p":2.5,"q":3,"s":"x"}`},
		{"${object.data.q}", `3`},
		{map[string]any{"total": "${object.data.q * object.data.p}", "n": 1}, `{"n":1,"total":7.5}`},
		{map[string]any{"t": "order ${object.key.name} of ${object.data.q}!"}, `{"t":"order o1 of 3!"}`},
		{map[string]any{"t": "$${literal}", "u": "a } b"}, `{"t":"${literal}","u":"a } b"}`},
		{map[string]any{"m": `${ {"a": "}"} }`}, `{"m":{"a":"}"}}`},
		{[]any{"${object.data.s}", true, nil}, `["x",true,null]`},
	} {
		got, err := effects(t, sync.Config{Data: c.data}, order(`{"q":3,"p":2.5,"s":"x"}`))
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, target("o1"), got[0].Object.Key)
		require.JSONEq(t, c.want, string(got[0].Object.Value.([]byte)))
	}
}

func TestEffects(t *testing.T) {
	copying := sync.Config{Data: "object.data"}
	old := target("old")
	verbs := func(e []engine.Effect) string {
		out := ""
		for _, x := range e {
			out += x.Verb.String() + " " + x.Object.Key.Name + ";"
		}
		return out
	}
	for _, c := range []struct {
		name   string
		cfg    sync.Config
		object *engine.Object
		owned  []engine.Key
		want   string
	}{
		{"it is applied", copying, order(`{}`), nil, "apply o1;"},
		{"again, while owned", copying, order(`{}`), []engine.Key{target("o1")}, "apply o1;"},
		{"a new name deletes the former target", copying, order(`{}`), []engine.Key{old}, "apply o1;delete old;"},
		{"gone", copying, nil, []engine.Key{target("o1")}, "delete o1;"},
		{"gone, never owned", copying, nil, nil, ""},
		{"gone, orphaned", sync.Config{Data: "1", OnDelete: "orphan"}, nil, []engine.Key{target("o1")}, "release o1;"},
		{"orphan is not for a former name", sync.Config{Data: "1", OnDelete: "orphan"}, order(`{}`), []engine.Key{old}, "apply o1;delete old;"},
		{"when is false", sync.Config{Data: "1", When: "false"}, order(`{}`), []engine.Key{target("o1")}, "delete o1;"},
		{"when is true", sync.Config{Data: "1", When: `object.data.s != "draft"`}, order(`{"s":"paid"}`), nil, "apply o1;"},
		{"named", sync.Config{Data: "1", Name: `"for-" + object.key.name`}, order(`{}`), nil, "apply for-o1;"},
	} {
		got, err := effects(t, c.cfg, c.object, c.owned...)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, verbs(got), c.name)
	}
}

func TestWhatCannotBecomeRightIsAnError(t *testing.T) {
	for _, c := range []struct {
		cfg    sync.Config
		object string
		want   string
	}{
		{sync.Config{Data: "object.data"}, `{`, "not JSON"},
		{sync.Config{Data: "object.data.missing"}, `{}`, "has()"},
		{sync.Config{Data: map[string]any{"a": map[string]any{"b": "${object.data.x}"}}}, `{}`, "data.a.b: expression"},
		{sync.Config{Data: "1", When: `"yes"`}, `{}`, "when: expression"},
		{sync.Config{Data: "1", Name: `""`}, `{}`, "empty name"},
		{sync.Config{Data: "1", Name: `1`}, `{}`, "not to text"},
	} {
		_, err := effects(t, c.cfg, order(c.object))
		require.ErrorContains(t, err, c.want)
	}
}

func TestCompileReportsEverythingAtOnce(t *testing.T) {
	_, err := sync.Compile(sync.Config{
		When: "object.", Name: "1 +", OnDelete: "keep", OnConflict: "steal", Data: map[string]any{"x": "${nope}", "y": "${object"},
	})
	for _, want := range []string{"to: ", "when: ", "name: ", "onDelete: ", "onConflict: ", "data.x: ", "data.y: "} {
		require.ErrorContains(t, err, want)
	}
	_, err = sync.Compile(sync.Config{To: "x"})
	require.ErrorContains(t, err, "data: it is required")
}

func FuzzTemplate(f *testing.F) {
	f.Add("a ${object.data.q} b", `{"q":1}`)
	f.Add("$${x", `[]`)
	f.Fuzz(func(t *testing.T, text, value string) {
		s, err := sync.Compile(sync.Config{To: "x", Data: map[string]any{"t": text}})
		if err != nil {
			return
		}
		got, err := s.Effects(order(value), nil, nil, target)
		if err == nil {
			require.True(t, json.Valid(got[0].Object.Value.([]byte)))
		}
	})
}
