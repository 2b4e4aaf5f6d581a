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

func effects(t *testing.T, cfg sync.Output, o *engine.Object, owned ...engine.Key) ([]engine.Effect, error) {
	t.Helper()
	cfg.To = "shipments"
	s, err := sync.Compile(sync.Config{Output: cfg})
	require.NoError(t, err)
	return s.Effects(o, nil, map[string]sync.State{"shipments": {Owned: owned, Key: target}})
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
		got, err := effects(t, sync.Output{Data: c.data}, order(`{"q":3,"p":2.5,"s":"x"}`))
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, target("o1"), got[0].Object.Key)
		require.JSONEq(t, c.want, string(got[0].Object.Value.([]byte)))
	}
}

func TestEffects(t *testing.T) {
	copying := sync.Output{Data: "object.data"}
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
		cfg    sync.Output
		object *engine.Object
		owned  []engine.Key
		want   string
	}{
		{"it is applied", copying, order(`{}`), nil, "apply o1;"},
		{"again, while owned", copying, order(`{}`), []engine.Key{target("o1")}, "apply o1;"},
		{"a new name deletes the former target", copying, order(`{}`), []engine.Key{old}, "apply o1;delete old;"},
		{"gone", copying, nil, []engine.Key{target("o1")}, "delete o1;"},
		{"gone, never owned", copying, nil, nil, ""},
		{"gone, orphaned", sync.Output{Data: "1", OnDelete: "orphan"}, nil, []engine.Key{target("o1")}, "release o1;"},
		{"orphan is not for a former name", sync.Output{Data: "1", OnDelete: "orphan"}, order(`{}`), []engine.Key{old}, "apply o1;delete old;"},
		{"when is false", sync.Output{Data: "1", When: "false"}, order(`{}`), []engine.Key{target("o1")}, "delete o1;"},
		{"when is true", sync.Output{Data: "1", When: `object.data.s != "draft"`}, order(`{"s":"paid"}`), nil, "apply o1;"},
		{"named", sync.Output{Data: "1", Name: `"for-" + object.key.name`}, order(`{}`), nil, "apply for-o1;"},
	} {
		got, err := effects(t, c.cfg, c.object, c.owned...)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, verbs(got), c.name)
	}
}

func TestWhatCannotBecomeRightIsAnError(t *testing.T) {
	for _, c := range []struct {
		cfg    sync.Output
		object string
		want   string
	}{
		{sync.Output{Data: "object.data"}, `{`, "not JSON"},
		{sync.Output{Data: "object.data.missing"}, `{}`, "has()"},
		{sync.Output{Data: map[string]any{"a": map[string]any{"b": "${object.data.x}"}}}, `{}`, "data.a.b: expression"},
		{sync.Output{Data: "1", When: `"yes"`}, `{}`, "when: expression"},
		{sync.Output{Data: "1", Name: `""`}, `{}`, "empty name"},
		{sync.Output{Data: "1", Name: `1`}, `{}`, "not to text"},
	} {
		_, err := effects(t, c.cfg, order(c.object))
		require.ErrorContains(t, err, c.want)
	}
}

func TestCompileReportsEverythingAtOnce(t *testing.T) {
	wrong := sync.Output{When: "object.", Name: "1 +", OnDelete: "keep", OnConflict: "steal", Data: map[string]any{"x": "${nope}", "y": "${object"}}
	_, err := sync.Compile(sync.Config{Output: wrong, Also: []sync.Output{wrong}})
	for _, want := range []string{"to: ", "when: ", "name: ", "onDelete: ", "onConflict: ", "data.x: ", "data.y: "} {
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "also.0."+want)
	}
	_, err = sync.Compile(sync.Config{Output: sync.Output{To: "x"}})
	require.ErrorContains(t, err, "data: it is required")
}

func TestSeveralOutputs(t *testing.T) {
	other := func(name string) engine.Key { return engine.Key{Kind: engine.KindOf("k8s/Service"), Name: name} }
	compile := func(also ...sync.Output) (*sync.Sync, error) {
		return sync.Compile(sync.Config{Output: sync.Output{To: "a", Data: "1"}, Also: also})
	}
	s, err := compile(
		sync.Output{To: "b", Data: "2", When: "object.data.b", OnDelete: "orphan"}, sync.Output{To: "a", Data: "3", Name: "'second'", OnConflict: "adopt"},
	)
	require.NoError(t, err)
	state := map[string]sync.State{"a": {Owned: []engine.Key{target("o1"), target("former")}, Key: target}, "b": {Owned: []engine.Key{other("o1")}, Key: other}}
	got, err := s.Effects(order(`{"b": true}`), nil, state)
	require.NoError(t, err)
	require.Equal(t, []engine.Effect{
		{Object: engine.Object{Key: target("o1"), Value: []byte("1")}},
		{Object: engine.Object{Key: other("o1"), Value: []byte("2")}},
		{Object: engine.Object{Key: target("second"), Value: []byte("3")}, Adopt: true},
		{Verb: engine.DeleteObject, Object: engine.Object{Key: target("former")}},
	}, got)
	got, err = s.Effects(nil, nil, state)
	require.NoError(t, err)
	require.Equal(t, []engine.Effect{
		{Verb: engine.DeleteObject, Object: engine.Object{Key: target("o1")}},
		{Verb: engine.DeleteObject, Object: engine.Object{Key: target("former")}},
		{Verb: engine.ReleaseObject, Object: engine.Object{Key: other("o1")}},
	}, got)
	got, err = s.Effects(order(`{"b": false}`), nil, state)
	require.NoError(t, err)
	require.Contains(t, got, engine.Effect{Verb: engine.DeleteObject, Object: engine.Object{Key: other("o1")}})
	_, err = s.Effects(order(`{}`), nil, state)
	require.ErrorContains(t, err, "also.0.when: ")

	s, err = compile(sync.Output{To: "a", Data: "2"})
	require.NoError(t, err)
	_, err = s.Effects(order(`{}`), nil, state)
	require.ErrorContains(t, err, "also.0.name: two outputs make nats/kv:shipments/o1")
	_, err = compile(sync.Output{To: "a", Data: "2", OnDelete: "orphan"})
	require.ErrorContains(t, err, "also.0.onDelete: it is orphan, but delete for another output to a")
	require.Equal(t, []string{"a", "b"}, sync.Config{Output: sync.Output{To: "a"}, Also: []sync.Output{{To: "b"}, {To: "a"}}}.Sinks())
}

func FuzzTemplate(f *testing.F) {
	f.Add("a ${object.data.q} b", `{"q":1}`)
	f.Add("$${x", `[]`)
	f.Fuzz(func(t *testing.T, text, value string) {
		s, err := sync.Compile(sync.Config{Output: sync.Output{To: "x", Data: map[string]any{"t": text}}})
		if err != nil {
			return
		}
		got, err := s.Effects(order(value), nil, map[string]sync.State{"x": {Key: target}})
		if err == nil {
			require.True(t, json.Valid(got[0].Object.Value.([]byte)))
		}
	})
}
