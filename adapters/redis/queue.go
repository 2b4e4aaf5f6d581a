package redis

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"hash/maphash"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/envelope"
	"github.com/windlass-dev/windlass/internal/ownedqueue"
	"github.com/windlass-dev/windlass/internal/owner"
	"github.com/windlass-dev/windlass/internal/queue"
)

const (
	// window is how many requests of one partition and class are in hand at most. The rest wait in Redis, where merging
	// costs nothing.
	window = 512
	// fetchBatch is how many are read at once.
	fetchBatch = 256
	// idleWait is how long nothing is looked for unless somebody says that there is something.
	idleWait = 5 * time.Second
)

var classTokens = [queue.Classes]string{"h", "d", "l"}

// laterMark stands between the key and what makes unique a request for a later time: it must not take the place of one that
// waits, nor another one its own.
const laterMark = "\x00"

// requests is the queue of one controller on Redis.
type requests struct {
	*ownedqueue.Queue

	bus *Bus
	cfg engine.QueueConfig

	mu      sync.Mutex
	records []map[uint64]struct{} // by partition, hashes of the keys that have a state record
	seed    maphash.Seed
	lanes   map[laneID]*lane
}

var _ engine.Queue = (*requests)(nil)

// partKeys are the keys of a partition.
type partKeys struct{ owner, requests, states, classes string }

func (k partKeys) class(c queue.Class) string { return k.classes + classTokens[c] }

func (b *Bus) partition(p owner.Partition) partKeys {
	base := b.partKey(escaped(p.Group)+":"+strconv.Itoa(p.Number), "")
	return partKeys{owner: base + "owner", requests: base + "requests", states: base + "states", classes: base}
}

func (q *requests) keys(partition int) partKeys {
	return q.bus.partition(owner.Partition{Group: q.cfg.Controller, Number: partition})
}

// PartitionOf is the number of a key's partition.
func (b *Bus) PartitionOf(k engine.Key) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(k.String()))               // it never fails
	return int(h.Sum32() % uint32(b.cfg.Partitions)) //nolint:gosec // 1 to 64.
}

// hash stands for a key among those of its partition. Where two have the same, a record is removed in vain, or one is left
// that changes nothing: as often as two of 2^64 meet.
func (q *requests) hash(k engine.Key) uint64 { return maphash.Comparable(q.seed, k) }

// Queue implements engine.Bus.
func (b *Bus) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	q := &requests{
		bus: b, cfg: cfg, records: make([]map[uint64]struct{}, b.cfg.Partitions), seed: maphash.MakeSeed(), lanes: make(map[laneID]*lane),
	}
	if err := q.open(ctx); err != nil {
		return nil, err
	}
	q.Queue = ownedqueue.New(q, ownedqueue.Config{
		QueueConfig: cfg, Partitions: b.cfg.Partitions, PartitionOf: b.PartitionOf, Replica: b.replica, Store: b.store, ExtendEvery: time.Hour,
		Publish: q.publish, Log: b.conn.log,
	})
	return q, q.Open(ctx)
}

// open refuses another number of partitions than the one that there is.
func (q *requests) open(ctx context.Context) error {
	key := q.bus.queueKey(q.cfg.Controller)
	pipe := q.bus.conn.client.TxPipeline()
	pipe.HSetNX(ctx, key, "partitions", q.bus.cfg.Partitions)
	have := pipe.HGet(ctx, key, "partitions")
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("open the queue of controller %s: %w", q.cfg.Controller, understood(err))
	}
	if got, want := have.Val(), strconv.Itoa(q.bus.cfg.Partitions); got != want {
		return engine.PartitionsError("redis", q.cfg.Controller, got, want)
	}
	if err := q.bus.conn.client.SAdd(ctx, q.bus.key("queues"), q.cfg.Controller).Err(); err != nil {
		return fmt.Errorf("open the queue of controller %s: %w", q.cfg.Controller, understood(err))
	}
	return nil
}

func (q *requests) publish(ctx context.Context, req engine.Request) error {
	m, err := engine.EncodeRequest(req)
	if err != nil {
		return err
	}
	text := envelope.Seal(m)
	class, member := queue.Class(req.Priority), req.Key.String()
	if !req.Due.IsZero() {
		class, member = queue.Live, member+laterMark+watermill.NewShortUUID()
	}
	p := q.bus.PartitionOf(req.Key)
	k := q.keys(p)
	_, err = q.bus.pipeline.do(ctx, enqueueScript, []string{k.owner, k.class(class), k.requests},
		classTokens[class], member, text, q.bus.key("news"), laneID{p, class}.news(q.cfg.Controller))
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	return nil
}

