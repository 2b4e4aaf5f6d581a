package nats

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go/jetstream"
)

// Subscriber implements engine.Bus. Members of a group share a durable consumer, which begins with what is published
// after its creation; in the empty group each subscription has a consumer of its own. A message is delivered again
// after a nack, and when its reader has died.
func (b *Bus) Subscriber(group string) message.Subscriber {
	return &subscriber{bus: b, group: group, done: make(chan struct{})}
}

// eventAckWait is how long a reader that says nothing is believed to be alive. One that works on a message says so.
const eventAckWait = 5 * time.Second

type subscriber struct {
	bus   *Bus
	group string

	mu     sync.Mutex
	closed bool
	done   chan struct{}
	open   sync.WaitGroup
}

// SubscribeInitialize makes the group, so that it gets what is published from now on.
func (s *subscriber) SubscribeInitialize(topic string) error {
	if s.group == "" {
		return nil
	}
	_, err := s.consumer(s.bus.conn.base, topic)
	return err
}

func (s *subscriber) consumer(ctx context.Context, topic string) (jetstream.Consumer, error) {
	cfg := jetstream.ConsumerConfig{
		FilterSubject: s.bus.eventSubjects(topic) + ".>", DeliverPolicy: jetstream.DeliverNewPolicy, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: eventAckWait, MaxDeliver: -1, MaxAckPending: 1, InactiveThreshold: 5 * time.Minute,
	}
	if s.group != "" {
		cfg.Durable, cfg.InactiveThreshold = token(s.group)+"-"+token(topic), 0
	}
	c, err := ask(ctx, s.bus.conn, func(ctx context.Context) (jetstream.Consumer, error) {
		return s.bus.conn.js.CreateOrUpdateConsumer(ctx, eventStream(s.bus.cfg.Engine), cfg)
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", topic, err)
	}
	return c, nil
}

// Subscribe implements message.Subscriber.
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("NATS bus: subscriber closed")
	}
	if s.bus.cfg.Events == "off" {
		return nil, errors.New("NATS bus: events are off")
	}
	consumer, err := s.consumer(ctx, topic)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	out := make(chan *message.Message)
	s.open.Go(func() {
		defer close(out)
		defer cancel()
		s.open.Go(func() {
			select {
			case <-s.done:
				cancel()
			case <-ctx.Done():
			}
		})
		s.read(ctx, consumer, out)
	})
	return out, nil
}

// read hands out one message at a time, in the order of their publication.
func (s *subscriber) read(ctx context.Context, consumer jetstream.Consumer, out chan<- *message.Message) {
	for ctx.Err() == nil {
		err := s.batch(ctx, consumer, out)
		if err != nil && ctx.Err() == nil {
			s.bus.conn.log.Warn("subscription interrupted; it is taken up again", "err", err)
			select {
			case <-time.After(250 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
}

func (s *subscriber) batch(ctx context.Context, consumer jetstream.Consumer, out chan<- *message.Message) error {
	session, cancel := s.bus.conn.during(ctx)
	defer cancel()
	wait, stop := context.WithTimeout(session, fetchWait)
	defer stop()
	batch, err := consumer.Fetch(1, jetstream.FetchContext(wait), jetstream.FetchHeartbeat(fetchHeartbeat))
	if err != nil {
		return fetchError(err)
	}
	for m := range batch.Messages() {
		if err := s.deliver(ctx, m, out); err != nil {
			return err
		}
	}
	return fetchError(batch.Error())
}

func (s *subscriber) deliver(ctx context.Context, m jetstream.Msg, out chan<- *message.Message) error {
	w := watermillMessage(m.Headers(), m.Data())
	mctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.SetContext(mctx)
	beat := time.NewTicker(eventAckWait / 3)
	defer beat.Stop()
	for to := out; ; {
		select {
		case to <- w:
			to = nil
		case <-w.Acked():
			return m.Ack()
		case <-w.Nacked():
			return m.Nak()
		case <-beat.C:
			_ = m.InProgress() // a lost one leads to another delivery
		case <-ctx.Done():
			return m.Nak() // to another reader, at once
		}
	}
}

// Close implements message.Subscriber. It returns once all its channels are closed.
func (s *subscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
	}
	s.mu.Unlock()
	s.open.Wait()
	return nil
}
