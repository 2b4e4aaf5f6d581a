package owner

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Broker is what the owner needs of a durable bus. Its methods are safe for concurrent use.
type Broker[K comparable, V any] interface {
	// Load returns the state records of a partition, once nothing that a former owner does can reach it any more.
	Load(ctx context.Context, t Term) ([]queue.State[K, V], error)
	// Fetch waits for messages of a partition and class and passes them on as they come. It returns nil after a while,
	// whether any came or not. The same message may be delivered again.
	Fetch(ctx context.Context, t Term, class queue.Class, take func(Message[K, V])) error
	// Save stores a key's state record; an empty state removes it.
	Save(ctx context.Context, s queue.State[K, V]) error
	// Crashes returns how often a process has ended while it ran a key, for the keys of a partition of which that is known.
	Crashes(ctx context.Context, t Term) (map[K]int, error)
	// Died notes that the owner of a partition before this term died, and returns how many have in a row, each within DeathsTell
	// of the one before.
	Died(ctx context.Context, t Term) (deaths int, err error)
	// Suspect stores how often a process has ended while it ran a key. 0 removes it.
	Suspect(ctx context.Context, key K, crashes int) error
	// Settle returns once every ack of a partition so far has had its effect, or when ctx ends.
	Settle(ctx context.Context, t Term) error
	// Hand gives the broker a request that only this owner knew of, for the next owner.
	Hand(ctx context.Context, key K, value V) error
}

// Message is a request that the broker keeps until it is acked.
type Message[K comparable, V any] struct {
	// ID is that of the message within the controller, the same at every delivery.
	ID      uint64
	Key     K
	Value   V
	Options queue.Options
	// Suspect says that an owner who died may have run what was asked for.
	Suspect bool
	// Ack ends the message. A lost ack leads to another delivery.
	Ack func()
	// Extend tells the broker that the message is still in hand.
	Extend func()

	running bool // the run that it asked for is under way
	acked   bool
}

// Run is a key that is to be worked on.
type Run[K comparable, V any] struct {
	queue.Run[K, V]
	// Fence is the epoch of the key's partition.
	Fence uint64
	// Crashes is how often a process has ended while it ran the key.
	Crashes int
}

// Process works on one key and says what came of it.
type Process[K comparable, V any] = func(context.Context, *Run[K, V]) queue.Outcome[V]

// Config describes an owner.
type Config[K comparable, V any] struct {
	Queue      queue.Config[K, V]
	Partitions int
	// Partition is that of a key.
	Partition func(key K) int
	Workers   int
	// Trusted says whether a run may start now. Nil is always.
	Trusted func() bool
	// ExtendEvery is how often the broker is told of the messages in hand.
	ExtendEvery time.Duration
	// Failed is told what goes wrong with the broker; the owner tries again.
	Failed func(err error)
}

// Owner drives one controller's queue. Its methods are safe for concurrent use.
type Owner[K comparable, V any] struct {
	cfg    Config[K, V]
	broker Broker[K, V]
	queue  *queue.Queue[K, held[K, V]]

	trial sync.Mutex // of a key that a process has run when it ended: one at a time

	// mu makes the end of a term one moment: what the queue knows of a partition changes under it.
	mu      sync.Mutex
	terms   []*term[K] // by partition; nil: not ours
	inHand  map[uint64]*Message[K, V]
	session *session
}

// session is the time of Run.
type session struct {
	intake, work context.Context
	group        sync.WaitGroup
	ended        bool
}

// held is a value with the messages that asked for it.
type held[K comparable, V any] struct {
	value    V
	messages []*Message[K, V]
}

