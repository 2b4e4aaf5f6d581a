//go:build e2e

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/internal/testbed"
)

// startConsul starts an agent, until the test ends.
func startConsul(t *testing.T) (c *api.Client, address string) {
	t.Helper()
	consul, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(consul.Stop)
	config := api.DefaultConfig()
	config.Address = consul.Addresses[0]
	c, err = api.NewClient(config)
	require.NoError(t, err)
	return c, config.Address
}

func TestServicesOfConsulShowInABucket(t *testing.T) {
	c, address := startConsul(t)
	text, err := os.ReadFile("../../examples/consul-to-nats/engine.yaml")
	require.NoError(t, err)
	dir, port := t.TempDir(), freePort(t)
	changed := strings.Replace(string(text), "127.0.0.1:4222", fmt.Sprintf("127.0.0.1:%d", port), 1)
	changed += "server: { health: \"127.0.0.1:0\", metrics: \"127.0.0.1:0\", admin: { address: \"127.0.0.1:0\" } }\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.yaml"), []byte(changed), 0o600))

	register := func(id string, port int) {
		require.NoError(t, c.Agent().ServiceRegister(&api.AgentServiceRegistration{
			ID: id, Name: "web", Port: port, Address: "10.0.0.1", Check: &api.AgentServiceCheck{CheckID: id, TTL: "1h", Status: api.HealthPassing},
		}))
	}
	register("web1", 80)
	env := []string{"CONSUL_HTTP_ADDR=" + address}
	p := start(t, dir, env, binary, "run", "-c", "engine.yaml")
	registry := bucket(t, client(t, port), "services")
	is := func(want string) {
		t.Helper()
		eventually(t, want, func() bool { return get(registry, "web") == want })
	}
	is(`{"addresses":["10.0.0.1:80"],"instances":1}`)
	register("web2", 81)
	is(`{"addresses":["10.0.0.1:80","10.0.0.1:81"],"instances":2}`)
	require.NoError(t, c.Agent().UpdateTTL("web1", "out of order", api.HealthCritical))
	is(`{"addresses":["10.0.0.1:81"],"instances":2}`)
	put(t, registry, "web", "changed by hand")
	is(`{"addresses":["10.0.0.1:81"],"instances":2}`)
	require.NoError(t, c.Agent().ServiceDeregister("web1"))
	is(`{"addresses":["10.0.0.1:81"],"instances":1}`)

	// What goes while nobody watches is noticed at the next start.
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())
	require.NoError(t, c.Agent().ServiceDeregister("web2"))
	start(t, dir, env, binary, "run", "-c", "engine.yaml")
	registry = bucket(t, client(t, port), "services")
	is("")
}
