package integration

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
)

// TestExampleOnTheUsersServer runs the example with a URL in place of the embedded server.
func TestExampleOnTheUsersServer(t *testing.T) { onTheUsersServer(t, usersServer(t), "") }

// TestExampleWithTheBusOnRedis has the buckets on NATS and the queue on Redis.
func TestExampleWithTheBusOnRedis(t *testing.T) {
	path, err := exec.LookPath("redis-server")
	if err != nil && os.Getenv("CI") == "" {
		t.Skip("redis-server is not installed (Debian: apt-get install redis-server)")
	}
	require.NoError(t, err)
	port := strconv.Itoa(freePort(t))
	server := exec.Command(path, "--port", port, "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--appendonly", "yes")
	require.NoError(t, server.Start())
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	eventually(t, "Redis answers", func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	onTheUsersServer(t, usersServer(t), "127.0.0.1:"+port)
}

// usersServer starts a NATS server and returns its URL.
func usersServer(t *testing.T) string {
	t.Helper()
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true})
	require.NoError(t, err)
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	require.True(t, s.ReadyForConnections(10*time.Second))
	return s.ClientURL()
}

func onTheUsersServer(t *testing.T, url, redis string) {
	t.Helper()
	port := 0
	_, err := fmt.Sscanf(url, "nats://127.0.0.1:%d", &port)
	require.NoError(t, err)

	dir := exampleOn(t, url, redis)
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	js := client(t, port)
	orders, shipments := bucket(t, js, "orders"), bucket(t, js, "shipments")
	put(t, orders, "o1", `{"state":"paid","quantity":3,"price":2.5}`)
	eventually(t, "the shipment", func() bool { return get(shipments, "o1") == `{"order":"o1","total":7.5}` })

	// Replicas of it share the work, and do what one of them leaves behind, however it ends.
	shipped := func(value int, keys ...string) {
		t.Helper()
		for _, k := range keys {
			put(t, orders, k, fmt.Sprintf(`{"state":"paid","quantity":%d,"price":1}`, value))
		}
		for _, k := range keys {
			eventually(t, k, func() bool { return get(shipments, k) == fmt.Sprintf(`{"order":"%s","total":%d}`, k, value) })
		}
	}
	var keys []string
	for i := range 24 {
		keys = append(keys, fmt.Sprintf("o%d", i))
	}
	second := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	second.says("controller started")
	shipped(1, keys...)
	asks(t, p, second, orders)
	p.signal(syscall.SIGKILL)
	shipped(2, keys...)
	third := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	third.says("controller started")
	shipped(3, keys...)
	second.signal(syscall.SIGTERM)
	shipped(4, keys...)
	require.Equal(t, 0, second.wait())
	third.signal(syscall.SIGTERM)
	require.Equal(t, 0, third.wait())
}

// asks asks each of two replicas what both know.
func asks(t *testing.T, first, second *process, orders jetstream.KeyValue) {
	t.Helper()
	put(t, orders, "broken", "not JSON")
	for _, p := range []*process{first, second} {
		engine := func(args ...string) string {
			out, err := exec.Command(binary, append(args, "--server", p.admin())...).CombinedOutput()
			require.NoError(t, err, string(out))
			return string(out)
		}
		eventually(t, "both share the partitions", func() bool {
			return strings.Count(engine("get", "members"), " 4 ") == 2
		})
		require.Equal(t, 2, strings.Count(engine("get", "members", "-o", "name"), "\n"))
		require.Equal(t, 1, strings.Count(engine("get", "members"), "this one was asked"))
		partitions := engine("get", "partitions")
		require.Equal(t, 8, strings.Count(partitions, "order-shipping/"), partitions)
		require.NotContains(t, partitions, "nobody")
		require.Contains(t, engine("get", "controllers", "-o", "yaml"), "- order-shipping")
		eventually(t, "the broken order is seen by both", func() bool {
			items := engine("get", "items", "order-shipping")
			return strings.Contains(items, "orders/broken   parked") && strings.Count(items, "\n") == 2
		})
		told := engine("explain", "order-shipping", "nats/kv@main:orders/broken")
		require.Contains(t, told, "is parked: ")
		require.Contains(t, told, "its last runs, the newest first:")
	}
}

// admin is where a process answers operators.
func (p *process) admin() string {
	p.t.Helper()
	var found []string
	eventually(p.t, "it says where it answers", func() bool {
		found = regexp.MustCompile(`server\.admin\.address"?[, ]"?address"?[:=]"?([0-9.:]+)`).FindStringSubmatch(p.output())
		return found != nil
	})
	return found[1]
}

func TestHelloRuns(t *testing.T) {
	hello := filepath.Join(t.TempDir(), "hello")
	out, err := exec.Command("go", "build", "-o", hello, "../../examples/hello").CombinedOutput()
	require.NoError(t, err, string(out))
	p := start(t, t.TempDir(), nil, hello)
	p.says("apples resync → 3 boxes")
	p.signal(syscall.SIGINT)
	require.Equal(t, 0, p.wait())
}

func TestBusCommands(t *testing.T) {
	dir, port := example(t)
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	js := client(t, port)
	put(t, bucket(t, js, "orders"), "broken", "not JSON")
	eventually(t, "it is parked", func() bool {
		out, _ := exec.Command(binary, "get", "items", "order-shipping", "--server", p.admin()).CombinedOutput()
		return strings.Contains(string(out), "parked")
	})
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())

	file := filepath.Join(dir, "engine.yaml")
	change := func(old, with string) {
		t.Helper()
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Contains(t, string(text), old)
		require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(text), old, with, 1)), 0o600))
	}
	run := func(code int, args ...string) string {
		t.Helper()
		cmd := exec.Command(binary, append(args, "-c", "engine.yaml")...)
		cmd.Dir = dir
		out, _ := cmd.CombinedOutput() // the code is looked at
		require.Equal(t, code, cmd.ProcessState.ExitCode(), string(out))
		return string(out)
	}
	change("dataDir:", "partitions: 5, dataDir:")
	require.Contains(t, run(1, "run"), "was made for 8 partitions, and the configuration says 5")
	require.Contains(t, run(0, "bus", "migrate"), "order-shipping: 1 of 1 moved")
	require.Contains(t, run(0, "bus", "migrate"), "order-shipping: 0 of 1 moved")
	p = start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	p.says("controller started")
	out, err := exec.Command(binary, "get", "items", "order-shipping", "--server", p.admin()).CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(out), "parked", "it is still known")
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())

	require.Contains(t, run(0, "bus", "prune"), "nothing is left")
	change("name: order-shipping", "name: another")
	require.Regexp(t, `order-shipping +1 +0`, run(0, "bus", "prune"))
	require.Contains(t, run(0, "bus", "prune", "--yes"), "order-shipping: removed")
	require.Contains(t, run(0, "bus", "prune"), "nothing is left")
}

func TestReplicasAtWorkAreNotMigrated(t *testing.T) {
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true})
	require.NoError(t, err)
	s.Start()
	defer func() { s.Shutdown(); s.WaitForShutdown() }()
	require.True(t, s.ReadyForConnections(10*time.Second))
	dir := exampleOn(t, s.ClientURL(), "")
	p := start(t, dir, nil, binary, "run", "-c", "engine.yaml")
	p.says("controller started")
	cmd := exec.Command(binary, "bus", "migrate", "-c", "engine.yaml")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "these replicas are at work; stop them first: ")
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())
}