// New returns an owner of nothing.
func New[K comparable, V any](broker Broker[K, V], cfg Config[K, V]) *Owner[K, V] {
	o := &Owner[K, V]{cfg: cfg, broker: broker, inHand: make(map[uint64]*Message[K, V]), terms: make([]*term[K], cfg.Partitions)}
	qc := queue.Config[K, held[K, V]]{
		Hash: cfg.Queue.Hash, Debounce: cfg.Queue.Debounce, DebounceMax: cfg.Queue.DebounceMax, Limit: cfg.Queue.Limit,
		Join: func(into *held[K, V], from held[K, V]) {
			cfg.Queue.Join(&into.value, from.value)
			into.messages = append(into.messages, from.messages...)
		},
	}
	if cfg.Queue.Revives != nil {
		qc.Revives = func(parked, added held[K, V]) bool { return cfg.Queue.Revives(parked.value, added.value) }
	}
	if cfg.Queue.Unchanged != nil {
		qc.Unchanged = func(kept, listed held[K, V]) bool { return cfg.Queue.Unchanged(kept.value, listed.value) }
	}
	o.queue = queue.New[K](qc)
	return o
}

// Add asks for a run of a request that the broker does not keep, because it can be found again after a crash. It returns
// false if the key is not this owner's.
func (o *Owner[K, V]) Add(key K, value V, opts queue.Options) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.terms[o.cfg.Partition(key)]; t == nil || t.closed {
		return false
	}
	o.queue.Add(key, held[K, V]{value: value}, opts)
	return true
}

// Run works on one key after the other until intake ends; then it waits for the runs to end. Each worker calls newProcess
// once.
func (o *Owner[K, V]) Run(intake, work context.Context, newProcess func() Process[K, V]) {
	defer context.AfterFunc(intake, o.queue.Close)()
	s := &session{intake: intake, work: work}
	o.mu.Lock()
	o.session = s
	for _, t := range o.terms {
		if t != nil {
			o.begin(t)
		}
	}
	for range o.cfg.Workers {
		s.group.Go(func() { o.work(work, newProcess()) })
	}
	s.group.Go(func() { o.extend(intake) })
	o.mu.Unlock()
	<-intake.Done()
	o.mu.Lock()
	s.ended = true // no term begins to fetch any more
	o.mu.Unlock()
	s.group.Wait()
}

// fetch takes messages of one partition and class into the queue until ctx ends.
func (o *Owner[K, V]) fetch(ctx context.Context, t *term[K], class queue.Class) {
	for ctx.Err() == nil {
		err := o.broker.Fetch(ctx, t.Term, class, func(m Message[K, V]) { o.take(t, m) })
		if err != nil && ctx.Err() == nil {
			o.cfg.Failed(err)
			sleep(ctx, brokerWait)
		}
	}
}

// take adds a message to the queue, unless it is in hand already.
func (o *Owner[K, V]) take(t *term[K], m Message[K, V]) {
	o.mu.Lock()
	if _, known := o.inHand[m.ID]; known || t.closed {
		o.mu.Unlock()
		return
	}
	o.inHand[m.ID] = &m
	if m.Suspect {
		t.suspect(m.Key)
	}
	added := o.queue.Add(m.Key, held[K, V]{m.Value, []*Message[K, V]{&m}}, m.Options)
	o.mu.Unlock()
	switch {
	case m.Options.Later == 0 && added == queue.Absorbed:
		o.ack(&m)
	case m.Options.Later != 0 && added == queue.Delayed: // otherwise its time has come: a request like any other now
		o.takeLater(t, &m)
	}
}

// takeLater makes a request for a later time part of its key's record.
func (o *Owner[K, V]) takeLater(t *term[K], m *Message[K, V]) {
	o.mu.Lock()
	var s queue.State[K, held[K, V]]
	ok := !t.closed
	if ok {
		if s, ok = o.queue.Hold(m.Key); ok {
			t.busy++
		}
	}
	o.mu.Unlock()
	if ok {
		o.store(t, s)
		o.release(t, m.Key)
	}
}

// release unlocks a key after its run.
func (o *Owner[K, V]) release(t *term[K], key K) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue.Release(key)
	if t.busy--; t.busy == 0 && t.closed {
		close(t.idle)
	}
}

func (o *Owner[K, V]) work(ctx context.Context, process Process[K, V]) {
	for ctx.Err() == nil {
		run, ok := o.queue.Next()
		if !ok {
			return
		}
		t := o.start(&run)
		if t == nil {
			continue
		}
		if !o.trusted(t) {
			o.release(t, run.Key)
			continue
		}
		o.run(t, run, process)
		o.release(t, run.Key)
	}
}

