//go:build e2e

package k8s_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
)

func TestAnObjectIsReconciledWhenItIsThereWhenItChangesAndWhenItGoes(t *testing.T) {
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull} {
		t.Run(cache, func(t *testing.T) {
			c := newCluster(t)
			c.putConfigMap("early", "1")
			var h handled
			maps := c.configMaps(k8s.ResourceConfig{Cache: cache})
			c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithHandler(h.record(dataOf))}})
			eventually(t, "listed", func() bool { return h.last("early") == run{"early", "1", engine.Resynced, false} })

			c.putConfigMap("late", "1")
			eventually(t, "created", func() bool { return h.last("late") == run{"late", "1", engine.Created, false} })
			c.putConfigMap("late", "2")
			eventually(t, "updated", func() bool { return h.last("late") == run{"late", "2", engine.Updated, false} })
			c.deleteConfigMap("late")
			eventually(t, "deleted", func() bool { return h.last("late") == run{"late", "", engine.Deleted, true} })
			require.Len(t, h.of("early"), 1)
		})
	}
}

func TestSource(t *testing.T) {
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull, k8s.CacheFields} {
		t.Run(cache, func(t *testing.T) {
			enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
				c := newCluster(t)
				maps, n := c.configMaps(k8s.ResourceConfig{Cache: cache, Fields: []string{"data.value"}}), 0
				return enginetest.SourceFixture{
					Source: maps, Key: maps.Key,
					Put:    func(_ *testing.T, name string) { n++; c.putConfigMap(name, strconv.Itoa(n)) },
					Delete: func(_ *testing.T, name string) { c.deleteConfigMap(name) },
				}
			})
		})
	}
}

func TestSink(t *testing.T) {
	for _, mode := range []string{k8s.ModeApply, k8s.ModeUpdate, k8s.ModeMerge} {
		t.Run(mode, func(t *testing.T) {
			enginetest.TestSink(t, func(t *testing.T) enginetest.SinkFixture {
				maps := newCluster(t).configMaps(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{Mode: mode}})
				return enginetest.SinkFixture{Sink: maps, Object: func(name string, version int) engine.Object {
					return engine.Object{Key: maps.Key(name), Value: fmt.Appendf(nil, `{"data":{"value":"%d"}}`, version)}
				}}
			})
		})
	}
}

// changes collects what a source tells.
type changes struct {
	mu     sync.Mutex
	events []engine.Event
	lists  int
}

func (x *changes) of(name string) (events []engine.Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range x.events {
		if e.Key.Name == name {
			events = append(events, e)
		}
	}
	return events
}

func (x *changes) listed() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.lists
}

// follow runs a source until the test ends.
func follow(t *testing.T, r *k8s.Resource) *changes {
	t.Helper()
	x := &changes{}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- r.Run(ctx, func(_ context.Context, e engine.Event) error {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.events = append(x.events, e)
			if e.Operation == engine.ListEnded {
				x.lists++
			}
			return nil
		})
	}()
	t.Cleanup(func() {
		stop()
		require.NoError(t, <-done)
	})
	return x
}

