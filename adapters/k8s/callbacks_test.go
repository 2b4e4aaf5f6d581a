package k8s_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	fcache "k8s.io/client-go/tools/cache/testing"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/adapters/k8s/k8stest"
	"github.com/windlass-dev/windlass/engine"
)

// services is a Callbacks that notes its calls, on client-go's fake of what can be listed and watched.
type services struct {
	source   *fcache.FakeControllerSource
	informer cache.SharedIndexInformer

	mu      sync.Mutex
	upserts []string // key@generation
	deletes []string
	err     error
	block   chan struct{}
	panics  bool
}

func newServices(t *testing.T, existing ...string) *services {
	t.Helper()
	s := &services{source: fcache.NewFakeControllerSource()}
	t.Cleanup(s.source.Shutdown)
	for _, name := range existing {
		s.source.Add(service(name, 1))
	}
	s.informer = cache.NewSharedIndexInformer(s.source, &corev1.Service{}, 0, cache.Indexers{})
	return s
}

func service(name string, generation int64) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Generation: generation}}
}

func (s *services) callbacks() k8s.Callbacks {
	call := func(list *[]string) func(string, *corev1.Service) error {
		return func(key string, obj *corev1.Service) error {
			s.mu.Lock()
			block, panics := s.block, s.panics
			s.mu.Unlock()
			if block != nil {
				<-block
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if panics {
				s.panics = false
				panic("as the test wants")
			}
			text := key
			if obj != nil {
				text = fmt.Sprintf("%s@%d", key, obj.Generation)
			}
			*list = append(*list, text)
			return s.err
		}
	}
	return k8s.NewResource(s.informer, call(&s.upserts), call(&s.deletes))
}

func (s *services) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *services) calls() (upserts, deletes []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.upserts...), append([]string(nil), s.deletes...)
}

// bubble runs a test in virtual time.
func bubble(t *testing.T, existing []string, f func(t *testing.T, s *services, c *k8s.CallbackController, stop func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newServices(t, existing...)
		c, stop := k8stest.RunController(t, s.callbacks())
		settle()
		f(t, s, c, stop)
	})
}

// settle lets what happens within a little while happen: informers poll.
func settle() {
	time.Sleep(time.Second) // virtual
	synctest.Wait()
}

func TestCallbacksForWhatIsThere(t *testing.T) {
	bubble(t, []string{"foo", "bar"}, func(t *testing.T, s *services, c *k8s.CallbackController, _ func()) {
		upserts, deletes := s.calls()
		require.ElementsMatch(t, []string{"default/foo@1", "default/bar@1"}, upserts)
		require.Empty(t, deletes)
		require.True(t, c.HasSynced())
		require.NotEmpty(t, c.LastSyncResourceVersion())
		<-c.HasSyncedChecker().Done()
	})
	c := &k8s.CallbackController{}
	require.False(t, c.HasSynced())
	require.Empty(t, c.LastSyncResourceVersion())
}

func TestCallbacksSeeTheNewestState(t *testing.T) {
	bubble(t, nil, func(t *testing.T, s *services, _ *k8s.CallbackController, _ func()) {
		s.set(func() { s.block = make(chan struct{}) })
		s.source.Add(service("other", 1))
		settle() // the one worker is held there
		s.source.Add(service("foo", 1))
		s.source.Modify(service("foo", 2))
		s.source.Add(service("short", 1))
		s.source.Delete(service("short", 1))
		settle()
		close(s.block)
		settle()
		upserts, deletes := s.calls()
		require.Equal(t, []string{"default/other@1", "default/foo@2"}, upserts, "keys coalesce")
		require.Equal(t, []string{"default/short@1"}, deletes, "what came and went meanwhile was never upserted")
		s.source.Delete(service("foo", 2))
		s.source.Add(service("foo", 3))
		settle()
		upserts, deletes = s.calls()
		require.Equal(t, "default/foo@3", upserts[len(upserts)-1])
		require.NotContains(t, deletes[1:], "default/foo@3")
	})
}

