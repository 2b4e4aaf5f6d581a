package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"time"
)

// Verb is what an effect does.
type Verb uint8

// The verbs. Release keeps the object and gives up its ownership.
const (
	ApplyObject Verb = iota
	DeleteObject
	ReleaseObject
)

var verbs = names[Verb]{"apply", "delete", "release"}

// String returns the verb's name.
func (v Verb) String() string { return verbs.name(v) }

// MarshalText writes the name.
func (v Verb) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Effect is one intended write.
type Effect struct {
	Verb Verb `json:"verb"`
	// Object is what to apply; of a deletion only the key counts.
	Object Object `json:"object"`
	// Adopt takes over an object that exists and that nobody owns, where the default is ErrResourceExists.
	Adopt bool `json:"adopt,omitempty"`
}

// IntentAnnotation is where an object that can carry annotations shows the intent that made it (Write.Intent).
const IntentAnnotation = "windlass.dev/intent"

// do carries out effects in their order and stops at the first that fails. Effects that follow one another into a sink that writes several
// objects in one step are written together.
func (s *runState) do(ctx context.Context, effects []Effect) error {
	var together batch
	for _, e := range effects {
		sink := s.c.sinkOf(e.Object.Key)
		if sink == nil {
			return errors.Join(together.write(ctx), Terminal(fmt.Errorf("%w: controller %s may not write %s: no sink that it Owns or WritesTo covers the key",
				ErrInvalid, s.c.name, e.Object.Key)))
		}
		if s.c.dryRun {
			s.log().InfoContext(ctx, "dry run", "would", e.Verb.String(), "target", e.Object.Key.String())
			continue
		}
		if !together.takes(sink, e.Object.Key) {
			if err := together.write(ctx); err != nil {
				return err
			}
		}
		a := &application{s: s, sink: sink, effect: e, me: owner{s.c.name, s.req.Key}}
		if err := a.prepare(ctx); err != nil {
			return errors.Join(together.write(ctx), err)
		}
		if _, ok := sink.(Batcher); ok {
			together = append(together, a)
			continue
		}
		if err := a.write(ctx); err != nil {
			return err
		}
	}
	return together.write(ctx)
}

// application is one effect on its way into its sink.
type application struct {
	s      *runState
	sink   Sink
	effect Effect
	me     owner

	// What the effect comes to: a write, nil if there is nothing to write, and what follows it, successful or not.
	change *Change
	then   func(ctx context.Context, revision string, err error) error
}

// prepare finds out what the effect comes to.
func (a *application) prepare(ctx context.Context) error {
	target := a.effect.Object.Key
	reader, readable := a.sink.(Reader)
	if !readable {
		// Nobody can tell what is there, so nobody can own it: a log, a webhook.
		if a.effect.Verb == DeleteObject {
			a.delete(Object{Key: target})
		} else {
			a.apply(a.conditions())
		}
		return nil
	}
	have, err := reader.Get(ctx, target)
	exists := err == nil
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("read %s before writing it: %w", target, err)
	}
	if keepsOwner(a.sink) {
		return a.marked(have, exists)
	}
	return a.recorded(ctx, have, exists)
}

func keepsOwner(s Sink) bool {
	k, ok := s.(interface{ KeepsOwner() bool })
	return ok && k.KeepsOwner()
}

// marked carries out an effect where the object itself names its owner.
func (a *application) marked(have Object, exists bool) error {
	mine := exists && have.Owner == a.me.Key
	if exists && !mine && (!have.Owner.IsZero() || !a.effect.Adopt) {
		if a.effect.Verb != ApplyObject {
			return nil
		}
		return a.refuse(have.Owner)
	}
	switch {
	case !exists && a.effect.Verb == ApplyObject:
		w := a.conditions()
		w.Absent = true
		a.apply(w)
	case !exists:
	case a.effect.Verb == DeleteObject:
		a.delete(have)
	case a.effect.Verb == ReleaseObject:
		a.me, a.effect.Object = owner{}, have
		fallthrough
	default:
		unchanged := same
		if s, ok := a.sink.(interface{ Same(have, want Object) bool }); ok {
			unchanged = s.Same
		}
		if have.Owner == a.me.Key && unchanged(have, a.effect.Object) {
			return nil
		}
		w := a.conditions()
		w.Revision, w.Release = have.Revision, a.effect.Verb == ReleaseObject
		a.apply(w)
	}
	return nil
}

