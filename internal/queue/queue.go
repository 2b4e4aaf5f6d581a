package queue

import (
	"sync"
	"time"
)

// Class is the urgency of a request.
type Class uint8

// The classes, the most urgent first.
const (
	Live Class = iota
	Dependency
	List
	Classes // how many there are
)

// shares is how many keys of each class are taken before a less urgent one gets its turn.
var shares = [Classes]int{16, 4, 1}

// Config is what a queue must know of the values it carries.
type Config[V any] struct {
	// Join adds what from carries to a request that already waits.
	Join func(into *V, from V)
	// Revives says whether an added request brings a parked key back. Nil means that every one does.
	Revives func(parked, added V) bool
	// Unchanged says whether a listed key is as it was when the request that is kept for it was made. Nil means never.
	// Before the first Next, a list does not disturb such a key: its time comes as if there had been no restart.
	Unchanged func(kept, listed V) bool
}

// Queue holds the requests of one controller. Its methods are safe for concurrent use.
type Queue[K comparable, V any] struct {
	cfg Config[V]

	mu      sync.Mutex
	wakeup  sync.Cond
	idle    int // callers of Next that wait
	items   map[K]*item[K, V]
	ready   [Classes]list[K, V]
	credit  [Classes]int
	delayed delays[K, V]
	timer   *time.Timer
	armed   int64 // when the timer fires; 0: not armed
	running int
	parked  int
	started bool // Next was called: what is listed from now on is not a restart's list
	closed  bool
}

// New returns an empty queue.
func New[K comparable, V any](cfg Config[V]) *Queue[K, V] {
	q := &Queue[K, V]{cfg: cfg, items: make(map[K]*item[K, V]), credit: shares}
	q.wakeup.L = &q.mu
	return q
}

// Options say how a request is added.
type Options struct {
	Class Class
	// Manual passes notBefore and revives a parked key.
	Manual bool
	// Later is a time, in nanoseconds since the Unix epoch, before which the request asks nothing. 0 means now.
	Later int64
}

// Added says what became of a request.
type Added uint8

// What becomes of a request.
const (
	Queued   Added = iota // the key waits because of it
	Joined                // the key waited already
	Delayed               // it is kept for its later time
	Absorbed              // the key is parked and stays so
)

// Add asks for a run of key that starts after this call.
func (q *Queue[K, V]) Add(key K, value V, opts Options) Added {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return Queued
	}
	it := q.items[key]
	if it == nil {
		it = &item[K, V]{key: key, class: opts.Class}
		q.items[key] = it
	}
	now := time.Now().UnixNano()
	if opts.Later > now {
		q.addLater(it, value, opts.Later, now)
		return Delayed
	}
	if d := it.d; d != nil {
		if q.absorbs(d, value, opts) {
			return Absorbed
		}
		if d.parked {
			q.revive(it)
		}
	}
	it.manual = it.manual || opts.Manual
	if it.waiting {
		q.cfg.Join(&it.value, value)
		if opts.Class < it.class {
			q.promote(it, opts.Class)
		}
		if opts.Manual {
			q.place(it, now)
		}
		return Joined
	}
	it.waiting, it.value, it.class = true, value, opts.Class
	if it.ready != nil {
		// Ready already, because a delay fell due: it keeps its turn.
		it.class = it.ready.class
		if opts.Class < it.class {
			q.promote(it, opts.Class)
		}
		return Joined
	}
	q.place(it, now)
	return Queued
}

// absorbs says whether a key stays as it is, parked or delayed, whatever was added.
func (q *Queue[K, V]) absorbs(d *delay[V], value V, opts Options) bool {
	switch {
	case opts.Manual:
		return false
	case d.parked:
		return q.cfg.Revives != nil && !q.cfg.Revives(d.value, value)
	default:
		return !q.started && opts.Class == List && d.due != 0 && q.cfg.Unchanged != nil && q.cfg.Unchanged(d.value, value)
	}
}

// addLater keeps the earliest of the times asked for from outside.
func (q *Queue[K, V]) addLater(it *item[K, V], value V, at, now int64) {
	d := it.delay()
	if d.later == 0 {
		d.laterValue = value
	} else {
		q.cfg.Join(&d.laterValue, value)
	}
	if d.later == 0 || d.laterTaken || at < d.later {
		d.later, d.laterTaken = at, false
	}
	q.place(it, now)
}

