package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/engine"
)

const (
	// eventsKept is how many events of a source are kept: they are a log, not the queue.
	eventsKept = 100_000
	// redeliverAfter is how long a member of a group may take for a message before another gets it.
	redeliverAfter = 30 * time.Second
	// block is how long a subscription waits in Redis: so long does its end take at most.
	block = 500 * time.Millisecond
	// The fields of an event: Watermill's, and with a prefix its metadata.
	fieldUUID, fieldPayload, fieldMetadata = "uuid", "payload", "meta:"
)

func (b *Bus) eventsKey(topic string) string {
	return b.partKey("events:"+escaped(strings.TrimPrefix(topic, engine.EventTopic(""))), "log")
}

// Publisher implements engine.Bus.
func (b *Bus) Publisher() message.Publisher {
	if b.cfg.Events == "off" {
		return nil
	}
	return &publisher{b}
}

type publisher struct{ bus *Bus }

// Publish implements message.Publisher. It returns once Redis has the messages.
func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		args := []any{"XADD", p.bus.eventsKey(topic), "MAXLEN", "~", eventsKept, "*", fieldUUID, m.UUID, fieldPayload, []byte(m.Payload)}
		for k, v := range m.Metadata {
			args = append(args, fieldMetadata+k, v)
		}
		if _, err := p.bus.pipeline.do(m.Context(), nil, nil, args...); err != nil {
			return fmt.Errorf("publish to %s: %w", topic, err)
		}
	}
	return nil
}

// Close implements message.Publisher.
func (p *publisher) Close() error { return nil }

// Subscriber implements engine.Bus. Members of a group share the messages, from the group's first subscription on, in order as long
// as there is one of them; in the empty
// group each subscription gets all that is published after it began. A message is delivered again after a nack, and in a
// group when its reader has died or was not done with it after half a minute.
func (b *Bus) Subscriber(group string) message.Subscriber {
	ctx, cancel := context.WithCancel(b.ctx)
	return &subscriber{bus: b, group: group, ctx: ctx, cancel: cancel}
}

type subscriber struct {
	bus    *Bus
	group  string
	ctx    context.Context // until Close
	cancel context.CancelFunc

	mu   sync.Mutex
	open sync.WaitGroup
}

// SubscribeInitialize makes the group, so that it gets what is published from now on.
func (s *subscriber) SubscribeInitialize(topic string) error {
	if s.group == "" {
		return nil
	}
	err := s.bus.conn.client.XGroupCreateMkStream(s.ctx, s.bus.eventsKey(topic), s.group, "$").Err()
	if err != nil && !goredis.HasErrorPrefix(err, "BUSYGROUP") {
		return fmt.Errorf("subscribe to %s: %w", topic, understood(err))
	}
	return nil
}

// Subscribe implements message.Subscriber.
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil, errors.New("bus on Redis: subscriber closed")
	}
	if s.bus.cfg.Events == "off" {
		return nil, errors.New("bus on Redis: events are off")
	}
	if err := s.SubscribeInitialize(topic); err != nil {
		return nil, err
	}
	r := &reader{bus: s.bus, key: s.bus.eventsKey(topic), group: s.group, topic: topic, me: watermill.NewShortUUID(), out: make(chan *message.Message)}
	if err := r.begin(ctx); err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", topic, understood(err))
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	s.open.Go(func() {
		defer close(r.out)
		defer cancel()
		defer stop()
		r.run(ctx)
	})
	return r.out, nil
}

// Close implements message.Subscriber. It returns once all its channels are closed.
func (s *subscriber) Close() error {
	s.mu.Lock()
	s.cancel()
	s.mu.Unlock()
	s.open.Wait()
	return nil
}

// reader hands out the messages of a topic one by one, in the order of their publication.
type reader struct {
	bus   *Bus
	key   string
	group string
	topic string
	me    string
	last  string // without a group: the last message that was read
	out   chan *message.Message
}

