package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
)

// topics is the events half of the memory bus. A group gets the messages of a topic in the order of their publication
// and one at a time: the next after the ack of the last, the same again after a nack. A topic without subscribers
// keeps nothing.
type topics struct {
	listened atomic.Bool // somebody has subscribed

	mu     sync.Mutex
	groups map[string][]*group
}

// group is one line of messages, shared by its members.
type group struct {
	name    string
	mu      sync.Mutex
	line    []*message.Message
	turn    chan struct{} // holds a token while no member is at work and the line is not empty
	members int
}

var errClosed = errors.New("memory bus: subscriber closed")

// Wants says whether anybody subscribed to topic.
func (t *topics) Wants(topic string) bool {
	if !t.listened.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.groups[topic]) > 0
}

// Publish implements message.Publisher. It copies the messages and never blocks.
func (t *topics) Publish(topic string, messages ...*message.Message) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, g := range t.groups[topic] {
		g.mu.Lock()
		for _, m := range messages {
			g.line = append(g.line, m.Copy())
		}
		if len(g.line) == len(messages) {
			g.pass()
		}
		g.mu.Unlock()
	}
	return nil
}

// Close implements message.Publisher.
func (t *topics) Close() error { return nil }

// pass lets a member take the head of the line.
func (g *group) pass() {
	select {
	case g.turn <- struct{}{}:
	default:
	}
}

type memorySubscriber struct {
	topics *topics
	group  string

	mu     sync.Mutex
	closed bool
	done   chan struct{}
	open   sync.WaitGroup
}

// Subscribe implements message.Subscriber.
func (s *memorySubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	g := s.topics.join(topic, s.group)
	out := make(chan *message.Message)
	s.open.Go(func() {
		defer close(out)
		defer s.topics.leave(topic, g)
		for {
			select {
			case <-g.turn:
				if !s.deliver(ctx, g, out) {
					g.pass()
					return
				}
			case <-ctx.Done():
				return
			case <-s.done:
				return
			}
		}
	})
	return out, nil
}

// deliver hands out the head of the line until it is acked. It returns false if the subscriber ended first.
func (s *memorySubscriber) deliver(ctx context.Context, g *group, out chan<- *message.Message) bool {
	g.mu.Lock()
	head := g.line[0]
	g.mu.Unlock()
	for {
		m := head.Copy()
		mctx, cancel := context.WithCancel(ctx)
		m.SetContext(mctx)
		acked, ended := s.offer(ctx, m, out)
		cancel()
		if ended {
			return false
		}
		if acked {
			break
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.line = g.line[1:]; len(g.line) > 0 {
		g.pass()
	}
	return true
}

func (s *memorySubscriber) offer(ctx context.Context, m *message.Message, out chan<- *message.Message) (acked, ended bool) {
	select {
	case out <- m:
	case <-ctx.Done():
		return false, true
	case <-s.done:
		return false, true
	}
	select {
	case <-m.Acked():
		return true, false
	case <-m.Nacked():
		return false, false
	case <-ctx.Done():
		return false, true
	case <-s.done:
		return false, true
	}
}

// Close implements message.Subscriber. It returns once all its channels are closed.
func (s *memorySubscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
	}
	s.mu.Unlock()
	s.open.Wait()
	return nil
}

func (t *topics) join(topic, name string) *group {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, g := range t.groups[topic] {
		if name != "" && g.name == name {
			g.members++
			return g
		}
	}
	if t.groups == nil {
		t.groups = make(map[string][]*group)
	}
	g := &group{name: name, turn: make(chan struct{}, 1), members: 1}
	t.groups[topic] = append(t.groups[topic], g)
	t.listened.Store(true)
	return g
}

func (t *topics) leave(topic string, left *group) {
	t.mu.Lock()
	defer t.mu.Unlock()
	left.members--
	if left.members > 0 {
		return
	}
	kept := t.groups[topic][:0]
	for _, g := range t.groups[topic] {
		if g != left {
			kept = append(kept, g)
		}
	}
	t.groups[topic] = kept
}
