package queue

import (
	"runtime"
	"sync/atomic"
	"time"
)

// crew is what is known of the workers. To wake one costs more than a short run, and many that run at once stand in each
// other's way: while as many as there are processors come back quickly, no other is woken. A worker that came back
// quickly may take long the next time, and nobody can tell: the watchdog looks whether anything is taken.
type crew struct {
	idle     atomic.Int32 // callers of Next that wait
	waking   atomic.Bool  // one of them has been signalled and has not looked yet
	quick    atomic.Int32 // workers whose last run was short
	round    uint32       // goes up when the quick ones turn out not to be
	enough   int32        // how many quick ones are
	watching atomic.Bool  // the watchdog will look
	seen     uint64       // how many keys had been taken when it looked
}

const (
	// quickRun is how long a run may take to be called short, in nanoseconds: about what it costs to wake a worker.
	quickRun = 10_000
	// watchEvery bounds, twice over, how long a key may be ready while workers are idle.
	watchEvery = 250 * time.Microsecond
	// stalled is how few keys taken within watchEvery mean that the quick workers are quick no more.
	stalled = uint64(watchEvery / quickRun / 2)
)

func newCrew() crew { return crew{round: 1, enough: int32(runtime.GOMAXPROCS(0))} } //nolint:gosec // a few hundred at most.

// needed says whether to wake a worker if fewer than enough are quick.
func (c *crew) needed(enough int32) bool {
	return c.idle.Load() > 0 && !c.waking.Load() && c.quick.Load() < enough
}

// returned notes that a worker came back after a run of some nanoseconds, or that it goes to sleep (never).
func (c *crew) returned(counted *uint32, took int64) {
	was, is := *counted == c.round, took != never && took < quickRun
	switch {
	case is && !was:
		c.quick.Add(1)
		*counted = c.round
	case was && !is:
		c.quick.Add(-1)
		*counted = 0
	}
}

// wake signals one worker, if it is of use. That one signals the next when it has looked and there is more, so that a
// burst does not wake workers that will find nothing.
func (q *Queue[K, V]) wake() {
	if !q.crew.needed(q.crew.enough) {
		q.watch()
		return
	}
	q.crew.waking.Store(true)
	q.wakeup.Signal()
}

// watch makes the watchdog look after a while, if somebody is idle.
func (q *Queue[K, V]) watch() {
	c := &q.crew
	if c.idle.Load() == 0 || c.watching.Swap(true) {
		return
	}
	time.AfterFunc(watchEvery, q.look)
}

// look wakes a worker if keys are ready, workers are idle and too few keys have been taken.
func (q *Queue[K, V]) look() {
	q.lock()
	defer q.mu.Unlock()
	c := &q.crew
	c.watching.Store(false)
	slow := q.taken-c.seen < stalled
	c.seen = q.taken
	if q.closed || !q.anyReady() || q.gate > time.Now().UnixNano() && q.ready[urgent].head == nil {
		return
	}
	if slow {
		c.round++
		c.quick.Store(0)
		q.wake()
	}
	q.watch()
}
