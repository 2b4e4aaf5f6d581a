package integration

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
)

// example writes the example config into a directory of its own, on free ports.
func example(t *testing.T) (dir string, port int) {
	t.Helper()
	text, err := os.ReadFile("../../examples/nats-sync/engine.yaml")
	require.NoError(t, err)
	dir, port = t.TempDir(), freePort(t)
	changed := strings.Replace(string(text), "127.0.0.1:4222", fmt.Sprintf("127.0.0.1:%d", port), 1)
	require.NotEqual(t, string(text), changed)
	changed += "server: { health: \"127.0.0.1:0\", metrics: \"127.0.0.1:0\", admin: { address: \"127.0.0.1:0\" } }\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.yaml"), []byte(changed), 0o600))
	return dir, port
}

// exampleOn is example on the server at this URL in place of the embedded one, with the bus on Redis if its address is given.
func exampleOn(t *testing.T, url, redis string) (dir string) {
	t.Helper()
	dir, _ = example(t)
	file := filepath.Join(dir, "engine.yaml")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	before, after, ok := strings.Cut(string(text), "bus:\n")
	require.True(t, ok)
	_, after, ok = strings.Cut(after, "\n") // the embedded server's line
	require.True(t, ok)
	connections, bus := fmt.Sprintf("main: { nats: { url: %q } }", url), "nats: { connection: main }"
	if redis != "" {
		connections, bus = connections+fmt.Sprintf(", cache: { redis: { address: %q } }", redis), "redis: { connection: cache }"
	}
	changed := before + "connections: { " + connections + " }\nbus: { " + bus + " }\n" + after
	require.NoError(t, os.WriteFile(file, []byte(changed), 0o600))
	return dir
}

func TestExampleKeepsBucketsInStep(t *testing.T) {
	dir, port := example(t)
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	js := client(t, port)
	orders, shipments := bucket(t, js, "orders"), bucket(t, js, "shipments")
	is := func(key, want string) {
		t.Helper()
		eventually(t, key+" is "+want, func() bool { return get(shipments, key) == want })
	}
	begin := time.Now()
	put(t, orders, "o1", `{"state":"paid","quantity":3,"price":2.5}`)
	is("o1", `{"order":"o1","total":7.5}`)
	t.Logf("a put showed after %s", time.Since(begin))
	put(t, orders, "o1", `{"state":"paid","quantity":2,"price":3}`)
	is("o1", `{"order":"o1","total":6}`)
	put(t, orders, "o1", `{"state":"draft","quantity":2,"price":3}`)
	is("o1", "")
	put(t, orders, "o1", `{"state":"paid","quantity":1,"price":1}`)
	is("o1", `{"order":"o1","total":1}`)
	put(t, shipments, "o1", "changed by hand")
	is("o1", `{"order":"o1","total":1}`)
	require.NoError(t, shipments.Purge(t.Context(), "o1"))
	is("o1", `{"order":"o1","total":1}`)
	require.NoError(t, orders.Delete(t.Context(), "o1"))
	is("o1", "")
	put(t, orders, "o2", `{"state":"paid","quantity":1,"price":1}`)
	is("o2", `{"order":"o2","total":1}`)
	require.NoError(t, orders.Purge(t.Context(), "o2"))
	is("o2", "")

	put(t, shipments, "theirs", "hands off")
	put(t, orders, "theirs", `{"state":"paid","quantity":1,"price":1}`)
	p.says("resource exists and is not managed by this controller")
	put(t, orders, "bad", `{`)
	p.says("the value of nats/kv:orders/bad is not JSON")
	put(t, orders, "fieldless", `{"state":"paid"}`)
	p.says("if the field may be missing, test it with has()")
	put(t, orders, "good", `{"state":"paid","quantity":4,"price":1}`)
	is("good", `{"order":"good","total":4}`)
	require.Equal(t, "hands off", get(shipments, "theirs"))

	require.Contains(t, fetch(t, p, "server.health", "/readyz?verbose"), "[+] bus\n[+] source orders\n[+] source shipments\nok\n")
	metrics := fetch(t, p, "server.metrics", "/metrics")
	for _, want := range []string{
		`controller_runtime_reconcile_total{controller="order-shipping",result="success"}`, `workqueue_depth{controller="order-shipping",name="order-shipping",priority="live"} 0`,
		`windlass_items{controller="order-shipping",state="parked"} 2`, `windlass_events_total{operation="purge",source="orders"} 1`, "process_cpu_seconds_total",
	} {
		require.Contains(t, metrics, want)
	}

	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait(), "a drained engine exits 0")
	require.Contains(t, p.output(), `"msg":"stopped"`)
}

// fetch gets a page from the address that the engine said it listens on.
func fetch(t *testing.T, p *process, setting, path string) string {
	t.Helper()
	_, rest, ok := strings.Cut(p.output(), `"setting":"`+setting+`","address":"`)
	require.True(t, ok, p.output())
	address, _, _ := strings.Cut(rest, `"`)
	resp, err := http.Get("http://" + address + path)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(body)
}

func TestWhatChangedWhileDownIsCaughtUp(t *testing.T) {
	dir, port := example(t)
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	js := client(t, port)
	orders, shipments := bucket(t, js, "orders"), bucket(t, js, "shipments")
	put(t, orders, "deleted", `{"state":"paid","quantity":1,"price":1}`)
	put(t, orders, "changed", `{"state":"paid","quantity":1,"price":1}`)
	eventually(t, "both", func() bool { return get(shipments, "deleted") != "" && get(shipments, "changed") != "" })
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())

	// A server on the same files, without an engine.
	server, err := nats.StartServer(nats.ServerConfig{DataDir: filepath.Join(dir, "data"), Listen: fmt.Sprintf("127.0.0.1:%d", port)})
	require.NoError(t, err)
	orders = bucket(t, client(t, port), "orders")
	put(t, orders, "changed", `{"state":"paid","quantity":5,"price":1}`)
	require.NoError(t, orders.Delete(t.Context(), "deleted"))
	server.Shutdown()

	start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	js = client(t, port)
	shipments = bucket(t, js, "shipments")
	eventually(t, "a change", func() bool { return get(shipments, "changed") == `{"order":"changed","total":5}` })
	eventually(t, "a deletion", func() bool { return get(shipments, "deleted") == "" })
}

func TestDataDirectoryInUse(t *testing.T) {
	dir, port := example(t)
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	client(t, port)
	second := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	require.Equal(t, 1, second.wait())
	require.Contains(t, second.output(), fmt.Sprintf("the data directory is in use by another engine: ./data is held by process %d", p.cmd.Process.Pid))
}

// TestSecondSignalLeavesAtOnce holds the engine in its start, on a server that takes the connection and says nothing.
func TestSecondSignalLeavesAtOnce(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	dir := exampleOn(t, "nats://"+l.Addr().String(), "")

	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	conn, err := l.Accept()
	require.NoError(t, err)
	defer conn.Close()
	p.signal(syscall.SIGTERM)
	p.signal(syscall.SIGINT) // another one, since two of a kind may arrive as one
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.output(), "left at once, as a second signal asks")
	require.NotContains(t, p.output(), "connect to NATS", "it did not wait for what it was doing")
}
