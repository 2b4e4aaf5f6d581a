package k8s

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/lanes"
)

// Run implements engine.Source.
func (r *Resource) Run(ctx context.Context, emit engine.Emit) error {
	if !r.keepsObjects() {
		// Nobody keeps the index up to date from here on. What is read from memory goes on to be: it is filled again at once, and a
		// read that is older than its cause is repeated.
		defer r.index.setSynced(false)
	}
	if r.informer != nil {
		return r.runInformer(ctx, emit)
	}
	for ctx.Err() == nil {
		m, c, err := r.await(ctx)
		if err != nil {
			return err
		}
		f := r.newFollower(emit)
		err = f.run(ctx, m, c)
		if !errors.Is(err, errKindUnknown) {
			return err
		}
	}
	return nil
}

// The waits for a kind that the server does not know.
const (
	firstLook   = time.Second
	longestLook = 10 * time.Second
)

// await returns the mapping of the kind, and the client to follow it with, as soon as the server knows it.
func (r *Resource) await(ctx context.Context) (*meta.RESTMapping, client, error) {
	for wait := firstLook; ; wait = min(2*wait, longestLook) {
		m, c, err := r.resolve()
		if err == nil && !r.keepsObjects() && len(r.fields) == 0 {
			c = r.conn.metadataClient(m)
		}
		if !errors.Is(err, errKindUnknown) {
			return m, c, err
		}
		if r.Status() == nil {
			r.conn.log.WarnContext(ctx, "the source waits for its kind", "source", r.cfg.Name, "err", err)
		}
		r.setStatus(err)
		select {
		case <-ctx.Done():
			return nil, nil, nil // an ended context is how a source ends
		case <-time.After(wait):
		}
	}
}

// follower is one run of a resource: the store of its reflectors, one for each namespace.
type follower struct {
	r    *Resource
	emit engine.Emit
	stop context.CancelCauseFunc
	ctx  context.Context //nolint:containedctx // the run's: reflectors give their store none.

	mu       sync.Mutex // reflectors call at once
	ended    bool       // the lanes are closed
	lanes    *lanes.Lanes
	unlisted int // namespaces whose first list has not ended
}

func (r *Resource) newFollower(emit engine.Emit) *follower {
	return &follower{r: r, emit: emit, unlisted: len(r.namespaces())}
}

// run lists and watches until ctx ends, and returns nil then. It returns errKindUnknown if the kind was removed, when that was told.
func (f *follower) run(ctx context.Context, m *meta.RESTMapping, c client) error {
	if ctx.Err() != nil {
		return nil
	}
	parent := ctx
	ctx, f.stop = context.WithCancelCause(ctx)
	defer f.stop(nil)
	f.ctx = ctx
	logger := logr.FromSlogHandler(f.r.conn.log.Handler())
	ctx = klog.NewContext(ctx, logger)
	f.lanes = lanes.New(f.tell, func() {})
	defer f.lanes.Close()
	if err := f.emit(ctx, engine.Event{Operation: engine.ListStarted}); err != nil {
		return err
	}
	var group sync.WaitGroup
	for _, namespace := range f.r.namespaces() {
		reflector := cache.NewReflectorWithOptions(f.listWatch(c.in(namespace)), nil, &namespaceStore{f: f, namespace: namespace}, cache.ReflectorOptions{
			Name: f.r.cfg.Name, TypeDescription: m.GroupVersionKind.String(), Logger: &logger,
			// Client-go's own begins with 0.8 s: too long for who waits for a restarted server.
			Backoff: &wait.Backoff{Duration: 100 * time.Millisecond, Cap: 10 * time.Second, Steps: 100, Factor: 2, Jitter: 0.5},
		})
		group.Go(func() { reflector.RunWithContext(ctx) })
	}
	group.Wait()
	switch err := f.lanes.Failure(); {
	case parent.Err() != nil:
		return nil
	case err != nil:
		return err
	default:
		return f.lost(parent, context.Cause(ctx))
	}
}

// lost looks why the server does not know the kind any more. If it was removed, its objects are told as deleted.
func (f *follower) lost(ctx context.Context, cause error) error {
	f.r.forget()
	if _, _, err := f.r.resolve(); !errors.Is(err, errKindUnknown) {
		return cause
	}
	f.ctx = ctx
	for n := range f.r.index.names() {
		f.r.index.remove(n, "")
		if err := f.lanes.Add(engine.Event{Key: f.r.keyOf(n), Operation: engine.Put, Repaired: true}); err != nil {
			return err
		}
	}
	if err := f.lanes.Flush(); err != nil {
		return err
	}
	return errKindUnknown
}

