package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// topics is the events half of the memory bus. A group gets the messages of a topic in the order of their publication
// and one at a time: the next after the ack of the last, the same again after a nack. A group with a name keeps what
// comes while none of its members is there, from the first Subscribe on; a topic without groups keeps nothing.
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
	members atomic.Int32
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

// Publish implements message.Publisher. It never blocks. The messages must not be changed any more.
func (t *topics) Publish(topic string, messages ...*message.Message) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, g := range t.groups[topic] {
		g.mu.Lock()
		waiting := len(g.line)
		g.line = append(g.line, messages...)
		if waiting == 0 && len(messages) > 0 {
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

	mu          sync.Mutex
	closed      bool
	done        chan struct{}
	open        sync.WaitGroup
	initialized map[string]*group
}

// SubscribeInitialize implements message.SubscribeInitializer: what is published to the topic from now on is kept until
// the subscriber's Subscribe.
func (s *memorySubscriber) SubscribeInitialize(topic string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if s.initialized == nil {
		s.initialized = make(map[string]*group)
	}
	if s.initialized[topic] == nil {
		s.initialized[topic] = s.topics.join(topic, s.group)
	}
	return nil
}

// begin makes the subscriber a member of its group, and end ends that. Close waits for end.
func (s *memorySubscriber) begin(topic string) (g *group, end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed
	}
	g = s.topics.join(topic, s.group)
	if begun := s.initialized[topic]; begun != nil {
		s.topics.leave(topic, g) // its place was taken by SubscribeInitialize already
		g = begun
		delete(s.initialized, topic)
	}
	s.open.Add(1)
	return g, func() {
		s.topics.leave(topic, g)
		s.open.Done()
	}, nil
}

// consumed is how many messages Consume hands over at most.
const consumed = 256

// Consume hands the messages of a topic to take, in order and several at a time, until ctx or the subscriber ends, which
// is no error. Take returns how many of them it has done with: the rest comes again, to whoever reads next. It must
// neither change nor ack the messages: there is one of each for all who read it, where Subscribe makes a copy.
func (s *memorySubscriber) Consume(ctx context.Context, topic string, take func([]*message.Message) int) error {
	g, end, err := s.begin(topic)
	if err != nil {
		return err
	}
	defer end()
	for {
		select {
		case <-g.turn:
		case <-ctx.Done():
			return nil
		case <-s.done:
			return nil
		}
		g.mu.Lock()
		batch := g.line[:min(len(g.line), consumed)]
		g.mu.Unlock()
		n := 0
		if ctx.Err() == nil {
			n = take(batch)
		}
		g.mu.Lock()
		clear(g.line[:n])
		g.line = g.line[n:]
		if len(g.line) > 0 {
			g.pass()
		}
		g.mu.Unlock()
	}
}

// Subscribe implements message.Subscriber.
func (s *memorySubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	g, end, err := s.begin(topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer end()
		defer close(out)
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
	}()
	return out, nil
}

// deliver hands out the head of the line until it is acked, and what is behind it while no other member waits. It returns
// false if the subscriber ended first.
func (s *memorySubscriber) deliver(ctx context.Context, g *group, out chan<- *message.Message) bool {
	for {
		g.mu.Lock()
		head, alone := g.line[0], g.members.Load() == 1
		g.mu.Unlock()
		switch acked, ended := s.hand(ctx, head, out, alone); {
		case ended:
			return false
		case !acked:
			g.pass() // nobody read it: somebody else's turn
			return true
		}
		g.mu.Lock()
		g.line[0] = nil
		g.line = g.line[1:]
		more := len(g.line) > 0
		if more && !alone {
			g.pass()
		}
		g.mu.Unlock()
		if !more || !alone {
			return true
		}
	}
}

// ignoredAfter is how long a member may leave a message unread before another member is offered it.
const ignoredAfter = 10 * time.Millisecond

// hand hands one message out until it is acked, or until it was left unread for a while and others might read it.
func (s *memorySubscriber) hand(ctx context.Context, head *message.Message, out chan<- *message.Message, alone bool) (acked, ended bool) {
	for {
		// What is kept is never handed out: whoever gets it may change it.
		m := head.Copy()
		mctx := &lazyContext{Context: ctx}
		m.SetContext(mctx)
		read, ended := s.offer(ctx, m, out, alone)
		if read {
			acked, ended = s.await(ctx, m)
		}
		mctx.cancel()
		if ended || acked || !read {
			return acked, ended
		}
	}
}

func (s *memorySubscriber) offer(ctx context.Context, m *message.Message, out chan<- *message.Message, alone bool) (read, ended bool) {
	var ignored <-chan time.Time
	if !alone {
		timer := time.NewTimer(ignoredAfter)
		defer timer.Stop()
		ignored = timer.C
	}
	select {
	case out <- m:
		return true, false
	case <-ignored:
		return false, false
	case <-ctx.Done():
	case <-s.done:
	}
	return false, true
}

func (s *memorySubscriber) await(ctx context.Context, m *message.Message) (acked, ended bool) {
	select {
	case <-m.Acked():
		return true, false
	case <-m.Nacked():
		return false, false
	case <-ctx.Done():
	case <-s.done:
	}
	return false, true
}

// Close implements message.Subscriber. It returns once all its channels are closed.
func (s *memorySubscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
		for topic, g := range s.initialized {
			s.topics.leave(topic, g)
		}
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
			g.members.Add(1)
			return g
		}
	}
	if t.groups == nil {
		t.groups = make(map[string][]*group)
	}
	g := &group{name: name, turn: make(chan struct{}, 1)}
	g.members.Add(1)
	t.groups[topic] = append(t.groups[topic], g)
	t.listened.Store(true)
	return g
}

func (t *topics) leave(topic string, left *group) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if left.members.Add(-1) > 0 || left.name != "" {
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
