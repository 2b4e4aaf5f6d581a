package queue

import "container/heap"

// item is a key that waits, runs, is delayed or parked. What most keys never need is behind d.
type item[K comparable, V any] struct {
	key        K
	value      V // of the request that waits, if one does
	next, prev *item[K, V]
	ready      *list[K, V] // the list it stands in; nil: none
	d          *delay[V]
	since      int64 // when it became ready
	class      Class
	waiting    bool
	manual     bool // passes notBefore
	running    bool
}

// delay is what a key remembers between runs. Times are nanoseconds since the Unix epoch, 0 is none.
type delay[V any] struct {
	value      V // of the delayed or parked request
	laterValue V
	err        string
	due        int64
	notBefore  int64
	later      int64 // asked for from outside
	superseded int64 // the due time that the run under way has passed over
	wake       int64 // while in the heap
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
		if it.manual || d.notBefore <= now {
			return now
		}
		sooner(d.notBefore)
	}
	if d.due != 0 {
		sooner(max(d.due, d.notBefore))
	}
	if d.later != 0 {
		sooner(max(d.later, d.notBefore))
	}
	return at
}

// reset forgets all but what was asked for from outside.
func (d *delay[V]) reset() {
	*d = delay[V]{later: d.later, laterValue: d.laterValue, slot: d.slot, wake: d.wake}
}

// fail delays the next attempt.
func (d *delay[V]) fail(now int64, o Outcome[V], class Class) {
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
	d.due, d.retry, d.value, d.class = due, true, o.Value, class
	d.superseded, d.early = 0, false
}

// empty says that there is nothing to remember.
func (d *delay[V]) empty() bool {
	return d.attempt == 0 && d.due == 0 && d.later == 0 && !d.parked
}

// list is a first-in-first-out list through the items.
type list[K comparable, V any] struct {
	head, tail *item[K, V]
	n          int
	class      Class
}

func (l *list[K, V]) push(it *item[K, V], c Class) {
	it.ready, it.prev, it.next = l, l.tail, nil
	if l.tail != nil {
		l.tail.next = it
	} else {
		l.head = it
	}
	l.tail, l.class = it, c
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
	it.ready, it.prev, it.next = nil, nil, nil
	l.n--
}

// delays is a heap of the keys with a delay, the earliest first.
type delays[K comparable, V any] []*item[K, V]

func (h delays[K, V]) Len() int           { return len(h) }
func (h delays[K, V]) Less(i, j int) bool { return h[i].d.wake < h[j].d.wake }
func (h delays[K, V]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].d.slot, h[j].d.slot = i+1, j+1
}

// Push is heap.Interface's: use set.
func (h *delays[K, V]) Push(x any) {
	it := x.(*item[K, V])
	*h = append(*h, it)
	it.d.slot = len(*h)
}

// Pop is heap.Interface's: use remove.
func (h *delays[K, V]) Pop() any {
	last := len(*h) - 1
	it := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	it.d.slot, it.d.wake = 0, 0
	return it
}

func (h *delays[K, V]) set(it *item[K, V], wake int64) {
	it.d.wake = wake
	if it.d.slot > 0 {
		heap.Fix(h, it.d.slot-1)
		return
	}
	heap.Push(h, it)
}

func (h *delays[K, V]) remove(it *item[K, V]) { heap.Remove(h, it.d.slot-1) }
