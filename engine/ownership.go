package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/windlass-dev/windlass/engine/kv"
)

// owner is who owns a target: a key of a controller.
type owner struct {
	Controller string `json:"controller"`
	Key        Key    `json:"key"`
}

func (o owner) String() string { return fmt.Sprintf("controller %s for %s", o.Controller, o.Key) }

// ownerRecord says who owns a target whose system has no place for an owner mark. It is written as an intent before
// the target is created and confirmed after it, so that a crash between the two leaves neither an object that nobody
// owns nor a claim on somebody else's.
type ownerRecord struct {
	Owner owner `json:"owner"`
	// Revision is the last one that the engine wrote.
	Revision string `json:"revision,omitempty"`
	// Intent is set until the create is confirmed: the mark that the new target carries.
	Intent string `json:"intent,omitempty"`
	// Digest is that of the intended bytes, for systems whose objects cannot carry the mark.
	Digest string `json:"digest,omitempty"`

	revision string // of the record itself
	// mark is what the write that is under way carries, and echo the revision of the event that showed it; deleting
	// says that the write is a deletion. They do not outlive the write, and only keep its echo from causing a reconcile.
	mark     string
	echo     string
	deleting bool
}

// ownership is the table of records: the store's content, indexed both ways and written through.
type ownership struct {
	store  kv.Store
	shared bool // other replicas write too

	mu      sync.Mutex
	targets map[Key]ownerRecord
	owned   map[owner]map[Key]struct{}
	removed map[Key]string // the revision at which this process removed a record, until the watch has told
}

const ownershipPrefix = "owner/"

