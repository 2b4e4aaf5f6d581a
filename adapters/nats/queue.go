package nats

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/envelope"
	"github.com/windlass-dev/windlass/internal/ownedqueue"
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
	// metaPartitions is where a stream keeps the number of partitions that it was made for.
	metaPartitions = "rq.partitions"
)

var classTokens = [queue.Classes]string{"h", "d", "l"}

// requests is the queue of one controller on JetStream.
type requests struct {
	*ownedqueue.Queue

	bus    *Bus
	cfg    engine.QueueConfig
	prefix string // of the subjects of requests
	states string // of the subjects of state records
	stream jetstream.Stream
	commit *committer
	acks   *acks

	mu        sync.Mutex
	records   []map[uint64]uint64 // by partition and the hash of the key, the sequence of its state record
	seed      maphash.Seed
	consumers map[string]jetstream.Consumer
	given     map[string]uint64 // by consumer: how far a former owner had come when it died
}

var _ engine.Queue = (*requests)(nil)

// Queue implements engine.Bus.
func (b *Bus) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	q := &requests{
		bus: b, cfg: cfg, commit: b.committer(), records: make([]map[uint64]uint64, b.cfg.Partitions), seed: maphash.MakeSeed(), consumers: make(map[string]jetstream.Consumer),
		given:  make(map[string]uint64),
		prefix: "rq." + token(b.cfg.Engine) + "." + token(cfg.Controller) + ".",
		states: "rqs." + token(b.cfg.Engine) + "." + token(cfg.Controller) + ".",
	}
	if err := q.open(ctx); err != nil {
		return nil, err
	}
	q.acks = newAcks(b.conn, q.stream, b.cfg.GroupCommit)
	q.Queue = ownedqueue.New(q, ownedqueue.Config{
		QueueConfig: cfg, Partitions: b.cfg.Partitions, PartitionOf: b.PartitionOf, Replica: b.replica, Store: b.store, ExtendEvery: extendEvery,
		Publish: q.publish, Log: b.conn.log,
	})
	return q, q.Open(ctx)
}

// hash stands for a key among those of its partition. Where two have the same, which two of 2^64 seldom have, the
// condition on the write tells.
func (q *requests) hash(k engine.Key) uint64 { return maphash.Comparable(q.seed, k) }

// recordsOf are those of a key's partition. The queue is locked.
func (q *requests) recordsOf(k engine.Key) map[uint64]uint64 { return q.records[q.bus.PartitionOf(k)] }

