//go:build e2e

package k8s_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/link"
	"github.com/windlass-dev/windlass/internal/testbed"
)

// ownCluster is a cluster that a test may break.
func ownCluster(t *testing.T) *testbed.Kubernetes {
	t.Helper()
	k, err := testbed.StartKubernetes(t.Context(), t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(k.Stop)
	return k
}

func TestNothingIsLostWhenTheAPIServerIsKilledUnderLoad(t *testing.T) {
	k := ownCluster(t)
	c := newClusterAt(t, k.Kubeconfig)
	maps := c.configMaps(k8s.ResourceConfig{Cache: k8s.CacheFull})
	var h handled
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithConcurrency(4).WithHandler(h.record(dataOf))}})
	const writers, keys = 4, 50
	last := make([]map[string]string, writers)
	writing, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for w := range writers {
		last[w] = make(map[string]string)
		group.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for n := 0; writing.Err() == nil; n++ {
				name, value := fmt.Sprintf("w%d-%d", w, rng.IntN(keys)), strconv.Itoa(n)
				if rng.IntN(10) == 0 {
					if err := c.kube.CoreV1().ConfigMaps(c.namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err == nil {
						last[w][name] = ""
					} else {
						delete(last[w], name) // it may or may not have been carried out
					}
				} else if err := tryPut(t.Context(), c, name, value); err == nil {
					last[w][name] = value
				} else {
					delete(last[w], name)
				}
			}
		})
	}
	for range 3 {
		time.Sleep(time.Second)
		k.KillAPI()
		eventually(t, "not ready", func() bool { return maps.Status() != nil })
		require.ErrorContains(t, maps.Status(), "no API server answers there: check the address and that it is running")
		require.NoError(t, k.StartAPI(t.Context()))
	}
	eventually(t, "ready", func() bool { return maps.Status() == nil })
	stop()
	group.Wait()
	checked := 0
	for _, written := range last {
		for name, value := range written {
			checked++
			eventually(t, name+" is "+value, func() bool {
				r := h.last(name)
				return r.value == value && (r.gone || r.name == "") == (value == "")
			})
		}
	}
	require.Greater(t, checked, writers*keys/4)
	t.Logf("%d runs; the last versions of %d objects were reconciled", len(h.runs), checked)
}

func tryPut(ctx context.Context, c *cluster, name, value string) error {
	maps := c.kube.CoreV1().ConfigMaps(c.namespace)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"value": value}}
	_, err := maps.Update(ctx, cm, metav1.UpdateOptions{})
	if err != nil {
		_, err = maps.Create(ctx, cm, metav1.CreateOptions{})
	}
	return err
}

func TestWhatChangedBehindACutConnectionAndACompactionIsFound(t *testing.T) {
	k := ownCluster(t)
	c := newClusterAt(t, k.Kubeconfig)
	cut, err := link.New(t.Context(), k.Address)
	require.NoError(t, err)
	t.Cleanup(cut.Close)
	text, err := os.ReadFile(k.Kubeconfig)
	require.NoError(t, err)
	through := t.TempDir() + "/kubeconfig"
	require.NoError(t, os.WriteFile(through, []byte(strings.ReplaceAll(string(text), k.Address, cut.Address())), 0o600))
	conn, err := k8s.Connect(t.Context(), k8s.ConnectionConfig{Kubeconfig: through, QPS: -1})
	require.NoError(t, err)
	maps, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: "ConfigMap", Namespaces: []string{c.namespace}, Cache: k8s.CacheFull})
	require.NoError(t, err)
	for _, name := range []string{"same", "changed", "deleted", "replaced"} {
		c.putConfigMap(name, "1")
	}
	x := follow(t, maps)
	eventually(t, "listed", func() bool { return x.listed() == 1 })

	cut.Sever(true)
	c.putConfigMap("changed", "2")
	c.putConfigMap("added", "1")
	c.deleteConfigMap("deleted")
	c.deleteConfigMap("replaced")
	c.putConfigMap("replaced", "2")
	for i := range 200 { // beyond what the server's own memory of changes could tell
		c.putConfigMap("noise", strconv.Itoa(i))
	}
	require.NoError(t, k.Compact(t.Context()))
	k.KillAPI()
	require.NoError(t, k.StartAPI(t.Context()))
	cut.Sever(false)
	operations := func(name string) (ops []engine.Operation) {
		for _, e := range x.of(name) {
			ops = append(ops, e.Operation)
		}
		return ops
	}
	eventually(t, "found", func() bool {
		return len(operations("changed")) == 2 && len(operations("added")) == 1 && len(operations("deleted")) == 2 && len(operations("replaced")) >= 2
	})
	require.Equal(t, []engine.Operation{engine.Resync, engine.Delete}, operations("deleted"))
	require.Equal(t, []engine.Operation{engine.Resync}, operations("same"), "what did not change is not told again")
	require.True(t, x.of("deleted")[1].Repaired)
	require.True(t, x.of("changed")[1].Repaired)
	require.NotNil(t, x.of("changed")[1].Old)
	require.NotEqual(t, x.of("replaced")[0].Incarnation, x.of("replaced")[1].Incarnation)
	require.Equal(t, 1, x.listed())
}

var crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// define adds a kind to the cluster.
func define(t *testing.T, client dynamic.Interface, group, kind string) {
	t.Helper()
	plural := strings.ToLower(kind) + "s"
	_, err := client.Resource(crds).Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": plural + "." + group},
		"spec": map[string]any{
			"group": group, "scope": "Namespaced", "names": map[string]any{"kind": kind, "plural": plural},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true, "subresources": map[string]any{"status": map[string]any{}},
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
			}},
		},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
}

func dynamicClient(t *testing.T) dynamic.Interface {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	client, err := dynamic.NewForConfig(config)
	require.NoError(t, err)
	return client
}

func TestAKindMayAppearGoAndAppearAgain(t *testing.T) {
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull} {
		t.Run(cache, func(t *testing.T) {
			c, client := newCluster(t), dynamicClient(t)
			group := cache + ".later.dev"
			boats := c.open(k8s.ResourceConfig{APIVersion: group + "/v1", Kind: "Boat", Cache: cache})
			x := follow(t, boats)
			eventually(t, "waits", func() bool { return boats.Status() != nil })
			require.ErrorContains(t, boats.Status(), "the server has no such kind: Boat of "+group+"/v1: install its definition, or correct apiVersion and kind")
			require.Zero(t, x.listed())

			for round := range 2 {
				define(t, client, group, "Boat")
				eventually(t, "started by itself", func() bool { return x.listed() == round+1 && boats.Status() == nil })
				made := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/v1", "kind": "Boat", "metadata": map[string]any{"name": "a"}}}
				at := client.Resource(schema.GroupVersionResource{Group: group, Version: "v1", Resource: "boats"}).Namespace(c.namespace)
				eventually(t, "made", func() bool {
					_, err := at.Create(t.Context(), made, metav1.CreateOptions{})
					return err == nil
				})
				eventually(t, "told", func() bool { return len(x.of("a")) == 2*round+1 })
				require.NoError(t, client.Resource(crds).Delete(t.Context(), "boats."+group, metav1.DeleteOptions{}))
				eventually(t, "told as deleted", func() bool {
					events := x.of("a")
					return len(events) == 2*round+2 && events[len(events)-1].Operation == engine.Delete
				})
				eventually(t, "waits again", func() bool { return boats.Status() != nil })
			}
		})
	}
}

func TestLargeObjects(t *testing.T) {
	c := newCluster(t)
	maps := c.configMaps(k8s.ResourceConfig{Cache: k8s.CacheFull})
	var h handled
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithHandler(h.record(dataOf))}})
	mebibyte := strings.Repeat("x", 1<<20-1000)
	c.putConfigMap("large", mebibyte)
	eventually(t, "reconciled", func() bool { return h.last("large").value == mebibyte })
	_, err := maps.Apply(t.Context(), engine.Object{Key: maps.Key("larger"), Value: map[string]any{"data": map[string]any{"v": strings.Repeat("x", 1<<22)}}}, engine.Write{Absent: true})
	require.ErrorIs(t, err, engine.ErrInvalid)
	require.ErrorContains(t, err, "larger than the API server takes")
	_, err = maps.Apply(t.Context(), engine.Object{Key: maps.Key("larger"), Value: map[string]any{"data": map[string]any{"v": strings.Repeat("x", 1<<20+1)}}}, engine.Write{Absent: true})
	require.ErrorIs(t, err, engine.ErrInvalid)
	require.ErrorContains(t, err, "may not be more than 1048576 bytes")
}