// Run implements engine.Queue.
func (q *requests) Run(intake, work context.Context, newProcess func() engine.Process) error {
	defer q.bus.news.listen(q.told)()
	return q.Queue.Run(intake, work, newProcess)
}

// told wakes what waits for a request.
func (q *requests) told(channel, text string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for id, l := range q.lanes {
		if channel == "" || text == id.news(q.cfg.Controller) {
			wake(l.wake)
		}
	}
}

// Load implements owner.Broker. The claim has already shut out former owners.
func (q *requests) Load(ctx context.Context, t owner.Term) ([]queue.State[engine.Key, engine.Causes], error) {
	q.mu.Lock()
	q.records[t.Partition] = make(map[uint64]struct{})
	for c := range queue.Classes {
		id := laneID{t.Partition, c}
		q.lanes[id] = newLane(q, id, t.Epoch)
	}
	q.mu.Unlock()
	if t.Orphaned {
		if err := q.noteGiven(ctx, t.Partition); err != nil {
			return nil, err
		}
	}
	var states []queue.State[engine.Key, engine.Causes]
	key := q.keys(t.Partition).states
	err := scan(ctx, q.bus.conn.client, key, "*", func(member, text string) error {
		m, err := envelope.Open([]byte(text))
		var s queue.State[engine.Key, engine.Causes]
		if err == nil {
			s, err = engine.DecodeState(m)
		}
		if err != nil {
			return q.malformed(ctx, key, text, err, func() error { return q.bus.conn.client.HDel(ctx, key, member).Err() })
		}
		q.mu.Lock()
		q.records[t.Partition][q.hash(s.Key)] = struct{}{}
		q.mu.Unlock()
		states = append(states, s)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("load the state records of controller %s: %w", q.cfg.Controller, understood(err))
	}
	return states, nil
}

// noteGiven notes how far the former owner has come: it may have been running what it was given, and died of it.
func (q *requests) noteGiven(ctx context.Context, partition int) error {
	for c := range queue.Classes {
		given, err := q.bus.conn.client.HGet(ctx, q.keys(partition).owner, "given:"+classTokens[c]).Uint64()
		if err != nil && !errors.Is(err, goredis.Nil) {
			return fmt.Errorf("what the former owner was given: %w", understood(err))
		}
		q.mu.Lock()
		q.lanes[laneID{partition, c}].given = given
		q.mu.Unlock()
	}
	return nil
}

func (q *requests) malformed(ctx context.Context, from, text string, reason error, remove func() error) error {
	if err := q.bus.setAside(ctx, from, text, reason); err != nil {
		return err
	}
	if q.cfg.Malformed != nil {
		q.cfg.Malformed(from, reason)
	}
	return remove()
}

// Save implements owner.Broker.
func (q *requests) Save(ctx context.Context, s queue.State[engine.Key, engine.Causes]) error {
	q.mu.Lock()
	p := q.bus.PartitionOf(s.Key)
	_, exists := q.records[p][q.hash(s.Key)]
	l := q.lanes[laneID{p, queue.Live}]
	q.mu.Unlock()
	text := ""
	if s.Empty() {
		if !exists {
			return nil
		}
	} else {
		m, err := engine.EncodeState(q.cfg.Controller, s)
		if err != nil {
			return err
		}
		text = string(envelope.Seal(m))
	}
	if l == nil {
		return fmt.Errorf("store the state record of %s: %w: its partition is not this replica's", s.Key, engine.ErrLeaseLost)
	}
	k := q.keys(p)
	if _, err := q.bus.pipeline.do(ctx, saveScript, []string{k.owner, k.states}, l.epoch, s.Key.String(), text); err != nil {
		return fmt.Errorf("store the state record of %s: %w", s.Key, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if text == "" {
		delete(q.records[p], q.hash(s.Key))
	} else {
		q.records[p][q.hash(s.Key)] = struct{}{}
	}
	return nil
}

// Settle implements owner.Broker. Acks and claims go through one pipeline, in order.
func (q *requests) Settle(context.Context, owner.Term) error { return nil }

// Fetch implements owner.Broker.
func (q *requests) Fetch(ctx context.Context, t owner.Term, class queue.Class, take func(owner.Message[engine.Key, engine.Causes])) error {
	q.mu.Lock()
	l := q.lanes[laneID{t.Partition, class}]
	q.mu.Unlock()
	if l == nil || l.epoch != t.Epoch {
		return fmt.Errorf("fetch: %w: partition %d is in other hands", engine.ErrLeaseLost, t.Partition)
	}
	n, err := l.fetch(ctx, take)
	if err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	if n > 0 {
		return nil
	}
	timer := time.NewTimer(idleWait)
	defer timer.Stop()
	select {
	case <-l.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

type laneID struct {
	partition int
	class     queue.Class
}

// news is what is published when there is something in a lane whose owner waits.
func (id laneID) news(controller string) string {
	return "queue " + strconv.Itoa(id.partition) + classTokens[id.class] + " " + controller
}

// lane is a partition's class, for one term.
type lane struct {
	q     *requests
	id    laneID
	epoch uint64
	keys  []string // the owner, the class, the requests
	wake  chan struct{}
	given uint64 // how far a former owner had come when it died

	mu     sync.Mutex
	cursor uint64            // the last sequence that was read
	inHand map[uint64]string // what was read and is not removed, by sequence
	done   []uint64          // what is to be removed
	asked  bool              // a removal is on its way
	again  bool              // what was read may have to be read again
}

func newLane(q *requests, id laneID, epoch uint64) *lane {
	k := q.keys(id.partition)
	return &lane{
		q: q, id: id, epoch: epoch, keys: []string{k.owner, k.class(id.class), k.requests},
		wake: make(chan struct{}, 1), inHand: make(map[uint64]string),
	}
}

// fetch reads what is beyond the cursor, as much as there is room for, and returns how much that was.
func (l *lane) fetch(ctx context.Context, take func(owner.Message[engine.Key, engine.Causes])) (int, error) {
	l.mu.Lock()
	if l.again {
		l.cursor, l.again = 0, false
	}
	from, room := l.cursor, min(window-len(l.inHand), fetchBatch)
	l.mu.Unlock()
	if room <= 0 {
		return 0, nil
	}
	found, err := fetchScript.Run(ctx, l.q.bus.conn.client, l.keys, l.epoch, classTokens[l.id.class], from, room).StringSlice()
	if err != nil {
		return 0, understood(err)
	}
	for i := 0; i+2 < len(found); i += 3 {
		seq, err := strconv.ParseUint(found[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("sequence %q in %s: %w", found[i], l.keys[1], err)
		}
		if err := l.pass(ctx, seq, found[i+1], found[i+2], take); err != nil {
			return 0, err
		}
	}
	return len(found) / 3, nil
}

// pass hands on one request, unless it is in hand already.
func (l *lane) pass(ctx context.Context, seq uint64, member, text string, take func(owner.Message[engine.Key, engine.Causes])) error {
	l.mu.Lock()
	_, known := l.inHand[seq]
	if !known {
		l.inHand[seq] = member
	}
	l.mu.Unlock()
	if !known {
		m, err := l.message(seq, text)
		if err == nil {
			take(m)
		} else if err := l.q.malformed(ctx, l.keys[2]+" "+member, text, err, func() error { l.ack(seq); return nil }); err != nil {
			l.mu.Lock()
			delete(l.inHand, seq)
			l.mu.Unlock()
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cursor = max(l.cursor, seq)
	return nil
}

func (l *lane) message(seq uint64, text string) (owner.Message[engine.Key, engine.Causes], error) {
	m, err := envelope.Open([]byte(text))
	if err != nil {
		return owner.Message[engine.Key, engine.Causes]{}, err
	}
	req, err := engine.DecodeRequest(m)
	if err != nil {
		return owner.Message[engine.Key, engine.Causes]{}, err
	}
	// Sequences are the partition's own.
	id := seq*maxPartitions + uint64(l.id.partition) //nolint:gosec // 0 to 63.
	return owner.Message[engine.Key, engine.Causes]{
		ID: id, Key: req.Key, Value: req.Causes.Partial(), Options: req.Options(), Suspect: seq <= l.given,
		Ack: func() { l.ack(seq) }, Extend: func() {},
	}, nil
}

// ack removes a request, together with the others that are done by the time that it is sent.
func (l *lane) ack(seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, seq)
	if l.asked {
		return
	}
	l.asked = true
	var sent []uint64
	l.q.bus.pipeline.send(l.q.bus.ctx, &call{
		script: ackScript, keys: l.keys,
		args: func() []any {
			l.mu.Lock()
			defer l.mu.Unlock()
			sent, l.done, l.asked = l.done, nil, false
			args := []any{l.epoch, classTokens[l.id.class]}
			for _, seq := range sent {
				args = append(args, seq, l.inHand[seq])
			}
			return args
		},
		then: func(_ any, err error) { l.acked(sent, err) },
	})
}

// acked forgets what was removed. What may not have been is read again, and run once more: that is better than to wait for
// Redis with it.
func (l *lane) acked(seqs []uint64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	full := len(l.inHand) >= window
	for _, seq := range seqs {
		delete(l.inHand, seq)
	}
	if err != nil && !errors.Is(err, engine.ErrConflict) {
		l.again = true
	}
	if full || err != nil {
		wake(l.wake)
	}
}
