// Package bus makes an engine.Bus of any Watermill Pub/Sub: Kafka, AMQP, SQL and the rest come in by this door.
//
// Such a Pub/Sub knows neither keys nor delays, so the queue is in this process, the very one of the memory bus, and the
// Pub/Sub only carries requests to it. What it can promise depends on when a message is acked:
//
//   - OnAccept: as soon as its request is in the queue. The promises 1 to 6 and 8 to 10 hold within the process; a crash
//     loses what waited until the next list or resync.
//   - AfterRun: when a reconcile that began after it has ended well. A crash loses nothing: what was not done with is
//     delivered again. While a key is delayed for longer than a second its message is published anew and the old one
//     acked, every second, so that no broker takes it for stuck. Attempts begin anew after a crash.
//
// One replica may use it at a time. Parked keys are told on the topic dead.<engine>.<controller>.
package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Ack is when a message is acked.
type Ack string

// The modes.
const (
	OnAccept Ack = "onAccept"
	AfterRun Ack = "afterRun"
)

// Config describes a bus on a Pub/Sub.
type Config struct {
	Publisher message.Publisher
	// Subscriber returns the subscriber of a group: those of one group share the messages, those of the empty group each
	// get all. A Pub/Sub without groups may return the same for every group; then only one replica may run.
	Subscriber func(group string) message.Subscriber
	// Ack is OnAccept, the default, or AfterRun.
	Ack Ack
	// Store keeps ownership and suspensions. Default: in memory, forgotten when the process ends.
	Store kv.Store
	// Logger is told the mode, once, and what goes wrong. Default: nowhere.
	Logger *slog.Logger
}

// PubSub is an engine.Bus. Create it with FromPubSub.
type PubSub struct {
	cfg   Config
	inner *engine.MemoryBus
	id    string // of this process's messages that keep a place
}

var _ engine.Bus = (*PubSub)(nil)

// FromPubSub returns a bus on a Pub/Sub.
func FromPubSub(cfg Config) (*PubSub, error) {
	if cfg.Ack == "" {
		cfg.Ack = OnAccept
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	inner := engine.NewMemoryBus()
	if cfg.Store == nil {
		cfg.Store = inner.Store()
	}
	var problems []error
	if cfg.Publisher == nil || cfg.Subscriber == nil {
		problems = append(problems, errors.New("bus: Publisher and Subscriber are required"))
	}
	if cfg.Ack != OnAccept && cfg.Ack != AfterRun {
		problems = append(problems, fmt.Errorf("bus: Ack %q is none of %s, %s", string(cfg.Ack), OnAccept, AfterRun))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	cfg.Logger.Info("requests are carried by a Watermill Pub/Sub, for one replica", "ack", string(cfg.Ack))
	return &PubSub{cfg, inner, watermill.NewUUID()}, nil
}

// Publisher implements engine.Bus.
func (b *PubSub) Publisher() message.Publisher { return b.cfg.Publisher }

// Subscriber implements engine.Bus.
func (b *PubSub) Subscriber(group string) message.Subscriber { return b.cfg.Subscriber(group) }

// Store implements engine.Bus.
func (b *PubSub) Store() kv.Store { return b.cfg.Store }

// Queue implements engine.Bus. It returns once the topic is subscribed to.
func (b *PubSub) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	inner, err := b.inner.Queue(ctx, cfg)
	if err != nil {
		return nil, err
	}
	name := cfg.Engine + "." + cfg.Controller
	q := &requests{Queue: inner, bus: b, cfg: cfg, topic: "requests." + name, dead: "dead." + name, held: make(map[engine.Key]*place)}
	// The subscription outlives ctx, which may be that of opening: Run ends it.
	live, end := context.WithCancel(context.WithoutCancel(ctx))
	q.end = end
	q.messages, err = b.cfg.Subscriber(b.groupOf(cfg)).Subscribe(live, q.topic)
	if err != nil {
		end()
		return nil, fmt.Errorf("subscribe to %s: %w", q.topic, err)
	}
	return q, nil
}

func (b *PubSub) groupOf(cfg engine.QueueConfig) string { return cfg.Engine + "." + cfg.Controller }

// requests is the queue of one controller: the memory bus's, fed by a topic.
type requests struct {
	engine.Queue

	bus         *PubSub
	cfg         engine.QueueConfig
	topic, dead string
	messages    <-chan *message.Message
	end         context.CancelFunc

	mu   sync.Mutex
	held map[engine.Key]*place
}

// place is what the Pub/Sub keeps of a key until it is done with: messages that are not acked. Those of a run under way
// are in running, those that came meanwhile in waiting.
type place struct {
	waiting, running []*message.Message
	timer            *time.Timer // renews waiting, which a delay has to outlast
}

// metaKeeper marks a message that only keeps a key's place, with the process whose queue knows the rest.
const metaKeeper = "windlass-keeper"

// Enqueue implements engine.Queue: nil means that the Pub/Sub has the request.
func (q *requests) Enqueue(_ context.Context, req engine.Request) error {
	m, err := engine.EncodeRequest(req)
	if err != nil {
		return err
	}
	if err := q.bus.cfg.Publisher.Publish(q.topic, m); err != nil {
		return fmt.Errorf("publish to %s: %w", q.topic, err)
	}
	return nil
}

// Run implements engine.Queue.
func (q *requests) Run(intake, work context.Context, newProcess func() engine.Process) error {
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case m, open := <-q.messages:
				if !open {
					return
				}
				q.take(intake, m)
			case <-intake.Done():
				return
			}
		}
	})
	err := q.Queue.Run(intake, work, func() engine.Process {
		process := newProcess()
		return func(ctx context.Context, req engine.Request) engine.Outcome {
			q.began(req.Key)
			o := process(ctx, req)
			q.ended(req, o)
			return o
		}
	})
	group.Wait()
	q.abandon()
	q.end()
	return err
}

