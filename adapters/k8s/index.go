package k8s

import (
	"cmp"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/windlass-dev/windlass/engine"
)

// name is what tells the objects of one kind apart.
type name struct{ namespace, name string }

func nameOf(k engine.Key) name { return name{k.Namespace, k.Name} }

func nameIn(o runtime.Object) name {
	m, err := meta.Accessor(o)
	if err != nil {
		return name{} // no object of a cluster
	}
	return name{m.GetNamespace(), m.GetName()}
}

// entry is what is known of an object. It is replaced, never changed, but for what was told.
type entry struct {
	revision, incarnation string
	meta                  *engine.Meta
	object                runtime.Object // nil where only metadata is kept
	gone                  bool           // deleted, and the deletion was not told yet

	stamp    uint64 // of all but the status, where changes of the status alone are not told
	told     string // the revision that was emitted last
	toldMeta *engine.Meta
	toldAs   uint64 // the stamp then
}

// index is what a resource knows of the objects of its kind.
type index struct {
	mu      sync.RWMutex
	entries map[name]*entry
	owned   map[engine.Key]map[name]struct{}
	synced  bool
}

func (x *index) init() {
	x.entries, x.owned = make(map[name]*entry), make(map[engine.Key]map[name]struct{})
}

func (x *index) isSynced() bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.synced
}

func (x *index) setSynced(yes bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.synced = yes
}

func (x *index) get(n name) (*entry, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e, ok := x.entries[n]
	return e, ok && !e.gone
}

// put enters what was seen. Unless it is listed, it gives way to something newer: the answer to a write may overtake the
// event of an earlier one. A list is always right, because revisions go back when a backup is restored.
func (x *index) put(n name, e *entry, listed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	was := x.entries[n]
	if was != nil {
		if !listed && older(e, was) {
			return
		}
		e.told, e.toldMeta, e.toldAs = was.told, was.toldMeta, was.toldAs
		x.disownLocked(n, was)
	}
	x.entries[n] = e
	if owner := e.meta.Owner; !owner.IsZero() {
		if x.owned[owner] == nil {
			x.owned[owner] = make(map[name]struct{})
		}
		x.owned[owner][n] = struct{}{}
	}
}

// older says that e is what was seen before was, or that was is its deletion.
func older(e, was *entry) bool {
	n, err := resourceversion.CompareResourceVersion(e.revision, was.revision)
	return err == nil && n < 0
}

func (x *index) disownLocked(n name, e *entry) {
	if owned := x.owned[e.meta.Owner]; owned != nil {
		delete(owned, n)
		if len(owned) == 0 {
			delete(x.owned, e.meta.Owner)
		}
	}
}

// remove marks an object as gone. It stays until its deletion was told. The revision is that of the deletion, "" if unknown.
func (x *index) remove(n name, revision string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	was, ok := x.entries[n]
	if !ok {
		return
	}
	x.disownLocked(n, was)
	x.entries[n] = &entry{
		gone: true, revision: cmp.Or(revision, was.revision), incarnation: was.incarnation, meta: was.meta, told: was.told, toldMeta: was.toldMeta,
	}
}

// tell returns what must be told of an object, false if that was told.
func (x *index) tell(n name) (engine.Event, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	now, ok := x.entries[n]
	switch {
	case !ok || !now.gone && (now.told == now.revision || now.told != "" && now.stamp != 0 && now.stamp == now.toldAs):
		return engine.Event{}, false
	case now.gone:
		return engine.Event{Operation: engine.Delete, Old: now.meta, Incarnation: now.incarnation, Revision: now.revision}, true
	default:
		return engine.Event{Operation: engine.Put, Old: now.toldMeta, New: now.meta, Incarnation: now.incarnation, Revision: now.revision}, true
	}
}

// wasTold notes what was emitted.
func (x *index) wasTold(n name, revision string, m *engine.Meta) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now, ok := x.entries[n]
	switch {
	case !ok:
	case now.gone && now.revision == revision:
		delete(x.entries, n)
	default:
		if now.told, now.toldMeta = revision, m; now.revision == revision {
			now.toldAs = now.stamp
		}
	}
}

// names returns all names, those that are gone and not told too.
func (x *index) names() map[name]struct{} {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make(map[name]struct{}, len(x.entries))
	for n := range x.entries {
		all[n] = struct{}{}
	}
	return all
}

func (x *index) objects(objectOf func(name, *entry) engine.Object) []engine.Object {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make([]engine.Object, 0, len(x.entries))
	for n, e := range x.entries {
		if !e.gone {
			all = append(all, objectOf(n, e))
		}
	}
	return all
}

func (x *index) ownedBy(owner engine.Key, key func(name) engine.Key) []engine.Key {
	x.mu.RLock()
	defer x.mu.RUnlock()
	keys := make([]engine.Key, 0, len(x.owned[owner]))
	for n := range x.owned[owner] {
		keys = append(keys, key(n))
	}
	return keys
}
