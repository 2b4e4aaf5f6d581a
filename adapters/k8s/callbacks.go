package k8s

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Callbacks is a controller in the shape of consul-k8s' helper: an informer, and what to do with an object that is there and with
// one that is gone. Which of the two is called is decided by what the informer holds when the key's turn has come.
type Callbacks interface {
	// Informer returns what to watch. It is called once in a run, and run by the controller.
	Informer() cache.SharedIndexInformer
	// Upsert is called with namespace/name and the newest state of an object that is there.
	Upsert(key string, obj any) error
	// Delete is called with the last known state of an object that is gone, nil if none is known. It may be called twice.
	Delete(key string, obj any) error
}

// Backgrounder is a Callbacks that has something to do beside it, such as a controller of what depends on it. Run is started before the
// informer and must return when stop is closed; the controller waits for it.
type Backgrounder interface{ Run(stop <-chan struct{}) }

// NewResource returns callbacks made of functions. Objects of another type than T are reported and not retried.
func NewResource[T any](informer cache.SharedIndexInformer, upsert, gone func(key string, obj T) error) Callbacks {
	return functions[T]{informer, upsert, gone}
}

type functions[T any] struct {
	informer     cache.SharedIndexInformer
	upsert, gone func(key string, obj T) error
}

func (f functions[T]) Informer() cache.SharedIndexInformer { return f.informer }

func (f functions[T]) Upsert(key string, obj any) error { return typedCall(f.upsert, key, obj) }

func (f functions[T]) Delete(key string, obj any) error {
	if obj == nil {
		var none T
		return f.gone(key, none)
	}
	return typedCall(f.gone, key, obj)
}

func typedCall[T any](f func(string, T) error, key string, obj any) error {
	t, ok := obj.(T)
	if !ok {
		return engine.Terminal(fmt.Errorf("%w: %s is a %T, not a %T", engine.ErrInvalid, key, obj, t))
	}
	return f(key, t)
}

// CallbackController runs Callbacks on an engine of its own: one worker, keys that coalesce, six calls with growing waits and then
// rest until there is news of the key, panics that end nothing. It is a cache.Controller. Set its fields before it runs.
type CallbackController struct {
	Resource Callbacks
	// Logger is where it reports. Nil is nowhere.
	Logger *slog.Logger

	mu       sync.Mutex
	informer cache.SharedIndexInformer // while it runs and afterwards
	source   *Resource
}

var _ cache.Controller = (*CallbackController)(nil)

// HasSynced says whether every object that was there at the start has been told to the controller. It is false before it runs.
func (c *CallbackController) HasSynced() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.source != nil && c.source.index.isSynced()
}

// HasSyncedChecker lets wait for HasSynced.
func (c *CallbackController) HasSyncedChecker() cache.DoneChecker {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = wait.PollUntilContextCancel(context.Background(), 10*time.Millisecond, true, func(context.Context) (bool, error) { return c.HasSynced(), nil }) //nolint:forbidigo // the interface has none.
	}()
	return checker{done}
}

type checker struct{ done <-chan struct{} }

func (checker) Name() string            { return "callbacks" }
func (k checker) Done() <-chan struct{} { return k.done }

// LastSyncResourceVersion is the informer's, "" before it runs.
func (c *CallbackController) LastSyncResourceVersion() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.informer == nil {
		return ""
	}
	return c.informer.LastSyncResourceVersion()
}

// Run is RunWithContext for a channel.
func (c *CallbackController) Run(stop <-chan struct{}) {
	c.RunWithContext(wait.ContextForChannel(stop))
}

// RunWithContext is Work, and logs its error.
func (c *CallbackController) RunWithContext(ctx context.Context) {
	if err := c.Work(ctx); err != nil {
		c.log().ErrorContext(ctx, "controller failed", "err", err)
	}
}

func (c *CallbackController) log() *slog.Logger {
	if c.Logger != nil {
		return c.Logger
	}
	return slog.New(slog.DiscardHandler)
}

// The bounds of consul-k8s: five retries, from 5 ms.
var callbackBackoff = engine.Backoff{Initial: 5 * time.Millisecond, Max: 1000 * time.Second, MaxAttempts: 6}

// longestDrain is how long calls that are due may take when the controller is stopped.
const longestDrain = 30 * time.Second

// Work runs the informer and the background work, and calls back until ctx ends; then it makes the calls that are due, waits for
// the background work and returns. It returns an error if it cannot go on, and can be called once.
func (c *CallbackController) Work(ctx context.Context) error {
	calls := &calls{to: c.Resource, last: make(map[string]any)}
	if err := c.begin(calls); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	if b, ok := c.Resource.(Backgrounder); ok {
		group.Go(func() { b.Run(ctx.Done()) })
	}
	group.Go(func() { c.informer.RunWithContext(ctx) })
	e, err := engine.New(engine.Config{Name: "callbacks", Logger: c.log(), DrainTimeout: longestDrain, Controllers: []engine.Controller{
		engine.NewController(controllerName).For(c.source).WithHandler(calls.handle).WithBackoff(callbackBackoff).WithTimeout(-1),
	}})
	if err != nil {
		return err
	}
	// The engine outlives ctx until what is due has been called.
	working, done := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() {
		<-ctx.Done()
		drain(working, e)
		done()
	})
	return e.Run(working)
}

const controllerName = "callbacks"

// drain waits until no key is due or running.
func drain(ctx context.Context, e *engine.Engine) {
	ctx, cancel := context.WithTimeout(ctx, longestDrain)
	defer cancel()
	_ = wait.PollUntilContextCancel(ctx, 5*time.Millisecond, true, func(context.Context) (bool, error) {
		items, err := e.Items(controllerName)
		for _, i := range items {
			if i.Phase == queue.Ready || i.Phase == queue.Running {
				return false, nil
			}
		}
		return true, err
	})
}

// begin makes the source. It fails if it was called before.
func (c *CallbackController) begin(calls *calls) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.informer != nil {
		return engine.ErrAlreadyRan
	}
	informer := c.Resource.Informer()
	source, err := FromInformer(InformerConfig{Name: "informer", APIVersion: "callbacks/v1", Kind: "Object", Resyncs: true, Logger: c.log()}, informer)
	if err != nil {
		return err
	}
	source.informer.deleted = calls.gone
	c.informer, c.source, calls.source = informer, source, source
	return nil
}

// calls turns runs into callbacks.
type calls struct {
	to     Callbacks
	source *Resource

	mu   sync.Mutex
	last map[string]any // the last known states of objects that are gone and were not called back about
}

func keyText(n name) string { return cache.NewObjectName(n.namespace, n.name).String() }

func (x *calls) gone(n name, last runtime.Object) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.last[keyText(n)] = last
}

func (x *calls) handle(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
	n := nameOf(req.Key)
	key := keyText(n)
	if e, ok := x.source.index.get(n); ok {
		x.forget(key)
		return engine.Result{}, x.to.Upsert(key, e.object.DeepCopyObject())
	}
	x.mu.Lock()
	last := x.last[key]
	x.mu.Unlock()
	err := x.to.Delete(key, last)
	if err == nil {
		x.forget(key)
	}
	return engine.Result{}, err
}

func (x *calls) forget(key string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.last, key)
}

func metaAccessor(o any) (metav1.Object, error) {
	if o == nil {
		return nil, errors.New("nothing")
	}
	return meta.Accessor(o)
}
