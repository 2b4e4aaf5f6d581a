package app_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/app"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mapConfig describes a memory map.
type mapConfig struct {
	Size       int           `yaml:"size"`
	Wait       time.Duration `yaml:"wait"`
	Connection string        `yaml:"connection"`
	Nested     struct {
		Flag  bool              `yaml:"flag"`
		Words []string          `yaml:"words"`
		Table map[string]string `yaml:"table"`
	} `yaml:"nested"`
}

func (c mapConfig) ConnectionName() string { return c.Connection }

func (c mapConfig) Validate() error {
	if c.Size < 0 {
		return errors.Join(errors.New("size: it is negative"), errors.New("nested.words: there are too few"))
	}
	return nil
}

type conn struct{}

func (conn) Close() {}

type handlerConfig struct {
	To   string   `yaml:"to"`
	With []string `yaml:"with"`
}

func (h handlerConfig) Reads() []string { return h.With }

func (h handlerConfig) Owns() []string {
	if h.To == "" {
		return nil
	}
	return []string{h.To}
}

// maps are the maps that a test's components made.
type maps map[string]*memory.Map[string]

func components(made maps) app.Components {
	newMap := func(name string) *memory.Map[string] {
		made[name] = memory.New[string](name)
		return made[name]
	}
	return app.Components{
		Connections: map[string]app.Factory[app.Closer]{"fake": app.New(func(context.Context, *app.Env, string, struct{}) (app.Closer, error) { return conn{}, nil })},
		Buses: map[string]app.Factory[engine.Bus]{"memory": app.New(func(context.Context, *app.Env, string, struct{}) (engine.Bus, error) {
			return engine.NewMemoryBus(), nil
		})},
		Sources: map[string]app.Factory[engine.Source]{"map": app.New(func(_ context.Context, _ *app.Env, name string, _ mapConfig) (engine.Source, error) {
			return newMap(name), nil
		})},
		Sinks: map[string]app.Factory[engine.Sink]{"map": app.New(func(_ context.Context, _ *app.Env, name string, _ mapConfig) (engine.Sink, error) {
			return newMap(name), nil
		})},
		Handlers: map[string]app.Factory[engine.Handler]{"copy": app.New(func(_ context.Context, env *app.Env, _ string, cfg handlerConfig) (engine.Handler, error) {
			to, err := app.Sink[*memory.Map[string]](env, cfg.To)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
				return engine.Result{}, rt.Apply(ctx, to.Object(req.Key.Name, "copied"))
			}, nil
		})},
		DefaultBus: "memory",
	}
}

const head = "apiVersion: windlass.dev/v1alpha1\nkind: Engine\n"

const good = head + `
metadata: { name: shop }
connections: { main: { fake: {} } }
sources:
  - { name: orders, map: { size: 3, wait: 1m, connection: main } }
  - name: parts
    map: { nested: { flag: true, words: [a, b], table: { x: "1" } } }
sinks: [ { name: shipments, map: {} } ]
controllers:
  - name: shipping
    for: orders
    owns: [shipments]
    watches:
      - { source: parts, map: { expr: '[event.key.name, "extra"]' } }
      - { source: parts, map: sameName }
    reads: [parts]
    handler: { copy: { to: shipments } }
    concurrency: 2
    timeout: 5s
    resync: 10m
    backoff: { initial: 1s, max: 1m, multiplier: 3, jitter: 0.1, maxAttempts: 7 }
    placement: singleton
    dryRun: false
log: { level: debug, format: text }
shutdown: { drainTimeout: 3s }
tracing: { otlp: { endpoint: "x:4317", protocol: grpc }, sampleRatio: 0.5, causality: parent }
server: { health: "127.0.0.1:0", metrics: "off" }
`

func load(text string) (*app.Plan, error) {
	return app.Parse("engine.yaml", []byte(text), components(maps{}))
}

func TestGoodConfigIsUnderstood(t *testing.T) {
	p, err := load(good)
	require.NoError(t, err)
	c := p.Config.Controllers[0]
	require.Equal(t, "shop", p.Config.Metadata.Name)
	require.Equal(t, 5*time.Second, c.Timeout)
	require.Equal(t, 7, c.Backoff.MaxAttempts)
	require.InDelta(t, 0.5, *p.Config.Tracing.SampleRatio, 0)
}

