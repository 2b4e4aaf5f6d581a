// Package topic is a source of events that somebody else publishes: another engine, whose sources publish to
// events.<source>, or any program that writes messages as engine.EncodeEvent does.
package topic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine"
)

// Config describes a topic.
type Config struct {
	// Name is the source's.
	Name string
	// Subscriber reads the topic. It should keep what comes while nobody reads, which is the matter of its group.
	Subscriber message.Subscriber
	// Topic is engine.EventTopic(Name), unless said otherwise.
	Topic string
	// Malformed is told of messages that are no events. They are acked: they will not become any. Nil is off.
	Malformed func(topic string, err error)
}

// Source is an engine.Source. Its objects cannot be read: a controller reads them elsewhere. There is no list of what
// there is; the first list is empty.
type Source struct{ cfg Config }

var _ engine.Source = (*Source)(nil)

// New returns a source.
func New(cfg Config) (*Source, error) {
	if cfg.Name == "" || cfg.Subscriber == nil {
		return nil, errors.New("topic: Name and Subscriber are required")
	}
	if cfg.Topic == "" {
		cfg.Topic = engine.EventTopic(cfg.Name)
	}
	return &Source{cfg}, nil
}

// Name implements engine.Source.
func (s *Source) Name() string { return s.cfg.Name }

// Published says that the events are on a topic already: the engine does not publish them again.
func (s *Source) Published() bool { return true }

// batches is what a subscriber may offer beside Subscribe: messages in order and several at a time, neither to be changed
// nor acked. Take returns how many it has done with; the rest comes again.
type batches interface {
	message.SubscribeInitializer
	Consume(ctx context.Context, topic string, take func([]*message.Message) int) error
}

// Run implements engine.Source. A message is acked once its event was accepted; until then it is emitted again and again,
// for what comes behind it must not overtake it.
func (s *Source) Run(ctx context.Context, emit engine.Emit) error {
	b, ok := s.cfg.Subscriber.(batches)
	if !ok {
		return s.subscribe(ctx, emit)
	}
	if err := b.SubscribeInitialize(s.cfg.Topic); err != nil {
		return fmt.Errorf("subscribe to %s: %w", s.cfg.Topic, err)
	}
	if err := listNothing(ctx, emit); err != nil {
		return err
	}
	return b.Consume(ctx, s.cfg.Topic, func(messages []*message.Message) int {
		for i, m := range messages {
			if !s.deliver(ctx, emit, m) {
				return i
			}
		}
		return len(messages)
	})
}

// listNothing says that the source is synced, once no message is missed any more.
func listNothing(ctx context.Context, emit engine.Emit) error {
	for _, op := range []engine.Operation{engine.ListStarted, engine.ListEnded} {
		if err := emit(ctx, engine.Event{Operation: op}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Source) subscribe(ctx context.Context, emit engine.Emit) error {
	messages, err := s.cfg.Subscriber.Subscribe(ctx, s.cfg.Topic)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", s.cfg.Topic, err)
	}
	if err := listNothing(ctx, emit); err != nil {
		return err
	}
	for {
		select {
		case m, open := <-messages:
			switch {
			case open:
			case ctx.Err() == nil:
				return fmt.Errorf("the subscription to %s ended", s.cfg.Topic)
			default:
				return nil
			}
			if !s.deliver(ctx, emit, m) {
				m.Nack()
				return nil
			}
			m.Ack()
		case <-ctx.Done():
			return nil
		}
	}
}

// deliver emits a message until it is accepted. It returns false if ctx ended first.
func (s *Source) deliver(ctx context.Context, emit engine.Emit, m *message.Message) bool {
	e, _, err := engine.DecodeEvent(m)
	if err != nil {
		if s.cfg.Malformed != nil {
			s.cfg.Malformed(s.cfg.Topic, err)
		}
		return true
	}
	if e.Operation == engine.ListStarted || e.Operation == engine.ListEnded {
		return true // somebody else's list
	}
	for emit(ctx, e) != nil {
		timer := time.NewTimer(100 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
	}
	return true
}
