//go:build e2e

package k8s_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/testbed"
)

// kubeconfig is the cluster's that all tests share. It is the caller's, or one that lives as long as the tests.
var kubeconfig = os.Getenv("WINDLASS_KUBECONFIG")

func TestMain(m *testing.M) {
	if kubeconfig != "" {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "windlass-k8s-")
	must(err)
	cluster, err := testbed.StartKubernetes(context.Background(), dir, os.Stderr) // there is no test yet
	must(err)
	kubeconfig = cluster.Kubeconfig
	code := m.Run()
	cluster.Stop()
	must(os.RemoveAll(dir))
	os.Exit(code)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// cluster is a namespace of its own in the cluster, and clients for it.
type cluster struct {
	t          *testing.T
	kubeconfig string
	namespace  string
	conn       *k8s.Connection
	kube       kubernetes.Interface
	log        *logged
	patches    atomic.Int64 // that conn has sent
}

type counter struct {
	next    http.RoundTripper
	patches *atomic.Int64
}

func (c *counter) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPatch {
		c.patches.Add(1)
	}
	return c.next.RoundTrip(r)
}

// logged is what the adapter has logged.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newCluster(t *testing.T) *cluster { return newClusterAt(t, kubeconfig) }

func newClusterAt(t *testing.T, kubeconfig string) *cluster {
	t.Helper()
	c := &cluster{t: t, kubeconfig: kubeconfig, log: &logged{}}
	logger := slog.New(slog.NewTextHandler(c.log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.log)
		}
	})
	counted, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper { return &counter{next, &c.patches} })
	c.conn, err = k8s.ConnectConfig(t.Context(), counted, k8s.ConnectionConfig{QPS: -1, Logger: logger})
	require.NoError(t, err)
	t.Cleanup(c.conn.Close)
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	config.QPS = -1
	c.kube, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	ns, err := c.kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "t-"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	c.namespace = ns.Name
	return c
}

// open opens a kind in the test's namespace.
func (c *cluster) open(cfg k8s.ResourceConfig) *k8s.Resource {
	c.t.Helper()
	if cfg.Namespaces == nil {
		cfg.Namespaces = []string{c.namespace}
	}
	r, err := k8s.Open(c.conn, cfg)
	require.NoError(c.t, err)
	return r
}

func (c *cluster) configMaps(cfg k8s.ResourceConfig) *k8s.Resource {
	c.t.Helper()
	cfg.APIVersion, cfg.Kind = "v1", "ConfigMap"
	return c.open(cfg)
}

func (c *cluster) putConfigMap(name, value string) *corev1.ConfigMap {
	c.t.Helper()
	maps := c.kube.CoreV1().ConfigMaps(c.namespace)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"value": value}}
	out, err := maps.Update(c.t.Context(), cm, metav1.UpdateOptions{})
	if err != nil {
		out, err = maps.Create(c.t.Context(), cm, metav1.CreateOptions{})
	}
	require.NoError(c.t, err)
	return out
}

func (c *cluster) deleteConfigMap(name string) {
	c.t.Helper()
	require.NoError(c.t, c.kube.CoreV1().ConfigMaps(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}))
}

// run runs an engine until the test ends.
func (c *cluster) run(cfg engine.Config) *engine.Engine {
	c.t.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(c.log, nil))
	e, err := engine.New(cfg)
	require.NoError(c.t, err)
	ctx, stop := context.WithCancel(c.t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	c.t.Cleanup(func() {
		stop()
		require.NoError(c.t, <-done)
	})
	return e
}

// handled is what a handler has seen, in order.
type handled struct {
	mu   sync.Mutex
	runs []run
}

type run struct {
	name, value string
	trigger     engine.Trigger
	gone        bool
}

// record returns a handler that reads its key's object.
func (h *handled) record(value func(engine.Object) string) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		o, err := rt.Get(ctx, req.Key)
		x := run{name: req.Key.Name, trigger: req.Trigger(), gone: engine.IsNotFound(err)}
		if err != nil && !x.gone {
			return engine.Result{}, err
		}
		if !x.gone {
			x.value = value(o)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.runs = append(h.runs, x)
		return engine.Result{}, nil
	}
}

func dataOf(o engine.Object) string {
	cm, err := engine.As[*corev1.ConfigMap](o)
	if err != nil {
		return err.Error()
	}
	return cm.Data["value"]
}

func (h *handled) of(name string) (runs []run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.runs {
		if r.name == name {
			runs = append(runs, r)
		}
	}
	return runs
}

func (h *handled) last(name string) run {
	runs := h.of(name)
	if len(runs) == 0 {
		return run{}
	}
	return runs[len(runs)-1]
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, 30*time.Second, 10*time.Millisecond, what)
}

func long(s string) string { return strings.Repeat(s, 100) }

var (
	listAll   = metav1.ListOptions{}
	deleteNow = metav1.DeleteOptions{}
)
