package engine

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/internal/queue"
)

// MemoryBus is a Bus within one process: ordered, deterministic, and forgotten when the process ends. It is the
// default, and what tests run on. Create it with NewMemoryBus.
type MemoryBus struct {
	topics topics
	store  kv.Memory

	mu     sync.Mutex
	states map[string][]queue.State[Key, Causes] // what the closed queues knew
}

var _ Bus = (*MemoryBus)(nil)

// NewMemoryBus returns an empty bus.
func NewMemoryBus() *MemoryBus { return &MemoryBus{} }

// Publisher implements Bus.
func (b *MemoryBus) Publisher() message.Publisher { return &b.topics }

// Subscriber implements Bus.
func (b *MemoryBus) Subscriber(group string) message.Subscriber {
	return &memorySubscriber{topics: &b.topics, group: group, done: make(chan struct{})}
}

// Store implements Bus.
func (b *MemoryBus) Store() kv.Store { return &b.store }

// Queue implements Bus. It knows the delays, attempts and parked keys that were left when the queue of this name last
// ended; what only waited is forgotten.
func (b *MemoryBus) Queue(_ context.Context, cfg QueueConfig) (Queue, error) {
	m := &memoryQueue{bus: b, cfg: cfg, q: queue.New[Key](cfg.Rules())}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.states[m.name()] {
		m.q.Restore(s)
	}
	delete(b.states, m.name())
	return m, nil
}

type memoryQueue struct {
	bus *MemoryBus
	cfg QueueConfig
	q   *queue.Queue[Key, Causes]
}

func (m *memoryQueue) name() string { return m.cfg.Engine + "/" + m.cfg.Controller }

// Enqueue implements Queue. It never blocks.
func (m *memoryQueue) Enqueue(_ context.Context, req Request) error {
	m.q.Put(req.Key, req.Causes, req.Options())
	return nil
}

// Run implements Queue.
func (m *memoryQueue) Run(intake, work context.Context, newProcess func() Process) error {
	defer context.AfterFunc(intake, m.q.Close)()
	var workers sync.WaitGroup
	for range m.cfg.Workers {
		workers.Go(func() {
			process := newProcess()
			var last Outcome
			run, ok := m.q.Next()
			for ok {
				if run.Yield {
					runtime.Gosched()
				}
				req := RequestOf(m.cfg.Controller, &run)
				if !run.Yield && run.Taken == last.ended.UnixNano() {
					req.taken = last.ended
				}
				if last = process(work, req); last.ended.IsZero() {
					last.ended = time.Now()
				}
				out := AfterRun(&req, last)
				ok = m.q.FinishNext(&run, &out, last.ended.UnixNano())
			}
		})
	}
	workers.Wait()
	var left []queue.State[Key, Causes]
	for _, it := range m.q.Items() {
		if !it.Empty() {
			left = append(left, it.State)
		}
	}
	m.bus.mu.Lock()
	defer m.bus.mu.Unlock()
	if m.bus.states == nil {
		m.bus.states = make(map[string][]queue.State[Key, Causes])
	}
	m.bus.states[m.name()] = left
	return nil
}

// Items implements Queue.
func (m *memoryQueue) Items() []Item { return m.q.Items() }

// Item implements Queue.
func (m *memoryQueue) Item(key Key) (Item, bool) { return m.q.Item(key) }

// Pause implements Queue.
func (m *memoryQueue) Pause(key *Key, p *queue.Pause) { m.q.Pause(key, p) }

// Drop implements Queue.
func (m *memoryQueue) Drop(_ context.Context, key Key) error {
	m.q.Drop(key)
	return nil
}

// Stats implements Queue.
func (m *memoryQueue) Stats() queue.Stats { return m.q.Stats() }

// Options says how a queue adds r. It is for the buses of this module, as RequestOf is.
func (r *Request) Options() queue.Options {
	o := queue.Options{Class: queue.Class(r.Priority), Manual: r.Manual, Deletion: r.Deletion, Now: r.now, Quiet: r.quiet}
	if !r.Due.IsZero() {
		o.Later = r.Due.UnixNano()
	}
	return o
}

// RequestOf returns what a queue took out, as handlers see it.
func RequestOf(controller string, run *queue.Run[Key, Causes]) Request {
	return Request{
		Controller: controller, Key: run.Key, Causes: run.Value, Attempt: run.Attempt,
		Priority: Priority(run.Class), RetryPending: run.RetryPending, Waited: time.Duration(run.Taken - run.Since),
	}
}
