//go:build e2e

package k8s_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

func (c *cluster) secret(name string) *corev1.Secret {
	c.t.Helper()
	s, err := c.kube.CoreV1().Secrets(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	require.NoError(c.t, err)
	return s
}

func (c *cluster) hasSecret(name string) bool {
	c.t.Helper()
	list, err := c.kube.CoreV1().Secrets(c.namespace).List(c.t.Context(), metav1.ListOptions{})
	require.NoError(c.t, err)
	for _, s := range list.Items {
		if s.Name == name {
			return true
		}
	}
	return false
}

func (c *cluster) secrets(cfg k8s.ResourceConfig) *k8s.Resource {
	c.t.Helper()
	cfg.APIVersion, cfg.Kind = "v1", "Secret"
	return c.open(cfg)
}

// copies returns a handler that keeps a Secret of the same name in step with each object of the primary.
func copies(to *k8s.Resource, value func(engine.Object) string, runs *atomic.Int64) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		if runs != nil {
			runs.Add(1)
		}
		name := req.Key.Name[strings.LastIndex(req.Key.Name, "/")+1:]
		o, err := rt.Get(ctx, req.Key)
		if engine.IsNotFound(err) {
			owned, err := rt.Owned(ctx, to.Name())
			for _, k := range owned {
				err = errors.Join(err, rt.Delete(ctx, k))
			}
			return engine.Result{}, err
		}
		if err != nil {
			return engine.Result{}, err
		}
		return engine.Result{}, rt.Apply(ctx, engine.Object{Key: to.Key(name), Value: map[string]any{"stringData": map[string]any{"value": value(o)}}})
	}
}

