package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/owner"
	"github.com/windlass-dev/windlass/internal/queue"
)

const (
	// ackWait is how long the server waits for an ack before it delivers again. It is no lock: a second delivery is
	// recognised. extendEvery keeps it from happening.
	ackWait     = 5 * time.Minute
	extendEvery = ackWait / 2
	// window is how many messages of one partition and class are in hand at most. The rest wait in the stream, where
	// merging costs nothing.
	window = 512
	// epoch is part of the consumers' names; it will fence a former owner's acks once replicas share the work.
	epoch = 1
	// metaPartitions is where a stream keeps the number of partitions that it was made for.
	metaPartitions = "rq.partitions"
)

var classTokens = [queue.Classes]string{"h", "d", "l"}

// laterToken stands in the class's place for requests for a later time. The consumer of live requests reads them too.
const laterToken = "t"

// requests is the queue of one controller on JetStream.
type requests struct {
	bus    *Bus
	cfg    engine.QueueConfig
	prefix string // of the subjects of requests
	states string // of the subjects of state records
	stream jetstream.Stream
	owner  *owner.Owner[engine.Key, engine.Causes]

	mu        sync.Mutex
	records   map[engine.Key]uint64 // the sequence of each key's state record
	consumers map[string]jetstream.Consumer
}

var _ engine.Queue = (*requests)(nil)

// Queue implements engine.Bus.
func (b *Bus) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	q := &requests{
		bus: b, cfg: cfg, records: make(map[engine.Key]uint64), consumers: make(map[string]jetstream.Consumer),
		prefix: "rq." + token(b.cfg.Engine) + "." + token(cfg.Controller) + ".",
		states: "rqs." + token(b.cfg.Engine) + "." + token(cfg.Controller) + ".",
	}
	if err := q.open(ctx); err != nil {
		return nil, err
	}
	q.owner = owner.New(q, owner.Config[engine.Key, engine.Causes]{
		Queue: cfg.Rules(), Partitions: b.cfg.Partitions, Workers: cfg.Workers, ExtendEvery: extendEvery,
		Failed: func(err error) {
			b.conn.log.Warn("the bus does not answer; trying again", "controller", cfg.Controller, "err", err)
		},
	})
	if err := q.owner.Load(ctx); err != nil {
		return nil, err
	}
	return q, nil
}

// open sets up the stream, unless one is there that was made for another number of partitions.
func (q *requests) open(ctx context.Context) error {
	name, want := requestStream(q.bus.cfg.Engine, q.cfg.Controller), strconv.Itoa(q.bus.cfg.Partitions)
	have, err := q.bus.conn.js.Stream(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return streamError(name, err)
	}
	if err == nil {
		if got := have.CachedInfo().Config.Metadata[metaPartitions]; got != want {
			return fmt.Errorf("stream %s was made for %s partitions, and the configuration says %s: set bus.nats.partitions to %s, "+
				"or remove the stream once it is empty", name, got, want, got)
		}
	}
	q.stream, err = q.bus.stream(ctx, jetstream.StreamConfig{
		Name: name, Subjects: []string{q.prefix + ">"}, Retention: jetstream.WorkQueuePolicy, MaxMsgsPerSubject: 1,
		// Never a limit here: DiscardOld would drop the oldest keys without a word.
		Discard: jetstream.DiscardOld, AllowAtomicPublish: true,
		Metadata: map[string]string{"rq.version": "1", metaPartitions: want},
	})
	return err
}

// Enqueue implements engine.Queue. Requests of class list stay in the process: the next list makes them again.
func (q *requests) Enqueue(ctx context.Context, req engine.Request) error {
	later := !req.Due.IsZero()
	if req.Priority == engine.PriorityList && !later && !req.Manual {
		q.owner.Add(req.Key, req.Causes, req.Options())
		return nil
	}
	m, err := engine.EncodeRequest(req)
	if err != nil {
		return err
	}
	tokens := keyTokens(req.Key)
	subject := q.prefix + strconv.Itoa(partition(tokens, q.bus.cfg.Partitions)) + "."
	if later {
		subject += laterToken + "." + tokens + "." + nuid.Next()
	} else {
		subject += classTokens[req.Priority] + "." + tokens
	}
	if _, err := q.bus.conn.js.PublishMsg(ctx, natsMessage(subject, m)); err != nil {
		return fmt.Errorf("publish: %w", understood(err))
	}
	return nil
}

