package engine

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Bus carries events as Watermill messages on the topics events.<source>, and requests through its queues.
//
// A bus that several replicas of an engine share has a method Leases() lease.Store. Then each source is run by one replica
// at a time, each key by the one that owns it, and what the engine keeps in the store is followed by all. A bus that can tell
// whether it works has a method Status() error; one with Trusted() bool is asked before each write whether this replica may
// still work, by its own clock. One whose replicas know of each other has the methods of sharedBus.
type Bus interface {
	// Publisher publishes events. It may be nil: then events are not published. A publisher with a method
	// Wants(topic string) bool is asked before a message is made.
	Publisher() message.Publisher
	// Subscriber reads events. Subscribers of one group share the messages; those of the empty group each get all.
	Subscriber(group string) message.Subscriber
	// Queue opens the queue of one controller. It returns once the bus can accept requests.
	Queue(ctx context.Context, cfg QueueConfig) (Queue, error)
	// Store is where the engine keeps small state, as durable as the bus.
	Store() kv.Store
}

// QueueConfig describes the queue of one controller.
type QueueConfig struct {
	Engine     string
	Controller string
	// Workers is how many keys are processed at once.
	Workers int
	// Standby says that this replica only adds to the queue until Run, and works on nothing: another one may.
	Standby bool
	// Debounce holds back what is asked for a key until it has been quiet.
	Debounce Debounce
	// Limit takes a permission to run a key and returns from when on it is good. It must not call back. Nil is no limit.
	Limit func(now int64) int64
	// Malformed is called for each message that cannot be read. Nil is off.
	Malformed func(topic string, err error)
}

// Queue holds the requests of one controller.
type Queue interface {
	// Enqueue adds a request. Nil means that a run will start after this call, or for a request with a Due time, after
	// that time; on a durable bus, whatever happens to this process. It is safe for concurrent use.
	Enqueue(ctx context.Context, req Request) error
	// Run processes one request after the other, never twice at once for one key, until intake ends; then it waits for
	// those that run and returns nil. Each worker calls newProcess once, and what that returns for each of its requests.
	// Every run gets a context that is derived from work and that also ends when this process may no longer work on the
	// key. An error means that the queue cannot go on.
	Run(intake, work context.Context, newProcess func() Process) error
	// Items returns every key that is not idle.
	Items() []Item
	// Item returns one key, false if it is idle.
	Item(key Key) (Item, bool)
	// Pause holds back a key, or with a nil key all of them; a nil pause ends that.
	Pause(key *Key, p *queue.Pause)
	// Drop forgets what is parked for a key. It does nothing for a key that is not parked.
	Drop(ctx context.Context, key Key) error
	// Stats counts keys, cheaply.
	Stats() queue.Stats
}

// Process works on one request and says what came of it.
type Process func(ctx context.Context, req Request) Outcome

// Item is a key of a controller with its queue state.
type Item = queue.Item[Key, Causes]

// Rules say how causes are joined, what they mean to a key that is parked or delayed, and what holds requests back. They
// are for the buses of this module.
func (cfg QueueConfig) Rules() queue.Config[Key, Causes] {
	seed := maphash.MakeSeed()
	return queue.Config[Key, Causes]{
		Debounce: cfg.Debounce.After, DebounceMax: cmp.Or(cfg.Debounce.Max, 10*cfg.Debounce.After), Limit: cfg.Limit,
		// A controller's keys differ in these.
		Hash:      func(k Key) uint64 { return maphash.Comparable(seed, [2]string{k.Namespace, k.Name}) },
		Join:      func(into *Causes, from Causes) { into.Join(from) },
		Revives:   func(parked, added Causes) bool { return parked.Revives(added) },
		Unchanged: func(kept, listed Causes) bool { return kept.Unchanged(listed) },
	}
}

// PartitionsError says that a queue has another number of partitions than the configuration, and what to do. Have is of the form
// 8>16 while that is being changed.
func PartitionsError(bus, controller, have, want string) error {
	if strings.Contains(have, ">") {
		return fmt.Errorf("queue %s is being moved to another number of partitions: wait for 'engine bus migrate', or run it again if it was interrupted", controller)
	}
	return fmt.Errorf("queue %s was made for %s partitions, and the configuration says %s: set bus.%s.partitions to %s, "+
		"or stop all replicas and run 'engine bus migrate'", controller, have, want, bus, have)
}
