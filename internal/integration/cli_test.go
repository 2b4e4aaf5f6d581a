package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

func TestCommandLine(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	const head = "apiVersion: windlass.dev/v1alpha1\nkind: Engine\n"
	const rest = "sources: [{name: a, nats: {bucket: a%s}}]\nsinks: [{name: b, nats: {bucket: b, create: true}}]\n" +
		"controllers: [{name: c, for: a, handler: {sync: {to: b, data: object.data}}}]\nserver: {health: \"off\", metrics: \"off\", admin: {address: \"off\"}}\n"
	write("good.yaml", head+fmt.Sprintf(rest, ", create: true"))
	write("nobucket.yaml", head+fmt.Sprintf(rest, ""))
	write("unreachable.yaml", head+"connections: {main: {nats: {url: \"nats://127.0.0.1:1\"}}}\nbus: {nats: {connection: main}}\n"+fmt.Sprintf(rest, ""))
	write("bad.yaml", head+`
connections: { main: { nats: { url: nonsense, tokn: x } } }
bus: { nats: { connection: mian, sync: maybe } }
sources: [ { name: a, nats: { bucket: "a b" } } ]
sinks: [ { name: b, nats: { bucket: b, creat: true } } ]
controllers:
  - name: c
    for: a
    handler:
      sync:
        to: x
        when: object.
        onDelete: keep
        data: { total: "${object.data.q *}" }
    timout: 3s
`)
	for _, c := range []struct {
		args string
		code int
		want []string
	}{
		{"version", 0, []string{"windlass engine dev", "go1."}},
		{"--help", 0, []string{"engine check -c engine.yaml", "demo", "bench"}},
		{"run --help", 0, []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "second signal"}},
		{"nonsense", 2, []string{`unknown command "nonsense"`, "see 'engine --help'"}},
		{"run --nonsense", 2, []string{"unknown flag: --nonsense", "see 'engine run --help'"}},
		{"run", 2, []string{"no config: say which with -c"}},
		{"version x", 2, []string{`unexpected argument "x"`}},
		{"demo --for 1s", 2, []string{"the story takes 12s at least"}},
		{"bench --workload x", 2, []string{"none of distinct, coalesce"}},
		{"run -c good.yaml --log-level loud", 2, []string{"none of debug, info, warn, error"}},
		{"run -c none.yaml", 1, []string{"none.yaml: there is no such file", "1 problem(s) found"}},
		{"run -c nobucket.yaml", 1, []string{`source a: bucket "a" does not exist on NATS at the embedded server: create it, or set create: true`}},
		{"run -c unreachable.yaml", 1, []string{"connection main: connect to NATS at nats://127.0.0.1:1", "no server answers there; check the address"}},
		{"check -c good.yaml", 0, []string{`ok: engine "windlass" with 1 controller(s)`}},
		{"check -c bad.yaml", 1, []string{
			`bad.yaml:4: connections.main.nats: unknown key "tokn"; did you mean "tokenFile"?`,
			`bad.yaml:5: bus.nats.connection: there is no connection "mian"; did you mean "main"?`,
			`bad.yaml:5: bus.nats.sync: "maybe" is neither always nor interval`,
			`bad.yaml:5: bus.nats.connection: dataDir, listen, sync and syncInterval are for the embedded server`,
			`bad.yaml:6: sources[0].nats.bucket: "a b" may hold only letters, digits, - and _`,
			`bad.yaml:7: sinks[0].nats: unknown key "creat"; did you mean "create"?`,
			`bad.yaml:12: controllers[0].handler: there is no sink "x"; known: b`,
			`bad.yaml:14: controllers[0].handler.sync.when: expression "object.": column`,
			`bad.yaml:15: controllers[0].handler.sync.onDelete: "keep" is neither delete nor orphan`,
			`bad.yaml:16: controllers[0].handler.sync.data.total: expression "object.data.q *": column`,
			`bad.yaml:17: controllers[0]: unknown key "timout"; did you mean "timeout"?`,
			"11 problem(s) found",
		}},
		{"bench --events 1000 -o json", 0, []string{`"reconciles_per_s":`, `"workload":"distinct"`}},
	} {
		t.Run(c.args, func(t *testing.T) {
			p := start(t, dir, nil, binary, strings.Fields(c.args)...)
			require.Equal(t, c.code, p.wait(), p.output())
			for _, want := range c.want {
				require.Contains(t, p.output(), want)
			}
		})
	}
}