func TestSelectorsAndNamespacesBoundWhatIsTold(t *testing.T) {
	c, other := newCluster(t), newCluster(t)
	label := func(c *cluster, name string, labels map[string]string) {
		_, err := c.kube.CoreV1().ConfigMaps(c.namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	label(c, "yes", map[string]string{"app": "shop"})
	label(c, "no", map[string]string{"app": "bank"})
	label(other, "there", map[string]string{"app": "shop"})
	x := follow(t, c.configMaps(k8s.ResourceConfig{Name: "one", LabelSelector: "app=shop"}))
	both := follow(t, c.configMaps(k8s.ResourceConfig{Name: "two", LabelSelector: "app", Namespaces: []string{c.namespace, other.namespace}}))
	named := follow(t, c.configMaps(k8s.ResourceConfig{Name: "three", FieldSelector: "metadata.name=no"}))
	eventually(t, "listed", func() bool { return x.listed() == 1 && both.listed() == 1 && named.listed() == 1 })
	require.Len(t, x.of("yes"), 1)
	require.Empty(t, append(x.of("no"), x.of("there")...))
	require.Len(t, slices.Concat(both.of("yes"), both.of("no"), both.of("there")), 3)
	require.Len(t, named.of("no"), 1)
	require.Empty(t, named.of("yes"))

	// An object that the selector does not choose any more is gone to who selects.
	_, err := c.kube.CoreV1().ConfigMaps(c.namespace).Patch(t.Context(), "yes", types.MergePatchType, []byte(`{"metadata":{"labels":{"app":"bank"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	eventually(t, "deleted", func() bool { return len(x.of("yes")) == 2 })
	require.Equal(t, engine.Delete, x.of("yes")[1].Operation)
}

func TestEventsCarryMetadataBeforeAndAfterAndDeclaredFields(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps := c.configMaps(k8s.ResourceConfig{Fields: []string{"data.value"}})
	x := follow(t, maps)
	eventually(t, "listed", func() bool { return x.listed() == 1 })
	_, err := c.kube.CoreV1().ConfigMaps(c.namespace).Patch(t.Context(), "a", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"l":"1"},"annotations":{"a":"1","tracing.k8s.io/traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},"data":{"value":"2"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	eventually(t, "told", func() bool { return len(x.of("a")) == 2 })
	e := x.of("a")[1]
	require.Equal(t, engine.Put, e.Operation)
	require.Equal(t, map[string]string{"data.value": "1"}, e.Old.Fields)
	require.Equal(t, map[string]string{"data.value": "2"}, e.New.Fields)
	require.Equal(t, map[string]string{"l": "1"}, e.New.Labels)
	require.Equal(t, "1", e.New.Annotations["a"])
	require.Empty(t, e.Old.Labels)
	require.Equal(t, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", e.Traceparent)
	require.NotEmpty(t, e.Incarnation)
	newer, err := maps.CompareRevisions(x.of("a")[0].Revision, e.Revision)
	require.NoError(t, err)
	require.Negative(t, newer)
}

func TestReadersGetCopiesAndOnlyWhatIsKept(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	full, some := c.configMaps(k8s.ResourceConfig{Name: "full", Cache: k8s.CacheFull}), c.configMaps(k8s.ResourceConfig{
		Name: "some", Cache: k8s.CacheFields, Fields: []string{"metadata.name"},
	})
	for _, x := range []*changes{follow(t, full), follow(t, some)} {
		eventually(t, "listed", func() bool { return x.listed() == 1 })
	}
	cm, err := k8s.Get[*corev1.ConfigMap](t.Context(), full, full.Key("a"))
	require.NoError(t, err)
	require.Equal(t, "1", cm.Data["value"])
	require.Equal(t, "ConfigMap", cm.Kind)
	require.Empty(t, cm.ManagedFields)
	cm.Data["value"] = "mine"
	cm, err = k8s.Get[*corev1.ConfigMap](t.Context(), full, full.Key("a"))
	require.NoError(t, err)
	require.Equal(t, "1", cm.Data["value"])

	cm, err = k8s.Get[*corev1.ConfigMap](t.Context(), some, some.Key("a"))
	require.NoError(t, err)
	require.Equal(t, "a", cm.Name)
	require.Empty(t, cm.Data)
	_, err = full.Get(t.Context(), full.Key("b"))
	require.ErrorIs(t, err, engine.ErrNotFound)
}

func TestObjectsAreFoundByLabelAndField(t *testing.T) {
	c := newCluster(t)
	maps := c.configMaps(k8s.ResourceConfig{Cache: k8s.CacheFull, Fields: []string{"data.value"}, IndexLabels: []string{"app"}})
	_, err := maps.ByLabel("app", "shop")
	require.ErrorContains(t, err, "its first list has not ended")
	c.putConfigMap("a", "1")
	x := follow(t, maps)
	eventually(t, "listed", func() bool { return x.listed() == 1 })
	c.putConfigMap("b", "1")
	_, err = c.kube.CoreV1().ConfigMaps(c.namespace).Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"labels":{"app":"shop"}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	eventually(t, "by label", func() bool {
		found, err := maps.ByLabel("app", "shop")
		require.NoError(t, err)
		return len(found) == 1 && dataOf(found[0]) == "1"
	})
	eventually(t, "by field", func() bool {
		found, err := maps.ByField("data.value", "1")
		require.NoError(t, err)
		return len(found) == 2
	})
	c.putConfigMap("b", "2")
	eventually(t, "moved", func() bool {
		one, err1 := maps.ByField("data.value", "1")
		two, err2 := maps.ByField("data.value", "2")
		return err1 == nil && err2 == nil && len(one) == 1 && len(two) == 1
	})
	_, err = maps.ByLabel("tier", "x")
	require.EqualError(t, err, `label "tier" of source configmap is not indexed; IndexLabels are [app]`)
}
