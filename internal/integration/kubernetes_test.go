//go:build e2e

package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// clusterExample writes an example config into a directory of its own, on free ports and the testbed's cluster.
func clusterExample(t *testing.T, name string) (dir string, port int, env []string, kube kubernetes.Interface) {
	t.Helper()
	kubeconfig := os.Getenv("WINDLASS_KUBECONFIG")
	require.NotEmpty(t, kubeconfig, "run this by 'make e2e', which starts a cluster")
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	kube, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	text, err := os.ReadFile("../../examples/" + name + "/engine.yaml")
	require.NoError(t, err)
	dir, port = t.TempDir(), freePort(t)
	changed := strings.Replace(string(text), "127.0.0.1:4222", fmt.Sprintf("127.0.0.1:%d", port), 1)
	require.NotEqual(t, string(text), changed)
	changed += "server: { health: \"127.0.0.1:0\", metrics: \"127.0.0.1:0\", admin: { address: \"127.0.0.1:0\" } }\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.yaml"), []byte(changed), 0o600))
	return dir, port, []string{"KUBECONFIG=" + kubeconfig}, kube
}

func TestServicesShowInABucket(t *testing.T) {
	dir, port, env, kube := clusterExample(t, "services-to-nats")
	services := kube.CoreV1().Services("default")
	make := func(name string) *corev1.Service {
		s, err := services.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return s
	}
	early := make("early")
	p := start(t, dir, env, binary, "run", "-c", "engine.yaml")
	registry := bucket(t, client(t, port), "services")
	is := func(s *corev1.Service, port int) {
		t.Helper()
		want := fmt.Sprintf(`{"address":%q,"ports":[{"name":"http","port":%d,"protocol":"TCP","targetPort":80}],"type":"ClusterIP"}`, s.Spec.ClusterIP, port)
		eventually(t, want, func() bool { return get(registry, "default."+s.Name) == want })
	}
	is(early, 80)
	late := make("late")
	is(late, 80)
	_, err := services.Patch(t.Context(), "late", types.MergePatchType, []byte(`{"spec":{"ports":[{"name":"http","port":81,"targetPort":80}]}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	is(late, 81)
	put(t, registry, "default.late", "changed by hand")
	is(late, 81)
	require.NoError(t, services.Delete(t.Context(), "late", metav1.DeleteOptions{}))
	eventually(t, "gone", func() bool { return get(registry, "default.late") == "" })
	require.Contains(t, fetch(t, p, "server.health", "/readyz?verbose"), "[+] source services\n")
	metrics := fetch(t, p, "server.metrics", "/metrics")
	require.Contains(t, metrics, `rest_client_requests_total{code="200",host="`)
	require.Contains(t, metrics, `rest_client_rate_limiter_duration_seconds_count{host="`)

	// What goes while nobody watches is noticed at the next start.
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())
	require.NoError(t, services.Delete(t.Context(), "early", metav1.DeleteOptions{}))
	start(t, dir, env, binary, "run", "-c", "engine.yaml")
	registry = bucket(t, client(t, port), "services")
	eventually(t, "gone while down", func() bool { return get(registry, "default.early") == "" })
}

func TestAppsShowAsConfigMaps(t *testing.T) {
	dir, port, env, kube := clusterExample(t, "nats-to-configmaps")
	maps, secrets := kube.CoreV1().ConfigMaps("default"), kube.CoreV1().Secrets("default")
	secret, err := secrets.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	p := start(t, dir, env, binary, "run", "-c", "engine.yaml")
	apps := bucket(t, client(t, port), "apps")
	data := func(name string) string {
		m, err := maps.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return ""
		}
		b, err := json.Marshal(m.Data)
		require.NoError(t, err)
		return string(b)
	}
	is := func(name, want string) {
		t.Helper()
		eventually(t, name+" is "+want, func() bool { return data(name) == want })
	}
	put(t, apps, "web", `{"image":"web:3","settings":{"theme":"dark"}}`)
	credentials := func(s *corev1.Secret) string { return s.Name + " at " + s.ResourceVersion }
	is("web", fmt.Sprintf(`{"credentials":%q,"image":"web:3","settings.json":"{\"theme\":\"dark\"}\n"}`, credentials(secret)))
	put(t, apps, "alone", `{"image":"alone:1","settings":{}}`)
	alone := `{"credentials":"none","image":"alone:1","settings.json":"{}\n"}`
	is("alone", alone)

	// A third party changes and deletes what it does not own.
	_, err = maps.Patch(t.Context(), "alone", types.MergePatchType, []byte(`{"data":{"image":"x"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	is("alone", alone)
	require.NoError(t, maps.Delete(t.Context(), "alone", metav1.DeleteOptions{}))
	is("alone", alone)

	// A tertiary causes nothing by itself, and is seen by the next run.
	secret, err = secrets.Patch(t.Context(), "web", types.MergePatchType, []byte(`{"data":{"password":"eA=="}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	put(t, apps, "alone", `{"image":"alone:2","settings":{}}`)
	is("alone", `{"credentials":"none","image":"alone:2","settings.json":"{}\n"}`)
	require.NotContains(t, data("web"), credentials(secret))
	put(t, apps, "web", `{"image":"web:4","settings":{}}`)
	is("web", fmt.Sprintf(`{"credentials":%q,"image":"web:4","settings.json":"{}\n"}`, credentials(secret)))

	// What is not the engine's is left alone.
	_, err = maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Data: map[string]string{"hands": "off"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	put(t, apps, "theirs", `{"image":"x","settings":{}}`)
	p.says("resource exists and is not managed by this controller")
	require.JSONEq(t, `{"hands":"off"}`, data("theirs"))

	require.NoError(t, apps.Delete(t.Context(), "web"))
	is("web", "")
	p.signal(syscall.SIGTERM)
	require.Equal(t, 0, p.wait())
}