func TestDocumentedConfigIsInOrder(t *testing.T) {
	text, err := os.ReadFile("../../docs/configuration.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), "```yaml\n")
	require.True(t, ok)
	config, _, ok := strings.Cut(rest, "```")
	require.True(t, ok)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.yaml"), []byte(config), 0o600))
	p := start(t, dir, nil, binary, "check", "-c", "engine.yaml")
	require.Equal(t, 0, p.wait(), p.output())
}

// otlpReceiver takes spans as a collector does, over OTLP/HTTP.
type otlpReceiver struct {
	*httptest.Server

	mu    sync.Mutex
	spans []*tracev1.Span
}

func newReceiver(t *testing.T) *otlpReceiver {
	t.Helper()
	r := &otlpReceiver{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		var export collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(body, &export)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, rs := range export.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				r.spans = append(r.spans, ss.Spans...)
			}
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func TestSpansAreExportedWithLinksToTheirCauses(t *testing.T) {
	receiver := newReceiver(t)
	dir, port := example(t)
	p := start(t, dir, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + receiver.URL, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"},
		binary, "run", "-c", "engine.yaml", "--trace-stdout")
	p.says("controller started")
	js := client(t, port)
	orders, shipments := bucket(t, js, "orders"), bucket(t, js, "shipments")
	put(t, orders, "o1", `{"state":"paid","quantity":3,"price":2.5}`)
	eventually(t, "the shipment", func() bool { return get(shipments, "o1") != "" })
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())

	receiver.mu.Lock()
	defer receiver.mu.Unlock()
	byName := map[string][]*tracev1.Span{}
	for _, s := range receiver.spans {
		byName[s.Name] = append(byName[s.Name], s)
	}
	require.Len(t, byName["publish events.orders"], 1)
	require.Len(t, byName["reconcile order-shipping"], 1, "one span an attempt, and none for the echo of its own write")
	published, reconciled := byName["publish events.orders"][0], byName["reconcile order-shipping"][0]
	require.Equal(t, tracev1.Span_SPAN_KIND_CONSUMER, reconciled.Kind)
	require.Empty(t, reconciled.ParentSpanId, "a root of its own")
	require.Len(t, reconciled.Links, 1)
	require.Equal(t, published.TraceId, reconciled.Links[0].TraceId)
	require.Equal(t, published.SpanId, reconciled.Links[0].SpanId)
	attrs := map[string]string{}
	for _, a := range reconciled.Attributes {
		attrs[a.Key] = a.Value.GetStringValue()
	}
	require.Equal(t, "nats/kv:orders/o1", attrs["windlass.key"])
	require.Equal(t, "created", attrs["windlass.trigger"])
	require.Equal(t, "success", attrs["windlass.result"])
	require.Equal(t, "nats", attrs["messaging.system"])
	for _, s := range append(byName["get nats/kv"], byName["apply nats/kv"]...) {
		require.Equal(t, reconciled.SpanId, s.ParentSpanId)
	}
	require.Len(t, byName["apply nats/kv"], 1)
	// The write carried the context of the reconcile, so the event that it made continues its trace.
	require.Equal(t, reconciled.TraceId, byName["publish events.shipments"][0].TraceId)
	require.Contains(t, p.output(), `"Name": "reconcile order-shipping"`)
}

func TestDemoKeepsItsPromises(t *testing.T) {
	p := start(t, t.TempDir(), nil, binary, "demo", "--for", "13s", "-o", "json")
	require.Equal(t, 0, p.wait(), p.output())
	lines := strings.Split(strings.TrimSpace(p.output()), "\n")
	var counts map[string]int
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &counts))
	for _, name := range []string{"events", "reconciles", "merged", "retries", "delayed", "dead"} {
		require.Positive(t, counts[name], name)
	}
}
