package engine_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// anyText draws text of every sort: printable, odd, not even UTF-8.
func anyText(t *rapid.T, label string) string {
	return string(rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, label))
}

func anyKey(t *rapid.T) engine.Key {
	k := engine.Key{Kind: engine.KindOf(anyText(t, "kind")), Name: anyText(t, "name")}
	if rapid.Bool().Draw(t, "scoped") {
		k.Scope = anyText(t, "scope")
	}
	if rapid.Bool().Draw(t, "namespaced") {
		k.Namespace = anyText(t, "namespace")
	}
	return k
}

func TestEveryKeyIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := anyKey(t)
		got, err := engine.ParseKey(k.String())
		require.NoError(t, err)
		require.Equal(t, k, got)
		require.NotContains(t, k.String(), " ")
		require.NotContains(t, k.String(), "\n")
	})
}

func TestKeyText(t *testing.T) {
	for _, c := range []struct {
		key  engine.Key
		text string
	}{
		{engine.Key{Kind: engine.KindOf("k8s/apps/Deployment"), Scope: "prod", Namespace: "default", Name: "web"}, "k8s/apps/Deployment@prod:default/web"},
		{engine.Key{Kind: engine.KindOf("consul/kv"), Name: "flags/a b"}, "consul/kv:flags%2Fa%20b"},
		{engine.Key{Kind: engine.KindOf("nats/kv"), Namespace: "orders", Name: "é.%\xff"}, "nats/kv:orders/é.%25%FF"},
	} {
		require.Equal(t, c.text, c.key.String())
		got, err := engine.ParseKey(c.text)
		require.NoError(t, err)
		require.Equal(t, c.key, got)
	}
}

func TestBadKeysSayWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"": "no colon", "orders/a": "no colon", ":a": "the kind is empty", "k:": "the name is empty", "k@:a": "the scope is empty",
		"k:/a": "the namespace is empty", "k:a%": "cut short", "k:a%zz": "not a hexadecimal escape", "k%4:a": "cut short",
	} {
		_, err := engine.ParseKey(text)
		require.ErrorContains(t, err, want, text)
		require.ErrorContains(t, err, "kind[@scope]:[namespace/]name")
	}
}

func anyCause(t *rapid.T) engine.Cause {
	return engine.Cause{
		Trigger: engine.Trigger(rapid.IntRange(0, int(engine.Manual)).Draw(t, "trigger")), Key: anyKey(t),
		Operation: engine.Operation(rapid.IntRange(0, int(engine.Resync)).Draw(t, "operation")), Revision: rapid.StringMatching(`[0-9]{0,5}`).Draw(t, "revision"),
		Time: time.Unix(0, rapid.Int64Range(1, 1<<62).Draw(t, "time")).UTC(),
	}
}

func anyCauses(t *rapid.T) engine.Causes {
	var c engine.Causes
	for range rapid.IntRange(0, 12).Draw(t, "causes") {
		c.Join(engine.CausesOf(anyCause(t)))
	}
	return c
}

func TestMessagesAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := engine.Event{
			Source: "things", Key: anyKey(t), Operation: engine.Operation(rapid.IntRange(0, int(engine.Resync)).Draw(t, "operation")),
			Revision: "7", Incarnation: "u", Time: time.Unix(1, 2).UTC(), Traceparent: "00-0-0-0", Repaired: rapid.Bool().Draw(t, "repaired"),
			New: &engine.Meta{Labels: map[string]string{"a": "b"}, Owner: anyKey(t)},
		}
		m, err := engine.EncodeEvent(e, "me")
		require.NoError(t, err)
		got, by, err := engine.DecodeEvent(m)
		require.NoError(t, err)
		require.Equal(t, e, got)
		require.Equal(t, "me", by)

		r := engine.Request{
			Controller: "c", Key: anyKey(t), Causes: anyCauses(t), Due: time.Unix(5, 6).UTC(), Manual: rapid.Bool().Draw(t, "manual"), Deletion: rapid.Bool().Draw(t, "deletion"),
			Priority: engine.Priority(rapid.IntRange(0, 2).Draw(t, "priority")),
		}
		m, err = engine.EncodeRequest(r)
		require.NoError(t, err)
		require.Equal(t, m.Metadata["windlass-due"], m.Metadata["_watermill_delayed_until"])
		back, err := engine.DecodeRequest(m)
		require.NoError(t, err)
		require.Equal(t, r.Causes.All(), back.Causes.All())
		require.Equal(t, r.Causes.Count(), back.Causes.Count())
		back.Causes = r.Causes
		require.Equal(t, r, back)

		s := queue.State[engine.Key, engine.Causes]{
			Key: anyKey(t), Value: anyCauses(t), Attempt: rapid.IntRange(0, 99).Draw(t, "attempt"), Due: 7, NotBefore: 8, Retry: true,
			Class: queue.List, Later: 9, LaterValue: anyCauses(t), Parked: rapid.Bool().Draw(t, "parked"), Err: "why\nnot",
		}
		m, err = engine.EncodeState("c", s)
		require.NoError(t, err)
		state, err := engine.DecodeState(m)
		require.NoError(t, err)
		require.Equal(t, s.Value.All(), state.Value.All())
		require.Equal(t, s.LaterValue.All(), state.LaterValue.All())
		state.Value, state.LaterValue = s.Value, s.LaterValue
		require.Equal(t, s, state)
	})
}

