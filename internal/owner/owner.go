package owner

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Broker is what the owner needs of a durable bus. Its methods are safe for concurrent use.
type Broker[K comparable, V any] interface {
	// Load returns the state records of a partition.
	Load(ctx context.Context, partition int) ([]queue.State[K, V], error)
	// Fetch waits for messages of a partition and class and passes them on as they come. It returns nil after a while,
	// whether any came or not. The same message may be delivered again.
	Fetch(ctx context.Context, partition int, class queue.Class, take func(Message[K, V])) error
	// Save stores a key's state record; an empty state removes it.
	Save(ctx context.Context, s queue.State[K, V]) error
}

// Message is a request that the broker keeps until it is acked.
type Message[K comparable, V any] struct {
	// ID is that of the message within the controller, the same at every delivery.
	ID      uint64
	Key     K
	Value   V
	Options queue.Options
	// Ack ends the message. A lost ack leads to another delivery.
	Ack func()
	// Extend tells the broker that the message is still in hand.
	Extend func()
}

// Config describes an owner.
type Config[K comparable, V any] struct {
	Queue      queue.Config[K, V]
	Partitions int
	Workers    int
	// ExtendEvery is how often the broker is told of the messages in hand.
	ExtendEvery time.Duration
	// Failed is told what goes wrong with the broker; the owner tries again.
	Failed func(err error)
}

// Owner drives one controller's queue.
type Owner[K comparable, V any] struct {
	cfg    Config[K, V]
	broker Broker[K, V]
	queue  *queue.Queue[K, held[K, V]]

	mu     sync.Mutex
	inHand map[uint64]*Message[K, V]
}

// held is a value with the messages that asked for it.
type held[K comparable, V any] struct {
	value    V
	messages []*Message[K, V]
}

// New returns an owner that has nothing in hand.
func New[K comparable, V any](broker Broker[K, V], cfg Config[K, V]) *Owner[K, V] {
	o := &Owner[K, V]{cfg: cfg, broker: broker, inHand: make(map[uint64]*Message[K, V])}
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

// Add asks for a run of a request that the broker does not keep, because it can be found again after a crash.
func (o *Owner[K, V]) Add(key K, value V, opts queue.Options) {
	o.queue.Add(key, held[K, V]{value: value}, opts)
}

// Process works on one key and says what came of it.
type Process[K comparable, V any] = func(context.Context, *queue.Run[K, V]) queue.Outcome[V]

// Run takes up what the broker keeps and works on one key after the other until intake ends; then it waits for the runs
// to end. Each worker calls newProcess once.
func (o *Owner[K, V]) Run(intake, work context.Context, newProcess func() Process[K, V]) {
	defer context.AfterFunc(intake, o.queue.Close)()
	var group sync.WaitGroup
	for p := range o.cfg.Partitions {
		for c := range queue.Classes {
			group.Go(func() { o.fetch(intake, p, c) })
		}
	}
	for range o.cfg.Workers {
		group.Go(func() { o.work(work, newProcess()) })
	}
	group.Go(func() { o.extend(intake) })
	group.Wait()
}

// Load takes up the state records. It comes before Add and Run: a list must find out what is parked and what is due.
func (o *Owner[K, V]) Load(ctx context.Context) error {
	errs := make([]error, o.cfg.Partitions)
	var group sync.WaitGroup
	for p := range o.cfg.Partitions {
		group.Go(func() {
			states, err := o.broker.Load(ctx, p)
			for _, s := range states {
				o.queue.Restore(hold(s))
			}
			errs[p] = err
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// fetch takes messages of one partition and class into the queue until ctx ends.
func (o *Owner[K, V]) fetch(ctx context.Context, partition int, class queue.Class) {
	for ctx.Err() == nil {
		err := o.broker.Fetch(ctx, partition, class, func(m Message[K, V]) { o.take(ctx, m) })
		if err != nil && ctx.Err() == nil {
			o.cfg.Failed(err)
			pause(ctx)
		}
	}
}

// take adds a message to the queue, unless it is in hand already.
func (o *Owner[K, V]) take(ctx context.Context, m Message[K, V]) {
	o.mu.Lock()
	_, known := o.inHand[m.ID]
	if !known {
		o.inHand[m.ID] = &m
	}
	o.mu.Unlock()
	if known {
		return
	}
	if m.Options.Later != 0 {
		o.takeLater(ctx, &m)
		return
	}
	if o.queue.Add(m.Key, held[K, V]{m.Value, []*Message[K, V]{&m}}, m.Options) == queue.Absorbed {
		o.ack(&m)
	}
}

// takeLater makes a request for a later time part of its key's record.
func (o *Owner[K, V]) takeLater(ctx context.Context, m *Message[K, V]) {
	if o.queue.Add(m.Key, held[K, V]{m.Value, []*Message[K, V]{m}}, m.Options) != queue.Delayed {
		return // its time has come: it is a request like any other now
	}
	if s, ok := o.queue.Hold(m.Key); ok {
		o.store(ctx, s)
		o.queue.Release(m.Key)
	}
}

func (o *Owner[K, V]) work(ctx context.Context, process Process[K, V]) {
	for ctx.Err() == nil {
		run, ok := o.queue.Next()
		if !ok {
			return
		}
		out := process(ctx, &queue.Run[K, V]{
			Key: run.Key, Value: run.Value.value, Class: run.Class, Attempt: run.Attempt,
			RetryPending: run.RetryPending, Since: run.Since, Taken: run.Taken,
		})
		o.finish(ctx, run, out)
	}
}

// finish stores what follows from a run, acks what caused it and unlocks the key, in this order.
func (o *Owner[K, V]) finish(ctx context.Context, run queue.Run[K, held[K, V]], out queue.Outcome[V]) {
	defer o.queue.Release(run.Key)
	s := o.queue.Finish(run, queue.Outcome[held[K, V]]{
		Verdict: out.Verdict, After: out.After, NotBefore: out.NotBefore, Err: out.Err, Value: held[K, V]{value: out.Value},
	})
	if out.Verdict == queue.Interrupt {
		return // the messages and the old record stay for the next owner
	}
	if o.store(ctx, s) {
		for _, m := range run.Value.messages {
			o.ack(m)
		}
	}
}

// store writes a record until the broker takes it, and acks the messages that live on in it. It gives up when ctx
// ends: then nothing is acked and the run is repeated elsewhere.
func (o *Owner[K, V]) store(ctx context.Context, s queue.State[K, held[K, V]]) bool {
	for {
		err := o.broker.Save(ctx, release(s))
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return false
		}
		o.cfg.Failed(err)
		pause(ctx)
	}
	for _, m := range s.LaterValue.messages {
		o.ack(m)
	}
	return true
}

func (o *Owner[K, V]) ack(m *Message[K, V]) {
	o.mu.Lock()
	_, mine := o.inHand[m.ID]
	delete(o.inHand, m.ID)
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

// pause waits before the broker is tried again.
func pause(ctx context.Context) {
	select {
	case <-time.After(100 * time.Millisecond):
	case <-ctx.Done():
	}
}