func TestDefaults(t *testing.T) {
	p, err := load(head + "sources: [{name: a, map: {}}]\nsinks: [{name: b, map: {}}]\ncontrollers: [{name: c, for: a, handler: {copy: {to: b}}}]\n")
	require.NoError(t, err)
	c := p.Config.Controllers[0]
	require.Equal(t, []any{"windlass", 1, 30 * time.Second, "sharded", ":8081", ":8080", 30 * time.Second, "info"}, []any{
		p.Config.Metadata.Name, c.Concurrency, c.Timeout, c.Placement, p.Config.Server.Health, p.Config.Server.Metrics,
		p.Config.Shutdown.DrainTimeout, p.Config.Log.Level,
	})
}

// TestProblems gives bad configs and what is said of them, line by line.
func TestProblems(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"empty", "", []string{"engine.yaml: the file is empty"}},
		{"not YAML", "a: [", []string{"engine.yaml: line 1: did not find expected node content"}},
		{"a list", "[]", []string{
			"engine.yaml:1: want a mapping, got a list", `engine.yaml:1: apiVersion: want windlass.dev/v1alpha1, got ""`, `engine.yaml:1: kind: want Engine, got ""`,
		}},
		{"another kind", "apiVersion: v1\nkind: Pod\n", []string{
			`engine.yaml:1: apiVersion: want windlass.dev/v1alpha1, got "v1"`, `engine.yaml:2: kind: want Engine, got "Pod"`,
		}},
		{"unknown keys, with the nearest", head + "sorces: []\ncontroller: []\nxyzzy: 1\n", []string{
			`engine.yaml:3: unknown key "sorces"; did you mean "sources"?`,
			`engine.yaml:4: unknown key "controller"; did you mean "controllers"?`,
			`engine.yaml:5: unknown key "xyzzy"; known: apiVersion, bus, connections, controllers, kind, log, metadata, server, shutdown, sinks, sources, tracing`,
		}},
		{"keys twice", head + "log: {}\nlog: {}\n", []string{`engine.yaml:4: key "log" is there twice, first in line 3`}},
		{"no controllers", head, []string{"engine.yaml: there are no controllers"}},
		{"wrong types, all at once", head + `
sources:
  - name: a
    map:
      size: many
      wait: soon
      nested: { flag: maybe, words: x, table: [] }
controllers: {}
log: text
`, []string{
			`engine.yaml:7: sources[0].map.size: want a whole number, got "many"`,
			`engine.yaml:8: sources[0].map.wait: want a duration such as 30s or 1m30s, got "soon"`,
			`engine.yaml:9: sources[0].map.nested.flag: want true or false, got "maybe"`,
			`engine.yaml:9: sources[0].map.nested.words: want a list, got "x"`,
			`engine.yaml:9: sources[0].map.nested.table: want a mapping, got a list`,
			`engine.yaml:10: controllers: want a list, got a mapping`,
			`engine.yaml:11: log: want a mapping, got "text"`,
		}},
		{"components", head + `
bus: { kafka: {} }
sources:
  - { name: a, mapp: {} }
  - { map: {} }
  - { name: b, map: {}, other: {} }
  - { name: b, map: { size: -1, nested: { words: [] } } }
  - { name: d }
  - { name: e, map: { connection: mian } }
connections: { main: { fake: {} } }
`, []string{
			`engine.yaml:4: bus.kafka: unknown type of bus "kafka"; known: memory`,
			`engine.yaml:6: sources[0].mapp: unknown type of source "mapp"; did you mean "map"?`,
			`engine.yaml:7: sources[1].map: the source has no name`,
			`engine.yaml:8: sources[2]: "map" and "other" are two types for one thing; choose one`,
			`engine.yaml:9: sources[3].map: there are two sources or sinks named "b"`,
			`engine.yaml:9: sources[3].map.size: it is negative`,
			`engine.yaml:9: sources[3].map.nested.words: there are too few`,
			`engine.yaml:10: sources[4]: the source has no type; one of the keys [map] is needed`,
			`engine.yaml:11: sources[5].map.connection: there is no connection "mian"; did you mean "main"?`,
		}},
		{"references and settings of controllers", head + `
sources: [ { name: orders, map: {} } ]
sinks: [ { name: shipments, map: {} } ]
controllers:
  - name: Bad Name
    for: order
    owns: [orders]
    reads: [nothing]
    watches:
      - { source: part, map: { expr: "event.key." } }
      - { source: orders }
      - { source: orders, map: same }
      - { source: orders, map: { exprs: x } }
    handler: { copy: { to: shipment, with: [shipments, orders] } }
    concurrency: -1
    timeout: -1s
    resync: -1s
    placement: moon
    backoff: { initial: 1h, max: 1s }
  - name: x
  - { name: x, for: orders, handler: copy2 }
`, []string{
			`engine.yaml:7: controllers[0].name: the name must be lower-case letters, digits and dashes, 63 at most`,
			`engine.yaml:8: controllers[0].for: there is no source "order"; did you mean "orders"?`,
			`engine.yaml:9: controllers[0].owns[0]: there is no sink "orders"; known: shipments`,
			`engine.yaml:10: controllers[0].reads[0]: there is no source "nothing"; known: orders, shipments`,
			`engine.yaml:12: controllers[0].watches[0].source: there is no source "part"; known: orders, shipments`,
			`engine.yaml:12: controllers[0].watches[0].map.expr: expression "event.key.": column 11: Syntax error: no viable alternative at input '.'`,
			`engine.yaml:13: controllers[0].watches[1]: map: how an event becomes keys is required: one of owner, sameName, label, annotation, field, expr`,
			`engine.yaml:14: controllers[0].watches[2].map: unknown mapper "same"; did you mean "sameName"?`,
			`engine.yaml:15: controllers[0].watches[3].map: unknown mapper "exprs"; did you mean "expr"?`,
			`engine.yaml:15: controllers[0].watches[3]: map: how an event becomes keys is required: one of owner, sameName, label, annotation, field, expr`,
			`engine.yaml:16: controllers[0].handler: there is no sink "shipment"; did you mean "shipments"?`,
			`engine.yaml:16: controllers[0].handler: it reads source "shipments", which the controller does not reference; add it to reads, or to watches`,
			`engine.yaml:17: controllers[0].concurrency: -1 is less than 1`,
			`engine.yaml:19: controllers[0].resync: -1s is negative; 0 is never`,
			`engine.yaml:20: controllers[0].placement: "moon" is none of sharded, singleton, each`,
			`engine.yaml:21: controllers[0].backoff: initial 1h0m0s is longer than max 1s`,
			`engine.yaml:22: controllers[1].for: the name of a source is required`,
			`engine.yaml:22: controllers[1].handler: a handler is required`,
			`engine.yaml:23: controllers[2].name: there are two controllers named "x"`,
			`engine.yaml:23: controllers[2].handler: unknown type of handler "copy2"; did you mean "copy"?`,
		}},
		{"the rest", head + `
sources: [ { name: a, map: {} } ]
sinks: [ { name: b, map: {} } ]
controllers: [ { name: c, for: a, handler: { copy: { to: b } } } ]
log: { level: loud, format: xml }
tracing: { otlp: { protocol: smoke }, sampleRatio: 2, causality: none }
shutdown: { drainTimeout: -1s }
`, []string{
			`engine.yaml: log.level: "loud" is none of debug, info, warn, error`,
			`engine.yaml: log.format: "xml" is none of auto, json, text`,
			`engine.yaml: tracing.otlp.protocol: "smoke" is none of grpc, http/protobuf`,
			`engine.yaml: tracing.causality: "none" is none of link, parent`,
			`engine.yaml: tracing.sampleRatio: it is not between 0 and 1`,
			`engine.yaml: shutdown.drainTimeout: it is negative`,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := load(c.text)
			var problems app.Problems
			require.ErrorAs(t, err, &problems)
			var got []string
			for _, p := range problems {
				got = append(got, p.String())
			}
			require.ElementsMatch(t, c.want, got, strings.Join(got, "\n"))
		})
	}
}

