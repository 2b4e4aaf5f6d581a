package queue

import "time"

// Run is one key taken out to be worked on.
type Run[K comparable, V any] struct {
	Key   K
	Value V
	Class Class
	// Attempt counts the failures before this run.
	Attempt int
	// RetryPending says that a retry was still to come when something else started this run.
	RetryPending bool
	// Since is when the request began to wait, and Taken when it was taken.
	Since, Taken int64
	// Yield says that the worker should let others run now and then, this time.
	Yield bool

	item  *item[K, V]
	quick uint32 // the crew's round in which its worker was counted as quick
}

// Next blocks until a key is ready, takes it and locks it until Release. It returns false once the queue is closed,
// whatever is ready then.
func (q *Queue[K, V]) Next() (Run[K, V], bool) {
	var run Run[K, V]
	q.lock()
	ok := q.next(&run, 0)
	q.mu.Unlock()
	return run, ok
}

// FinishNext is Finish, Release and Next in one, where nothing has to be done in between. Now is the present time; if
// it did not have to wait, that is when the next key was taken.
func (q *Queue[K, V]) FinishNext(run *Run[K, V], o *Outcome[V], now int64) bool {
	q.lock()
	q.crew.returned(&run.quick, now-run.Taken)
	it := run.item
	q.finish(it, run.Class, o, now)
	q.release(it, now)
	ok := q.next(run, now)
	q.mu.Unlock()
	return ok
}

// next fills run. Now is the present time, 0 if it is not known.
func (q *Queue[K, V]) next(run *Run[K, V], now int64) bool {
	q.started = true
	for !q.closed {
		if now == 0 {
			now = time.Now().UnixNano()
		}
		if it := q.pop(now); it != nil {
			if q.anyReady() {
				q.wake()
			}
			q.take(run, it, now)
			return true
		}
		q.crew.returned(&run.quick, never)
		q.crew.idle.Add(1)
		if q.inbox.n.Load() == 0 {
			q.wakeup.Wait()
			now = 0
		}
		q.crew.idle.Add(-1)
		q.crew.waking.Store(false)
		if q.inbox.n.Load() > 0 {
			q.takeIn()
		}
	}
	*run = Run[K, V]{}
	return false
}

func (q *Queue[K, V]) anyReady() bool {
	return q.ready[Live].head != nil || q.ready[Dependency].head != nil || q.ready[List].head != nil || q.ready[urgent].head != nil
}

// pop removes the first key of the class whose turn it is, if the limit lets it.
func (q *Queue[K, V]) pop(now int64) *item[K, V] {
	if it := q.ready[urgent].head; it != nil {
		q.ready[urgent].remove(it)
		return it
	}
	if q.cfg.Limit != nil && !q.permitted(now) {
		return nil
	}
	for range 2 {
		for c := range Classes {
			if it := q.ready[c].head; it != nil && q.credit[c] > 0 {
				q.credit[c]--
				q.ready[c].remove(it)
				return it
			}
		}
		q.credit = shares
	}
	return nil
}

// permitted says whether the permission for the key that is about to be taken is good already. One that is not is kept
// until it is.
func (q *Queue[K, V]) permitted(now int64) bool {
	if !q.anyReady() {
		return false
	}
	if q.gate == 0 {
		q.gate = q.cfg.Limit(now)
	}
	if q.gate > now {
		q.arm(now)
		return false
	}
	q.gate = 0
	return true
}

// Workers whose runs are short would keep those who add from the processors until everything is done, and do one by one
// what would have merged. So they step aside every yieldEvery runs: while adding merges, or for as long as fewer keys
// than ahead are there, so that what would merge gets the chance to.
const (
	yieldEvery = 64
	ahead      = 1 << 17
)