func TestASecondWriterDelaysAndNeverBreaksAnApply(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{Cache: k8s.CacheFull})
	var runs atomic.Int64
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(maps).Owns(secrets).
		WithBackoff(engine.Backoff{Max: 20 * time.Millisecond}).WithHandler(copies(secrets, dataOf, &runs))}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	storm, calm := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		for n := 0; storm.Err() == nil; n++ {
			_, err := c.kube.CoreV1().Secrets(c.namespace).Patch(storm, "a", types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"theirs":"%d"}}}`, n), metav1.PatchOptions{})
			if storm.Err() == nil && err != nil {
				t.Error(err)
			}
		}
	})
	for n := range 50 {
		c.putConfigMap("a", strconv.Itoa(n))
	}
	eventually(t, "the last version, in the storm", func() bool { return string(c.secret("a").Data["value"]) == "49" })
	calm()
	group.Wait()
	require.NotEmpty(t, c.secret("a").Annotations["theirs"])
}

func TestTenThousandObjects(t *testing.T) {
	c := newCluster(t)
	const n = 10000
	var group sync.WaitGroup
	for w := range 16 {
		group.Go(func() {
			for i := w; i < n; i += 16 {
				if err := tryPut(t.Context(), c, "m"+strconv.Itoa(i), strconv.Itoa(i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull} {
		maps := c.configMaps(k8s.ResourceConfig{Cache: cache})
		var seen sync.Map
		var count atomic.Int64
		ctx, stop := context.WithCancel(t.Context())
		e, err := engine.New(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithConcurrency(8).
			WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
				if _, again := seen.LoadOrStore(req.Key.Name, true); !again {
					count.Add(1)
				}
				return engine.Result{}, nil
			})}})
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		eventually(t, "all", func() bool { return count.Load() == n })
		stop()
		require.NoError(t, <-done)
	}
}

// TestAControllerComesAndGoesWhileTheEngineRuns adds one whose kind is not there yet.
func TestAControllerComesAndGoesWhileTheEngineRuns(t *testing.T) {
	c, client := newCluster(t), dynamicClient(t)
	maps := c.configMaps(k8s.ResourceConfig{})
	var h handled
	e := c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithHandler(h.record(dataOf))}})
	boats := c.open(k8s.ResourceConfig{APIVersion: "atruntime.dev/v1", Kind: "Boat"})
	eventually(t, "added", func() bool {
		return e.Add(t.Context(), engine.NewController("boats").For(boats).WithHandler(h.record(func(engine.Object) string { return "boat" }))) == nil
	})
	readiness := func() error {
		for _, s := range e.Sources() {
			if s.Name == "boat" {
				return s.Err
			}
		}
		return errors.New("no such source")
	}
	eventually(t, "not ready, and why", func() bool {
		err := readiness()
		return err != nil && strings.Contains(err.Error(), "the server has no such kind: Boat")
	})
	c.putConfigMap("a", "1")
	eventually(t, "the other works", func() bool { return h.last("a").value == "1" })
	define(t, client, "atruntime.dev", "Boat")
	eventually(t, "ready", func() bool { return readiness() == nil })
	at := client.Resource(schema.GroupVersionResource{Group: "atruntime.dev", Version: "v1", Resource: "boats"}).Namespace(c.namespace)
	_, err := at.Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "atruntime.dev/v1", "kind": "Boat", "metadata": map[string]any{"name": "b"},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
	eventually(t, "reconciled", func() bool { return h.last("b").value == "boat" })
	require.NoError(t, e.Remove(t.Context(), "boats"))
	require.ErrorContains(t, readiness(), "no such source")
	runs := len(h.of("b"))
	require.NoError(t, at.Delete(t.Context(), "b", metav1.DeleteOptions{}))
	c.putConfigMap("a", "2")
	eventually(t, "the other still works", func() bool { return h.last("a").value == "2" })
	require.Len(t, h.of("b"), runs)
}
