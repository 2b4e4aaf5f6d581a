package integration

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"
)

// TestExampleOnTheUsersServer runs the example with a URL in place of the embedded server.
func TestExampleOnTheUsersServer(t *testing.T) {
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true})
	require.NoError(t, err)
	s.Start()
	defer func() { s.Shutdown(); s.WaitForShutdown() }()
	require.True(t, s.ReadyForConnections(10*time.Second))
	port := 0
	_, err = fmt.Sscanf(s.ClientURL(), "nats://127.0.0.1:%d", &port)
	require.NoError(t, err)

	dir := exampleOn(t, s.ClientURL())
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

func TestHelloRuns(t *testing.T) {
	hello := filepath.Join(t.TempDir(), "hello")
	out, err := exec.Command("go", "build", "-o", hello, "../../examples/hello").CombinedOutput()
	require.NoError(t, err, string(out))
	p := start(t, t.TempDir(), nil, hello)
	p.says("apples resync → 3 boxes")
	p.signal(syscall.SIGINT)
	require.Equal(t, 0, p.wait())
}
