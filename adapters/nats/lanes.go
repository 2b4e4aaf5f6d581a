package nats

import (
	"hash/maphash"
	"sync"

	"github.com/windlass-dev/windlass/engine"
)

// laneCount is how many events of a bucket are on their way at once: an emit waits for the bus, and one at a time would be
// as slow as its answers.
const laneCount = 64

// lanes emit events of different keys at once, and those of one key in their order.
type lanes struct {
	emit   func(engine.Event) error
	failed func()
	seed   maphash.Seed
	queues [laneCount]chan engine.Event
	group  sync.WaitGroup // of the lanes
	under  sync.WaitGroup // events that were added and are not done with

	mu  sync.Mutex
	err error
}

// newLanes starts the lanes. Failed is called when emit has failed; what was added behind that is dropped.
func newLanes(emit func(engine.Event) error, failed func()) *lanes {
	l := &lanes{emit: emit, failed: failed, seed: maphash.MakeSeed()}
	for i := range l.queues {
		q := make(chan engine.Event, 16)
		l.queues[i] = q
		l.group.Go(func() { l.run(q) })
	}
	return l
}

func (l *lanes) run(q <-chan engine.Event) {
	for e := range q {
		if l.failure() == nil {
			if err := l.emit(e); err != nil {
				l.mu.Lock()
				l.err = err
				l.mu.Unlock()
				l.failed()
			}
		}
		l.under.Done()
	}
}

func (l *lanes) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// add waits until there is room in the lane of the event's key.
func (l *lanes) add(e engine.Event) error {
	l.under.Add(1)
	l.queues[maphash.String(l.seed, e.Key.Name)%laneCount] <- e
	return l.failure()
}

// flush waits until everything that was added is done with.
func (l *lanes) flush() error {
	l.under.Wait()
	return l.failure()
}

func (l *lanes) close() {
	for _, q := range l.queues {
		close(q)
	}
	l.group.Wait()
}
