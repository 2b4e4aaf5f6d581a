//go:build e2e

package k8s_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	admission "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/testbed"
)

func TestAConnectionThatCannotBeMadeSaysWhatToDo(t *testing.T) {
	admin, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	stranger := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(stranger.Close)
	theirs := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: stranger.Certificate().Raw})
	file := func(server string, ca []byte, token string) string {
		path := filepath.Join(t.TempDir(), "kubeconfig")
		require.NoError(t, os.WriteFile(path, []byte(testbed.Kubeconfig(server, ca, token)), 0o600))
		return path
	}
	for name, c := range map[string]struct {
		cfg  k8s.ConnectionConfig
		want []string
	}{
		"no file":           {k8s.ConnectionConfig{Kubeconfig: "/nowhere/kubeconfig"}, []string{"kubeconfig /nowhere/kubeconfig", "no such file"}},
		"not a file of it":  {k8s.ConnectionConfig{Kubeconfig: writeFile(t, "{")}, []string{"kubeconfig", "error loading config file"}},
		"no such context":   {k8s.ConnectionConfig{Kubeconfig: kubeconfig, Context: "tset"}, []string{`no context "tset"`, `did you mean "test"?`}},
		"nobody listens":    {k8s.ConnectionConfig{Kubeconfig: file("https://127.0.0.1:1", admin.CAData, "x")}, []string{"https://127.0.0.1:1", "no API server answers there: check the address and that it is running"}},
		"another authority": {k8s.ConnectionConfig{Kubeconfig: file(admin.Host, theirs, "x")}, []string{"not signed by the kubeconfig's certificate-authority"}},
		"another name": {k8s.ConnectionConfig{Kubeconfig: writeFile(t, strings.Replace(testbed.Kubeconfig(admin.Host, admin.CAData, "x"),
			"server:", "tls-server-name: elsewhere, server:", 1))}, []string{"its certificate is for another name: correct the server's address, or set tls-server-name"}},
		"unknown token": {k8s.ConnectionConfig{Kubeconfig: file(admin.Host, admin.CAData, "x")}, []string{"does not know these credentials: renew the token or certificate"}},
		"negative qps":  {k8s.ConnectionConfig{Kubeconfig: kubeconfig, QPS: -5}, []string{"qps: -5 is less than nothing; -1 is no bound"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := k8s.Connect(t.Context(), c.cfg)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "\n", "one line")
		})
	}
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestNoKubeconfigAtAll(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nowhere/a")
	_, err := k8s.Connect(t.Context(), k8s.ConnectionConfig{})
	require.ErrorContains(t, err, "no kubeconfig was found at /nowhere/a, and this process does not run in a cluster: set kubeconfig or $KUBECONFIG")
}

func TestAWriteThatIsRefusedSaysWhyAndWhatToDo(t *testing.T) {
	c := newCluster(t)
	maps := c.configMaps(k8s.ResourceConfig{})
	apply := func(r *k8s.Resource, name, value string) error {
		_, err := r.Apply(t.Context(), engine.Object{Key: r.Key(name), Value: []byte(value)}, engine.Write{Absent: true})
		return err
	}
	t.Run("kind unknown", func(t *testing.T) {
		err := apply(c.open(k8s.ResourceConfig{APIVersion: "apps/v1", Kind: "Deploymnt"}), "a", `{}`)
		require.ErrorContains(t, err, `Deploymnt of apps/v1: install its definition, or correct apiVersion and kind; did you mean "Deployment"?`)
		err = apply(c.open(k8s.ResourceConfig{APIVersion: "v1", Kind: "Deployment"}), "a", `{}`)
		require.ErrorContains(t, err, `did you mean "Deployment of apps/v1"?`)
	})
	t.Run("namespace", func(t *testing.T) {
		everywhere, err := k8s.Open(c.conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap"})
		require.NoError(t, err)
		err = apply(everywhere, "a", `{}`)
		require.ErrorIs(t, err, engine.ErrInvalid)
		require.ErrorContains(t, err, "name it namespace/name, or list one namespace")
		nodes, err := k8s.Open(c.conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "Node"})
		require.NoError(t, err)
		require.ErrorContains(t, apply(nodes, "x/a", `{}`), `a Node is in no namespace, and namespace "x" was named`)
		require.ErrorContains(t, apply(everywhere, "nowhere/a", `{}`), `namespaces "nowhere" not found`)
	})
	t.Run("invalid", func(t *testing.T) {
		err := apply(c.open(k8s.ResourceConfig{APIVersion: "v1", Kind: "Service"}), "UPPER", `{"spec":{"ports":[{"port":99999}]}}`)
		require.ErrorIs(t, err, engine.ErrInvalid)
		require.ErrorContains(t, err, "metadata.name")
		require.ErrorContains(t, err, "spec.ports[0].port: Invalid value: 99999: must be between 1 and 65535")
		require.ErrorIs(t, apply(maps, "a", `[]`), engine.ErrInvalid)
		require.ErrorIs(t, apply(maps, "a", `{"dta":{}}`), engine.ErrInvalid)
	})
	t.Run("quota", func(t *testing.T) {
		none := corev1.ResourceList{"count/configmaps": resource.MustParse("0")}
		q, err := c.kube.CoreV1().ResourceQuotas(c.namespace).Create(t.Context(), &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: none},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		q.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none} // no controller runs that would do this
		_, err = c.kube.CoreV1().ResourceQuotas(c.namespace).UpdateStatus(t.Context(), q, metav1.UpdateOptions{})
		require.NoError(t, err)
		eventually(t, "refused", func() bool { err = apply(maps, "quota", `{}`); return err != nil })
		require.ErrorContains(t, err, "a quota is used up: raise it, or remove something")
		require.NotErrorIs(t, err, engine.ErrInvalid, "it may be raised")
	})
	t.Run("webhook", func(t *testing.T) {
		denyService(t, c)
		var err error
		services := c.open(k8s.ResourceConfig{APIVersion: "v1", Kind: "Service"})
		eventually(t, "refused", func() bool {
			err = apply(services, "a", `{"spec":{"ports":[{"port":80}]}}`)
			if err == nil {
				require.NoError(t, services.Delete(t.Context(), services.Key("a"), engine.Write{}))
			}
			return err != nil
		})
		require.ErrorContains(t, err, "the cluster's admission refuses it")
		require.ErrorContains(t, err, "not on a Sunday")
	})
}

