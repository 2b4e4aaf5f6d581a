package engine

import (
	"slices"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Trigger is why a request exists.
type Trigger uint8

// The triggers. Created, Updated, Deleted and Resynced speak of the request's own key, Dependency of another one.
const (
	Created Trigger = iota
	Updated
	Deleted
	Dependency
	Requeued
	Retried
	Resynced
	Manual
)

var triggers = names[Trigger]{"created", "updated", "deleted", "dependency", "requeue", "retry", "resync", "manual"}

// String returns the name that travels in messages and metrics.
func (t Trigger) String() string { return triggers.name(t) }

// MarshalText writes the name.
func (t Trigger) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads a name.
func (t *Trigger) UnmarshalText(text []byte) (err error) {
	*t, err = triggers.parse("trigger", string(text))
	return err
}

// Priority is the class of a request.
type Priority uint8

// The priorities, served 16:4:1 while there is work of each.
const (
	PriorityLive       = Priority(queue.Live)
	PriorityDependency = Priority(queue.Dependency)
	PriorityList       = Priority(queue.List)
)

var priorities = names[Priority]{"live", "dependency", "list"}

// String returns the name that travels in messages and metrics.
func (p Priority) String() string { return priorities.name(p) }

// MarshalText writes the name.
func (p Priority) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads a name.
func (p *Priority) UnmarshalText(text []byte) (err error) {
	*p, err = priorities.parse("priority", string(text))
	return err
}

// Cause is one reason for a request.
type Cause struct {
	Trigger   Trigger   `json:"trigger"`
	Operation Operation `json:"operation"`
	// Key, Revision and Incarnation are those of the object that changed.
	Key         Key       `json:"key"`
	Revision    string    `json:"revision,omitempty"`
	Incarnation string    `json:"incarnation,omitempty"`
	Time        time.Time `json:"time"`
	Traceparent string    `json:"traceparent,omitempty"`
}

// MaxCauses is how many causes a request keeps: the first and the newest.
const MaxCauses = 8

// Causes are the causes of one request, joined. The zero value has none. Causes are for telemetry and explanation: do
// not decide by them, for a reconcile must be right whatever led to it.
type Causes struct {
	first      Cause
	rest       []Cause
	n          int
	incomplete bool
}

// CausesOf returns the causes given, bounded.
func CausesOf(causes ...Cause) Causes {
	var c Causes
	for _, cause := range causes {
		c.add(cause)
	}
	return c
}

// All returns the causes that were kept, the oldest first.
func (c Causes) All() []Cause {
	if c.n == 0 {
		return nil
	}
	return append([]Cause{c.first}, c.rest...)
}

// Count is how many causes there were, the dropped ones included.
func (c Causes) Count() int { return c.n }

// Dropped is how many causes were not kept.
func (c Causes) Dropped() int { return max(c.n-1-len(c.rest), 0) }

// Complete says whether every cause was counted. Across processes a queue may forget some.
func (c Causes) Complete() bool { return !c.incomplete }

// Newest returns the cause that came last.
func (c Causes) Newest() Cause {
	if len(c.rest) > 0 {
		return c.rest[len(c.rest)-1]
	}
	return c.first
}

func (c *Causes) add(cause Cause) {
	c.n++
	switch {
	case c.n == 1:
		c.first = cause
	case len(c.rest) < MaxCauses-1:
		c.rest = append(c.rest, cause)
	default:
		copy(c.rest, c.rest[1:])
		c.rest[len(c.rest)-1] = cause
	}
}

// Join adds the causes of from to those of c.
func (c *Causes) Join(from Causes) {
	dropped := from.Dropped()
	if from.n > 0 {
		c.add(from.first)
	}
	for _, cause := range from.rest {
		c.add(cause)
	}
	if c.n > 0 {
		c.n += dropped
	}
	c.incomplete = c.incomplete || from.incomplete
}

// Clone returns a copy that shares nothing with c.
func (c Causes) clone() Causes {
	c.rest = append([]Cause(nil), c.rest...)
	return c
}

// version returns the newest cause that knows a version of the request's own key.
func (c Causes) version() (Cause, bool) {
	for _, v := range slices.Backward(c.rest) {
		if v.own() {
			return v, true
		}
	}
	return c.first, c.n > 0 && c.first.own()
}

// own says that the cause speaks of the request's own key and knows its version.
func (c Cause) own() bool { return c.Trigger != Dependency && c.Revision != "" }

// quiet says that something else was listed, and is not known to have changed.
func (c Cause) quiet() bool { return c.Trigger == Dependency && c.Operation == Resync }

// Revives says whether causes that arrive bring back a key that was parked with the causes of c: news of its
// dependencies does, and news of itself if the revision or incarnation differs. Where there is nothing to compare, a
// live event is news and a list is not.
func (c Causes) Revives(arrived Causes) bool {
	for _, cause := range arrived.All() {
		switch {
		case cause.Trigger == Manual, cause.Trigger == Dependency && !cause.quiet():
			return true
		case cause.Trigger == Dependency:
		case c.knows(cause):
		case cause.Trigger != Resynced || c.versioned() && cause.Revision != "":
			return true
		}
	}
	return false
}

// Unchanged says that everything listed is as it was when c were the causes of what is kept for the key.
func (c Causes) Unchanged(listed Causes) bool {
	for _, cause := range listed.All() {
		if !cause.quiet() && !c.knows(cause) {
			return false
		}
	}
	return true
}

func (c Causes) versioned() bool {
	_, known := c.version()
	return known
}

// knows says that cause speaks of the version of the key that c know.
func (c Causes) knows(cause Cause) bool {
	v, known := c.version()
	return known && cause.own() && v.Revision == cause.Revision && v.Incarnation == cause.Incarnation
}

// Request is one key of one controller that must be reconciled.
type Request struct {
	Controller string
	Key        Key
	Causes     Causes
	// Attempt counts the failures before this run: 0 first.
	Attempt  int
	Priority Priority
	// Due is when the request may start; zero means at once.
	Due time.Time
	// RetryPending says that a retry was still to come when something else started this run: failing, it keeps the
	// attempt and the retry's time.
	RetryPending bool
	// Manual passes hard delays and revives a parked key.
	Manual bool
	// Fence grows with every change of the key's owner.
	Fence uint64
	// Waited is how long the request was ready before this run.
	Waited time.Duration
}

// Trigger is that of the newest cause.
func (r Request) Trigger() Trigger { return r.Causes.Newest().Trigger }

// Partial returns the causes marked as incomplete: a bus that keeps the newest message of a key may have replaced
// others.
func (c Causes) Partial() Causes {
	c.incomplete = true
	return c
}
