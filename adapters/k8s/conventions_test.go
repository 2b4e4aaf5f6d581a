//go:build e2e

package k8s_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
)

// boats are objects of a kind of a test's own, with a status.
type boats struct {
	*cluster

	client dynamic.ResourceInterface
	kind   *k8s.Resource
}

func newBoats(t *testing.T, group string, cfg k8s.ResourceConfig) *boats {
	t.Helper()
	c, client := newCluster(t), dynamicClient(t)
	define(t, client, group, "Boat")
	cfg.APIVersion, cfg.Kind = group+"/v1", "Boat"
	b := &boats{c, client.Resource(schema.GroupVersionResource{Group: group, Version: "v1", Resource: "boats"}).Namespace(c.namespace), c.open(cfg)}
	eventually(t, "served", func() bool { _, err := b.client.List(t.Context(), listAll); return err == nil })
	return b
}

func (b *boats) put(name string, annotations map[string]any, speed int64) {
	b.t.Helper()
	_, err := b.client.Create(b.t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": b.kind.Key("").Kind.String()[len("k8s/"):len(b.kind.Key("").Kind.String())-len("/Boat")] + "/v1", "kind": "Boat",
		"metadata": map[string]any{"name": name, "annotations": annotations}, "spec": map[string]any{"speed": speed},
	}}, metav1.CreateOptions{})
	require.NoError(b.t, err)
}