// denyService has a webhook refuse all Services of the test's namespace.
func denyService(t *testing.T, c *cluster) {
	t.Helper()
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		body, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(body, &review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Result: &metav1.Status{Message: "not on a Sunday"}}
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(hook.Close)
	scope, none := admission.NamespacedScope, admission.SideEffectClassNone
	_, err := c.kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(), &admission.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: c.namespace},
		Webhooks: []admission.ValidatingWebhook{{
			Name: "deny.windlass.dev", SideEffects: &none, AdmissionReviewVersions: []string{"v1"},
			ClientConfig:      admission.WebhookClientConfig{URL: &hook.URL, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": c.namespace}},
			Rules: []admission.RuleWithOperations{{
				Operations: []admission.OperationType{admission.Create},
				Rule:       admission.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"services"}, Scope: &scope},
			}},
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = c.kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(context.WithoutCancel(t.Context()), c.namespace, metav1.DeleteOptions{})
	})
}

func TestAMissingRightNamesVerbResourceAndAccount(t *testing.T) {
	c := newCluster(t)
	_, err := c.kube.CoreV1().ServiceAccounts(c.namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	token, err := c.kube.CoreV1().ServiceAccounts(c.namespace).CreateToken(t.Context(), "nobody", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	require.NoError(t, err)
	admin, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = token.Status.Token
	conn, err := k8s.ConnectConfig(t.Context(), config, k8s.ConnectionConfig{})
	require.NoError(t, err)
	maps, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap", Namespaces: []string{c.namespace}})
	require.NoError(t, err)
	_, err = maps.Get(t.Context(), maps.Key("a"))
	want := "a right is missing: grant it with a Role or ClusterRole ('engine rbac' prints one): configmaps \"a\" is forbidden: User \"system:serviceaccount:" +
		c.namespace + ":nobody\" cannot get resource \"configmaps\" in API group \"\" in the namespace \"" + c.namespace + "\""
	require.EqualError(t, err, want)
	x := follow(t, maps)
	eventually(t, "not ready", func() bool {
		return maps.Status() != nil && strings.Contains(maps.Status().Error(), "a right is missing")
	})
	require.Zero(t, x.listed())
}

func TestARetryAfterIsHonoured(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "configmaps") {
			w.Header().Set("Content-Type", "application/json")
			switch r.URL.Path {
			case "/api":
				_, _ = io.WriteString(w, `{"kind":"APIVersions","versions":["v1"]}`)
			case "/api/v1":
				_, _ = io.WriteString(w, `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"configmaps","namespaced":true,"kind":"ConfigMap","verbs":["get"]}]}`)
			default:
				_, _ = io.WriteString(w, `{"kind":"APIGroupList","groups":[]}`)
			}
			return
		}
		asked.Add(1)
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
	}))
	t.Cleanup(server.Close)
	conn, err := k8s.ConnectConfig(t.Context(), &rest.Config{Host: server.URL}, k8s.ConnectionConfig{})
	require.NoError(t, err)
	maps, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap", Namespaces: []string{"default"}})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	_, err = maps.Get(ctx, maps.Key("a"))
	require.Error(t, err)
	require.LessOrEqual(t, asked.Load(), int64(3), "one a second, as the server asks")
	require.Greater(t, asked.Load(), int64(1))
}

func TestRequestsBeyondTheLimitWait(t *testing.T) {
	admin, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	conn, err := k8s.ConnectConfig(t.Context(), admin, k8s.ConnectionConfig{QPS: 10, Burst: 5})
	require.NoError(t, err)
	c := newCluster(t)
	maps, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap", Namespaces: []string{c.namespace}})
	require.NoError(t, err)
	begin := time.Now()
	for range 20 {
		_, err := maps.Get(t.Context(), maps.Key("a"))
		require.ErrorIs(t, err, engine.ErrNotFound)
	}
	require.Greater(t, time.Since(begin), time.Second, "20 requests, less a burst of 5, at 10 a second")
}
