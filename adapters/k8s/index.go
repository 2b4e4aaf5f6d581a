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
	by      map[lookup]map[name]struct{}
	indexed []string // labels that are looked up; all declared fields are
	synced  bool
}

// lookup is a label or a field, and its value.
type lookup struct{ kind, name, value string }

// lookups are what finds an object besides its name and its owner.
func (x *index) lookups(e *entry) (all []lookup) {
	for _, l := range x.indexed {
		if v, ok := e.meta.Labels[l]; ok {
			all = append(all, lookup{"label", l, v})
		}
	}
	for f, v := range e.meta.Fields {
		all = append(all, lookup{"field", f, v})
	}
	return all
}

func (x *index) init() {
	x.entries, x.owned, x.by = make(map[name]*entry), make(map[engine.Key]map[name]struct{}), make(map[lookup]map[name]struct{})
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
		if !was.gone {
			x.dropLocked(n, was)
		}
	}
	x.entries[n] = e
	if owner := e.meta.Owner; !owner.IsZero() {
		enter(x.owned, owner, n)
	}
	for _, l := range x.lookups(e) {
		enter(x.by, l, n)
	}
}

func enter[K comparable](index map[K]map[name]struct{}, k K, n name) {
	if index[k] == nil {
		index[k] = make(map[name]struct{})
	}
	index[k][n] = struct{}{}
}

func leave[K comparable](index map[K]map[name]struct{}, k K, n name) {
	delete(index[k], n)
	if len(index[k]) == 0 {
		delete(index, k)
	}
}

// older says that e is what was seen before was, or that was is its deletion.
func older(e, was *entry) bool {
	n, err := resourceversion.CompareResourceVersion(e.revision, was.revision)
	return err == nil && n < 0
}

// dropLocked takes an object out of the indexes.
func (x *index) dropLocked(n name, e *entry) {
	leave(x.owned, e.meta.Owner, n)
	for _, l := range x.lookups(e) {
		leave(x.by, l, n)
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
	if !was.gone {
		x.dropLocked(n, was)
	}
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

// found returns the objects that a lookup finds.
func (x *index) found(l lookup, objectOf func(name, *entry) engine.Object) []engine.Object {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make([]engine.Object, 0, len(x.by[l]))
	for n := range x.by[l] {
		all = append(all, objectOf(n, x.entries[n]))
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
