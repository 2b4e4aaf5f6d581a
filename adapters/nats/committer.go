package nats

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

// committer publishes to a stream. On a server that syncs its disk for every message, what is waiting while a publish is
// under way goes together as one atomic batch (NATS ADR-50), for which the server syncs once.
type committer struct {
	conn *Connection
	// groups is off for servers that sync at intervals: a batch costs them more than its messages one by one.
	groups bool

	mu      sync.Mutex
	waiting []*publication
	busy    bool
}

// publication is a message on its way.
type publication struct {
	msg      *natsgo.Msg
	expected *uint64 // what the last sequence of its subject must be
	done     chan struct{}
	seq      uint64
	err      error
}

// expect puts the condition of the publication into its message.
func (p *publication) expect(m *natsgo.Msg) {
	if p.expected != nil {
		m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(*p.expected, 10))
	}
}

// maxGroup is how many messages go together at most; the server takes a thousand.
const maxGroup = 500

// linger is how long a group waits for more after another.
const linger = 500 * time.Microsecond

// publish returns the sequence of the message once the server has stored it. When ctx ends first it may be stored yet.
func (c *committer) publish(ctx context.Context, m *natsgo.Msg, expected *uint64) (uint64, error) {
	p := &publication{msg: m, expected: expected, done: make(chan struct{})}
	if !c.groups {
		c.alone(ctx, p)
		return p.seq, p.err
	}
	c.mu.Lock()
	c.waiting = append(c.waiting, p)
	lead := !c.busy
	c.busy = true
	c.mu.Unlock()
	if lead {
		go c.run(context.WithoutCancel(ctx))
	}
	select {
	case <-p.done:
		return p.seq, p.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// run publishes group after group until nothing waits.
func (c *committer) run(ctx context.Context) {
	for {
		group := c.next()
		if len(group) == 0 {
			return
		}
		if len(group) == 1 || !c.together(ctx, group) {
			for _, p := range group {
				c.alone(ctx, p)
			}
		}
		for _, p := range group {
			close(p.done)
		}
		// Those who were waiting for this group are about to publish again: with them the next one is twice as large.
		timer := time.NewTimer(linger)
		<-timer.C
	}
}

// next takes the messages that go together.
func (c *committer) next() []*publication {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.waiting), maxGroup)
	group := slices.Clone(c.waiting[:n])
	c.waiting = slices.Delete(c.waiting, 0, n)
	c.busy = n > 0
	return group
}

func (c *committer) alone(ctx context.Context, p *publication) {
	p.expect(p.msg)
	p.seq, p.err = c.conn.publish(ctx, p.msg)
}

// together publishes a group as a batch. It returns false if the server refused it: one of the messages is to blame, and
// none is stored.
func (c *committer) together(ctx context.Context, group []*publication) bool {
	id := nuid.Next()
	fail := func(err error) bool {
		for _, p := range group {
			p.err = fmt.Errorf("publish %d messages together: %w", len(group), err)
		}
		return true
	}
	var last *natsgo.Msg
	for i, p := range group {
		m := natsgo.NewMsg(p.msg.Subject)
		maps.Copy(m.Header, p.msg.Header)
		m.Data = p.msg.Data
		m.Header.Set("Nats-Batch-Id", id)
		m.Header.Set("Nats-Batch-Sequence", strconv.Itoa(i+1))
		p.expect(m)
		if last = m; i == len(group)-1 {
			m.Header.Set("Nats-Batch-Commit", "1")
			break
		}
		if err := c.conn.nc.PublishMsg(m); err != nil {
			return fail(err)
		}
	}
	reply, err := ask(ctx, c.conn, func(ctx context.Context) (*natsgo.Msg, error) { return c.conn.nc.RequestMsgWithContext(ctx, last) })
	if err != nil {
		return fail(err)
	}
	var ack struct {
		Sequence uint64              `json:"seq"`
		Count    int                 `json:"count"`
		Error    *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return fail(err)
	}
	if ack.Error != nil || ack.Count != len(group) {
		return false
	}
	for i, p := range group {
		p.seq = ack.Sequence - uint64(len(group)-1-i) //nolint:gosec // not negative.
	}
	return true
}
