package engine_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Messages as they are on buses by now, and beside them what a later version may have added: replicas of two versions work side by
// side during an update, and a restart finds what the former version left. Do not change them to make the test pass.
const (
	writtenRequest = `{"_watermill_delayed_until":"2026-01-02T04:04:05.000000006Z","traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"windlass-controller":"c","windlass-due":"2026-01-02T04:04:05.000000006Z","windlass-key":"nats/kv@main:orders/o%2F1","windlass-priority":"dependency",
		"windlass-type":"request/1","windlass-later-version":"x"}`
	writtenCauses = `{"causes":[{"trigger":"updated","operation":"put","key":"nats/kv@main:orders/o%2F1","revision":"7","time":"2026-01-02T03:04:05.000000006Z",
		"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","laterVersion":1}],"laterVersion":{}}`
	writtenState = `{"_watermill_delayed_until":"2026-01-02T03:04:05.000000006Z","traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"windlass-attempt":"3","windlass-controller":"c","windlass-due":"2026-01-02T03:04:05.000000006Z","windlass-key":"nats/kv@main:orders/o%2F1",
		"windlass-type":"state/1","windlass-later-version":"x"}`
	writtenStateBody = `{"causes":` + writtenCauses + `,"notBefore":"2026-01-02T03:04:05.000000006Z","retry":true,"priority":"dependency",
		"later":"2026-01-02T04:04:05.000000006Z","laterCauses":` + writtenCauses + `,"error":"broken","laterVersion":[]}`
	writtenEvent = `{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","windlass-incarnation":"u","windlass-key":"nats/kv@main:orders/o%2F1",
		"windlass-operation":"delete","windlass-revision":"8","windlass-routed-by":"shop","windlass-source":"orders","windlass-time":"2026-01-02T03:04:05.000000006Z",
		"windlass-type":"event/1","windlass-later-version":"x"}`
	writtenEventBody = `{"old":{"labels":{"a":"b"},"owner":"nats/kv@main:orders/o%2F1","laterVersion":1},"laterVersion":1}`
)

func written(t *testing.T, metadata, payload string) *message.Message {
	t.Helper()
	m := message.NewMessage("1", []byte(payload))
	require.NoError(t, json.Unmarshal([]byte(metadata), &m.Metadata))
	return m
}

func TestMessagesOfOtherVersionsAreRead(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	key := engine.Key{Kind: engine.KindOf("nats/kv"), Scope: "main", Namespace: "orders", Name: "o/1"}
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	cause := engine.Cause{Trigger: engine.Updated, Operation: engine.Put, Key: key, Revision: "7", Time: at, Traceparent: trace}

	r, err := engine.DecodeRequest(written(t, writtenRequest, writtenCauses))
	require.NoError(t, err)
	require.Equal(t, key, r.Key)
	require.Equal(t, "c", r.Controller)
	require.Equal(t, engine.PriorityDependency, r.Priority)
	require.Equal(t, at.Add(time.Hour), r.Due)
	require.Equal(t, []engine.Cause{cause}, r.Causes.All())

	s, err := engine.DecodeState(written(t, writtenState, writtenStateBody))
	require.NoError(t, err)
	require.Equal(t, []engine.Cause{cause}, s.Value.All())
	require.Equal(t, []engine.Cause{cause}, s.LaterValue.All())
	s.Value, s.LaterValue = engine.Causes{}, engine.Causes{}
	require.Equal(t, queue.State[engine.Key, engine.Causes]{
		Key: key, Attempt: 3, Due: at.UnixNano(), NotBefore: at.UnixNano(), Retry: true, Class: queue.Dependency, Later: at.Add(time.Hour).UnixNano(), Err: "broken",
	}, s)

	e, by, err := engine.DecodeEvent(written(t, writtenEvent, writtenEventBody))
	require.NoError(t, err)
	require.Equal(t, "shop", by)
	require.Equal(t, engine.Event{
		Source: "orders", Key: key, Operation: engine.Delete, Revision: "8", Incarnation: "u", Time: at, Traceparent: trace,
		Old: &engine.Meta{Labels: map[string]string{"a": "b"}, Owner: key},
	}, e)
}