// run works on a key, and alone on one that a process has run when it ended: should that happen again, it is known which one
// is to blame.
func (o *Owner[K, V]) run(t *term[K], run queue.Run[K, held[K, V]], process Process[K, V]) {
	o.mu.Lock()
	crashes, suspect := t.suspects[run.Key]
	if !suspect {
		crashes = t.crashes[run.Key]
		suspect = crashes > 0 || !t.careful.IsZero() && time.Now().Before(t.careful)
	}
	o.mu.Unlock()
	if suspect {
		if crashes > 0 {
			if !o.trial.TryLock() {
				sleep(t.runs, trialWait)
				o.finish(t, run, interrupted(run))
				return
			}
			defer o.trial.Unlock()
		}
		if !o.until(t.runs, func() error { return o.broker.Suspect(t.runs, run.Key, crashes+1) }) {
			o.finish(t, run, interrupted(run))
			return
		}
	}
	out := process(t.runs, &Run[K, V]{Fence: t.Epoch, Crashes: crashes, Run: queue.Run[K, V]{
		Key: run.Key, Value: run.Value.value, Class: run.Class, Attempt: run.Attempt,
		RetryPending: run.RetryPending, Since: run.Since, Taken: run.Taken,
	}})
	o.finish(t, run, out)
	if !suspect {
		return
	}
	left := 0
	if out.Verdict == queue.Interrupt {
		left = crashes // this one was none
	}
	if o.until(t.runs, func() error { return o.broker.Suspect(t.runs, run.Key, left) }) && left == 0 {
		o.mu.Lock()
		delete(t.suspects, run.Key)
		delete(t.crashes, run.Key)
		o.mu.Unlock()
	}
}

func interrupted[K comparable, V any](run queue.Run[K, held[K, V]]) queue.Outcome[V] {
	return queue.Outcome[V]{Verdict: queue.Interrupt, Value: run.Value.value}
}

// start returns the term of a run, nil if the key has become somebody else's.
func (o *Owner[K, V]) start(run *queue.Run[K, held[K, V]]) *term[K] {
	o.mu.Lock()
	defer o.mu.Unlock()
	t := o.terms[o.cfg.Partition(run.Key)]
	if t == nil || t.closed {
		o.queue.Abandon(run.Key)
		return nil
	}
	for _, m := range run.Value.messages {
		m.running = true
	}
	t.busy++
	return t
}

// trusted waits, when this replica's right to work is in doubt, until it is beyond doubt. It returns false if the term
// has ended first.
func (o *Owner[K, V]) trusted(t *term[K]) bool {
	for o.cfg.Trusted != nil && !o.cfg.Trusted() {
		if !sleep(t.runs, 10*time.Millisecond) {
			return false
		}
	}
	return t.runs.Err() == nil // what was cancelled and is free again is not begun anew
}

// finish stores what follows from a run and acks what caused it, in this order.
func (o *Owner[K, V]) finish(t *term[K], run queue.Run[K, held[K, V]], out queue.Outcome[V]) {
	o.mu.Lock()
	if t.over {
		o.mu.Unlock()
		return // the next owner repeats it
	}
	value := held[K, V]{value: out.Value}
	if out.Verdict == queue.Interrupt {
		value.messages = run.Value.messages // they are still what asks for it
	}
	s := o.queue.Finish(run, queue.Outcome[held[K, V]]{
		Verdict: out.Verdict, After: out.After, NotBefore: out.NotBefore, Err: out.Err, Value: value,
	})
	o.mu.Unlock()
	if out.Verdict == queue.Interrupt {
		return // the messages and the old record stay for the next owner
	}
	if o.store(t, s) {
		for _, m := range run.Value.messages {
			o.ack(m)
		}
	}
}

