package engine

import (
	"context"
	"fmt"
	"time"
)

// Operation is what a source saw happen to a key.
type Operation uint8

// The operations. Purge is a deletion together with the key's history. Resync means that the key was listed: nothing
// is known to have changed. ListStarted and ListEnded bracket a full list, carry no key and are never mapped.
const (
	Put Operation = iota
	Delete
	Purge
	Resync
	ListStarted
	ListEnded
)

var operations = names[Operation]{"put", "delete", "purge", "resync", "list-started", "list-ended"}

// String returns the name that travels in messages and metrics.
func (o Operation) String() string { return operations.name(o) }

// MarshalText writes the name.
func (o Operation) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText reads a name.
func (o *Operation) UnmarshalText(text []byte) (err error) {
	*o, err = operations.parse("operation", string(text))
	return err
}

// Event is one observed change. It has no body: a handler reads the object, and gets its present state.
type Event struct {
	// Source is the name of the source. The engine fills it in.
	Source string
	Key    Key
	// Incarnation tells two objects apart that had the same key one after the other (a UID). May be empty.
	Incarnation string
	Operation   Operation
	// Revision is opaque: only the source can compare two of them for age.
	Revision string
	// Old and New are what is known of the object before and after. Old is nil for an object that is new, New for one
	// that is gone. They are shared: do not change them.
	Old, New *Meta
	// Time is when the source saw the change. The engine fills in the present time where it is zero.
	Time time.Time
	// Traceparent is the W3C trace context of what made the change, if the system carries one.
	Traceparent string
	// Repaired says that a later list found this change, and that no event had told of it.
	Repaired bool
}

// Meta is what mappers may look at.
type Meta struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Owner is the key that the object's owner mark names.
	Owner Key `json:"owner,omitzero"`
	// Fields are the fields that mappers declared an interest in.
	Fields map[string]string `json:"fields,omitempty"`
}

// Emit hands an event over. Nil means that it was accepted: everything that it leads to is in a queue, as durable as
// the bus is, and the source may move its cursor. An error means that it was not, and that the source must emit it
// again. It blocks until it knows. It is safe for concurrent use.
type Emit func(ctx context.Context, e Event) error

// Source watches one thing.
//
// Run emits every change until ctx ends, and returns nil then. It brackets each full list with ListStarted and
// ListEnded; no controller starts before every source that it references has ended its first list. It subscribes
// before it lists, so that nothing falls between. An error means that the source cannot go on; the engine calls Run
// again after a while. A source is run by one goroutine at a time.
//
// A source whose objects can be read is also a [Reader], one whose system can be written also a [Sink]. One whose events
// come from a topic has a method Published() bool that says so: the engine does not publish them again. One that waits for
// something while it runs has a method Status() error that says for what: the engine is not ready until it is nil.
type Source interface {
	// Name identifies the source within an engine.
	Name() string
	Run(ctx context.Context, emit Emit) error
}

// Mapper tells which keys of a controller must be reconciled because of an event. An object that moved from one owner
// to another concerns both: look at Old and New. An error is retried with backoff and blocks nothing else.
type Mapper func(ctx context.Context, e Event) ([]Key, error)

// names gives constants of a small integer type their text.
type names[T ~uint8] []string

func (n names[T]) name(v T) string {
	if int(v) < len(n) {
		return n[v]
	}
	return fmt.Sprintf("unknown(%d)", v)
}

func (n names[T]) parse(what, s string) (T, error) {
	for i, name := range n {
		if name == s {
			return T(i), nil
		}
	}
	return 0, fmt.Errorf("%s %q is none of %v", what, s, []string(n))
}
