package queue

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
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

// Config is what a queue must know of the keys and values it carries. Only Join is required.
type Config[K comparable, V any] struct {
	// Join adds what from carries to a request that already waits. Into is the queue's own, and may be changed in place;
	// joined into a zero V, from must be copied.
	Join func(into *V, from V)
	// Hash spreads keys. Nil is maphash.Comparable's.
	Hash func(key K) uint64
	// Revives says whether an added request brings a parked key back. Nil means that every one does.
	Revives func(parked, added V) bool
	// Unchanged says whether a listed key is as it was when the request that is kept for it was made. Nil means never.
	// Before the first Next, a list does not disturb such a key: its time comes as if there had been no restart.
	Unchanged func(kept, listed V) bool
	// Debounce holds an added request back until none has been added for this long, and no longer than DebounceMax after
	// the first. Zero is off. Neither a retry nor a manual request waits for it.
	Debounce, DebounceMax time.Duration
	// Limit takes a permission to run a key and returns from when on it is good. It is called with the queue locked, and
	// once for each key taken: a permission that is not good yet is kept until it is. Manual requests need none. Nil is no
	// limit.
	Limit func(now int64) int64
}

// Queue holds the requests of one controller. Its methods are safe for concurrent use.
type Queue[K comparable, V any] struct {
	cfg Config[K, V]

	inbox inbox[K, V]
	_     [64]byte // what adders write is on other cache lines than what workers write

	mu      sync.Mutex
	wakeup  sync.Cond
	crew    crew
	behind  atomic.Bool // adders are to step aside
	items   table[K, V]
	ready   [lists]list[K, V]
	credit  [Classes]int
	delayed delays[K, V]
	timer   *time.Timer
	armed   int64 // when the timer fires; 0: not armed
	gate    int64 // from when on the permission that was taken is good; 0: none was
	pauses  pauses[K]
	spare   []add[K, V]
	warm    uint64
	free    *item[K, V] // items to use again
	freed   int
	running int
	parked  int
	taken   uint64
	added   uint32 // of the last mergeWindow requests
	joined  uint32 // of those, the ones whose key waited already
	merging bool   // many did
	started bool   // Next was called: what is listed from now on is not a restart's list
	closed  bool
}

// New returns an empty queue.
func New[K comparable, V any](cfg Config[K, V]) *Queue[K, V] {
	if cfg.Hash == nil {
		seed := maphash.MakeSeed()
		cfg.Hash = func(key K) uint64 { return maphash.Comparable(seed, key) }
	}
	q := &Queue[K, V]{cfg: cfg, credit: shares, crew: newCrew()}
	q.wakeup.L = &q.mu
	return q
}