// listWatch lists and watches a namespace, and notes how that goes.
func (f *follower) listWatch(c client) *cache.ListWatch {
	options := func(o *metav1.ListOptions) {
		o.LabelSelector, o.FieldSelector = f.r.cfg.LabelSelector, f.r.cfg.FieldSelector
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			options(&o)
			list, err := c.list(ctx, o)
			return list, f.note(ctx, err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			options(&o)
			w, err := c.watch(ctx, o)
			return w, f.note(ctx, err)
		},
	}
}

// note keeps why the server cannot be listed or watched, for readiness, and ends the run if it does not know the kind.
func (f *follower) note(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
	case apierrors.IsNotFound(err):
		f.stop(err)
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err): // the reflector lists again
	default:
		f.r.setStatus(explained(err))
	}
	return err
}

// The waits before an event that was not accepted is emitted again, in the state that its object has by then.
const (
	firstRefusal   = 50 * time.Millisecond
	longestRefusal = 5 * time.Second
)

// tell emits what is to be told of a key until it is accepted; only the keys of this lane wait. Of a lane's event, only the key,
// Resync and Repaired count.
func (f *follower) tell(lane engine.Event) error {
	for wait := firstRefusal; ; wait = min(2*wait, longestRefusal) {
		e, ok := f.untold(lane)
		if !ok {
			return nil
		}
		err := f.emit(f.ctx, e)
		if err == nil {
			f.r.index.wasTold(nameOf(lane.Key), e.Revision, e.New)
			return nil
		}
		f.r.conn.log.InfoContext(f.ctx, "an event was not accepted; it is emitted again", "source", f.r.cfg.Name, "key", lane.Key.String(), "err", err, "after", wait)
		select {
		case <-time.After(wait):
		case <-f.ctx.Done():
			return context.Cause(f.ctx)
		}
	}
}

// untold is what is to be told of a key now, false if nothing is.
func (f *follower) untold(lane engine.Event) (engine.Event, bool) {
	n := nameOf(lane.Key)
	e, ok := f.r.index.tell(n)
	if lane.Operation == engine.Resync && e.Operation != engine.Delete {
		now, there := f.r.index.get(n)
		if !there {
			return e, false // it was told to be gone
		}
		e, ok = engine.Event{Operation: engine.Resync, Old: now.meta, New: now.meta, Incarnation: now.incarnation, Revision: now.revision}, true
	}
	e.Key, e.Repaired = lane.Key, lane.Repaired
	if e.New != nil {
		e.Traceparent = e.New.Annotations[TraceparentAnnotation]
	}
	return e, ok
}

// see enters an object and tells of it.
func (f *follower) see(o any, gone bool) error {
	object, ok := o.(runtime.Object)
	if !ok {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := nameIn(object)
	e := f.r.entryOf(object, f.r.keepsObjects())
	if gone {
		f.r.index.remove(n, e.revision)
	} else {
		f.r.index.put(n, e, false)
	}
	return f.lanes.Add(engine.Event{Key: f.r.keyOf(n), Operation: engine.Put})
}

// replace compares a list of a namespace with what is known. It returns once a first list was told.
func (f *follower) replace(namespace string, objects []any, first bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	missing := f.r.index.names()
	lane := engine.Event{Operation: engine.Put, Repaired: true}
	if first {
		lane = engine.Event{Operation: engine.Resync}
	}
	for _, o := range objects {
		object, ok := o.(runtime.Object)
		if !ok {
			continue
		}
		n := nameIn(object)
		f.r.index.put(n, f.r.entryOf(object, f.r.keepsObjects()), true)
		delete(missing, n)
		lane.Key = f.r.keyOf(n)
		if err := f.lanes.Add(lane); err != nil {
			return err
		}
	}
	for n := range missing {
		if namespace != metav1.NamespaceAll && n.namespace != namespace {
			continue
		}
		f.r.index.remove(n, "")
		if err := f.lanes.Add(engine.Event{Key: f.r.keyOf(n), Operation: engine.Put, Repaired: true}); err != nil {
			return err
		}
	}
	if !first {
		return nil
	}
	if f.unlisted--; f.unlisted > 0 {
		return nil
	}
	f.r.index.setSynced(true)
	if err := f.lanes.Flush(); err != nil {
		return err
	}
	f.r.setStatus(nil)
	return f.emit(f.ctx, engine.Event{Operation: engine.ListEnded})
}

// namespaceStore is what a reflector writes to.
type namespaceStore struct {
	f         *follower
	namespace string
	listed    bool
}

func (s *namespaceStore) Add(o any) error    { return s.f.see(o, false) }
func (s *namespaceStore) Update(o any) error { return s.f.see(o, false) }
func (s *namespaceStore) Delete(o any) error { return s.f.see(o, true) }

// Resync is never asked for: a controller has its own.
func (s *namespaceStore) Resync() error { return nil }

func (s *namespaceStore) Replace(objects []any, _ string) error {
	first := !s.listed
	s.listed = true
	if err := s.f.replace(s.namespace, objects, first); err != nil {
		s.f.stop(err)
		return err
	}
	return nil
}