// recorded carries out an effect where the engine keeps the owner.
func (a *application) recorded(ctx context.Context, have Object, exists bool) error {
	own, target := a.s.c.engine.ownership, a.effect.Object.Key
	record, known := own.get(target)
	if own.shared && (!known || !exists || record.Intent != "") {
		// Another replica may have made or removed the target and its record when the key was its own. In any other case a
		// stale record is found out by what is written over it.
		var err error
		if record, known, err = own.refresh(ctx, target); err != nil {
			return err
		}
	}
	if known && record.Owner != a.me {
		if a.effect.Verb != ApplyObject {
			return nil
		}
		a.s.c.engine.tellRival(ctx, record.Owner, a.me, target)
		return fmt.Errorf("%s: %w: it belongs to %s", target, ErrResourceExists, record.Owner)
	}
	if known && exists && record.Intent != "" && !a.intended(record, have) {
		// The create was never done: what is there came from somebody else.
		if err := own.remove(ctx, target); err != nil {
			return err
		}
		known = false
	}
	switch {
	case a.effect.Verb == ApplyObject:
		return a.applyRecorded(ctx, have, exists, record, known)
	case !known:
		return nil
	case a.effect.Verb == DeleteObject && exists:
		own.announce(target, "", true)
		a.delete(have)
		a.then = func(ctx context.Context, _ string, err error) error {
			if err != nil {
				own.announce(target, "", false)
				return err
			}
			return own.remove(ctx, target)
		}
		return nil
	}
	return own.remove(ctx, target)
}

func (a *application) applyRecorded(ctx context.Context, have Object, exists bool, record ownerRecord, known bool) error {
	own, want := a.s.c.engine.ownership, a.effect.Object
	if exists && !known && !a.effect.Adopt {
		return a.refuse(Key{})
	}
	if !known {
		record = ownerRecord{Owner: a.me, Intent: rand.Text(), Digest: digest(want.Value)}
		if exists {
			record.Intent, record.Digest, record.Revision = "", "", have.Revision
		}
		if err := own.put(ctx, want.Key, record); err != nil {
			return err
		}
		record, _ = own.get(want.Key)
	}
	if exists && same(have, want) {
		return a.confirm(ctx, record, have.Revision)
	}
	w := a.conditions()
	w.Absent, w.Revision, w.Intent = !exists, have.Revision, cmp.Or(record.Intent, rand.Text())
	own.announce(want.Key, w.Intent, false)
	a.apply(w)
	a.then = func(ctx context.Context, revision string, err error) error {
		if errors.Is(err, ErrInvalid) && record.Intent != "" {
			// The system will never take it: leave no claim behind.
			return errors.Join(err, own.remove(ctx, want.Key))
		}
		if err != nil {
			return err
		}
		record.Revision = revision
		record.Intent, record.Digest = "", ""
		if err := own.put(ctx, want.Key, record); err != nil {
			return err
		}
		if !own.settle(want.Key) {
			return a.s.c.add(ctx, Request{Controller: a.me.Controller, Key: a.me.Key, Priority: PriorityDependency, Causes: CausesOf(Cause{
				Trigger: Dependency, Operation: Put, Key: want.Key, Time: time.Now(), Traceparent: a.s.traceparent,
			})})
		}
		return nil
	}
	return nil
}

// confirm ends an intent whose target turned out to be there.
func (a *application) confirm(ctx context.Context, record ownerRecord, revision string) error {
	if record.Intent == "" {
		return nil
	}
	record.Intent, record.Digest, record.Revision = "", "", revision
	return a.s.c.engine.ownership.put(ctx, a.effect.Object.Key, record)
}

// intended says whether have is what the unconfirmed record meant to create: it shows the intent's mark, or, where
// it can show none, it has the very bytes.
func (a *application) intended(r ownerRecord, have Object) bool {
	if mark := have.Annotations[IntentAnnotation]; mark != "" {
		return mark == r.Intent
	}
	return digest(have.Value) == r.Digest
}

