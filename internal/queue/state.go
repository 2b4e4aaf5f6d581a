package queue

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

func (it *item[K, V]) state() State[K, V] {
	d := it.d
	if d == nil {
		return State[K, V]{Key: it.key}
	}
	return State[K, V]{
		Key: it.key, Value: d.value, Attempt: d.attempt, Due: d.due, NotBefore: d.notBefore, Retry: d.retry,
		Class: d.class, Later: d.later, LaterValue: d.laterValue, Parked: d.parked, Err: d.err,
	}
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
)

// Item is a key as an operator sees it.
type Item[K comparable, V any] struct {
	State[K, V]
	Phase Phase
	// Since is when it became ready, 0 if it is not.
	Since int64
	// Again says that a running key has been asked for again.
	Again bool
	// Waiting is what the request that waits carries.
	Waiting V
}

// Items returns every key that is not idle, in no order. It copies: a caller may take its time.
func (q *Queue[K, V]) Items() []Item[K, V] {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := make([]Item[K, V], 0, len(q.items))
	for _, it := range q.items {
		i := Item[K, V]{State: it.state(), Since: it.since, Waiting: it.value}
		switch {
		case it.running:
			i.Phase, i.Again = Running, it.waiting
		case it.ready != nil:
			i.Phase = Ready
		case i.Parked:
			i.Phase = Parked
		case i.Attempt > 0:
			i.Phase = Backoff
		default:
			i.Phase = Requeued
		}
		out = append(out, i)
	}
	return out
}

// Stats counts keys.
type Stats struct {
	Ready   [3]int // by class
	Running int
	Delayed int
	Parked  int
}

// Stats returns the counts in constant time.
func (q *Queue[K, V]) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := Stats{Running: q.running, Delayed: len(q.delayed), Parked: q.parked}
	for c := range q.ready {
		s.Ready[c] = q.ready[c].n
	}
	return s
}