// Run implements engine.Queue.
func (q *requests) Run(intake, work context.Context, newProcess func() engine.Process) error {
	if err := q.dropOldConsumers(intake); err != nil && intake.Err() == nil {
		return err
	}
	intake, stop := context.WithCancel(intake)
	defer stop()
	var lost error
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-q.bus.claim.lost:
			lost = q.bus.claim.err
			stop()
		case <-intake.Done():
		}
	})
	q.owner.Run(intake, work, func() owner.Process[engine.Key, engine.Causes] {
		process := newProcess()
		return func(ctx context.Context, run *queue.Run[engine.Key, engine.Causes]) queue.Outcome[engine.Causes] {
			req := engine.RequestOf(q.cfg.Controller, run)
			req.Fence = q.bus.claim.epoch
			return engine.AfterRun(&req, process(ctx, req))
		}
	})
	stop()
	watch.Wait()
	return lost
}

// dropOldConsumers removes the consumers of an earlier process, so that what it had in hand is delivered at once.
func (q *requests) dropOldConsumers(ctx context.Context) error {
	names := q.stream.ConsumerNames(ctx)
	var old []string
	for name := range names.Name() {
		old = append(old, name)
	}
	if err := names.Err(); err != nil {
		return fmt.Errorf("consumers of %s: %w", q.cfg.Controller, err)
	}
	for _, name := range old {
		if err := q.stream.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("consumer %s of %s: %w", name, q.cfg.Controller, err)
		}
	}
	return nil
}

// Items implements engine.Queue.
func (q *requests) Items() []engine.Item { return q.owner.Items() }

// Item implements engine.Queue.
func (q *requests) Item(key engine.Key) (engine.Item, bool) { return q.owner.Item(key) }

// Pause implements engine.Queue.
func (q *requests) Pause(key *engine.Key, p *queue.Pause) { q.owner.Pause(key, p) }

// Drop implements engine.Queue.
func (q *requests) Drop(ctx context.Context, key engine.Key) error { return q.owner.Drop(ctx, key) }

// Stats implements engine.Queue.
func (q *requests) Stats() queue.Stats { return q.owner.Stats() }

// Load implements owner.Broker.
func (q *requests) Load(ctx context.Context, p int) ([]queue.State[engine.Key, engine.Causes], error) {
	var states []queue.State[engine.Key, engine.Causes]
	filter := q.states + strconv.Itoa(p) + ".>"
	err := snapshot(ctx, q.bus.conn, q.bus.states, filter, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		s, err := engine.DecodeState(watermillMessage(m.Headers(), m.Data()))
		if err != nil {
			return q.malformed(ctx, m.Subject(), m.Headers(), m.Data(), err, func() error {
				return q.bus.states.DeleteMsg(ctx, meta.Sequence.Stream)
			})
		}
		q.mu.Lock()
		q.records[s.Key] = meta.Sequence.Stream
		q.mu.Unlock()
		states = append(states, s)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("load the state records of controller %s: %w", q.cfg.Controller, err)
	}
	return states, nil
}

func (q *requests) malformed(ctx context.Context, subject string, h natsgo.Header, data []byte, reason error, remove func() error) error {
	if err := q.bus.setAside(ctx, subject, h, data, reason); err != nil {
		return err
	}
	if q.cfg.Malformed != nil {
		q.cfg.Malformed(subject, reason)
	}
	return remove()
}

// Save implements owner.Broker.
func (q *requests) Save(ctx context.Context, s queue.State[engine.Key, engine.Causes]) error {
	q.mu.Lock()
	seq, exists := q.records[s.Key]
	q.mu.Unlock()
	if s.Empty() {
		if !exists {
			return nil
		}
		if err := q.bus.states.DeleteMsg(ctx, seq); err != nil && !gone(err) {
			return fmt.Errorf("remove the state record of %s: %w", s.Key, err)
		}
		q.mu.Lock()
		delete(q.records, s.Key)
		q.mu.Unlock()
		return nil
	}
	m, err := engine.EncodeState(q.cfg.Controller, s)
	if err != nil {
		return err
	}
	tokens := keyTokens(s.Key)
	subject := q.states + strconv.Itoa(partition(tokens, q.bus.cfg.Partitions)) + "." + tokens
	ack, err := q.bus.conn.js.PublishMsg(ctx, natsMessage(subject, m))
	if err != nil {
		return fmt.Errorf("store the state record of %s: %w", s.Key, understood(err))
	}
	q.mu.Lock()
	q.records[s.Key] = ack.Sequence
	q.mu.Unlock()
	return nil
}

