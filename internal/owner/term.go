package owner

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Term is the time in which a partition is this owner's.
type Term struct {
	Partition int
	// Epoch grows from owner to owner.
	Epoch uint64
	// Orphaned says that the owner before died.
	Orphaned bool
}

// term is a partition at work.
type term[K comparable] struct {
	Term

	crashes  map[K]int // how often a process has ended while it ran a key, as far as that is known
	suspects map[K]int // the same for the keys that the owner before may have run when it died
	careful  time.Time // until then every key is suspected: owners die, and the broker does not know of what they ran

	runs   context.Context         // of its runs and what follows from them; nil before the session
	end    context.CancelCauseFunc // of runs
	stop   context.CancelFunc      // of fetching
	closed bool                    // nothing new is begun
	over   bool                    // nothing that happens now reaches the broker
	busy   int                     // runs under way
	idle   chan struct{}           // closed when a closed term is no longer busy
}

// suspect notes that the owner before may have run a key when it died.
func (t *term[K]) suspect(key K) {
	if t.suspects == nil {
		t.suspects = make(map[K]int)
	}
	t.suspects[key] = t.crashes[key]
}

// DeathsTell is how soon after an owner's death another one's tells that they run a key that ends them. For as long every run is noted
// before it begins: when the process has ended, the message of its key may have been replaced, and a key that was only listed had none.
const DeathsTell = 10 * time.Minute

// carefulAfter is how many owners have to die before that: noting costs every run two writes.
const carefulAfter = 2

// Acquire begins a term: it takes up what the broker keeps of a partition. The partition must not be owned.
func (o *Owner[K, V]) Acquire(ctx context.Context, begun Term) error {
	states, err := o.broker.Load(ctx, begun)
	if err != nil {
		return err
	}
	var crashes map[K]int
	var careful time.Time
	if begun.Orphaned {
		if crashes, err = o.broker.Crashes(ctx, begun); err != nil {
			return err
		}
		deaths, err := o.broker.Died(ctx, begun)
		if err != nil {
			return err
		}
		if deaths >= carefulAfter {
			careful = time.Now().Add(DeathsTell)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	t := &term[K]{Term: begun, idle: make(chan struct{}), crashes: crashes, careful: careful}
	now := time.Now().UnixNano()
	for _, s := range states {
		if overdue := s.Due != 0 && s.Due <= now || s.Later != 0 && s.Later <= now; overdue && begun.Orphaned {
			t.suspect(s.Key)
		}
		o.queue.Restore(hold(s))
	}
	o.terms[t.Partition] = t
	if o.session != nil {
		o.begin(t)
	}
	return nil
}

// AcquireAll begins a term of every partition.
func (o *Owner[K, V]) AcquireAll(ctx context.Context, epoch uint64) error {
	errs := make([]error, o.cfg.Partitions)
	var group sync.WaitGroup
	for p := range o.cfg.Partitions {
		group.Go(func() { errs[p] = o.Acquire(ctx, Term{Partition: p, Epoch: epoch}) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// begin starts to fetch the messages of a partition. The owner is locked.
func (o *Owner[K, V]) begin(t *term[K]) {
	t.runs, t.end = context.WithCancelCause(o.session.work)
	fetching, stop := context.WithCancel(o.session.intake) //nolint:gosec // the end of the term calls it.
	t.stop = stop
	if o.session.ended {
		return
	}
	for c := range queue.Classes {
		o.session.group.Go(func() { o.fetch(fetching, t, c) })
	}
}

// Revoke ends the term of a partition at once: its runs are cancelled with cause, and what comes of them reaches nobody.
func (o *Owner[K, V]) Revoke(partition int, cause error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.terms[partition]; t != nil {
		o.over(t, cause)
	}
}

// over ends a term. The owner is locked.
func (o *Owner[K, V]) over(t *term[K], cause error) {
	t.closed, t.over = true, true
	o.terms[t.Partition] = nil
	o.drop(t, func(K, held[K, V]) {})
	if t.end != nil {
		t.stop()
		t.end(cause)
	}
}

// drop forgets what waits in a partition. The broker delivers it again, to whoever owns the partition then.
func (o *Owner[K, V]) drop(t *term[K], dropped func(K, held[K, V])) {
	o.queue.Forget(func(key K) bool { return o.cfg.Partition(key) == t.Partition }, t.over, dropped)
	for id, m := range o.inHand {
		if o.cfg.Partition(m.Key) == t.Partition && (t.over || !m.running) {
			delete(o.inHand, id)
		}
	}
}

// handsAtOnce is how many requests are handed to the broker at once: a partition that has just been listed has many.
const handsAtOnce = 64

// settleWait is how long a handover waits for acks: a run is repeated rather than nobody working.
const settleWait = 2 * time.Second

// Surrender ends the term of a partition in good order: nothing new is begun, what runs ends, and the broker knows all.
// When ctx ends first, the runs are cancelled with cause.
func (o *Owner[K, V]) Surrender(ctx context.Context, partition int, cause error) {
	o.mu.Lock()
	t := o.terms[partition]
	if t == nil || t.closed {
		o.mu.Unlock()
		return
	}
	type request struct {
		key   K
		value V
	}
	var unknown []request // to the broker
	t.closed = true
	o.drop(t, func(key K, h held[K, V]) {
		if len(h.messages) == 0 {
			unknown = append(unknown, request{key, h.value})
		}
	})
	if t.stop != nil {
		t.stop()
	}
	if t.busy == 0 {
		close(t.idle)
	}
	o.mu.Unlock()
	var handing sync.WaitGroup
	room := make(chan struct{}, handsAtOnce)
	for _, r := range unknown {
		room <- struct{}{}
		handing.Go(func() {
			o.until(ctx, func() error { return o.broker.Hand(ctx, r.key, r.value) })
			<-room
		})
	}
	handing.Wait()
	select {
	case <-t.idle:
		// What is not gone by the time that the next owner begins is run again.
		settling, cancel := context.WithTimeout(ctx, settleWait)
		defer cancel()
		if err := o.broker.Settle(settling, t.Term); err != nil && ctx.Err() == nil {
			o.cfg.Failed(err)
		}
	case <-ctx.Done():
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !t.over {
		o.over(t, cause)
	}
}

// Owned returns the partitions that are this owner's.
func (o *Owner[K, V]) Owned() []Term {
	o.mu.Lock()
	defer o.mu.Unlock()
	var owned []Term
	for _, t := range o.terms {
		if t != nil {
			owned = append(owned, t.Term)
		}
	}
	return owned
}