func TestMalformedMessagesAreToldFromGoodOnes(t *testing.T) {
	good, err := engine.EncodeRequest(engine.Request{Controller: "c", Key: engine.Key{Kind: engine.KindOf("k"), Name: "n"}})
	require.NoError(t, err)
	for field, bad := range map[string]string{
		"windlass-type": "request/2", "windlass-key": "nope", "windlass-priority": "urgent", "windlass-due": "tomorrow",
	} {
		m := good.Copy()
		m.Metadata = maps.Clone(good.Metadata)
		m.Metadata[field] = bad
		_, err := engine.DecodeRequest(m)
		require.ErrorIs(t, err, engine.ErrMalformed)
		require.ErrorContains(t, err, field)
	}
	m := good.Copy()
	m.Payload = []byte("{")
	_, err = engine.DecodeRequest(m)
	require.ErrorIs(t, err, engine.ErrMalformed)
}

func TestLongErrorsAreCut(t *testing.T) {
	m, err := engine.EncodeState("c", queue.State[engine.Key, engine.Causes]{
		Key: engine.Key{Kind: engine.KindOf("k"), Name: "n"}, Parked: true, Err: strings.Repeat("x", 1<<20),
	})
	require.NoError(t, err)
	require.Less(t, len(m.Payload), 8<<10)
}

func FuzzParseKey(f *testing.F) {
	f.Add("nats/kv@main:orders/a%20b")
	f.Add("k:%")
	f.Fuzz(func(t *testing.T, s string) {
		k, err := engine.ParseKey(s)
		if err != nil {
			return
		}
		again, err := engine.ParseKey(k.String())
		require.NoError(t, err)
		require.Equal(t, k, again)
	})
}

func FuzzDecode(f *testing.F) {
	f.Add("request/1", "k:n", "live", "2026-01-01T00:00:00Z", "0", []byte(`{"causes":[]}`))
	f.Add("event/1", "k:n", "put", "", "1", []byte(`{"new":{"owner":"k:n"}}`))
	f.Add("request/1", "k:n", "live", "", "0", []byte(`{"causes":[{"key":"k:m"}],"lineage":{"0":[{"controller":"c","key":"k:n","loops":-3}],"7":[]}}`))
	f.Add("state/1", "k:n", "list", "", "3", []byte(`{"causes":{"causes":[{"key":"k:n"}],"count":9},"parked":true}`))
	f.Fuzz(func(t *testing.T, typ, key, word, at, n string, payload []byte) {
		m := message.NewMessage("", payload)
		maps.Copy(m.Metadata, map[string]string{
			"windlass-type": typ, "windlass-key": key, "windlass-priority": word, "windlass-operation": word,
			"windlass-due": at, "windlass-time": at, "windlass-attempt": n,
		})
		if r, err := engine.DecodeRequest(m); err == nil {
			_, err = engine.EncodeRequest(r)
			require.NoError(t, err)
		}
		if e, _, err := engine.DecodeEvent(m); err == nil {
			_, err = engine.EncodeEvent(e, "")
			require.NoError(t, err)
		}
		if s, err := engine.DecodeState(m); err == nil {
			_, err = engine.EncodeState("c", s)
			require.NoError(t, err)
		}
	})
}