// Fetch implements owner.Broker.
func (q *requests) Fetch(ctx context.Context, p int, class queue.Class, take func(owner.Message[engine.Key, engine.Causes])) error {
	name := fmt.Sprintf("p%d-%s-e%d", p, classTokens[class], epoch)
	consumer, err := q.consumer(ctx, name, p, class)
	if err != nil {
		return err
	}
	session, cancel := q.bus.conn.during(ctx)
	defer cancel()
	wait, stop := context.WithTimeout(session, fetchWait)
	defer stop()
	batch, err := consumer.Fetch(fetchBatch, jetstream.FetchContext(wait), jetstream.FetchHeartbeat(fetchHeartbeat))
	if err != nil {
		return q.interrupted(ctx, session, name, err)
	}
	for m := range batch.Messages() {
		msg, ok, err := q.message(ctx, m)
		if err != nil {
			return q.interrupted(ctx, session, name, err)
		}
		if ok {
			take(msg)
		}
	}
	return q.interrupted(ctx, session, name, batch.Error())
}

// interrupted looks at how a fetch ended. Unless its time was simply over, what the server sent and we did not get
// would be held back until its ackWait: without the consumer it is deliverable at once.
func (q *requests) interrupted(ctx, session context.Context, name string, err error) error {
	if ctx.Err() != nil || session.Err() == nil && fetchError(err) == nil {
		return nil //nolint:nilerr // the end of ctx ends fetches.
	}
	q.mu.Lock()
	delete(q.consumers, name)
	q.mu.Unlock()
	if err := q.stream.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("renew consumer %s: %w", name, err)
	}
	if err = fetchError(err); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	return nil
}

// message reads one delivery; false means that it was malformed and set aside.
func (q *requests) message(ctx context.Context, m jetstream.Msg) (owner.Message[engine.Key, engine.Causes], bool, error) {
	meta, err := m.Metadata()
	if err != nil {
		return owner.Message[engine.Key, engine.Causes]{}, false, fmt.Errorf("message on %s: %w", m.Subject(), err)
	}
	req, err := engine.DecodeRequest(watermillMessage(m.Headers(), m.Data()))
	if err != nil {
		err = q.malformed(ctx, m.Subject(), m.Headers(), m.Data(), err, m.Ack)
		return owner.Message[engine.Key, engine.Causes]{}, false, err
	}
	return owner.Message[engine.Key, engine.Causes]{
		ID: meta.Sequence.Stream, Key: req.Key, Value: req.Causes.Partial(), Options: req.Options(),
		Ack:    func() { _ = m.Ack() },        // a lost ack leads to another delivery, which is what it is for
		Extend: func() { _ = m.InProgress() }, // likewise
	}, true, nil
}

// consumer returns the consumer of a partition and class, made anew if need be.
func (q *requests) consumer(ctx context.Context, name string, p int, class queue.Class) (jetstream.Consumer, error) {
	q.mu.Lock()
	c := q.consumers[name]
	q.mu.Unlock()
	if c != nil {
		return c, nil
	}
	prefix := q.prefix + strconv.Itoa(p) + "."
	filters := []string{prefix + classTokens[class] + ".>"}
	if class == queue.Live {
		filters = append(filters, prefix+laterToken+".>")
	}
	c, err := q.stream.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
		Name: name, FilterSubjects: filters, AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxDeliver: -1,
		MaxAckPending: window, MaxWaiting: 8, InactiveThreshold: 10 * time.Minute, MemoryStorage: true,
		DeliverPolicy: jetstream.DeliverAllPolicy,
	})
	if err != nil {
		return nil, fmt.Errorf("consumer %s: %w", name, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.consumers[name] = c
	return c, nil
}