func TestADeletionBehindALostWatchIsCalledBack(t *testing.T) {
	bubble(t, []string{"foo", "bar"}, func(t *testing.T, s *services, _ *k8s.CallbackController, _ func()) {
		s.source.DeleteDropWatch(service("foo", 1)) // the watch does not tell
		s.source.ResetWatch()
		for range 100 {
			settle()
		}
		upserts, deletes := s.calls()
		require.Equal(t, []string{"default/foo@1"}, deletes, "a tombstone is unwrapped")
		require.ElementsMatch(t, []string{"default/foo@1", "default/bar@1", "default/bar@1"}, upserts, "what was listed again is called back about, as a resync")
	})
}

func TestAFailingCallIsMadeSixTimesAndAgainWhenThereIsNews(t *testing.T) {
	bubble(t, nil, func(t *testing.T, s *services, _ *k8s.CallbackController, _ func()) {
		s.set(func() { s.err = errors.New("no") })
		s.source.Add(service("foo", 1))
		settle()
		upserts, _ := s.calls()
		require.Len(t, upserts, 6)
		time.Sleep(time.Hour) // virtual
		upserts, _ = s.calls()
		require.Len(t, upserts, 6)
		s.source.Modify(service("foo", 2))
		settle()
		upserts, _ = s.calls()
		require.Len(t, upserts, 12)
		require.Equal(t, "default/foo@2", upserts[6])
		s.set(func() { s.err = nil })
		s.source.Delete(service("foo", 2))
		settle()
		_, deletes := s.calls()
		require.Equal(t, []string{"default/foo@2"}, deletes)
	})
}

func TestAPanicInACallbackEndsNothing(t *testing.T) {
	bubble(t, nil, func(t *testing.T, s *services, _ *k8s.CallbackController, _ func()) {
		s.set(func() { s.panics = true })
		s.source.Add(service("foo", 1))
		settle()
		upserts, _ := s.calls()
		require.Equal(t, []string{"default/foo@1"}, upserts)
	})
}

func TestStopMakesTheCallsThatAreDue(t *testing.T) {
	bubble(t, nil, func(t *testing.T, s *services, c *k8s.CallbackController, stop func()) {
		s.set(func() { s.block = make(chan struct{}) })
		for i := range 5 {
			s.source.Add(service(fmt.Sprint("s", i), 1))
		}
		settle()
		go func() {
			time.Sleep(200 * time.Millisecond) // virtual
			close(s.block)
		}()
		begin := time.Now()
		stop()
		require.GreaterOrEqual(t, time.Since(begin), 200*time.Millisecond)
		upserts, _ := s.calls()
		require.Len(t, upserts, 5)
		require.ErrorIs(t, c.Work(t.Context()), engine.ErrAlreadyRan)
	})
}

// chain is a Callbacks with another below it.
type chain struct {
	k8s.Callbacks

	below   *chain
	running atomic.Bool
	ended   func()
}

func (c *chain) Run(stop <-chan struct{}) {
	c.running.Store(true)
	if c.below != nil {
		(&k8s.CallbackController{Resource: c.below}).Run(stop)
	}
	<-stop
	time.Sleep(200 * time.Millisecond) // virtual
	c.running.Store(false)
	c.ended()
}

func TestControllersNestAndParentsWaitForTheirChildren(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var ended []string
		level := func(name string, below *chain, s *services) *chain {
			return &chain{Callbacks: s.callbacks(), below: below, ended: func() {
				mu.Lock()
				defer mu.Unlock()
				ended = append(ended, name)
			}}
		}
		grandchild, child, parent := newServices(t, "g"), newServices(t, "c"), newServices(t, "p")
		third := level("third", nil, grandchild)
		second := level("second", third, child)
		first := level("first", second, parent)
		_, stop := k8stest.RunController(t, first)
		settle()
		for _, s := range []*services{grandchild, child, parent} {
			upserts, _ := s.calls()
			require.Len(t, upserts, 1)
		}
		stop()
		require.Equal(t, []string{"third", "second", "first"}, ended)
		require.False(t, first.running.Load())
	})
}

func TestAnObjectOfAnotherTypeIsNotRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServices(t, "foo")
		var calls atomic.Int64
		pods := func(string, *corev1.Pod) error { calls.Add(1); return nil }
		_, stop := k8stest.RunController(t, k8s.NewResource(s.informer, pods, pods))
		settle()
		stop()
		require.Zero(t, calls.Load())
	})
}

func TestAnInformerThatWasStoppedIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServices(t)
		_, stop := k8stest.RunController(t, s.callbacks())
		settle()
		stop()
		source, err := k8s.FromInformer(k8s.InformerConfig{Name: "x", APIVersion: "v1", Kind: "Service"}, s.informer)
		require.NoError(t, err)
		require.ErrorContains(t, source.Run(t.Context(), nil), "was stopped")
	})
	_, err := k8s.FromInformer(k8s.InformerConfig{Name: "x", APIVersion: "v1", Kind: "Service"}, nil)
	require.ErrorContains(t, err, "the informer is nil")
}

func TestAnInformerIsASource(t *testing.T) {
	for _, resyncs := range []bool{false, true} {
		t.Run(fmt.Sprintf("resyncs %v", resyncs), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServices(t, "foo")
				informer := cache.NewSharedIndexInformer(s.source, &corev1.Service{}, time.Minute, cache.Indexers{})
				source, err := k8s.FromInformer(k8s.InformerConfig{Name: "services", Scope: "there", APIVersion: "v1", Kind: "Service", Resyncs: resyncs}, informer)
				require.NoError(t, err)
				var mu sync.Mutex
				var told []string
				ctx, cancel := context.WithCancel(t.Context())
				var group sync.WaitGroup
				group.Go(func() {
					require.NoError(t, source.Run(ctx, func(_ context.Context, e engine.Event) error {
						mu.Lock()
						defer mu.Unlock()
						told = append(told, strings.TrimSpace(e.Operation.String()+" "+e.Key.Name))
						return nil
					}))
				})
				settle()
				require.ErrorContains(t, source.Status(), "has not synced: start it")
				_, err = source.Get(ctx, source.Key("default/foo"))
				require.ErrorContains(t, err, "only what that holds can be read")
				group.Go(func() { informer.RunWithContext(ctx) })
				settle()
				require.NoError(t, source.Status())
				s.source.Modify(service("foo", 2))
				settle()
				svc, err := k8s.Get[*corev1.Service](ctx, source, source.Key("default/foo"))
				require.NoError(t, err)
				require.Equal(t, int64(2), svc.Generation)
				require.Equal(t, "Service", svc.Kind)
				svc.Generation = 7 // a copy
				held, _, err := informer.GetStore().GetByKey("default/foo")
				require.NoError(t, err)
				require.Equal(t, int64(2), held.(*corev1.Service).Generation)
				require.Empty(t, held.(*corev1.Service).Kind, "the informer's own object is as it was")
				require.Equal(t, "k8s/core/Service@there:default/foo", source.Key("default/foo").String())
				time.Sleep(time.Minute) // virtual
				s.source.Delete(service("foo", 2))
				settle()
				cancel()
				group.Wait()
				want := []string{"list-started", "resync foo", "list-ended", "put foo"}
				if resyncs {
					want = append(want, "resync foo")
				}
				require.Equal(t, append(want, "delete foo"), told)
			})
		})
	}
}

func TestANoteAboutAnObjectOfAnInformerIsInTheLogAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServices(t, "foo")
		source, err := k8s.FromInformer(k8s.InformerConfig{Name: "services", APIVersion: "v1", Kind: "Service"}, s.informer)
		require.NoError(t, err)
		var outcomes []error
		e, err := engine.New(engine.Config{Controllers: []engine.Controller{engine.NewController("c").For(source).WithMiddleware(func(next engine.Handler) engine.Handler {
			return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
				result, err := next(ctx, rt, req)
				outcomes = append(outcomes, err)
				return result, err
			}
		}).WithHandler(func(ctx context.Context, rt engine.Runtime, _ engine.Request) (engine.Result, error) {
			rt.Note(ctx, engine.Note{Reason: "Seen", Message: "It is there."})
			return engine.Result{}, nil
		})}})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { s.informer.RunWithContext(ctx) })
		group.Go(func() { require.NoError(t, e.Run(ctx)) })
		settle()
		cancel()
		group.Wait()
		require.Equal(t, []error{nil}, outcomes)
	})
}