func (q *Queue[K, V]) take(run *Run[K, V], it *item[K, V], now int64) {
	if next := q.ready[it.class].head; next != nil {
		q.warm += q.items.touch(next.hash) // it will be looked for when it ends
	}
	now = max(now, it.since) // the caller may have looked at the clock before the timer did
	q.taken++
	*run = Run[K, V]{
		Key: it.key, Value: it.value, Class: it.class, Since: it.since, Taken: now, item: it, quick: run.quick,
		Yield: q.taken%yieldEvery == 0 && (q.merging || q.items.n < ahead),
	}
	had := it.waiting
	var none V
	it.value, it.waiting, it.manual, it.deletion, it.running = none, false, false, false, true
	q.running++
	d := it.d
	if d == nil {
		return
	}
	if d.parked {
		q.revive(it)
	}
	run.Attempt = d.attempt
	d.superseded, d.early, d.quiet = 0, false, 0
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
			// What has waited longer comes first: the newest is what this run is for.
			var all V
			q.cfg.Join(&all, d.value)
			if had {
				q.cfg.Join(&all, run.Value)
			}
			run.Value = all
		}
	}
	if d.later != 0 && d.later <= now {
		q.cfg.Join(&run.Value, d.laterValue)
		d.laterTaken = true
	}
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
	// Err is kept with a key that failed.
	Err string
}

// Finish records how the run of key ended and returns the state that a restart would have to know. The key stays
// locked until Release, so that the caller can write the state down in between.
func (q *Queue[K, V]) Finish(run Run[K, V], o Outcome[V]) State[K, V] {
	now := time.Now().UnixNano()
	q.lock()
	defer q.mu.Unlock()
	q.finish(run.item, run.Class, &o, now)
	return q.state(run.item)
}

func (q *Queue[K, V]) finish(it *item[K, V], class Class, o *Outcome[V], now int64) {
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
		it.delay().fail(now, o, class)
	case Park:
		d := it.delay()
		attempt := d.attempt + 1
		d.reset()
		d.attempt, d.parked, d.err, d.value = attempt, true, o.Err, o.Value
		q.parked++
	case Interrupt:
		if it.waiting {
			q.cfg.Join(&it.value, o.Value)
			it.class = min(it.class, class)
		} else {
			it.waiting, it.value, it.class = true, o.Value, class
		}
	}
	if it.waiting && it.d != nil && it.d.parked {
		q.revive(it) // a change during a run is owed one more run, whatever this one came to
	}
}

// Hold locks a key that does not run, so that its state can be written down. It returns false if the key runs, and
// what is to be written then is what Finish will return, or if there is nothing to know of it.
func (q *Queue[K, V]) Hold(key K) (State[K, V], bool) {
	q.lock()
	defer q.mu.Unlock()
	it := q.find(key)
	if it == nil || it.running {
		return State[K, V]{}, false
	}
	q.unlist(it)
	if it.d != nil && it.d.slot > 0 {
		q.delayed.remove(it)
	}
	it.running = true
	q.running++
	return q.state(it), true
}

// Amend changes what a key that Hold or Finish has locked carries for a later time.
func (q *Queue[K, V]) Amend(key K, change func(later *V)) {
	q.lock()
	defer q.mu.Unlock()
	if it := q.find(key); it != nil && it.d != nil {
		change(&it.d.laterValue)
	}
}

// Release unlocks a key that Finish or Hold has locked.
func (q *Queue[K, V]) Release(key K) {
	q.lock()
	defer q.mu.Unlock()
	q.release(q.find(key), time.Now().UnixNano())
}

func (q *Queue[K, V]) release(it *item[K, V], now int64) {
	it.running = false
	q.running--
	q.place(it, now)
}

// Restore puts back what an earlier process wrote down. A due time in the past is due now.
func (q *Queue[K, V]) Restore(s State[K, V]) {
	q.lock()
	defer q.mu.Unlock()
	if q.closed || s.Empty() {
		return
	}
	it := q.obtain(&s.Key, q.cfg.Hash(s.Key), s.Class)
	d := it.delay()
	d.attempt, d.due, d.notBefore, d.retry, d.class = s.Attempt, s.Due, s.NotBefore, s.Retry, s.Class
	d.value, d.later, d.laterValue, d.err = s.Value, s.Later, s.LaterValue, s.Err
	if s.Parked && !d.parked {
		d.parked = true
		q.parked++
	}
	if it.waiting && !it.running {
		// Added before what was known of the key: judge it now.
		q.unlist(it)
		if q.absorbs(d, it.value, Options{Class: it.class, Manual: it.manual}) {
			var none V
			it.waiting, it.value = false, none
		} else if d.parked {
			q.revive(it)
		}
	}
	q.place(it, time.Now().UnixNano())
}
