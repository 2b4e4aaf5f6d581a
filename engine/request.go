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
	Key         Key       `json:"key,omitzero"`
	Revision    string    `json:"revision,omitempty"`
	Incarnation string    `json:"incarnation,omitempty"`
	Time        time.Time `json:"time"`
	Traceparent string    `json:"traceparent,omitempty"`
	// Token is what a manual request was given to be recognised by.
	Token string `json:"token,omitempty"`
}

// MaxCauses is how many causes a request keeps: the first and the newest.
const MaxCauses = 8

// Causes are the causes of one request, joined. The zero value has none. Causes are for telemetry and explanation: do
// not decide by them, for a reconcile must be right whatever led to it.
type Causes struct {
	*causes

	own *Key // the request's, where it is known
}

// causes are kept small, for there are as many as there are pending keys.
type causes struct {
	first      cause
	rest       []cause
	n          int32
	incomplete bool
}

// cause is a Cause without what its request knows.
type cause struct {
	// Of a manual request, which has no revision, revision is the token.
	revision, incarnation string
	more                  *causeMore // nil: there is none of it
	time                  int64
	trigger               Trigger
	operation             Operation
}

// causeMore is what few causes have.
type causeMore struct {
	key         Key // zero: the request's own
	traceparent string
	by          *ancestry // the runs that it comes of, nil if they are not known
}

// withMore returns c with what few causes have.
func (c cause) withMore(m causeMore) cause {
	if m != (causeMore{}) {
		kept := m // m would be on the heap for all
		c.more = &kept
	}
	return c
}

func (c *cause) traceparent() string {
	if c.more == nil {
		return ""
	}
	return c.more.traceparent
}

func (c *cause) by() *ancestry {
	if c.more == nil {
		return nil
	}
	return c.more.by
}

// of says whether the cause speaks of key, in a request for own.
func (c *cause) of(key, own Key) bool {
	if c.more == nil || c.more.key.IsZero() {
		return key == own
	}
	return c.more.key == key
}

func (c *cause) expand(own *Key) Cause {
	x := Cause{
		Trigger: c.trigger, Operation: c.operation, Revision: c.revision, Incarnation: c.incarnation,
		Traceparent: c.traceparent(), Time: moment(c.time),
	}
	if c.trigger == Manual {
		x.Token, x.Revision = c.revision, ""
	}
	if c.more != nil && !c.more.key.IsZero() {
		x.Key = c.more.key
	} else if own != nil {
		x.Key = *own
	}
	return x
}

func compact(c Cause) cause {
	x := cause{trigger: c.Trigger, operation: c.Operation, revision: c.Revision, incarnation: c.Incarnation, time: nanos(c.Time)}
	if c.Trigger == Manual {
		x.revision = c.Token
	}
	return x.withMore(causeMore{key: c.Key, traceparent: c.Traceparent})
}

// CausesOf returns the causes given, bounded. A cause without a Key speaks of the request's own.
func CausesOf(all ...Cause) Causes {
	var c Causes
	for _, x := range all {
		c.add(compact(x))
	}
	return c
}

// of returns the causes with the key of their request, which All needs for those that speak of it.
func (c Causes) of(key *Key) Causes {
	if c.causes != nil {
		c.own = key
	}
	return c
}

// All returns the causes that were kept, the oldest first.
func (c Causes) All() []Cause {
	if c.Count() == 0 {
		return nil
	}
	all := append(make([]Cause, 0, 1+len(c.rest)), c.first.expand(c.own))
	for i := range c.rest {
		all = append(all, c.rest[i].expand(c.own))
	}
	return all
}

// Count is how many causes there were, the dropped ones included.
func (c Causes) Count() int {
	if c.causes == nil {
		return 0
	}
	return int(c.n)
}

// Dropped is how many causes were not kept.
func (c Causes) Dropped() int {
	if c.causes == nil {
		return 0
	}
	return max(int(c.n)-1-len(c.rest), 0)
}

// Complete says whether every cause was counted. Across processes a queue may forget some.
func (c Causes) Complete() bool { return c.causes == nil || !c.incomplete }

// Newest returns the cause that came last.
func (c Causes) Newest() Cause {
	if x := c.newest(); x != nil {
		return x.expand(c.own)
	}
	return Cause{}
}

func (c Causes) newest() *cause {
	switch {
	case c.Count() == 0:
		return nil
	case len(c.rest) > 0:
		return &c.rest[len(c.rest)-1]
	default:
		return &c.first
	}
}

