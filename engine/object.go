package engine

import (
	"context"
	"encoding/json"
	"fmt"
)

// Object is what a Key holds.
type Object struct {
	Key         Key
	Incarnation string
	Revision    string
	Meta
	// Value is the system's own value. Use As to decode it.
	Value any
}

// As returns the value of o as a T: as it is if it is one, else decoded from JSON, to which a value that is not text is
// encoded first. An error wraps ErrInvalid: it does not become right by trying again.
func As[T any](o Object) (T, error) {
	var t T
	switch v := o.Value.(type) {
	case T:
		return v, nil
	case nil:
		return t, fmt.Errorf("%w: %s has no value", ErrInvalid, o.Key)
	default:
		text, ok := o.Value.([]byte)
		if !ok {
			var err error
			if text, err = json.Marshal(v); err != nil {
				return t, fmt.Errorf("%w: %s holds a %T, not a %T: %w", ErrInvalid, o.Key, o.Value, t, err)
			}
		}
		if err := json.Unmarshal(text, &t); err != nil {
			return t, fmt.Errorf("%w: %s is not a JSON %T: %w", ErrInvalid, o.Key, t, err)
		}
		return t, nil
	}
}

// Reader reads the objects of one source. Its methods are safe for concurrent use.
type Reader interface {
	// Covers says whether key is one of this reader's.
	Covers(key Key) bool
	// Get returns the present object, or ErrNotFound. The caller may change what it gets.
	Get(ctx context.Context, key Key) (Object, error)
	// List returns all objects, in no order.
	List(ctx context.Context) ([]Object, error)
}

// Sink writes the objects of one system. Its methods are safe for concurrent use and return once the system has
// accepted the write.
//
// A sink whose objects carry owner marks implements KeepsOwner() bool and returns true; for the others the engine
// keeps the owners itself. Such a sink may have a method Owned(ctx, owner) ([]Key, error), where its List is slow, and
// Same(have, want Object) bool, where an object holds more than what was applied.
type Sink interface {
	// Name identifies the sink within an engine; a sink that can be watched is a source of the same name.
	Name() string
	// Covers says whether key is one of this sink's.
	Covers(key Key) bool
	// Apply makes the object as given, and returns its new revision. It returns ErrConflict if the precondition does
	// not hold, ErrInvalid if the system will never take the object.
	Apply(ctx context.Context, o Object, w Write) (revision string, err error)
	// Delete removes the object. It returns ErrNotFound if there is none, ErrConflict if the precondition fails.
	Delete(ctx context.Context, key Key, w Write) error
}

// Batcher is a sink that writes several objects in one step. What one call of Runtime.Do writes into it, one after the other, goes there together.
type Batcher interface {
	// Batch carries out changes, none of the same object, in their order and in as few steps as the system allows. A step is done as a whole or
	// not at all; the first that is refused ends it. It returns the revisions of the changes that were done, "" for deletions, and
	// why there are no more, as Apply and Delete would.
	Batch(ctx context.Context, changes []Change) (revisions []string, err error)
}

// Change is a write of one object.
type Change struct {
	// Object is what to apply; of a deletion only the key counts.
	Object Object
	Delete bool
	Write  Write
}

// Write says under which conditions a sink writes, and on whose behalf.
type Write struct {
	// Absent demands that there is no such object; Revision, that it has this revision. Neither: no condition.
	Absent   bool
	Revision string
	// Intent is a mark that the object shall carry where it can, so that a write whose answer was lost is recognised.
	Intent string
	// Release asks a sink whose objects carry owner marks to remove the mark. The object is otherwise as it was read.
	Release bool
	// Traceparent is the trace context of the reconcile that writes.
	Traceparent string
	// Fence grows with every change of the reconciled key's owner; a system that can check it refuses smaller ones.
	Fence uint64
}