func TestSeveralFilesAreOne(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(head+text), 0o600))
	}
	write("1.yaml", "metadata: {name: shop}\nsources: [{name: a, map: {}}]\nsinks: [{name: b, map: {}}]\n")
	write("2.yml", "controllers: [{name: c, for: a, handler: {copy: {to: b}}}]\n---\n"+head+"log: {level: debug}\n")
	p, err := app.Load([]string{dir}, components(maps{}))
	require.NoError(t, err)
	require.Equal(t, "shop", p.Config.Metadata.Name)
	require.Equal(t, "debug", p.Config.Log.Level)

	write("3.yaml", "metadata: {name: other}\nsources: [{name: a, map: {}}]\n")
	_, err = app.Load([]string{dir, filepath.Join(dir, "none.yaml"), t.TempDir()}, components(maps{}))
	require.ErrorContains(t, err, "3.yaml:3: metadata: this is said in another file already")
	require.ErrorContains(t, err, `3.yaml:4: sources[0].map: there are two sources or sinks named "a"`)
	require.ErrorContains(t, err, "none.yaml: there is no such file")
	require.ErrorContains(t, err, "the directory holds no .yaml file")
}

func TestPlanRunsAndTellsWhetherItIsReady(t *testing.T) {
	made := maps{}
	p, err := app.Parse("engine.yaml", []byte(good), components(made))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	address := make(chan string, 1)
	log := slog.New(slog.NewTextHandler(&addressOf{address}, nil))
	done := make(chan error, 1)
	started := make(chan *engine.Engine, 1)
	go func() {
		done <- p.Run(ctx, app.Options{Logger: log, Started: func(e *engine.Engine) app.Metrics { started <- e; return nil }})
	}()
	<-started
	base := "http://" + <-address
	get := func(path string) string {
		resp, err := http.Get(base + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return fmt.Sprint(resp.StatusCode, " ", string(body))
	}
	require.Equal(t, "200 ok\n", get("/healthz"))
	require.Eventually(t, func() bool { return get("/readyz") == "200 ok\n" }, 5*time.Second, time.Millisecond)
	require.Equal(t, "200 [+] source orders\n[+] source shipments\n[+] source parts\nok\n", get("/readyz?verbose"))
	made["orders"].Set("o", "1")
	made["parts"].Set("p", "1")
	for _, name := range []string{"o", "p", "extra"} {
		require.Eventually(t, func() bool { v, _ := made["shipments"].Value(name); return v == "copied" }, 5*time.Second, time.Millisecond, name)
	}
	cancel()
	require.NoError(t, <-done)
	http.DefaultClient.CloseIdleConnections()
}

// addressOf picks the address out of the log line that tells it.
type addressOf struct{ found chan string }

func (a *addressOf) Write(line []byte) (int, error) {
	if _, rest, ok := strings.Cut(string(line), "setting=server.health address="); ok {
		a.found <- strings.TrimSpace(rest)
	}
	return len(line), nil
}

func TestTakenAddressNamesTheSetting(t *testing.T) {
	p, err := load(strings.Replace(good, `health: "127.0.0.1:0"`, `health: "256.0.0.1:1"`, 1))
	require.NoError(t, err)
	err = p.Run(t.Context(), app.Options{Logger: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, "server.health: ")
	require.ErrorContains(t, err, `choose another address, or "off"`)
}

func FuzzLoad(f *testing.F) {
	f.Add(good)
	f.Add(head + "sources: [{name: &a x, map: *a}]")
	f.Add(head + "sources: &a [{name: a, a: {}}]\ncontrollers: *a\n")
	f.Add(head + "controllers: []\ncontrollers: [{name: a}]\n")
	f.Add(head + "controllers: [null, ~, 1, [], {}]\nsources: [null, nats, 1]\nbus: nats\n")
	f.Add(head + "connections: &a {x: *a}\nsources: &b [*b]\nbus: &c {memory: *c}\n")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := load(text)
		require.Equal(t, err == nil, p != nil)
	})
}