// load reads the records that earlier processes left.
func (o *ownership) load(ctx context.Context) error {
	entries, err := o.store.List(ctx, ownershipPrefix)
	if err != nil {
		return fmt.Errorf("load the records of ownership: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.targets, o.owned, o.removed = make(map[Key]ownerRecord), make(map[owner]map[Key]struct{}), make(map[Key]string)
	for _, e := range entries {
		target, r, err := readRecord(e)
		if err != nil {
			return err
		}
		o.keepLocked(target, r)
	}
	return nil
}

func readRecord(e kv.Entry) (target Key, r ownerRecord, err error) {
	if target, err = ParseKey(strings.TrimPrefix(e.Key, ownershipPrefix)); err == nil && !e.Deleted {
		err = json.Unmarshal(e.Value, &r)
	}
	if err != nil {
		return target, r, fmt.Errorf("record of ownership %q cannot be read: %w", e.Key, err)
	}
	r.revision = e.Revision
	return target, r, nil
}

// learn takes in what a replica has written, this one or another.
func (o *ownership) learn(e kv.Entry) error {
	target, r, err := readRecord(e)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	known, ok := o.targets[target]
	switch {
	case ok && !e.After(known.revision):
	case e.Deleted:
		delete(o.removed, target)
		if ok {
			o.forgetLocked(target, known)
		}
	case !ok && !e.After(o.removed[target]): // what this process has removed since
	default:
		if ok && known.Owner != r.Owner {
			o.forgetLocked(target, known)
		}
		r.mark, r.echo, r.deleting = known.mark, known.echo, known.deleting
		o.keepLocked(target, r)
	}
	return nil
}

// refresh reads one record anew.
func (o *ownership) refresh(ctx context.Context, target Key) (ownerRecord, bool, error) {
	e, err := o.store.Get(ctx, ownershipPrefix+target.String())
	if errors.Is(err, kv.ErrNotFound) {
		o.mu.Lock()
		defer o.mu.Unlock()
		if known, ok := o.targets[target]; ok {
			o.removed[target] = known.revision
			o.forgetLocked(target, known)
		}
		return ownerRecord{}, false, nil
	}
	if err == nil {
		err = o.learn(e)
	}
	if err != nil {
		return ownerRecord{}, false, fmt.Errorf("look for the owner of %s: %w", target, err)
	}
	r, ok := o.get(target)
	return r, ok, nil
}

func (o *ownership) forgetLocked(target Key, r ownerRecord) {
	delete(o.targets, target)
	delete(o.owned[r.Owner], target)
	if len(o.owned[r.Owner]) == 0 {
		delete(o.owned, r.Owner)
	}
}

func (o *ownership) keepLocked(target Key, r ownerRecord) {
	delete(o.removed, target)
	o.targets[target] = r
	if o.owned[r.Owner] == nil {
		o.owned[r.Owner] = make(map[Key]struct{})
	}
	o.owned[r.Owner][target] = struct{}{}
}

func (o *ownership) get(target Key) (ownerRecord, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r, ok := o.targets[target]
	return r, ok
}

// echoed returns the record of e's key, and whether e is the echo of the engine's own last write on behalf of controller, which concerns
// nobody. The two are looked up at once: the record goes with its target.
func (o *ownership) echoed(e *Event, controller string) (r ownerRecord, echo, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r, known = o.targets[e.Key]
	switch {
	case !known || r.Owner.Controller != controller:
		return r, false, known
	case e.Operation != Put && e.Operation != Resync:
		return r, r.deleting, true
	case e.New != nil && r.mark != "" && e.New.Annotations[IntentAnnotation] == r.mark:
		// It looks like ours. But somebody may have changed what we wrote and left the mark on it, so settle compares.
		r.mark, r.echo = "", e.Revision
		o.targets[e.Key] = r
		return r, true, true
	default:
		return r, r.Intent == "" && r.Revision == e.Revision, true
	}
}

// announce notes the write that is about to be made, before its echo can arrive.
func (o *ownership) announce(target Key, mark string, deleting bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if r, ok := o.targets[target]; ok {
		r.mark, r.echo, r.deleting = mark, "", deleting
		o.targets[target] = r
	}
}

// settle ends what announce began. It returns false if what was taken for the echo of the write was something else.
func (o *ownership) settle(target Key) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.targets[target]
	ours := r.echo == "" || r.echo == r.Revision
	r.mark, r.echo = "", ""
	o.targets[target] = r
	return ours
}

// put writes a record. It returns ErrResourceExists if somebody else has recorded the target meanwhile.
func (o *ownership) put(ctx context.Context, target Key, r ownerRecord) error {
	value, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record the owner of %s: %w", target, err)
	}
	name := ownershipPrefix + target.String()
	written, err := o.store.Put(ctx, name, value, r.revision)
	if errors.Is(err, kv.ErrConflict) {
		// Another replica may have written the record when this key was its own.
		if there, ok, err2 := o.refresh(ctx, target); err2 == nil && ok && there.Owner == r.Owner {
			written, err = o.store.Put(ctx, name, value, there.revision)
		}
	}
	r.revision = written
	if errors.Is(err, kv.ErrConflict) {
		return fmt.Errorf("%s: %w: somebody else has just claimed it", target, ErrResourceExists)
	}
	if err != nil {
		return fmt.Errorf("record the owner of %s: %w", target, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	r.mark, r.echo, r.deleting = o.targets[target].mark, o.targets[target].echo, false
	o.keepLocked(target, r)
	return nil
}

// remove deletes the record of a target.
func (o *ownership) remove(ctx context.Context, target Key) error {
	r, ok := o.get(target)
	if !ok {
		return nil
	}
	if err := o.store.Delete(ctx, ownershipPrefix+target.String(), r.revision); err != nil {
		return fmt.Errorf("remove the record of the owner of %s: %w", target, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.shared {
		o.removed[target] = r.revision
	}
	o.forgetLocked(target, r)
	return nil
}

// of returns the targets that w owns.
func (o *ownership) of(w owner) []Key {
	o.mu.Lock()
	defer o.mu.Unlock()
	keys := make([]Key, 0, len(o.owned[w]))
	for k := range o.owned[w] {
		keys = append(keys, k)
	}
	return keys
}

// covered returns the targets that r covers, with their owners.
func (o *ownership) covered(r Reader) map[Key]owner {
	o.mu.Lock()
	defer o.mu.Unlock()
	targets := make(map[Key]owner)
	for k, record := range o.targets {
		if r.Covers(k) {
			targets[k] = record.Owner
		}
	}
	return targets
}

// owners returns the keys of a controller that own something.
func (o *ownership) owners(controller string) map[Key]struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	keys := make(map[Key]struct{})
	for w := range o.owned {
		if w.Controller == controller {
			keys[w.Key] = struct{}{}
		}
	}
	return keys
}