// Run is one key taken out to be worked on.
type Run[K comparable, V any] struct {
	Key   K
	Value V
	Class Class
	// Attempt counts the failures before this run.
	Attempt int
	// RetryPending says that a retry was still to come when something else started this run.
	RetryPending bool
	// Since is when the request began to wait, in nanoseconds since the Unix epoch.
	Since int64
}

// Next blocks until a key is ready, takes it and locks it until Release. It returns false once the queue is closed,
// whatever is ready then.
func (q *Queue[K, V]) Next() (Run[K, V], bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.started = true
	for {
		if q.closed {
			return Run[K, V]{}, false
		}
		if it := q.pop(); it != nil {
			return q.take(it), true
		}
		q.idle++
		q.wakeup.Wait()
		q.idle--
	}
}

// pop removes the first key of the class whose turn it is.
func (q *Queue[K, V]) pop() *item[K, V] {
	for range 2 {
		for c := range Classes {
			if q.ready[c].head != nil && q.credit[c] > 0 {
				q.credit[c]--
				it := q.ready[c].head
				q.ready[c].remove(it)
				return it
			}
		}
		q.credit = shares
	}
	return nil
}

func (q *Queue[K, V]) take(it *item[K, V]) Run[K, V] {
	run := Run[K, V]{Key: it.key, Value: it.value, Class: it.class, Since: it.since}
	had := it.waiting
	var none V
	it.value, it.waiting, it.manual, it.running = none, false, false, true
	q.running++
	d := it.d
	if d == nil {
		return run
	}
	now := time.Now().UnixNano()
	join := func(v V) {
		if had {
			q.cfg.Join(&run.Value, v)
		} else {
			run.Value, had = v, true
		}
	}
	run.Attempt = d.attempt
	d.superseded, d.early = 0, false
	if d.due != 0 {
		fired := d.due <= now
		run.RetryPending = d.retry && !fired
		if !fired {
			d.superseded, d.early = d.due, d.retry
		}
		// A retry's causes were never dealt with, so whatever run comes first deals with them; a requeue that is
		// superseded is no reason for this run. What is taken stays in place until Finish, so that State tells the
		// truth to whoever writes it down meanwhile.
		if fired || d.retry {
			join(d.value)
		}
	}
	if d.later != 0 && d.later <= now {
		join(d.laterValue)
		d.laterTaken = true
	}
	return run
}

// Verdict is how a run ended.
type Verdict uint8

// The verdicts.
const (
	Done      Verdict = iota // all well: attempts start afresh
	Requeue                  // again after a while, not a failure: attempts start afresh
	Defer                    // again after a while: attempts are kept
	Retry                    // failed: again after a while, one attempt more
	Park                     // failed for good
	Interrupt                // never finished: as if it had not been taken
)

// Outcome tells the queue how a run ended.
type Outcome[V any] struct {
	Verdict Verdict
	// After is the soft delay of Requeue, Defer and Retry.
	After time.Duration
	// NotBefore is the hard delay of Retry.
	NotBefore time.Duration
	// Value is carried by the delayed or the parked request; for Interrupt, what the run had taken.
	Value V
	// Err is kept with a parked key.
	Err string
}

// Finish records how the run of key ended and returns the state that a restart would have to know. The key stays
// locked until Release, so that the caller can write the state down in between.
func (q *Queue[K, V]) Finish(run Run[K, V], o Outcome[V]) State[K, V] {
	q.mu.Lock()
	defer q.mu.Unlock()
	it := q.items[run.Key]
	now := time.Now().UnixNano()
	if it.d != nil && it.d.laterTaken {
		it.d.laterTaken = false
		if o.Verdict != Interrupt {
			var none V
			it.d.later, it.d.laterValue = 0, none
		}
	}
	switch o.Verdict {
	case Done:
		if it.d != nil {
			it.d.reset()
		}
	case Requeue, Defer:
		d := it.delay()
		kept := d.attempt
		d.reset()
		if o.Verdict == Defer {
			d.attempt = kept
		}
		d.due, d.value, d.class = now+max(int64(o.After), 0), o.Value, Live
	case Retry:
		it.delay().fail(now, o, run.Class)
	case Park:
		d := it.delay()
		attempt := d.attempt + 1
		d.reset()
		d.attempt, d.parked, d.err, d.value = attempt, true, o.Err, o.Value
		q.parked++
	case Interrupt:
		if it.waiting {
			q.cfg.Join(&it.value, o.Value)
			it.class = min(it.class, run.Class)
		} else {
			it.waiting, it.value, it.class = true, o.Value, run.Class
		}
	}
	if it.waiting && it.d != nil && it.d.parked {
		q.revive(it) // a change during a run is owed one more run, whatever this one came to
	}
	return it.state()
}