func (c *Causes) add(x cause) {
	if c.causes == nil {
		c.causes = &causes{}
	}
	c.n++
	switch {
	case c.n == 1:
		c.first = x
	case len(c.rest) < MaxCauses-1:
		if len(c.rest) == cap(c.rest) {
			c.rest = append(make([]cause, 0, either(2, MaxCauses-1, len(c.rest) > 0)), c.rest...)
		}
		c.rest = append(c.rest, x)
	default:
		copy(c.rest, c.rest[1:])
		c.rest[len(c.rest)-1] = x
	}
}

// Join adds the causes of from, which are of the same request, to those of c.
func (c *Causes) Join(from Causes) {
	if from.causes == nil {
		return
	}
	dropped := from.Dropped()
	if from.n > 0 {
		c.add(from.first)
	}
	for _, x := range from.rest {
		c.add(x)
	}
	if c.causes == nil {
		c.causes = &causes{}
	}
	if c.own == nil {
		c.own = from.own
	}
	c.n += int32(dropped) //nolint:gosec // a count of causes.
	c.incomplete = c.incomplete || from.incomplete
}

// clone returns a copy that shares nothing with c.
func (c Causes) clone() Causes {
	var copied Causes
	copied.Join(c)
	return copied.of(c.own)
}

// version returns the newest cause that knows a version of the request's own key, or nil.
func (c Causes) version() *cause {
	if c.causes == nil {
		return nil
	}
	for i := range slices.Backward(c.rest) {
		if c.rest[i].own() {
			return &c.rest[i]
		}
	}
	if c.n > 0 && c.first.own() {
		return &c.first
	}
	return nil
}

// own says that the cause speaks of the request's own key and knows its version.
func (c *cause) own() bool { return c.trigger != Dependency && c.trigger != Manual && c.revision != "" }

// quiet says that something else was listed, and is not known to have changed.
func (c *cause) quiet() bool { return c.trigger == Dependency && c.operation == Resync }

// each calls f for each cause that was kept, until f returns false.
func (c Causes) each(f func(*cause) bool) {
	if c.Count() == 0 || !f(&c.first) {
		return
	}
	for i := range c.rest {
		if !f(&c.rest[i]) {
			return
		}
	}
}

// Revives says whether causes that arrive bring back a key that was parked with the causes of c: news of its
// dependencies does, and news of itself if the revision or incarnation differs. Where there is nothing to compare, a
// live event is news and a list is not.
func (c Causes) Revives(arrived Causes) bool {
	for x := range arrived.each {
		switch {
		case x.trigger == Manual, x.trigger == Dependency && !x.quiet():
			return true
		case x.trigger == Dependency:
		case c.knows(x):
		case x.trigger != Resynced || c.version() != nil && x.revision != "":
			return true
		}
	}
	return false
}

// Unchanged says that everything listed is as it was when c were the causes of what is kept for the key.
func (c Causes) Unchanged(listed Causes) bool {
	for x := range listed.each {
		if !x.quiet() && !c.knows(x) {
			return false
		}
	}
	return true
}

// knows says that x speaks of the version of the key that c know.
func (c Causes) knows(x *cause) bool {
	v := c.version()
	return v != nil && x.own() && v.revision == x.revision && v.incarnation == x.incarnation
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
	// Deletion says that the object is gone, which passes a pause unless the pause says otherwise.
	Deletion bool
	// Fence grows with every change of the key's owner.
	Fence uint64
	// Crashes is how often a process has ended while it ran the key, as far as that is known: on a durable bus, since the key
	// last ran to an end. A key that did it three times is parked.
	Crashes int
	// Waited is how long the request was ready before this run.
	Waited time.Duration

	now   int64     // when it was made, if that is known
	quiet int64     // before it, it is no reason to run
	taken time.Time // when it was taken, if that is known with a monotonic clock
}

// Trigger is that of the newest cause.
func (r Request) Trigger() Trigger {
	if x := r.Causes.newest(); x != nil {
		return x.trigger
	}
	return Created
}

// Partial returns the causes marked as incomplete: a bus that keeps the newest message of a key may have replaced
// others.
func (c Causes) Partial() Causes {
	c = c.clone()
	if c.causes == nil {
		c.causes = &causes{}
	}
	c.incomplete = true
	return c
}
