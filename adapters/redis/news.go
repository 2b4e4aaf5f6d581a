package redis

import (
	"context"
	"sync"

	goredis "github.com/redis/go-redis/v9"
)

// news passes on what is published on channels. Redis keeps none of it: whoever listens is also told when something may have
// been missed.
type news struct {
	sub  *goredis.PubSub
	done chan struct{}

	mu        sync.Mutex
	listeners map[*listener]struct{}
}

// listener is told of what is published on which channel, and with no channel that something may have been missed. It must not
// block.
type listener struct {
	told func(channel, text string)
}

func newNews(ctx context.Context, conn *Connection, channels ...string) *news {
	n := &news{
		sub: conn.client.Subscribe(context.WithoutCancel(ctx), channels...), done: make(chan struct{}), listeners: make(map[*listener]struct{}),
	}
	go n.run()
	return n
}

func (n *news) run() {
	defer close(n.done)
	for m := range n.sub.ChannelWithSubscriptions(goredis.WithChannelSize(1000)) {
		switch m := m.(type) {
		case *goredis.Message:
			n.tell(m.Channel, m.Payload)
		case *goredis.Subscription: // the first, or after the connection was lost
			n.tell("", "")
		}
	}
}

func (n *news) tell(channel, text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for l := range n.listeners {
		l.told(channel, text)
	}
}

// listen returns what ends it.
func (n *news) listen(told func(channel, text string)) (stop func()) {
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