func TestASecondaryFollowsItsPrimaryAndIsPutRight(t *testing.T) {
	c := newCluster(t)
	cm := c.putConfigMap("a", "1")
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{})
	c.run(engine.Config{Controllers: []engine.Controller{
		engine.NewController("copy").For(maps).Owns(secrets).WithHandler(copies(secrets, dataOf, nil)),
	}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	s := c.secret("a")
	require.Equal(t, "1", string(s.Data["value"]))
	require.Equal(t, maps.Key("a").String(), s.Annotations[k8s.OwnerAnnotation])
	require.NotEmpty(t, s.Labels[k8s.OwnerLabel])
	require.Len(t, s.OwnerReferences, 1)
	require.Equal(t, cm.UID, s.OwnerReferences[0].UID)

	// A third party changes and deletes it.
	_, err := c.kube.CoreV1().Secrets(c.namespace).Patch(t.Context(), "a", types.MergePatchType, []byte(`{"stringData":{"value":"x"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	eventually(t, "put right", func() bool { return string(c.secret("a").Data["value"]) == "1" })
	require.NoError(t, c.kube.CoreV1().Secrets(c.namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}))
	eventually(t, "made again", func() bool { return c.hasSecret("a") })
	c.deleteConfigMap("a")
	eventually(t, "collected", func() bool { return !c.hasSecret("a") })
}

func TestAnObjectOfSomebodyElseIsRefusedAndCanBeAdopted(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	_, err := c.kube.CoreV1().Secrets(c.namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "a"}, StringData: map[string]string{"theirs": "1"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{})
	var refused atomic.Pointer[error]
	var adopt atomic.Bool
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(maps).Owns(secrets).WithBackoff(engine.Backoff{Max: 50 * time.Millisecond}).
		WithHandler(func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			err := rt.Do(ctx, engine.Effect{Adopt: adopt.Load(), Object: engine.Object{Key: secrets.Key("a"), Value: []byte(`{"stringData":{"ours":"1"}}`)}})
			refused.Store(&err)
			return engine.Result{}, err
		})}})
	eventually(t, "refused", func() bool { e := refused.Load(); return e != nil && errors.Is(*e, engine.ErrResourceExists) })
	require.NotContains(t, c.secret("a").Data, "ours")
	eventually(t, "an Event of the primary", func() bool {
		list, err := c.kube.CoreV1().Events(c.namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=a,reason=ErrResourceExists,type=Warning"})
		require.NoError(t, err)
		return len(list.Items) > 0 && list.Items[0].InvolvedObject.Kind == "ConfigMap"
	})
	adopt.Store(true)
	eventually(t, "adopted", func() bool { return c.secret("a").Annotations[k8s.OwnerAnnotation] == maps.Key("a").String() })
	require.Equal(t, map[string][]byte{"theirs": []byte("1"), "ours": []byte("1")}, c.secret("a").Data)
}

func TestAnOwnerElsewhereIsNamedByAnnotationAndHash(t *testing.T) {
	c := newCluster(t)
	// Longer than a label may be, and with bytes that one may not hold.
	name := "tenants/" + long("x") + "/a"
	apps, secrets := memory.New[string]("apps"), c.secrets(k8s.ResourceConfig{})
	apps.Set(name, "1")
	h := copies(secrets, func(o engine.Object) string { s, _ := engine.As[string](o); return s }, nil)
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(apps).Owns(secrets).WithHandler(h)}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	s := c.secret("a")
	require.Empty(t, s.OwnerReferences)
	require.Equal(t, apps.Key(name).String(), s.Annotations[k8s.OwnerAnnotation])
	require.NoError(t, c.kube.CoreV1().Secrets(c.namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}))
	eventually(t, "mapped to its owner and made again", func() bool { return c.hasSecret("a") })
}

func TestWhatOwnersLeftWhileNobodyWatchedIsCollectedAndNothingElse(t *testing.T) {
	c := newCluster(t)
	apps, secrets := memory.New[string]("apps"), c.secrets(k8s.ResourceConfig{})
	others := memory.New[string]("others")
	mark := func(name string, owner string) {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if owner != "" {
			s.Annotations = map[string]string{k8s.OwnerAnnotation: owner}
		}
		_, err := c.kube.CoreV1().Secrets(c.namespace).Create(t.Context(), s, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	apps.Set("live", "1")
	mark("live", apps.Key("live").String())
	mark("left", apps.Key("gone").String())
	mark("unowned", "")
	mark("of-another-kind", others.Key("gone").String())
	mark("unreadable", "not a key")
	c.run(engine.Config{Controllers: []engine.Controller{
		engine.NewController("copy").For(apps).Owns(secrets).WithHandler(copies(secrets, func(engine.Object) string { return "1" }, nil)),
	}})
	eventually(t, "collected", func() bool { return !c.hasSecret("left") })
	for _, name := range []string{"live", "unowned", "of-another-kind", "unreadable"} {
		require.True(t, c.hasSecret(name), name)
	}
}

func TestAnApplyThatWouldChangeNothingIsNotSent(t *testing.T) {
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull} {
		t.Run(cache, func(t *testing.T) {
			c := newCluster(t)
			c.putConfigMap("a", "1")
			maps, target := c.configMaps(k8s.ResourceConfig{Cache: cache}), c.open(k8s.ResourceConfig{APIVersion: "v1", Kind: "Service", Cache: cache})
			var runs atomic.Int64
			var port atomic.Int64
			port.Store(80)
			e := c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("serve").For(maps).Owns(target).
				WithHandler(func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
					defer runs.Add(1)
					return engine.Result{}, rt.Apply(ctx, engine.Object{Key: target.Key("a"), Value: map[string]any{
						"spec": map[string]any{"ports": []any{map[string]any{"port": port.Load()}}, "selector": map[string]any{"app": "a"}},
					}})
				})}})
			service := func() *corev1.Service {
				s, err := c.kube.CoreV1().Services(c.namespace).Get(t.Context(), "a", metav1.GetOptions{})
				if err != nil {
					return &corev1.Service{}
				}
				return s
			}
			eventually(t, "made", func() bool { return service().Name != "" })
			before := runs.Load()
			require.EqualValues(t, 1, c.patches.Load())
			_, err := e.Reconcile(t.Context(), "serve", maps.Key("a"), "1")
			require.NoError(t, err)
			eventually(t, "again", func() bool { return runs.Load() > before })
			require.EqualValues(t, 1, c.patches.Load())
			port.Store(81)
			_, err = e.Reconcile(t.Context(), "serve", maps.Key("a"), "2")
			require.NoError(t, err)
			eventually(t, "changed", func() bool { s := service(); return len(s.Spec.Ports) == 1 && s.Spec.Ports[0].Port == 81 })
		})
	}
}

func TestFieldsThatAreNoLongerWantedGoAndThoseOfOthersStay(t *testing.T) {
	c := newCluster(t)
	maps := c.configMaps(k8s.ResourceConfig{})
	_, err := maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{"data":{"a":"1","b":"1"}}`)}, engine.Write{Absent: true})
	require.NoError(t, err)
	revision, err := maps.Patch(t.Context(), maps.Key("a"), types.JSONPatchType, []byte(`[{"op":"add","path":"/data/theirs","value":"1"}]`))
	require.NoError(t, err)
	_, err = maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{"data":{"a":"2"}}`)}, engine.Write{Revision: revision})
	require.NoError(t, err)
	cm, err := k8s.Get[*corev1.ConfigMap](t.Context(), maps, maps.Key("a"))
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a": "2", "theirs": "1"}, cm.Data)
}

func TestAFieldOfAnotherManagerIsAConflictOrTaken(t *testing.T) {
	c := newCluster(t)
	theirs, ours := c.configMaps(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{FieldManager: "theirs"}}), c.configMaps(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{Conflicts: "fail"}})
	forced := c.configMaps(k8s.ResourceConfig{})
	revision, err := theirs.Apply(t.Context(), engine.Object{Key: ours.Key("a"), Value: []byte(`{"data":{"a":"1"}}`)}, engine.Write{Absent: true})
	require.NoError(t, err)
	want := engine.Object{Key: ours.Key("a"), Value: []byte(`{"data":{"a":"2"}}`)}
	_, err = ours.Apply(t.Context(), want, engine.Write{Revision: revision})
	require.ErrorIs(t, err, engine.ErrConflict)
	require.ErrorContains(t, err, `with "theirs"`)
	require.ErrorContains(t, err, "conflicts: force")
	_, err = forced.Apply(t.Context(), want, engine.Write{Revision: revision})
	require.NoError(t, err)
}

func TestDryRunIsCheckedAndNotCarriedOut(t *testing.T) {
	c := newCluster(t)
	maps := c.configMaps(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{DryRun: true}})
	_, err := maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{"data":{"a":"1"}}`)}, engine.Write{Absent: true})
	require.NoError(t, err)
	_, err = maps.Get(t.Context(), maps.Key("a"))
	require.ErrorIs(t, err, engine.ErrNotFound)
	_, err = maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{"data":{"a":1}}`)}, engine.Write{Absent: true})
	require.ErrorIs(t, err, engine.ErrInvalid)
}

func TestReleaseRemovesTheMarksOnly(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{})
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(maps).Owns(secrets).
		WithHandler(func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			if o, err := rt.Get(ctx, req.Key); err == nil && dataOf(o) == "1" {
				return engine.Result{}, rt.Apply(ctx, engine.Object{Key: secrets.Key("a"), Value: []byte(`{"metadata":{"labels":{"kept":"1"}},"stringData":{"v":"1"}}`)})
			}
			return engine.Result{}, rt.Do(ctx, engine.Effect{Verb: engine.ReleaseObject, Object: engine.Object{Key: secrets.Key("a")}})
		})}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	c.putConfigMap("a", "2")
	eventually(t, "released", func() bool { return c.secret("a").Annotations[k8s.OwnerAnnotation] == "" })
	s := c.secret("a")
	require.Equal(t, map[string]string{"kept": "1"}, s.Labels)
	require.Empty(t, s.OwnerReferences)
	require.Equal(t, "1", string(s.Data["v"]))
}

func TestCreateLeavesWhatIsThere(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{Mode: k8s.ModeCreate}})
	var runs atomic.Int64
	c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(maps).Owns(secrets).WithHandler(copies(secrets, dataOf, &runs))}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	eventually(t, "at rest", func() bool { return runs.Load() >= 2 }) // the primary, and the echo of what it owns
	before := runs.Load()
	c.putConfigMap("a", "2")
	eventually(t, "again", func() bool { return runs.Load() > before })
	require.Equal(t, "1", string(c.secret("a").Data["value"]))
}

func TestDeletionPropagatesAsConfigured(t *testing.T) {
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps := c.configMaps(k8s.ResourceConfig{WriteConfig: k8s.WriteConfig{Propagation: "Foreground"}})
	require.NoError(t, maps.Delete(t.Context(), maps.Key("a"), engine.Write{}))
	cm, err := k8s.Get[*corev1.ConfigMap](t.Context(), maps, maps.Key("a"))
	require.NoError(t, err)
	require.NotNil(t, cm.DeletionTimestamp)
	require.Equal(t, []string{metav1.FinalizerDeleteDependents}, cm.Finalizers, "a garbage collector would remove it")
}

func TestAWriteCarriesItsTraceAndAChangeIsTracedToIt(t *testing.T) {
	const tp = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	c := newCluster(t)
	c.putConfigMap("a", "1")
	maps, secrets := c.configMaps(k8s.ResourceConfig{}), c.secrets(k8s.ResourceConfig{})
	traced := func(next engine.Handler) engine.Handler {
		return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			rt.SetTraceparent(tp)
			return next(ctx, rt, req)
		}
	}
	var causes atomic.Pointer[[]engine.Cause]
	c.run(engine.Config{Controllers: []engine.Controller{
		engine.NewController("copy").For(maps).Owns(secrets).WithMiddleware(traced).WithHandler(copies(secrets, dataOf, nil)),
		engine.NewController("watch").For(secrets).WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			all := req.Causes.All()
			causes.Store(&all)
			return engine.Result{}, nil
		}),
	}})
	eventually(t, "made", func() bool { return c.hasSecret("a") })
	require.Equal(t, tp, c.secret("a").Annotations[k8s.TraceparentAnnotation])
	eventually(t, "linked", func() bool { x := causes.Load(); return x != nil && (*x)[0].Traceparent == tp })
}

// TestOneControllerJoinsTwoClusters has its primary in one cluster and what it owns in another.
func TestOneControllerJoinsTwoClusters(t *testing.T) {
	here, there := newCluster(t), newClusterAt(t, ownCluster(t).Kubeconfig)
	connect := func(file, scope string) *k8s.Connection {
		conn, err := k8s.Connect(t.Context(), k8s.ConnectionConfig{Kubeconfig: file, Scope: scope})
		require.NoError(t, err)
		return conn
	}
	open := func(conn *k8s.Connection, namespace, kind string) *k8s.Resource {
		r, err := k8s.Open(conn, k8s.ResourceConfig{APIVersion: "v1", Kind: kind, Namespaces: []string{namespace}})
		require.NoError(t, err)
		return r
	}
	maps, secrets := open(connect(kubeconfig, "here"), here.namespace, "ConfigMap"), open(connect(there.kubeconfig, "there"), there.namespace, "Secret")
	here.putConfigMap("a", "1")
	here.run(engine.Config{Controllers: []engine.Controller{engine.NewController("copy").For(maps).Owns(secrets).WithHandler(copies(secrets, dataOf, nil))}})
	eventually(t, "made there", func() bool { return there.hasSecret("a") })
	s := there.secret("a")
	require.Empty(t, s.OwnerReferences)
	require.Equal(t, "k8s/core/ConfigMap@here:"+here.namespace+"/a", s.Annotations[k8s.OwnerAnnotation])
	require.NoError(t, there.kube.CoreV1().Secrets(there.namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}))
	eventually(t, "made again", func() bool { return there.hasSecret("a") })
	here.deleteConfigMap("a")
	eventually(t, "collected", func() bool { return !there.hasSecret("a") })
}

func TestWhatTheSelectorWouldNotChooseIsNotWritten(t *testing.T) {
	maps := newCluster(t).configMaps(k8s.ResourceConfig{LabelSelector: "app=shop"})
	_, err := maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{}`)}, engine.Write{Absent: true})
	require.ErrorIs(t, err, engine.ErrInvalid)
	require.ErrorContains(t, err, "app=shop, would not choose it")
	_, err = maps.Apply(t.Context(), engine.Object{Key: maps.Key("a"), Value: []byte(`{"metadata":{"labels":{"app":"shop"}}}`)}, engine.Write{Absent: true})
	require.NoError(t, err)
}