// Hold locks a key that does not run, so that its state can be written down. It returns false if the key runs, and
// what is to be written then is what Finish will return, or if there is nothing to know of it.
func (q *Queue[K, V]) Hold(key K) (State[K, V], bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	it := q.items[key]
	if it == nil || it.running {
		return State[K, V]{}, false
	}
	if it.ready != nil {
		it.ready.remove(it)
	}
	if it.d != nil && it.d.slot > 0 {
		q.delayed.remove(it)
	}
	it.running = true
	q.running++
	return it.state(), true
}

// Release unlocks a key that Finish or Hold has locked.
func (q *Queue[K, V]) Release(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	it := q.items[key]
	it.running = false
	q.running--
	q.place(it, time.Now().UnixNano())
}

// Restore puts back what an earlier process wrote down. A due time in the past is due now.
func (q *Queue[K, V]) Restore(s State[K, V]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || s.Empty() {
		return
	}
	it := q.items[s.Key]
	if it == nil {
		it = &item[K, V]{key: s.Key, class: s.Class}
		q.items[s.Key] = it
	}
	d := it.delay()
	d.attempt, d.due, d.notBefore, d.retry, d.class = s.Attempt, s.Due, s.NotBefore, s.Retry, s.Class
	d.value, d.later, d.laterValue, d.err = s.Value, s.Later, s.LaterValue, s.Err
	if s.Parked && !d.parked {
		d.parked = true
		q.parked++
	}
	if it.waiting && !it.running {
		// Added before what was known of the key: judge it now.
		if it.ready != nil {
			it.ready.remove(it)
		}
		if q.absorbs(d, it.value, Options{Class: it.class, Manual: it.manual}) {
			var none V
			it.waiting, it.value = false, none
		} else if d.parked {
			q.revive(it)
		}
	}
	if !it.running {
		q.place(it, time.Now().UnixNano())
	}
}

// Close makes every present and future Next return false and every Add do nothing. Finish and Release still work.
func (q *Queue[K, V]) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.wakeup.Broadcast()
}

func (q *Queue[K, V]) revive(it *item[K, V]) {
	later, value := it.d.later, it.d.laterValue
	it.d.reset()
	it.d.later, it.d.laterValue = later, value
	q.parked--
}

// promote moves a waiting key to a more urgent class.
func (q *Queue[K, V]) promote(it *item[K, V], c Class) {
	if it.ready != nil {
		it.ready.remove(it)
		q.ready[c].push(it, c)
	}
	it.class = c
}

// place puts a key that does not run where it belongs: ready, delayed, parked or gone.
func (q *Queue[K, V]) place(it *item[K, V], now int64) {
	if it.running || it.ready != nil {
		return
	}
	wake := it.wake(now)
	if wake != 0 && wake <= now {
		if it.d != nil && it.d.slot > 0 {
			q.delayed.remove(it)
		}
		q.makeReady(it, now)
		return
	}
	if wake != 0 {
		q.delayed.set(it, wake)
		q.arm(now)
		return
	}
	if it.d == nil || it.d.empty() {
		delete(q.items, it.key)
	}
}

func (q *Queue[K, V]) makeReady(it *item[K, V], now int64) {
	c := it.class
	if d := it.d; d != nil {
		if d.parked {
			q.revive(it)
		}
		switch due := d.due != 0 && d.due <= now; {
		case due && it.waiting:
			c = min(c, d.class)
		case due:
			c = d.class
		case !it.waiting:
			c = Live // asked for from outside, for this time
		}
	}
	it.class, it.since = c, now
	q.ready[c].push(it, c)
	if q.idle > 0 {
		q.wakeup.Signal()
	}
}

// arm makes the timer fire when the earliest delay ends.
func (q *Queue[K, V]) arm(now int64) {
	if q.closed || len(q.delayed) == 0 {
		return
	}
	first := q.delayed[0].d.wake
	if q.armed != 0 && q.armed <= first {
		return
	}
	q.armed = first
	wait := time.Duration(first - now)
	if q.timer == nil {
		q.timer = time.AfterFunc(wait, q.fire)
		return
	}
	q.timer.Reset(wait)
}

// fire makes ready what is due.
func (q *Queue[K, V]) fire() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.armed = 0
	now := time.Now().UnixNano()
	for len(q.delayed) > 0 && q.delayed[0].d.wake <= now {
		it := q.delayed[0]
		q.delayed.remove(it)
		q.place(it, now)
	}
	q.arm(now)
}
