package nats

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// acks ends messages. On a server that syncs its disk for every write each ack is a write of its own: the server notes that the
// message is gone. There what one consumer is done with is removed by one purge instead, which is one write, of all that lies below
// the first message that it is not done with.
//
// A purge does not ask who has seen what it removes. So it goes only as far as this consumer was given every message in turn: its
// deliveries are numbered, and after a number that is missing its messages are acked one by one until it is made anew.
// Messages that come later have higher sequences. What a former owner purges it was done with while the partition was its own.
type acks struct {
	conn   *Connection
	stream jetstream.Stream
	groups bool // the server syncs always

	mu       sync.Mutex
	given    map[string]*given // by consumer
	busy     bool              // there are rounds
	removing bool              // one is under way
	round    chan struct{}     // closed when it has ended
}

// given is what a consumer delivered.
type given struct {
	consumer string
	filter   string
	next     uint64     // the number that the next delivery must have
	gap      bool       // one was missing
	messages []delivery // neither acked nor purged, in the order of the stream
	pending  uint64     // how many the server has not delivered
	room     chan struct{}

	alone sync.Mutex
	last  string // where the last message that was acked alone is acked
}

type delivery struct {
	seq  uint64
	ack  func() error
	at   string    // where it is acked
	done time.Time // zero: not yet
}

func newAcks(conn *Connection, stream jetstream.Stream, groups bool) *acks {
	return &acks{conn: conn, stream: stream, groups: groups, given: make(map[string]*given), round: make(chan struct{})}
}

// expect begins anew with a consumer that was just made.
func (a *acks) expect(consumer, filter string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.given[consumer] = &given{consumer: consumer, filter: filter, next: 1, room: make(chan struct{}, 1)}
}

// of is what a consumer delivered, nil if it is not expected any more.
func (a *acks) of(consumer string) *given {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.given[consumer]
}

// forget forgets the consumers that match.
func (a *acks) forget(match func(consumer string) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name := range a.given {
		if match(name) {
			delete(a.given, name)
		}
	}
}

// limit is how many messages the server lets a consumer deliver before their acks. It does not notice that a purge made room: there, room is the limit.
func (a *acks) limit() int {
	if a.groups {
		return -1
	}
	return window
}

// room waits until a consumer may deliver more, and returns how many; 0 once ctx has ended.
func (a *acks) room(ctx context.Context, g *given) int {
	if !a.groups {
		return fetchBatch
	}
	for {
		a.mu.Lock()
		free := window - len(g.messages)
		a.mu.Unlock()
		if free >= window/8 || ctx.Err() != nil {
			return min(free, fetchBatch)
		}
		select {
		case <-g.room:
		case <-ctx.Done():
		}
	}
}

// delivered notes a delivery, and returns what acks it. A lost ack leads to another delivery, which is what it is for.
func (a *acks) delivered(g *given, m jetstream.Msg, meta *jetstream.MsgMetadata) (ack func()) {
	if !a.groups {
		return func() { _ = g.ack(m.Ack, m.Reply()) }
	}
	seq := meta.Sequence.Stream
	a.mu.Lock()
	defer a.mu.Unlock()
	g.gap = g.gap || meta.Sequence.Consumer != g.next
	g.next, g.pending = meta.Sequence.Consumer+1, meta.NumPending
	if n := len(g.messages); n == 0 || g.messages[n-1].seq < seq { // and not delivered again
		g.messages = append(g.messages, delivery{seq: seq, ack: m.Ack, at: m.Reply()})
	}
	return func() {
		if !a.done(g.consumer, seq) {
			_ = g.ack(m.Ack, m.Reply())
		}
	}
}

// ack acks a message alone.
func (g *given) ack(ack func() error, at string) error {
	g.alone.Lock()
	g.last = at
	g.alone.Unlock()
	return ack()
}

// done says whether a message that is done will be removed in a round. It may have been delivered by a consumer of the same name that was made anew since.
func (a *acks) done(consumer string, seq uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.given[consumer]
	if g == nil {
		return false
	}
	i, known := slices.BinarySearchFunc(g.messages, seq, func(d delivery, seq uint64) int { return cmp.Compare(d.seq, seq) })
	if !known {
		return false
	}
	g.messages[i].done = time.Now()
	if !a.busy {
		a.busy = true
		go a.run()
	}
	return true
}

