//go:build e2e

package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/consul/api"
	natsgo "github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestAppsShowInThreeSystems(t *testing.T) {
	c, address := startConsul(t)
	dir, port, env, kube := clusterExample(t, "three-systems")
	env = append(env, "CONSUL_HTTP_ADDR="+address)
	services := kube.CoreV1().Services("default")

	service := func(name string) string {
		s, err := services.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return ""
		}
		return fmt.Sprintf("%d %s %s", s.Spec.Ports[0].Port, s.Spec.Selector["app"], s.Labels["team"])
	}
	entry := func(name string) string {
		found, _, err := c.Health().Service(name, "", false, nil)
		require.NoError(t, err)
		for _, e := range found {
			if e.Node.Node == "apps" {
				return fmt.Sprintf("%s:%d %s %s", e.Service.Address, e.Service.Port, e.Checks.AggregatedStatus(), e.Service.Meta["team"])
			}
		}
		return ""
	}
	p := start(t, dir, env, binary, "run", "-c", "engine.yaml", "--trace-stdout")
	nats := client(t, port)
	apps, health := bucket(t, nats, "apps"), bucket(t, nats, "health")
	is := func(name, wantService, wantEntry, wantHealth string) {
		t.Helper()
		for what, f := range map[string]func() (got, want string){
			"service": func() (string, string) { return service(name), wantService },
			"entry":   func() (string, string) { return entry(name), wantEntry },
			"health":  func() (string, string) { return get(health, name), wantHealth },
		} {
			_, want := f()
			eventually(t, fmt.Sprintf("%s of %s is %q", what, name, want), func() bool { got, want := f(); return got == want })
		}
	}
	put(t, apps, "web", `{"port": 80, "team": "shop"}`)
	is("web", "80 web shop", "web.default.svc:80 passing shop", `{"instances":1,"passing":1}`)
	put(t, apps, "web", `{"port": 81, "team": "shop", "maintenance": true}`)
	is("web", "81 web shop", "web.default.svc:81 critical shop", `{"instances":1,"passing":0}`)

	// One trace, from NATS into both others.
	const trace = "0af7651916cd43dd8448eb211c80319c"
	traced := natsgo.NewMsg("$KV.apps.traced")
	traced.Header.Set("traceparent", "00-"+trace+"-b7ad6b7169203331-01")
	traced.Data = []byte(`{"port": 83, "team": "shop"}`)
	_, err := nats.PublishMsg(t.Context(), traced)
	require.NoError(t, err)
	is("traced", "83 traced shop", "traced.default.svc:83 passing shop", `{"instances":1,"passing":1}`)
	s, err := services.Get(t.Context(), "traced", metav1.GetOptions{})
	require.NoError(t, err)
	require.Contains(t, s.Annotations["tracing.k8s.io/traceparent"], trace)
	side, _, err := c.KV().Get("traces/apps/traced", nil)
	require.NoError(t, err)
	require.Contains(t, string(side.Value), trace)

	// Another instance, somebody else's, counts: Consul's health is watched.
	require.NoError(t, c.Agent().ServiceRegister(&api.AgentServiceRegistration{
		ID: "web-elsewhere", Name: "web", Port: 90, Check: &api.AgentServiceCheck{CheckID: "elsewhere", TTL: "1h", Status: api.HealthPassing},
	}))
	is("web", "81 web shop", "web.default.svc:81 critical shop", `{"instances":2,"passing":1}`)
	require.NoError(t, c.Agent().UpdateTTL("elsewhere", "", api.HealthCritical))
	is("web", "81 web shop", "web.default.svc:81 critical shop", `{"instances":2,"passing":0}`)

	// What is changed by hand is put right, wherever it is.
	_, err = services.Patch(t.Context(), "web", types.MergePatchType, []byte(`{"metadata":{"labels":{"team":"x"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: "apps"}, nil)
	require.NoError(t, err)
	put(t, health, "web", "x")
	is("web", "81 web shop", "web.default.svc:81 critical shop", `{"instances":2,"passing":0}`)

	// What is somebody else's is left alone, and holds up nothing of other apps.
	_, err = services.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 1}}}}, metav1.CreateOptions{})
	require.NoError(t, err)
	put(t, apps, "theirs", `{"port": 80, "team": "shop"}`)
	p.says("resource exists and is not managed by this controller")
	put(t, apps, "api", `{"port": 82, "team": "shop"}`)
	is("api", "82 api shop", "api.default.svc:82 passing shop", `{"instances":1,"passing":1}`)
	require.True(t, strings.HasPrefix(service("theirs"), "1 "))
	require.NoError(t, services.Delete(t.Context(), "theirs", metav1.DeleteOptions{}))
	is("theirs", "80 theirs shop", "theirs.default.svc:80 passing shop", `{"instances":1,"passing":1}`)

	// What goes while nobody watches goes everywhere at the next start.
	require.NoError(t, apps.Delete(t.Context(), "api"))
	is("api", "", "", "")
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: "apps", ServiceID: "web"}, nil)
	require.NoError(t, err)
	require.NoError(t, services.Delete(t.Context(), "web", metav1.DeleteOptions{}))
	start(t, dir, env, binary, "run", "-c", "engine.yaml")
	nats = client(t, port)
	apps, health = bucket(t, nats, "apps"), bucket(t, nats, "health")
	is("web", "81 web shop", "web.default.svc:81 critical shop", `{"instances":2,"passing":0}`)
	require.NoError(t, apps.Delete(t.Context(), "web"))
	require.NoError(t, apps.Delete(t.Context(), "theirs"))
	is("web", "", "", "")
	is("theirs", "", "", "")
}