func (a *application) refuse(of Key) error {
	err := fmt.Errorf("%s: %w", a.effect.Object.Key, ErrResourceExists)
	a.s.record(Note{Warning: true, Reason: "ErrResourceExists", Message: err.Error()})
	if !of.IsZero() {
		return fmt.Errorf("%w: it belongs to %s", err, of)
	}
	return fmt.Errorf("%w: delete it, choose another name, or let the controller adopt it", err)
}

func (a *application) conditions() Write {
	return Write{Traceparent: a.s.traceparent, Fence: a.s.req.Fence}
}

// fenced returns an error if the run may not write any more. It is asked between the read and the write, which is made only
// over what was read: if another replica takes over after this moment, it has either not written yet, or the write is refused.
func (a *application) fenced() error {
	c := a.s.c
	bus, canTell := c.bus().(interface{ Trusted() bool })
	switch {
	case a.s.work.Err() != nil: // and a handler that does not honour its context passes on another
		return context.Cause(a.s.work)
	case c.lease != nil && !c.lease.Held(), canTell && !bus.Trusted():
		return ErrLeaseLost
	default:
		return nil
	}
}

func (a *application) apply(w Write) {
	o := a.effect.Object
	o.Owner = a.me.Key
	a.change = &Change{Object: o, Write: w}
}

func (a *application) delete(have Object) {
	w := a.conditions()
	w.Revision = have.Revision
	a.change = &Change{Object: Object{Key: have.Key}, Delete: true, Write: w}
}

// begin tells of the write that is about to be made, and returns what tells of its end and returns the effect's error.
func (a *application) begin(ctx context.Context) (context.Context, func(revision string, err error) error) {
	verb, key := "apply", a.change.Object.Key
	if a.change.Delete {
		verb = "delete"
	}
	outer := ctx
	ctx, end := a.s.access(ctx, verb, key)
	by := a.s.descendLocked()
	a.s.c.engine.lineage.note(key, "", by)
	return ctx, func(revision string, err error) error {
		if !a.change.Delete {
			a.s.c.engine.lineage.note(key, cmp.Or(revision, "none"), by)
		}
		end(err)
		if a.change.Delete && errors.Is(err, ErrNotFound) {
			err = nil
		}
		if err != nil {
			err = fmt.Errorf("%s %s: %w", verb, key, err)
		}
		if a.then != nil {
			err = a.then(outer, revision, err)
		}
		return err
	}
}

// write carries out what was prepared.
func (a *application) write(ctx context.Context) error {
	if a.change == nil {
		return nil
	}
	fenced := a.fenced()
	ctx, end := a.begin(ctx)
	switch c := a.change; {
	case fenced != nil:
		return end("", fenced)
	case c.Delete:
		return end("", a.sink.Delete(ctx, c.Object.Key, c.Write))
	default:
		return end(a.sink.Apply(ctx, c.Object, c.Write))
	}
}

// batch are effects that were prepared and are written together.
type batch []*application

// takes says whether an effect may be prepared before the batch is written.
func (b batch) takes(sink Sink, target Key) bool {
	for _, a := range b {
		if a.sink != sink || a.effect.Object.Key == target {
			return false
		}
	}
	return true
}

// write carries out what was prepared. It returns the error of the first effect that failed.
func (b *batch) write(ctx context.Context) error {
	var changes []Change
	var ends []func(revision string, err error) error
	for _, a := range *b {
		if a.change != nil {
			_, end := a.begin(ctx)
			changes, ends = append(changes, *a.change), append(ends, end)
		}
	}
	if len(changes) == 0 {
		*b = nil
		return nil
	}
	first := (*b)[0]
	*b = nil
	var revisions []string
	err := first.fenced()
	if err == nil {
		revisions, err = first.sink.(Batcher).Batch(ctx, changes)
	}
	var failed error
	for i, end := range ends {
		if i < len(revisions) {
			failed = cmp.Or(failed, end(revisions[i], nil))
		} else {
			failed = cmp.Or(failed, end("", err))
		}
	}
	return failed
}

// same says whether applying want would change nothing.
func same(have, want Object) bool {
	a, isBytes := have.Value.([]byte)
	if b, ok := want.Value.([]byte); ok && isBytes {
		return bytes.Equal(a, b)
	}
	return reflect.DeepEqual(have.Value, want.Value)
}

func digest(value any) string {
	b, ok := value.([]byte)
	if !ok {
		return ""
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
