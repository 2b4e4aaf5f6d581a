package redis

import (
	"context"
	"sync"

	goredis "github.com/redis/go-redis/v9"
)

// news passes on what is published on a channel. Redis keeps none of it: whoever listens is also told when something may have
// been missed.
type news struct {
	sub  *goredis.PubSub
	done chan struct{}

	mu        sync.Mutex
	listeners map[*listener]struct{}
}

// listener is told of what is published, and of gaps with missed set. It must not block.
type listener struct {
	told func(text string, missed bool)
}

func newNews(ctx context.Context, conn *Connection, channel string) *news {
	n := &news{
		sub: conn.client.Subscribe(context.WithoutCancel(ctx), channel), done: make(chan struct{}), listeners: make(map[*listener]struct{}),
	}
	go n.run()
	return n
}

func (n *news) run() {
	defer close(n.done)
	for m := range n.sub.ChannelWithSubscriptions(goredis.WithChannelSize(1000)) {
		switch m := m.(type) {
		case *goredis.Message:
			n.tell(m.Payload, false)
		case *goredis.Subscription: // the first, or after the connection was lost
			n.tell("", true)
		}
	}
}

func (n *news) tell(text string, missed bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for l := range n.listeners {
		l.told(text, missed)
	}
}

// listen returns what ends it.
func (n *news) listen(told func(text string, missed bool)) (stop func()) {
	l := &listener{told}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listeners[l] = struct{}{}
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.listeners, l)
	}
}

func (n *news) close() {
	_ = n.sub.Close() // it only ends the channel
	<-n.done
}

// wake makes a goroutine that waits on c look again.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