// Options say how a request is added.
type Options struct {
	Class Class
	// Manual passes notBefore, debounce and limit, and revives a parked key.
	Manual bool
	// Deletion passes a pause, unless the pause says otherwise.
	Deletion bool
	// Later is a time, in nanoseconds since the Unix epoch as all times here, before which the request asks nothing. 0
	// means now.
	Later int64
	// Quiet is a time before which this request is no reason to run; what else there is may be. 0 means now.
	Quiet int64
	// Now is the present time, if the caller happens to know it.
	Now int64
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

// inbox takes what is added faster than the queue's own lock would let it: adders fill it, and whoever holds the lock
// next empties it.
type inbox[K comparable, V any] struct {
	mu   sync.Mutex
	adds []add[K, V]
	n    atomic.Int32
}

type add[K comparable, V any] struct {
	key   K
	value V
	opts  Options
	hash  uint64
}

// The adder itself empties the inbox from inboxSize requests on, if nobody has the queue locked, and from inboxMax on in
// any case.
const (
	inboxSize = 256
	inboxMax  = 1 << 14
)

// Put is Add for callers that do not ask what became of the request.
func (q *Queue[K, V]) Put(key K, value V, opts Options) {
	if opts.Later != 0 || q.cfg.Debounce > 0 {
		q.Add(key, value, opts)
		return
	}
	if opts.Now == 0 {
		opts.Now = time.Now().UnixNano()
	}
	in := &q.inbox
	in.mu.Lock()
	in.adds = append(in.adds, add[K, V]{key: key, value: value, opts: opts})
	n := len(in.adds)
	in.n.Store(int32(n)) //nolint:gosec // a few hundred at most.
	in.mu.Unlock()
	// A worker that has been signalled and has not looked yet will find this request. One that is about to wait looks
	// at the inbox after it has made itself known as idle.
	switch {
	case q.crew.needed(1), n >= inboxMax, n >= inboxSize && q.behind.Load():
		q.lock()
		q.mu.Unlock()
	case n >= inboxSize && q.mu.TryLock():
		q.takeIn()
		q.mu.Unlock()
	default:
		q.watch()
	}
}

// lock locks the queue and takes in what has been put.
func (q *Queue[K, V]) lock() {
	q.mu.Lock()
	if q.inbox.n.Load() > 0 {
		q.takeIn()
	}
}

func (q *Queue[K, V]) takeIn() {
	in := &q.inbox
	in.mu.Lock()
	q.spare, in.adds = in.adds, q.spare[:0]
	in.n.Store(0)
	in.mu.Unlock()
	// Looking at all places of the table first lets the processor wait for memory once, not once for each.
	for i := range q.spare {
		a := &q.spare[i]
		a.hash = q.cfg.Hash(a.key)
		q.warm += q.items.touch(a.hash)
	}
	for i := range q.spare {
		q.add(&q.spare[i])
	}
	clear(q.spare)
}

// Add asks for a run of key that starts after this call.
func (q *Queue[K, V]) Add(key K, value V, opts Options) Added {
	if opts.Now == 0 {
		opts.Now = time.Now().UnixNano()
	}
	q.lock()
	defer q.mu.Unlock()
	return q.add(&add[K, V]{key, value, opts, q.cfg.Hash(key)})
}

func (q *Queue[K, V]) add(a *add[K, V]) Added {
	if q.closed {
		return Queued
	}
	now := a.opts.Now
	it := q.obtain(&a.key, a.hash, a.opts.Class)
	if a.opts.Later > now {
		q.addLater(it, a.value, a.opts.Later, now)
		return Delayed
	}
	if d := it.d; d != nil {
		if q.absorbs(d, a.value, a.opts) {
			return Absorbed
		}
		if d.parked {
			q.revive(it)
		}
	}
	first := !it.waiting
	q.count(first)
	q.holdBack(it, a.opts, first)
	manual := a.opts.Manual && !it.manual
	it.manual, it.deletion = it.manual || a.opts.Manual, it.deletion || a.opts.Deletion
	if !first {
		q.cfg.Join(&it.value, a.value)
		if a.opts.Class < it.class {
			q.promote(it, a.opts.Class)
		}
		if manual {
			q.unlist(it) // manual requests have a list of their own
		}
		q.place(it, now)
		return Joined
	}
	it.waiting, it.value = true, a.value
	if it.in != nowhere {
		// Ready already, because a delay fell due: it keeps its turn.
		if a.opts.Class < it.class {
			q.promote(it, a.opts.Class)
		}
		if manual {
			q.unlist(it)
			q.place(it, now)
		}
		return Joined
	}
	it.class = a.opts.Class
	q.place(it, now)
	return Queued
}

// mergeWindow is after how many requests it is looked at again whether they merge.
const mergeWindow = 1024

func (q *Queue[K, V]) count(first bool) {
	if !first {
		q.joined++
	}
	if q.added++; q.added == mergeWindow {
		q.merging = q.joined > mergeWindow/4
		q.added, q.joined = 0, 0
		q.behind.Store(!q.merging && q.items.n > ahead)
	}
}

// holdBack sets the time before which the request that waits is no reason to run. What is ready stays ready.
func (q *Queue[K, V]) holdBack(it *item[K, V], o Options, first bool) {
	if o.Manual || it.in != nowhere || q.cfg.Debounce <= 0 && o.Quiet == 0 && (it.d == nil || it.d.quiet == 0) {
		return
	}
	d := it.delay()
	switch {
	case o.Quiet != 0:
		if first || d.quiet != 0 {
			d.quiet = max(d.quiet, o.Quiet)
		}
	case q.cfg.Debounce <= 0:
		d.quiet = 0 // a reason of another sort: nothing to wait for
	case !first && d.quiet == 0: // it waits for another reason, and not for this
	default:
		if first {
			d.quietMax = o.Now + int64(q.cfg.DebounceMax)
		}
		d.quiet = o.Now + int64(q.cfg.Debounce)
		if q.cfg.DebounceMax > 0 {
			d.quiet = min(d.quiet, d.quietMax)
		}
	}
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

// Close makes every present and future Next return false and every Add do nothing. Finish and Release still work.
func (q *Queue[K, V]) Close() {
	q.lock()
	defer q.mu.Unlock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.wakeup.Broadcast()
}

func (q *Queue[K, V]) revive(it *item[K, V]) {
	it.d.reset()
	q.parked--
}

// promote moves a waiting key to a more urgent class.
func (q *Queue[K, V]) promote(it *item[K, V], c Class) {
	if it.in != nowhere && it.in != urgent {
		q.unlist(it)
		q.ready[c].push(it, uint8(c))
	}
	it.class = c
}

func (q *Queue[K, V]) unlist(it *item[K, V]) {
	if it.in != nowhere {
		q.ready[it.in].remove(it)
	}
}

// place puts a key that does not run where it belongs: ready, held, delayed, parked or gone.
func (q *Queue[K, V]) place(it *item[K, V], now int64) {
	if it.running || it.in != nowhere {
		return
	}
	wake := q.wakeOf(it, now)
	if wake != 0 && wake <= now {
		if it.d != nil && it.d.slot > 0 {
			q.delayed.remove(it)
		}
		q.makeReady(it, now)
		return
	}
	if wake != 0 && wake != never {
		it.delay()
		q.delayed.set(it, wake)
		q.arm(now)
		return
	}
	if it.d != nil && it.d.slot > 0 {
		q.delayed.remove(it)
	}
	if !it.waiting && (it.d == nil || it.d.empty()) {
		q.discard(it)
	}
}

// wakeOf is when the key becomes ready: now or earlier if it is, 0 if nothing is to come, never if it is paused.
func (q *Queue[K, V]) wakeOf(it *item[K, V], now int64) int64 {
	at := it.wake(now)
	if at == 0 || !q.pauses.any() {
		return at
	}
	p, paused := q.pauses.of(it.key)
	switch {
	case !paused, it.waiting && it.deletion && !p.Deletions:
		return at
	case p.Until == 0:
		return never
	default:
		return max(at, p.Until)
	}
}

func (q *Queue[K, V]) makeReady(it *item[K, V], now int64) {
	c := it.class
	if d := it.d; d != nil {
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
	to := uint8(c)
	if it.manual {
		to = urgent
	}
	q.ready[to].push(it, to)
	q.wake()
}

// arm makes the timer fire when the earliest delay ends, or when the limit may be asked again.
func (q *Queue[K, V]) arm(now int64) {
	first := int64(0)
	if q.gate > now {
		first = q.gate
	}
	if len(q.delayed) > 0 && (first == 0 || q.delayed[0].wake < first) {
		first = q.delayed[0].wake
	}
	if q.closed || first == 0 || q.armed != 0 && q.armed <= first {
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
	q.lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.armed = 0
	now := time.Now().UnixNano()
	if q.gate != 0 && q.gate <= now {
		q.wake()
	}
	for len(q.delayed) > 0 && q.delayed[0].wake <= now {
		it := q.delayed[0].item
		q.delayed.remove(it)
		q.place(it, now)
	}
	q.arm(now)
}