// removal is what one round does for one consumer.
type removal struct {
	*given

	below  uint64     // purged are the messages below it; 0: none
	acked  []delivery // what is acked one by one, or, should the purge fail, all of it
	single int        // of these, the last ones that are not purged
}

// run works in rounds until nothing is done that is not removed.
func (a *acks) run() {
	for {
		removals, more := a.next()
		if !more {
			return
		}
		for _, r := range removals {
			singles := r.acked[len(r.acked)-r.single:]
			if r.below != 0 {
				if _, err := ask(a.conn.base, a.conn, func(ctx context.Context) (struct{}, error) {
					return struct{}{}, a.stream.Purge(ctx, jetstream.WithPurgeSubject(r.filter), jetstream.WithPurgeSequence(r.below))
				}); err != nil {
					singles = r.acked
				}
			}
			for _, d := range singles {
				_ = r.ack(d.ack, d.at)
			}
		}
		a.mu.Lock()
		a.ended()
		a.mu.Unlock()
		timer := time.NewTimer(linger)
		<-timer.C
	}
}

// ended tells those who wait for it that a round has ended. The acks are locked.
func (a *acks) ended() {
	close(a.round)
	a.round, a.removing = make(chan struct{}), false
}

// next takes what a round removes, and says whether anything is done at all.
func (a *acks) next() (removals []removal, more bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var backlog uint64
	for _, g := range a.given {
		backlog += g.pending
	}
	// For a purge the server counts what waits for each consumer, which takes it about as long as a sync for every thousand messages. So a long
	// queue is purged of more at once, and what is done waits for that as long.
	worth := 2 + int(backlog/1000)
	due := time.Now().Add(-linger - time.Duration(backlog)*time.Microsecond)
	for _, g := range a.given {
		r, waits := g.take(worth, due)
		if len(r.acked) > 0 {
			removals = append(removals, r)
		}
		more = more || waits || len(r.acked) > 0
	}
	a.removing = true
	if a.busy = more; !more {
		a.ended()
	}
	return removals, more
}

// take removes from what was given what a round is to remove: all that is done at its beginning, if that is worth a purge, and what has been
// done for so long that it is acked alone.
func (g *given) take(worth int, due time.Time) (r removal, waits bool) {
	r.given = g
	first := slices.IndexFunc(g.messages, func(d delivery) bool { return d.done.IsZero() })
	if first < 0 {
		first = len(g.messages)
	}
	if !g.gap && first >= worth {
		r.below = g.messages[first-1].seq + 1
		r.acked = slices.Clone(g.messages[:first])
		g.messages = g.messages[first:]
	}
	g.messages = slices.DeleteFunc(g.messages, func(d delivery) bool {
		if d.done.IsZero() || d.done.After(due) {
			waits = waits || !d.done.IsZero()
			return false
		}
		r.acked, r.single = append(r.acked, d), r.single+1
		return true
	})
	if len(r.acked) > 0 {
		select {
		case g.room <- struct{}{}:
		default:
		}
	}
	return r, waits
}

// waits says whether something is done and not yet removed.
func (g *given) waits() bool {
	return g != nil && slices.ContainsFunc(g.messages, func(d delivery) bool { return !d.done.IsZero() })
}

// settle returns once everything that was acked for some consumers has been removed.
func (a *acks) settle(ctx context.Context, consumers ...string) error {
	for {
		a.mu.Lock()
		wait, ended := a.removing, a.round
		for _, name := range consumers {
			wait = wait || a.given[name].waits()
		}
		a.mu.Unlock()
		if !wait {
			break
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for _, name := range consumers {
		g := a.of(name)
		if g == nil {
			continue
		}
		g.alone.Lock()
		at := g.last
		g.alone.Unlock()
		if at == "" {
			continue
		}
		// The server takes a consumer's acks in turn, and answers this one after those before.
		if _, err := a.conn.nc.RequestWithContext(ctx, at, []byte("+ACK")); err != nil {
			return fmt.Errorf("acks of consumer %s: %w", name, err)
		}
	}
	return nil
}
