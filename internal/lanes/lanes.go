// Package lanes emits events of different keys at once, and those of one key in their order: an emit waits for the bus, and one at a
// time would be as slow as its answers.
package lanes

import (
	"hash/maphash"
	"sync"

	"github.com/windlass-dev/windlass/engine"
)

// count is how many events of a source are on their way at once.
const count = 64

// Lanes emit events of different keys at once, and those of one key in their order. Create them with New; only their owner
// calls their methods.
type Lanes struct {
	emit   func(engine.Event) error
	failed func()
	seed   maphash.Seed
	queues [count]chan engine.Event
	group  sync.WaitGroup // of the lanes
	under  sync.WaitGroup // events that were added and are not done with

	mu  sync.Mutex
	err error
}

// New starts the lanes. Failed is called when emit has failed; what was added behind that is dropped.
func New(emit func(engine.Event) error, failed func()) *Lanes {
	l := &Lanes{emit: emit, failed: failed, seed: maphash.MakeSeed()}
	for i := range l.queues {
		q := make(chan engine.Event, 16)
		l.queues[i] = q
		l.group.Go(func() { l.run(q) })
	}
	return l
}

func (l *Lanes) run(q <-chan engine.Event) {
	for e := range q {
		if l.Failure() == nil {
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

// Failure is the first error of an emit.
func (l *Lanes) Failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Add waits until there is room in the lane of the event's key.
func (l *Lanes) Add(e engine.Event) error {
	l.under.Add(1)
	l.queues[maphash.String(l.seed, e.Key.Name)%count] <- e
	return l.Failure()
}

// Flush waits until everything that was added is done with.
func (l *Lanes) Flush() error {
	l.under.Wait()
	return l.Failure()
}

// Close waits for what is under way, and ends the lanes.
func (l *Lanes) Close() {
	for _, q := range l.queues {
		close(q)
	}
	l.group.Wait()
}