// take brings a message into the queue. One that cannot be read is acked: it will never become readable.
func (q *requests) take(ctx context.Context, m *message.Message) {
	req, err := engine.DecodeRequest(m)
	if err != nil {
		if q.cfg.Malformed != nil {
			q.cfg.Malformed(q.topic, err)
		}
		m.Ack()
		return
	}
	if q.bus.cfg.Ack == OnAccept {
		_ = q.Queue.Enqueue(ctx, req) // it never fails
		m.Ack()
		return
	}
	q.mu.Lock()
	p := q.held[req.Key]
	if p == nil {
		p = &place{}
		q.held[req.Key] = p
	}
	p.waiting = append(p.waiting, m)
	q.mu.Unlock()
	if m.Metadata[metaKeeper] != q.bus.id {
		_ = q.Queue.Enqueue(ctx, req)
	}
	q.watch(req.Key)
}

// began moves what is held for a key to its run.
func (q *requests) began(key engine.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p := q.held[key]; p != nil {
		p.running, p.waiting = append(p.running, p.waiting...), nil
		if p.timer != nil {
			p.timer.Stop()
		}
	}
}

// ended acks what a run was for, or holds it for the next one.
func (q *requests) ended(req engine.Request, o engine.Outcome) {
	parked := engine.IsTerminal(o.Err)
	if parked {
		if m, err := engine.EncodeRequest(req); err == nil {
			m.Metadata["windlass-error"] = o.Err.Error()
			if err := q.bus.cfg.Publisher.Publish(q.dead, m); err != nil {
				q.bus.cfg.Logger.Warn("a parked key could not be told", "topic", q.dead, "key", req.Key.String(), "err", err)
			}
		}
	}
	q.mu.Lock()
	p := q.held[req.Key]
	if p == nil {
		q.mu.Unlock()
		return
	}
	if parked || o.Err == nil && o.Result == (engine.Result{}) {
		done := p.running
		p.running = nil
		if len(p.waiting) == 0 {
			delete(q.held, req.Key)
		}
		q.mu.Unlock()
		ack(done)
		return
	}
	p.waiting, p.running = append(p.running, p.waiting...), nil
	q.mu.Unlock()
	q.watch(req.Key)
}

func ack(messages []*message.Message) {
	for _, m := range messages {
		m.Ack()
	}
}

// renewEvery is for how long a message is held back unacked. A second is short for every broker.
const renewEvery = time.Second

// watch renews what is held for a key if its turn does not come soon.
func (q *requests) watch(key engine.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.held[key]
	if p == nil || len(p.waiting) == 0 {
		return
	}
	if p.timer == nil {
		p.timer = time.AfterFunc(renewEvery, func() { q.renew(key) })
		return
	}
	p.timer.Reset(renewEvery)
}

// renew publishes one message that keeps the place of a key, and acks those that did so far.
func (q *requests) renew(key engine.Key) {
	it, ok := q.Item(key)
	q.mu.Lock()
	p := q.held[key]
	if p == nil || len(p.waiting) == 0 {
		q.mu.Unlock()
		return
	}
	old := p.waiting
	p.waiting = nil
	q.mu.Unlock()
	if !ok || it.Phase == queue.Parked {
		ack(old) // it was absorbed: nothing is to come
		return
	}
	req := engine.Request{Controller: q.cfg.Controller, Key: key, Causes: it.Waiting}
	if req.Causes.Count() == 0 {
		req.Causes = it.Value
	}
	if due := max(it.Due, it.NotBefore, it.Later); due > time.Now().UnixNano() {
		req.Due = time.Unix(0, due)
	}
	m, err := engine.EncodeRequest(req)
	if err == nil {
		m.Metadata[metaKeeper] = q.bus.id
		err = q.bus.cfg.Publisher.Publish(q.topic, m)
	}
	if err != nil {
		q.bus.cfg.Logger.Warn("a delayed request could not be renewed; its message is held", "topic", q.topic, "key", key.String(), "err", err)
		q.mu.Lock()
		p.waiting = append(old, p.waiting...)
		q.mu.Unlock()
		q.watch(key)
		return
	}
	ack(old)
}

// abandon gives back what is held, for the next process.
func (q *requests) abandon() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range q.held {
		if p.timer != nil {
			p.timer.Stop()
		}
		for _, m := range append(p.running, p.waiting...) {
			m.Nack()
		}
	}
	q.held = make(map[engine.Key]*place)
}