func (b *boats) patch(name, patch string) {
	b.t.Helper()
	_, err := b.client.Patch(b.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(b.t, err)
}

func (b *boats) get(name string) *unstructured.Unstructured {
	b.t.Helper()
	o, err := b.client.Get(b.t.Context(), name, metav1.GetOptions{})
	require.NoError(b.t, err)
	return o
}

func (b *boats) condition(name, kind string) metav1.Condition {
	b.t.Helper()
	var have struct {
		Conditions []metav1.Condition `json:"conditions"`
	}
	status, _, err := unstructured.NestedMap(b.get(name).Object, "status")
	require.NoError(b.t, err)
	require.NoError(b.t, runtime.DefaultUnstructuredConverter.FromUnstructured(status, &have))
	if c := meta.FindStatusCondition(have.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

func TestOutcomesShowAsConditions(t *testing.T) {
	b := newBoats(t, "conditions.dev", k8s.ResourceConfig{Cache: k8s.CacheFull, IgnoreStatus: true})
	var fail atomic.Pointer[error]
	var runs atomic.Int64
	b.run(engine.Config{Controllers: []engine.Controller{engine.NewController("boats").For(b.kind).WithBackoff(engine.Backoff{Initial: 10 * time.Millisecond, Max: 10 * time.Millisecond}).
		WithMiddleware(k8s.Conventions()).WithHandler(func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
		runs.Add(1)
		if err := fail.Load(); err != nil {
			return engine.Result{}, *err
		}
		return engine.Result{}, nil
	})}})
	b.put("a", nil, 1)
	is := func(kind string, status metav1.ConditionStatus, reason string) func() bool {
		return func() bool {
			c := b.condition("a", kind)
			return c.Status == status && c.Reason == reason
		}
	}
	eventually(t, "ready", is("Ready", metav1.ConditionTrue, "ReconcileSucceeded"))
	require.Equal(t, int64(1), b.condition("a", "Ready").ObservedGeneration)
	require.EqualValues(t, 1, runs.Load(), "the status that it wrote caused no run")
	since := b.condition("a", "Ready").LastTransitionTime

	time.Sleep(1100 * time.Millisecond) // transition times count seconds
	b.patch("a", `{"spec":{"speed":2}}`)
	eventually(t, "observed", func() bool { return b.condition("a", "Ready").ObservedGeneration == 2 })
	require.Equal(t, since, b.condition("a", "Ready").LastTransitionTime, "it was ready all the time")

	wrong, sunk := errors.New("no wind"), engine.Terminal(errors.New("sunk"))
	fail.Store(&wrong)
	b.patch("a", `{"spec":{"speed":3}}`)
	eventually(t, "reconciling", is("Reconciling", metav1.ConditionTrue, "ReconcileFailed"))
	require.Equal(t, "no wind", b.condition("a", "Ready").Message)
	require.NotEqual(t, since, b.condition("a", "Ready").LastTransitionTime)
	fail.Store(&sunk)
	eventually(t, "stalled", is("Stalled", metav1.ConditionTrue, "TerminalError"))
	require.Equal(t, metav1.ConditionFalse, b.condition("a", "Reconciling").Status)
	fail.Store(nil)

	// A request is answered, and revives what was parked.
	b.patch("a", `{"metadata":{"annotations":{"windlass.dev/reconcile-requested-at":"now"}}}`)
	eventually(t, "ready again", is("Ready", metav1.ConditionTrue, "ReconcileSucceeded"))
	eventually(t, "answered", func() bool {
		at, _, err := unstructured.NestedString(b.get("a").Object, "status", "lastHandledReconcileAt")
		return err == nil && at == "now"
	})
}

func TestAPausedObjectIsHeldBackAndItsDeletionIsNot(t *testing.T) {
	b := newBoats(t, "paused.dev", k8s.ResourceConfig{Cache: k8s.CacheFull, IgnoreStatus: true})
	var h handled
	b.run(engine.Config{Controllers: []engine.Controller{engine.NewController("boats").For(b.kind).WithMiddleware(k8s.Conventions()).
		WithHandler(h.record(func(engine.Object) string { return "" }))}})
	b.put("a", map[string]any{k8s.PausedAnnotation: "true"}, 1)
	eventually(t, "paused", func() bool { return b.condition("a", "Paused").Status == metav1.ConditionTrue })
	require.Empty(t, h.of("a"))
	b.patch("a", `{"metadata":{"annotations":{"windlass.dev/paused":null}}}`)
	eventually(t, "runs", func() bool { return len(h.of("a")) == 1 })
	eventually(t, "not paused", func() bool { return b.condition("a", "Paused").Status == metav1.ConditionFalse })

	b.put("until", map[string]any{k8s.PausedAnnotation: time.Now().Add(1500 * time.Millisecond).UTC().Format(time.RFC3339Nano)}, 1)
	eventually(t, "paused", func() bool { return b.condition("until", "Paused").Status == metav1.ConditionTrue })
	require.Empty(t, h.of("until"))
	eventually(t, "runs when its time has come", func() bool { return len(h.of("until")) == 1 })

	b.put("wrong", map[string]any{k8s.PausedAnnotation: "maybe"}, 1)
	eventually(t, "runs", func() bool { return len(h.of("wrong")) == 1 })
	require.Contains(t, b.log.String(), `\"maybe\" is neither \"true\" nor a time such as`)

	b.put("gone", map[string]any{k8s.PausedAnnotation: "true"}, 1)
	eventually(t, "paused", func() bool { return b.condition("gone", "Paused").Status == metav1.ConditionTrue })
	require.NoError(t, b.client.Delete(t.Context(), "gone", metav1.DeleteOptions{}))
	eventually(t, "its deletion is seen", func() bool { return h.last("gone").gone })
}

func TestAFinalizerHoldsAnObjectUntilItsCleanupSucceeds(t *testing.T) {
	b := newBoats(t, "finalizers.dev", k8s.ResourceConfig{})
	var cleanups atomic.Int64
	var h handled
	b.run(engine.Config{Controllers: []engine.Controller{engine.NewController("boats").For(b.kind).WithBackoff(engine.Backoff{Initial: 10 * time.Millisecond, Max: 10 * time.Millisecond}).
		WithMiddleware(k8s.Finalizer("windlass.dev/test", func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			if cleanups.Add(1) < 3 {
				return engine.Result{}, errors.New("not yet")
			}
			return engine.Result{}, nil
		})).WithHandler(h.record(func(engine.Object) string { return "" }))}})
	b.put("a", nil, 1)
	eventually(t, "handled", func() bool { return len(h.of("a")) > 0 })
	require.Equal(t, []string{"windlass.dev/test"}, b.get("a").GetFinalizers(), "it was there before the handler was called")
	b.patch("a", `{"metadata":{"finalizers":["windlass.dev/test","somebody.else/too"]}}`)
	require.NoError(t, b.client.Delete(t.Context(), "a", metav1.DeleteOptions{}))
	eventually(t, "cleaned up", func() bool { return len(b.get("a").GetFinalizers()) == 1 })
	require.EqualValues(t, 3, cleanups.Load())
	require.Equal(t, []string{"somebody.else/too"}, b.get("a").GetFinalizers())
	b.patch("a", `{"metadata":{"finalizers":null}}`)
	eventually(t, "gone", func() bool { return h.last("a").gone })
	require.EqualValues(t, 3, cleanups.Load())
}

func TestNotesAreEventsOfTheObject(t *testing.T) {
	c := newCluster(t)
	cm := c.putConfigMap("a", "1")
	maps := c.configMaps(k8s.ResourceConfig{})
	var runs atomic.Int64
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).
		WithHandler(func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			rt.Note(ctx, engine.Note{Warning: true, Reason: "Leaking", Message: "There is water in it."})
			if runs.Add(1) == 40 {
				return engine.Result{}, nil
			}
			return engine.Result{RequeueAfter: time.Millisecond}, nil
		})}})
	eventually(t, "recorded", func() bool {
		list, err := c.kube.CoreV1().Events(c.namespace).List(t.Context(), listAll)
		require.NoError(t, err)
		return runs.Load() == 40 && len(list.Items) == 1 && list.Items[0].Count > 1
	})
	list, err := c.kube.CoreV1().Events(c.namespace).List(t.Context(), listAll)
	require.NoError(t, err)
	e := list.Items[0]
	require.Equal(t, []string{"Warning", "Leaking", "There is water in it.", "windlass"}, []string{e.Type, e.Reason, e.Message, e.Source.Component})
	require.Equal(t, cm.UID, e.InvolvedObject.UID)
	require.LessOrEqual(t, int(e.Count), 26, "a storm is bounded")
}