// open sets up the stream, unless one is there that was made for another number of partitions.
func (q *requests) open(ctx context.Context) error {
	name, want := requestStream(q.bus.cfg.Engine, q.cfg.Controller), strconv.Itoa(q.bus.cfg.Partitions)
	have, err := q.bus.conn.js.Stream(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return streamError(name, err)
	}
	if err == nil {
		if got := have.CachedInfo().Config.Metadata[metaPartitions]; got != want {
			return engine.PartitionsError("nats", q.cfg.Controller, got, want)
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

func (q *requests) publish(ctx context.Context, req engine.Request) error {
	later := !req.Due.IsZero()
	m, err := engine.EncodeRequest(req)
	if err != nil {
		return err
	}
	tokens := keyTokens(req.Key)
	subject := q.prefix + strconv.Itoa(partition(tokens, q.bus.cfg.Partitions)) + "."
	if later {
		// It must not take the place of one that waits, nor another one its own.
		subject += classTokens[queue.Live] + "." + tokens + "." + nuid.Next()
	} else {
		subject += classTokens[req.Priority] + "." + tokens
	}
	if _, err := q.commit.publish(ctx, &natsgo.Msg{Subject: subject, Data: envelope.Seal(m)}, nil); err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	return nil
}

// consumerName is that of a partition, class and epoch: a former owner acks in vain.
func consumerName(t owner.Term, class queue.Class) string {
	return fmt.Sprintf("p%d-%s-e%d", t.Partition, classTokens[class], t.Epoch)
}

// dropConsumers removes the consumers of a partition's former owners, so that what they had in hand is delivered at once
// and nothing that they still do is heard.
func (q *requests) dropConsumers(ctx context.Context, t owner.Term) error {
	former, err := ask(ctx, q.bus.conn, func(ctx context.Context) (former []string, err error) {
		names := q.stream.ConsumerNames(ctx)
		for name := range names.Name() {
			var p int
			var class byte
			var epoch uint64
			if n, _ := fmt.Sscanf(name, "p%d-%c-e%d", &p, &class, &epoch); n == 3 && p == t.Partition && epoch < t.Epoch {
				former = append(former, name)
			}
		}
		return former, names.Err()
	})
	if err != nil {
		return fmt.Errorf("consumers of controller %s: %w", q.cfg.Controller, err)
	}
	for _, name := range former {
		if t.Orphaned {
			if err := q.noteGiven(ctx, name, t); err != nil {
				return err
			}
		}
		if err := q.dropConsumer(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// noteGiven notes how far a former owner has come: it may have been running what it was given, and died of it.
func (q *requests) noteGiven(ctx context.Context, former string, t owner.Term) error {
	info, err := ask(ctx, q.bus.conn, func(ctx context.Context) (*jetstream.ConsumerInfo, error) {
		c, err := q.stream.Consumer(ctx, former)
		if err != nil {
			return nil, err
		}
		return c.CachedInfo(), nil
	})
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("consumer %s of controller %s: %w", former, q.cfg.Controller, err)
	}
	class := queue.Class(slices.Index(classTokens[:], strings.Split(former, "-")[1])) //nolint:gosec // one of three.
	q.mu.Lock()
	defer q.mu.Unlock()
	name := consumerName(t, class)
	q.given[name] = max(q.given[name], info.Delivered.Stream)
	return nil
}

func (q *requests) dropConsumer(ctx context.Context, name string) error {
	_, err := ask(ctx, q.bus.conn, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, q.stream.DeleteConsumer(ctx, name)
	})
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("remove consumer %s of controller %s: %w", name, q.cfg.Controller, err)
	}
	return nil
}

// removeRecord removes a state record, if it is still there: the answer to an earlier attempt may have been lost. The server
// has several ways to say that there is nothing to remove, and the client passes on only its words, so it is asked.
func (q *requests) removeRecord(ctx context.Context, seq uint64) error {
	_, err := ask(ctx, q.bus.conn, func(ctx context.Context) (struct{}, error) { return struct{}{}, q.bus.states.DeleteMsg(ctx, seq) })
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
		_, there := ask(ctx, q.bus.conn, func(ctx context.Context) (*jetstream.RawStreamMsg, error) { return q.bus.states.GetMsg(ctx, seq) })
		if errors.Is(there, jetstream.ErrMsgNotFound) {
			return nil
		}
	}
	return err
}

// Load implements owner.Broker.
func (q *requests) Load(ctx context.Context, t owner.Term) ([]queue.State[engine.Key, engine.Causes], error) {
	of := func(name string) bool { return strings.HasPrefix(name, fmt.Sprintf("p%d-", t.Partition)) }
	q.mu.Lock()
	q.records[t.Partition] = make(map[uint64]uint64)
	maps.DeleteFunc(q.consumers, func(name string, _ jetstream.Consumer) bool {
		return of(name)
	})
	maps.DeleteFunc(q.given, func(name string, _ uint64) bool { return of(name) })
	q.mu.Unlock()
	q.acks.forget(of)
	if err := q.dropConsumers(ctx, t); err != nil {
		return nil, err
	}
	var states []queue.State[engine.Key, engine.Causes]
	filter := q.states + strconv.Itoa(t.Partition) + ".>"
	err := snapshot(ctx, q.bus.conn, q.bus.states, filter, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		s, err := engine.DecodeState(watermillMessage(m.Headers(), m.Data()))
		if err != nil {
			return q.malformed(ctx, m.Subject(), m.Headers(), m.Data(), err, func() error {
				return q.removeRecord(ctx, meta.Sequence.Stream)
			})
		}
		q.mu.Lock()
		q.recordsOf(s.Key)[q.hash(s.Key)] = meta.Sequence.Stream
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
	seq, exists := q.recordsOf(s.Key)[q.hash(s.Key)]
	q.mu.Unlock()
	if s.Empty() {
		if !exists {
			return nil
		}
		if err := q.removeRecord(ctx, seq); err != nil {
			return fmt.Errorf("remove the state record of %s: %w", s.Key, err)
		}
		q.mu.Lock()
		delete(q.recordsOf(s.Key), q.hash(s.Key))
		q.mu.Unlock()
		return nil
	}
	m, err := engine.EncodeState(q.cfg.Controller, s)
	if err != nil {
		return err
	}
	tokens := keyTokens(s.Key)
	subject := q.states + strconv.Itoa(partition(tokens, q.bus.cfg.Partitions)) + "." + tokens
	stored, err := q.bus.records.publish(ctx, natsMessage(subject, m), &seq)
	if errors.Is(err, engine.ErrConflict) {
		// Our own write, whose answer was lost, or the last one of a former owner, who did not get to his ack: what is being
		// stored knows better. A later owner has fenced us, and ends this.
		err = errors.Join(err, q.lookUp(ctx, s.Key, subject))
	}
	if err != nil {
		return fmt.Errorf("store the state record of %s: %w", s.Key, err)
	}
	q.mu.Lock()
	q.recordsOf(s.Key)[q.hash(s.Key)] = stored
	q.mu.Unlock()
	return nil
}

// lookUp finds out the sequence of a key's record.
func (q *requests) lookUp(ctx context.Context, key engine.Key, subject string) error {
	last, err := q.bus.conn.last(ctx, q.bus.states, subject)
	if err != nil && !errors.Is(err, engine.ErrNotFound) {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.recordsOf(key), q.hash(key))
	if err == nil {
		q.recordsOf(key)[q.hash(key)] = last.Sequence
	}
	return nil
}

// Settle implements owner.Broker.
func (q *requests) Settle(ctx context.Context, t owner.Term) error {
	names := make([]string, queue.Classes)
	for c := range queue.Classes {
		names[c] = consumerName(t, c)
	}
	return q.acks.settle(ctx, names...)
}

// Fetch implements owner.Broker.
func (q *requests) Fetch(ctx context.Context, t owner.Term, class queue.Class, take func(owner.Message[engine.Key, engine.Causes])) error {
	name := consumerName(t, class)
	consumer, err := q.consumer(ctx, name, t, class)
	if err != nil {
		return err
	}
	session, cancel := q.bus.conn.during(ctx)
	defer cancel()
	delivered := q.acks.of(name)
	if delivered == nil {
		return nil // the term has ended
	}
	room := q.acks.room(session, delivered) // however long that takes: a fetch that has little time left would be refused
	if room <= 0 {
		return nil
	}
	wait, stop := context.WithTimeout(session, fetchWait)
	defer stop()
	batch, err := consumer.Fetch(room, jetstream.FetchContext(wait), jetstream.FetchHeartbeat(fetchHeartbeat))
	if err != nil {
		return q.interrupted(ctx, session, name, err)
	}
	q.mu.Lock()
	given := q.given[name]
	q.mu.Unlock()
	for m := range batch.Messages() {
		msg, ok, err := q.message(ctx, delivered, m)
		if err != nil {
			return q.interrupted(ctx, session, name, err)
		}
		if ok {
			msg.Suspect = msg.ID <= given
			take(msg)
		}
	}
	return q.interrupted(ctx, session, name, batch.Error())
}

// interrupted looks at how a fetch ended. Unless its time was simply over, what the server sent and we did not get
// would be held back until its ackWait, so the consumer is made anew. That waits for the next fetch: there may be no
// connection now, and the next fetch is tried until there is one.
func (q *requests) interrupted(ctx, session context.Context, name string, err error) error {
	if ctx.Err() != nil || session.Err() == nil && fetchError(err) == nil {
		return nil //nolint:nilerr // the end of ctx ends fetches.
	}
	q.mu.Lock()
	delete(q.consumers, name)
	q.mu.Unlock()
	if err = fetchError(err); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	return nil
}

// message reads one delivery; false means that it was malformed and set aside.
func (q *requests) message(ctx context.Context, by *given, m jetstream.Msg) (owner.Message[engine.Key, engine.Causes], bool, error) {
	meta, err := m.Metadata()
	if err != nil {
		return owner.Message[engine.Key, engine.Causes]{}, false, fmt.Errorf("message on %s: %w", m.Subject(), err)
	}
	ack := q.acks.delivered(by, m, meta)
	var req engine.Request
	var sealed *message.Message
	if m.Headers().Get(headerUUID) != "" { // as requests were written before; a batch leaves headers of its own
		sealed = watermillMessage(m.Headers(), m.Data())
	} else {
		sealed, err = envelope.Open(m.Data())
	}
	if err == nil {
		req, err = engine.DecodeRequest(sealed)
	}
	if err != nil {
		err = q.malformed(ctx, m.Subject(), m.Headers(), m.Data(), err, func() error { ack(); return nil })
		return owner.Message[engine.Key, engine.Causes]{}, false, err
	}
	return owner.Message[engine.Key, engine.Causes]{
		ID: meta.Sequence.Stream, Key: req.Key, Value: req.Causes.Partial(), Options: req.Options(),
		Ack: ack, Extend: func() { _ = m.InProgress() }, // a lost one leads to another delivery
	}, true, nil
}

// consumer returns the consumer of a partition and class, made anew if need be.
func (q *requests) consumer(ctx context.Context, name string, t owner.Term, class queue.Class) (jetstream.Consumer, error) {
	q.mu.Lock()
	c := q.consumers[name]
	q.mu.Unlock()
	if c != nil {
		return c, nil
	}
	// What an earlier one of this name has sent into the void is deliverable at once without it.
	if err := q.dropConsumer(ctx, name); err != nil {
		return nil, err
	}
	// One filter: with two of them the server takes several times as long to find the next message of a long queue.
	filter := q.prefix + strconv.Itoa(t.Partition) + "." + classTokens[class] + ".>"
	q.acks.expect(name, filter)
	c, err := ask(ctx, q.bus.conn, func(ctx context.Context) (jetstream.Consumer, error) {
		return q.stream.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
			Name: name, FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxDeliver: -1,
			MaxAckPending: q.acks.limit(), MaxWaiting: 8, InactiveThreshold: 10 * time.Minute, MemoryStorage: true,
			DeliverPolicy: jetstream.DeliverAllPolicy,
		})
	})
	if err != nil {
		// A former owner may have made its own again.
		return nil, errors.Join(fmt.Errorf("consumer %s: %w", name, err), q.dropConsumers(ctx, t))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.consumers[name] = c
	return c, nil
}