func (r *reader) begin(ctx context.Context) error {
	if r.group != "" {
		return nil
	}
	newest, err := r.bus.conn.client.XRevRangeN(ctx, r.key, "+", "-", 1).Result()
	r.last = "0-0"
	if len(newest) > 0 {
		r.last = newest[0].ID
	}
	return err
}

func (r *reader) run(ctx context.Context) {
	for ctx.Err() == nil {
		m, err := r.next(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			r.bus.conn.log.Warn("subscription interrupted; it is taken up again", "topic", r.topic, "err", err)
			select {
			case <-time.After(250 * time.Millisecond):
			case <-ctx.Done():
			}
		case m != nil && r.deliver(ctx, m):
			r.settle(ctx, m.ID)
		case m != nil:
			r.giveBack(ctx, m.ID)
		}
	}
	if r.group != "" {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = r.bus.conn.client.XGroupDelConsumer(last, r.key, r.group, r.me).Err() // it is empty, and only untidy if it stays
	}
}

// next returns the next message, or nothing if none came for a while.
func (r *reader) next(ctx context.Context) (*goredis.XMessage, error) {
	if r.group == "" {
		return first(r.bus.conn.client.XRead(ctx, &goredis.XReadArgs{Streams: []string{r.key, r.last}, Count: 1, Block: block}).Result())
	}
	left, _, err := r.bus.conn.client.XAutoClaim(ctx, &goredis.XAutoClaimArgs{
		Stream: r.key, Group: r.group, Consumer: r.me, MinIdle: redeliverAfter, Start: "0-0", Count: 1,
	}).Result()
	if err != nil || len(left) > 0 {
		return first([]goredis.XStream{{Messages: left}}, err)
	}
	return first(r.bus.conn.client.XReadGroup(ctx, &goredis.XReadGroupArgs{
		Group: r.group, Consumer: r.me, Streams: []string{r.key, ">"}, Count: 1, Block: block,
	}).Result())
}

func first(streams []goredis.XStream, err error) (*goredis.XMessage, error) {
	if errors.Is(err, goredis.Nil) {
		return nil, nil //nolint:nilnil // nothing came.
	}
	if err != nil || len(streams) == 0 || len(streams[0].Messages) == 0 {
		return nil, err
	}
	return &streams[0].Messages[0], nil
}

// deliver hands out a message until it is acked. It returns false if ctx ended first.
func (r *reader) deliver(ctx context.Context, x *goredis.XMessage) bool {
	for ctx.Err() == nil {
		m := messageOf(x)
		mctx, cancel := context.WithCancel(ctx)
		m.SetContext(mctx)
		select {
		case r.out <- m:
		case <-ctx.Done():
		}
		select {
		case <-m.Acked():
			cancel()
			return true
		case <-m.Nacked():
		case <-ctx.Done():
		}
		cancel()
	}
	return false
}

func messageOf(x *goredis.XMessage) *message.Message {
	uuid, _ := x.Values[fieldUUID].(string)
	payload, _ := x.Values[fieldPayload].(string)
	m := message.NewMessage(uuid, []byte(payload))
	for k, v := range x.Values {
		if name, ok := strings.CutPrefix(k, fieldMetadata); ok {
			m.Metadata[name], _ = v.(string)
		}
	}
	return m
}

// settle notes that a message is done with.
func (r *reader) settle(ctx context.Context, id string) {
	r.last = id
	if r.group == "" {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	_ = r.bus.conn.client.XAck(last, r.key, r.group, id).Err() // a lost ack leads to another delivery, which is what it is for
}

// giveBack leaves a message to the others at once.
func (r *reader) giveBack(ctx context.Context, id string) {
	if r.group == "" {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	// The others get it after redeliverAfter at the latest.
	_ = r.bus.conn.client.Do(last, "XCLAIM", r.key, r.group, "given-back", 0, id, "IDLE", redeliverAfter.Milliseconds()+1, "JUSTID").Err()
}
