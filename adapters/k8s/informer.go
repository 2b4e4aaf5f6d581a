package k8s

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/lanes"
)

// InformerConfig says what an informer holds.
type InformerConfig struct {
	// Name is that of the source.
	Name string
	// APIVersion and Kind are those of its objects, Scope the name of their cluster.
	APIVersion, Kind, Scope string
	// Resyncs tells the informer's own resyncs, of objects that have not changed, as events of operation resync. Default: they are dropped.
	Resyncs bool
	// Logger is told what goes wrong. Nil is nowhere.
	Logger *slog.Logger
}

// informed is an informer as a source.
type informed struct {
	cache.SharedIndexInformer

	resyncs bool
	// deleted is called with the last known state of an object that is gone, before that is told.
	deleted func(n name, last runtime.Object)
}

// FromInformer returns an informer as a source whose objects are read from memory. The caller starts the informer and stops it, as
// a factory does; it may serve others too.
func FromInformer(cfg InformerConfig, informer cache.SharedIndexInformer) (*Resource, error) {
	if informer == nil {
		return nil, errors.New("source of an informer: the informer is nil")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := Open(&Connection{scope: cfg.Scope, log: cfg.Logger}, ResourceConfig{Name: cfg.Name, APIVersion: cfg.APIVersion, Kind: cfg.Kind, Cache: CacheFull})
	if err != nil {
		return nil, fmt.Errorf("source of an informer: %w", err)
	}
	r.informer = &informed{SharedIndexInformer: informer, resyncs: cfg.Resyncs}
	return r, nil
}

// runInformer follows the informer until ctx ends.
func (r *Resource) runInformer(ctx context.Context, emit engine.Emit) error {
	if r.informer.IsStopped() {
		return errors.New("the informer was stopped, and one that was cannot be started again")
	}
	f := r.newFollower(emit)
	f.ctx, f.stop = context.WithCancelCause(ctx)
	f.lanes = lanes.New(f.tell, func() {})
	defer f.end()
	if err := emit(ctx, engine.Event{Operation: engine.ListStarted}); err != nil {
		return err
	}
	r.setStatus(errors.New("the informer has not synced: start it"))
	missing := r.index.names()
	var listing sync.Mutex
	registration, err := r.informer.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(o any, initial bool) {
			if initial {
				listing.Lock()
				delete(missing, nameOfAny(o))
				listing.Unlock()
				f.hear(o, engine.Resync)
				return
			}
			f.hear(o, engine.Put)
		},
		UpdateFunc: func(old, now any) {
			if revisionOf(old) != revisionOf(now) {
				f.hear(now, engine.Put)
			} else if r.informer.resyncs {
				f.hear(now, engine.Resync)
			}
		},
		DeleteFunc: func(o any) { f.hear(o, engine.Delete) },
	})
	if err != nil {
		return fmt.Errorf("follow the informer: %w", err)
	}
	defer func() { _ = r.informer.RemoveEventHandler(registration) }() // it fails if the informer has stopped
	select {
	case <-registration.HasSyncedChecker().Done():
	case <-ctx.Done():
		return nil
	}
	listing.Lock()
	for n := range missing {
		f.r.index.remove(n, "")
		f.add(engine.Event{Key: r.keyOf(n), Operation: engine.Put, Repaired: true})
	}
	listing.Unlock()
	r.index.setSynced(true)
	if err := f.lanes.Flush(); err != nil && ctx.Err() == nil {
		return err
	}
	r.setStatus(nil)
	if err := emit(ctx, engine.Event{Operation: engine.ListEnded}); err != nil && ctx.Err() == nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// hear takes in what an informer tells.
func (f *follower) hear(o any, op engine.Operation) {
	if stone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = stone.Obj
	}
	object, ok := o.(runtime.Object)
	if !ok || object == nil {
		return
	}
	n := nameIn(object)
	e := f.r.entryOf(object, true)
	if op == engine.Delete {
		if f.r.informer.deleted != nil {
			f.r.informer.deleted(n, object)
		}
		f.r.index.remove(n, e.revision)
		op = engine.Put // in a lane: what is to be told
	} else {
		f.r.index.put(n, e, op == engine.Resync)
	}
	f.add(engine.Event{Key: f.r.keyOf(n), Operation: op})
}

// end closes the lanes. An informer may still be calling, or be about to.
func (f *follower) end() {
	f.stop(nil) // whatever waits in a lane gives up
	f.mu.Lock()
	f.ended = true
	f.mu.Unlock()
	f.lanes.Close()
}

// add gives a lane something to tell, unless the run has ended.
func (f *follower) add(e engine.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		_ = f.lanes.Add(e) // it fails when the run ends
	}
}

func nameOfAny(o any) name {
	if object, ok := o.(runtime.Object); ok {
		return nameIn(object)
	}
	return name{}
}

func revisionOf(o any) string {
	m, err := metaAccessor(o)
	if err != nil {
		return ""
	}
	return m.GetResourceVersion()
}
