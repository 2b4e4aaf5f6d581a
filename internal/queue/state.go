package queue

import "time"

// State is what a restart must know of a key: what lies behind it and what is still to come. Times are nanoseconds
// since the Unix epoch, 0 is none.
type State[K comparable, V any] struct {
	Key        K
	Value      V // carried by the delayed or parked request
	Attempt    int
	Due        int64
	NotBefore  int64
	Retry      bool // Due is a retry, not a requeue
	Class      Class
	Later      int64 // asked for from outside
	LaterValue V
	Parked     bool
	Err        string
}

// Empty says that there is nothing to write down.
func (s State[K, V]) Empty() bool {
	return s.Attempt == 0 && s.Due == 0 && s.Later == 0 && !s.Parked
}

// state copies what the queue goes on adding to.
func (q *Queue[K, V]) state(it *item[K, V]) State[K, V] {
	d := it.d
	if d == nil {
		return State[K, V]{Key: it.key}
	}
	s := State[K, V]{
		Key: it.key, Value: d.value, Attempt: d.attempt, Due: d.due, NotBefore: d.notBefore, Retry: d.retry,
		Class: d.class, Later: d.later, Parked: d.parked, Err: d.err,
	}
	if d.later != 0 {
		q.cfg.Join(&s.LaterValue, d.laterValue)
	}
	return s
}

// Phase is where a key stands.
type Phase uint8

// The phases.
const (
	Ready Phase = iota
	Running
	Requeued // delayed, and not because it failed
	Backoff  // delayed because it failed
	Parked
	Paused    // held back by a pause
	Debounced // held back until no more is added
)

var phases = [...]string{"ready", "running", "requeued", "backoff", "parked", "paused", "debounced"}

// String returns the name that operators see.
func (p Phase) String() string { return phases[p] }

// MarshalText writes the name.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Item is a key as an operator sees it.
type Item[K comparable, V any] struct {
	State[K, V]
	Phase Phase
	// Since is when it became ready, 0 if it is not.
	Since int64
	// Wake is when it becomes ready, 0 if that is not known or it is ready.
	Wake int64
	// Again says that a running key has been asked for again.
	Again bool
	// Waiting is what the request that waits carries.
	Waiting V
}

// Items returns every key that is not idle, in no order. It copies: a caller may take its time.
func (q *Queue[K, V]) Items() []Item[K, V] {
	q.lock()
	defer q.mu.Unlock()
	out := make([]Item[K, V], 0, q.items.n)
	now := time.Now().UnixNano()
	for it := range q.items.all {
		out = append(out, q.item(it, now))
	}
	return out
}

// Item returns how one key stands, false if it is idle.
func (q *Queue[K, V]) Item(key K) (Item[K, V], bool) {
	q.lock()
	defer q.mu.Unlock()
	it := q.find(key)
	if it == nil {
		return Item[K, V]{}, false
	}
	return q.item(it, time.Now().UnixNano()), true
}

func (q *Queue[K, V]) item(it *item[K, V], now int64) Item[K, V] {
	i := Item[K, V]{State: q.state(it)}
	if it.waiting {
		q.cfg.Join(&i.Waiting, it.value)
	}
	if wake := q.wakeOf(it, now); wake > now && wake != never && !it.running {
		i.Wake = wake
	}
	p, paused := q.pauses.of(it.key)
	switch {
	case it.running:
		i.Phase, i.Again = Running, it.waiting
	case it.in != nowhere:
		i.Phase, i.Since, i.Wake = Ready, it.since, 0
	case i.Parked:
		i.Phase = Parked
	case paused && (p.Until == 0 || p.Until > now):
		i.Phase = Paused
	case i.Attempt > 0:
		i.Phase = Backoff
	case it.waiting:
		i.Phase = Debounced
	default:
		i.Phase = Requeued
	}
	return i
}

// Stats counts keys.
type Stats struct {
	Ready   [3]int // by class; manual requests are live
	Running int
	Delayed int
	Parked  int
}

// Stats returns the counts in constant time.
func (q *Queue[K, V]) Stats() Stats {
	q.lock()
	defer q.mu.Unlock()
	s := Stats{Running: q.running, Delayed: len(q.delayed), Parked: q.parked}
	for c := range Classes {
		s.Ready[c] = q.ready[c].n
	}
	s.Ready[Live] += q.ready[urgent].n
	return s
}