// store writes a record until the broker takes it, and acks the messages that live on in it. It gives up when the term
// ends: then nothing is acked and the run is repeated elsewhere.
func (o *Owner[K, V]) store(t *term[K], s queue.State[K, held[K, V]]) bool {
	if !o.until(t.runs, func() error { return o.broker.Save(t.runs, release(s)) }) {
		return false
	}
	if len(s.LaterValue.messages) == 0 {
		return true
	}
	for _, m := range s.LaterValue.messages {
		o.ack(m)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue.Amend(s.Key, func(later *held[K, V]) { // what is done with need not be kept for as long as the key waits
		later.messages = slices.DeleteFunc(later.messages, func(m *Message[K, V]) bool { return m.acked })
		if len(later.messages) == 0 {
			later.messages = nil
		}
	})
	return true
}

// until asks the broker again and again. It returns false if ctx ended first.
func (o *Owner[K, V]) until(ctx context.Context, done func() error) bool {
	for {
		err := done()
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		o.cfg.Failed(err)
		sleep(ctx, brokerWait)
	}
}

func (o *Owner[K, V]) ack(m *Message[K, V]) {
	o.mu.Lock()
	mine := o.inHand[m.ID] == m // and not another delivery of it, to another term
	m.acked = true
	if mine {
		delete(o.inHand, m.ID)
	}
	o.mu.Unlock()
	if mine {
		m.Ack()
	}
}

// extend keeps the broker from delivering again what is in hand.
func (o *Owner[K, V]) extend(ctx context.Context) {
	ticker := time.NewTicker(o.cfg.ExtendEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		o.mu.Lock()
		messages := make([]*Message[K, V], 0, len(o.inHand))
		for _, m := range o.inHand {
			messages = append(messages, m)
		}
		o.mu.Unlock()
		for _, m := range messages {
			m.Extend()
		}
	}
}

// Items returns every key that is not idle.
func (o *Owner[K, V]) Items() []queue.Item[K, V] {
	items := o.queue.Items()
	out := make([]queue.Item[K, V], len(items))
	for i, it := range items {
		out[i] = outside(it)
	}
	return out
}

// Item returns one key, false if it is idle.
func (o *Owner[K, V]) Item(key K) (queue.Item[K, V], bool) {
	it, ok := o.queue.Item(key)
	return outside(it), ok
}

func outside[K comparable, V any](it queue.Item[K, held[K, V]]) queue.Item[K, V] {
	return queue.Item[K, V]{
		State: release(it.State), Phase: it.Phase, Since: it.Since, Wake: it.Wake, Again: it.Again, Waiting: it.Waiting.value,
	}
}

// Pause holds back a key, or with a nil key all of them; a nil pause ends that.
func (o *Owner[K, V]) Pause(key *K, p *queue.Pause) { o.queue.Pause(key, p) }

// Drop forgets what is parked for a key, here and in the broker.
func (o *Owner[K, V]) Drop(ctx context.Context, key K) error {
	if it, ok := o.queue.Item(key); !ok || it.Phase != queue.Parked {
		return nil
	}
	if err := o.broker.Save(ctx, queue.State[K, V]{Key: key}); err != nil {
		return err
	}
	o.queue.Drop(key)
	return nil
}

// Stats counts keys.
func (o *Owner[K, V]) Stats() queue.Stats { return o.queue.Stats() }

// hold and release change what a state carries.
func hold[K comparable, V any](s queue.State[K, V]) queue.State[K, held[K, V]] {
	return recast(s, func(v V) held[K, V] { return held[K, V]{value: v} })
}

func release[K comparable, V any](s queue.State[K, held[K, V]]) queue.State[K, V] {
	return recast(s, func(h held[K, V]) V { return h.value })
}

func recast[K comparable, A, B any](s queue.State[K, A], f func(A) B) queue.State[K, B] {
	return queue.State[K, B]{
		Key: s.Key, Value: f(s.Value), Attempt: s.Attempt, Due: s.Due, NotBefore: s.NotBefore, Retry: s.Retry,
		Class: s.Class, Later: s.Later, LaterValue: f(s.LaterValue), Parked: s.Parked, Err: s.Err,
	}
}

// trialWait is how long a key waits, at most, that may be run once another one was.
const trialWait = 10 * time.Millisecond

// brokerWait is how long a broker that failed is left alone.
const brokerWait = 100 * time.Millisecond
