package queue

import "math"

// item is a key that waits, runs, is delayed or parked. What most keys never need is behind d.
type item[K comparable, V any] struct {
	key        K
	value      V           // of the request that waits, if one does
	next, prev *item[K, V] // in its list
	d          *delay[V]
	hash       uint64
	since      int64 // when it became ready
	class      Class
	in         uint8 // the list it stands in
	waiting    bool
	manual     bool // passes notBefore, debounce and limit
	deletion   bool // passes a pause
	running    bool
}

// The lists beyond those of the classes. The zero item is in list Live: obtain says nowhere.
const (
	urgent  = uint8(Classes) // manual requests
	lists   = urgent + 1
	nowhere = lists
)

// never is a time that does not come.
const never = int64(math.MaxInt64)

// delay is what a key remembers between runs. Times are nanoseconds since the Unix epoch, 0 is none.
type delay[V any] struct {
	value      V // of the delayed or parked request
	laterValue V
	err        string
	due        int64
	notBefore  int64
	later      int64 // asked for from outside
	quiet      int64 // before it, the request that waits is no reason to run
	quietMax   int64 // quiet never passes it
	superseded int64 // the due time that the run under way has passed over
	slot       int   // its place in the heap, plus one
	attempt    int
	class      Class
	retry      bool // due is a retry, not a requeue
	early      bool // so was superseded
	laterTaken bool // the run under way is for later
	parked     bool
}

func (it *item[K, V]) delay() *delay[V] {
	if it.d == nil {
		it.d = &delay[V]{}
	}
	return it.d
}

// wake is when the key becomes ready: now or earlier if it is, 0 if nothing is to come.
func (it *item[K, V]) wake(now int64) int64 {
	d := it.d
	if d == nil {
		if it.waiting {
			return now
		}
		return 0
	}
	var at int64
	sooner := func(t int64) {
		if t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	if it.waiting {
		hold := max(d.notBefore, d.quiet)
		if it.manual || hold <= now {
			return now
		}
		sooner(hold)
	}
	if d.due != 0 {
		sooner(max(d.due, d.notBefore))
	}
	if d.later != 0 {
		sooner(max(d.later, d.notBefore))
	}
	return at
}

// reset forgets all but what was asked for from outside and what the request that waits has to wait for.
func (d *delay[V]) reset() {
	*d = delay[V]{later: d.later, laterValue: d.laterValue, slot: d.slot, quiet: d.quiet, quietMax: d.quietMax}
}

// fail delays the next attempt.
func (d *delay[V]) fail(now int64, o *Outcome[V], class Class) {
	due := now + max(int64(o.After), 0)
	switch {
	case d.early && d.superseded > now:
		due = d.superseded
	case d.early: // its time came during this run: the same step again
	default:
		d.attempt++
		if d.superseded > now {
			due = min(due, d.superseded)
		}
	}
	d.notBefore = 0
	if o.NotBefore > 0 {
		d.notBefore = now + int64(o.NotBefore)
	}
	d.due, d.retry, d.value, d.class, d.err = due, true, o.Value, class, o.Err
	d.superseded, d.early = 0, false
}

// empty says that there is nothing to remember.
func (d *delay[V]) empty() bool {
	return d.attempt == 0 && d.due == 0 && d.later == 0 && !d.parked
}

// find returns the item of key, or nil.
func (q *Queue[K, V]) find(key K) *item[K, V] { return q.items.find(q.cfg.Hash(key), &key) }

// obtain returns the item of key and makes it if there is none.
func (q *Queue[K, V]) obtain(key *K, hash uint64, class Class) *item[K, V] {
	if it := q.items.find(hash, key); it != nil {
		return it
	}
	it := q.free
	if it != nil {
		q.free, it.next = it.next, nil
		q.freed--
	} else {
		it = &item[K, V]{}
	}
	it.key, it.hash, it.class, it.in = *key, hash, class, nowhere
	q.items.insert(it)
	return it
}

// keepFree is how many items are kept to be used again.
const keepFree = 1024

// discard forgets a key.
func (q *Queue[K, V]) discard(it *item[K, V]) {
	q.items.remove(it)
	*it = item[K, V]{}
	if q.freed < keepFree {
		q.freed++
		q.free, it.next = it, q.free
	}
}

// list is a first-in-first-out list through the items.
type list[K comparable, V any] struct {
	head, tail *item[K, V]
	n          int
}

func (l *list[K, V]) push(it *item[K, V], number uint8) {
	it.in, it.prev, it.next = number, l.tail, nil
	if l.tail != nil {
		l.tail.next = it
	} else {
		l.head = it
	}
	l.tail = it
	l.n++
}

func (l *list[K, V]) remove(it *item[K, V]) {
	if it.prev != nil {
		it.prev.next = it.next
	} else {
		l.head = it.next
	}
	if it.next != nil {
		it.next.prev = it.prev
	} else {
		l.tail = it.prev
	}
	it.in, it.prev, it.next = nowhere, nil, nil
	l.n--
}
