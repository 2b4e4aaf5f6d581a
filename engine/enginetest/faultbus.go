package enginetest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/owner"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Faults are the chances, from 0 to 1, of what goes wrong.
type Faults struct {
	// Duplicate delivers a request once more.
	Duplicate float64
	// Reorder delivers requests in another order than they were made in.
	Reorder float64
	// Delay holds a delivery back, for up to a second.
	Delay float64
	// LoseAck forgets that a request was done with, so that it is delivered again.
	LoseAck float64
	// Refuse makes the bus fail: a request is not accepted, a state not saved, nothing is fetched.
	Refuse float64
	// Crash ends the process between what a reconcile did and the note that it did it.
	Crash float64
}

// AllFaults are moderate chances of everything.
var AllFaults = Faults{Duplicate: .1, Reorder: .3, Delay: .1, LoseAck: .1, Refuse: .1, Crash: .02}

// FaultBus is a durable bus in memory that does wrong as a seed says, and that outlives the engines that run on it. What
// happens to the n-th request, ack or save of a key depends on the seed, the key and n, and what happens to a fetch on the
// seed and the time, so that in virtual time a seed does the same wrong again. What an engine makes of it may still differ:
// of what its goroutines do at one instant, any may come first. Events and the store are those of a MemoryBus, which do no wrong.
type FaultBus struct {
	engine.MemoryBus

	mu      sync.Mutex
	seed    uint64
	drawn   map[string]uint64 // how often each thing was decided
	faults  Faults
	disks   map[string]*disk
	life    *life
	crashes int
}

// life is the time between two crashes: of what a dead process does, nothing reaches the disk.
type life struct {
	crashed chan struct{}
	dead    bool
}

// NewFaultBus returns an empty bus. If the test fails, the seed is printed.
func NewFaultBus(t testing.TB, seed uint64, f Faults) *FaultBus {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("fault bus: the seed was %d", seed)
		}
	})
	return &FaultBus{seed: seed, drawn: make(map[string]uint64), faults: f, disks: make(map[string]*disk), life: newLife()}
}

func newLife() *life { return &life{crashed: make(chan struct{})} }

// Crashed is closed when the bus has crashed the process: stop the engine then, and start another one after Restart.
func (b *FaultBus) Crashed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.life.crashed
}

// Crash crashes the process now: nothing that it does from here on reaches the disk.
func (b *FaultBus) Crash() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.crashLocked()
}

func (b *FaultBus) crashLocked() {
	if !b.life.dead {
		b.life.dead = true
		b.crashes++
		close(b.life.crashed)
	}
}

// Restart begins the life of another process on what is on the disk. It returns how often the bus has crashed.
func (b *FaultBus) Restart() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.life.dead {
		b.life = newLife()
	}
	return b.crashes
}

// Mend ends all faults.
func (b *FaultBus) Mend() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = Faults{}
}

// Pending is how many requests and states are on the disk.
func (b *FaultBus) Pending() (requests, states int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range b.disks {
		requests += len(d.messages)
		states += len(d.states)
	}
	return requests, states
}

// draw returns the numbers for the next decision about something. The bus is locked.
func (b *FaultBus) draw(what string) *rand.Rand {
	b.drawn[what]++
	return b.numbers(what, b.drawn[what])
}

// numbers are those of the n-th decision about something.
func (b *FaultBus) numbers(what string, n uint64) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(what))                         // it never fails
	return rand.New(rand.NewPCG(b.seed, h.Sum64()+n<<1)) //nolint:gosec // faults are no secret.
}

// happens says whether something of this chance does. The bus is locked.
func (b *FaultBus) happens(chance float64, what string) bool {
	return chance > 0 && b.draw(what).Float64() < chance
}

var (
	errRefused = errors.New("fault bus: refused, as the seed says")
	errDead    = errors.New("fault bus: the process has crashed")
)

// disk is what is kept of one controller's queue.
type disk struct {
	messages map[string]stored // by subject: one for a key and class
	states   map[engine.Key]queue.State[engine.Key, engine.Causes]
	changed  chan struct{}
	last     uint64
}

type stored struct {
	id       uint64
	req      engine.Request
	notUntil time.Time
}

// Queue implements engine.Bus.
func (b *FaultBus) Queue(ctx context.Context, cfg engine.QueueConfig) (engine.Queue, error) {
	b.mu.Lock()
	name := cfg.Engine + "/" + cfg.Controller
	if b.disks[name] == nil {
		b.disks[name] = &disk{
			messages: make(map[string]stored), states: make(map[engine.Key]queue.State[engine.Key, engine.Causes]), changed: make(chan struct{}),
		}
	}
	q := &faultQueue{bus: b, disk: b.disks[name], cfg: cfg, life: b.life}
	b.mu.Unlock()
	q.owner = owner.New(q, owner.Config[engine.Key, engine.Causes]{
		Queue: cfg.Rules(), Partitions: 1, Partition: func(engine.Key) int { return 0 }, Workers: cfg.Workers, ExtendEvery: time.Minute,
		Failed: func(error) {},
	})
	return q, q.owner.AcquireAll(ctx, 1)
}

type faultQueue struct {
	bus   *FaultBus
	disk  *disk
	cfg   engine.QueueConfig
	life  *life
	owner *owner.Owner[engine.Key, engine.Causes]
}

// Enqueue implements engine.Queue.
func (q *faultQueue) Enqueue(_ context.Context, req engine.Request) error {
	if req.Priority == engine.PriorityList && req.Due.IsZero() && !req.Manual {
		q.owner.Add(req.Key, req.Causes, req.Options()) // the next list makes it again
		return nil
	}
	q.bus.mu.Lock()
	defer q.bus.mu.Unlock()
	switch {
	case q.life.dead:
		return errDead
	case q.bus.happens(q.bus.faults.Refuse, "accept "+req.Key.String()):
		return errRefused
	}
	d := q.disk
	d.last++
	subject := fmt.Sprint(req.Priority, "/", req.Key)
	if !req.Due.IsZero() {
		subject += fmt.Sprint("/", d.last)
	}
	s := stored{id: d.last, req: req}
	if what := "delay " + req.Key.String(); q.bus.happens(q.bus.faults.Delay, what) {
		s.notUntil = time.Now().Add(time.Duration(q.bus.draw(what).Int64N(int64(time.Second))))
	}
	d.messages[subject] = s
	close(d.changed)
	d.changed = make(chan struct{})
	return nil
}

// Load implements owner.Broker.
func (q *faultQueue) Load(context.Context, owner.Term) ([]queue.State[engine.Key, engine.Causes], error) {
	q.bus.mu.Lock()
	defer q.bus.mu.Unlock()
	states := make([]queue.State[engine.Key, engine.Causes], 0, len(q.disk.states))
	for _, s := range q.disk.states {
		states = append(states, s)
	}
	slices.SortFunc(states, func(a, b queue.State[engine.Key, engine.Causes]) int { return byText(a.Key, b.Key) })
	return states, nil
}

func byText(a, b engine.Key) int {
	switch x, y := a.String(), b.String(); {
	case x < y:
		return -1
	case x > y:
		return 1
	default:
		return 0
	}
}

// Fetch implements owner.Broker.
func (q *faultQueue) Fetch(ctx context.Context, _ owner.Term, class queue.Class, take func(owner.Message[engine.Key, engine.Causes])) error {
	b := q.bus
	b.mu.Lock()
	// How often is fetched depends on the order of goroutines: what is decided depends on the time instead.
	rng := b.numbers(fmt.Sprint("fetch ", q.cfg.Controller, " ", class), uint64(time.Now().UnixNano()))
	happens := func(chance float64) bool { return rng.Float64() < chance }
	if refused := happens(b.faults.Refuse); q.life.dead || refused {
		b.mu.Unlock()
		return errRefused
	}
	var found []owner.Message[engine.Key, engine.Causes]
	for subject, s := range q.disk.messages {
		if queue.Class(s.req.Priority) == class && !time.Now().Before(s.notUntil) {
			found = append(found, q.message(subject, s))
		}
	}
	slices.SortFunc(found, func(x, y owner.Message[engine.Key, engine.Causes]) int { return int(x.ID) - int(y.ID) }) //nolint:gosec // small.
	if happens(b.faults.Reorder) {
		rng.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	}
	if len(found) > 0 && happens(b.faults.Duplicate) {
		found = append(found, found[rng.IntN(len(found))])
	}
	changed := q.disk.changed
	b.mu.Unlock()
	for _, m := range found {
		take(m)
	}
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C: // delayed ones are due, and lost acks are noticed
	case <-ctx.Done():
	}
	return nil
}

func (q *faultQueue) message(subject string, s stored) owner.Message[engine.Key, engine.Causes] {
	return owner.Message[engine.Key, engine.Causes]{
		ID: s.id, Key: s.req.Key, Value: engine.CausesOf(s.req.Causes.All()...).Partial(), Options: s.req.Options(), Extend: func() {},
		Ack: func() {
			b := q.bus
			b.mu.Lock()
			defer b.mu.Unlock()
			if q.life.dead || b.happens(b.faults.LoseAck, "ack "+s.req.Key.String()) || q.disk.messages[subject].id != s.id {
				return
			}
			delete(q.disk.messages, subject)
		},
	}
}

// Save implements owner.Broker. A crash comes before it or after it: the effect is made, the note of it is not, or is.
func (q *faultQueue) Save(_ context.Context, s queue.State[engine.Key, engine.Causes]) error {
	b := q.bus
	b.mu.Lock()
	defer b.mu.Unlock()
	what := "save " + s.Key.String()
	if b.happens(b.faults.Crash/2, what) {
		b.crashLocked()
	}
	switch {
	case q.life.dead:
		return errDead
	case b.happens(b.faults.Refuse, what):
		return errRefused
	case s.Empty():
		delete(q.disk.states, s.Key)
	default:
		q.disk.states[s.Key] = s
	}
	if b.happens(b.faults.Crash/2, what) {
		b.crashLocked()
	}
	return nil
}

// Crashes implements owner.Broker. Its owners take over from nobody.
func (q *faultQueue) Crashes(context.Context, owner.Term) (map[engine.Key]int, error) {
	return nil, nil
} //nolint:nilnil // none.

// Died implements owner.Broker.
func (q *faultQueue) Died(context.Context, owner.Term) (int, error) { return 0, nil }

// Suspect implements owner.Broker.
func (q *faultQueue) Suspect(context.Context, engine.Key, int) error { return nil }

// Settle implements owner.Broker.
func (q *faultQueue) Settle(context.Context, owner.Term) error { return nil }

// Hand implements owner.Broker. The only owner hands nothing over.
func (q *faultQueue) Hand(context.Context, engine.Key, engine.Causes) error { return nil }

// Run implements engine.Queue.
func (q *faultQueue) Run(intake, work context.Context, newProcess func() engine.Process) error {
	// A crash ends everything at once: what is running is cut off, and its outcome reaches nobody.
	intake, stop := context.WithCancel(intake)
	defer stop()
	work, kill := context.WithCancel(work)
	defer kill()
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-q.life.crashed:
			kill()
			stop()
		case <-intake.Done():
		}
	})
	q.owner.Run(intake, work, func() owner.Process[engine.Key, engine.Causes] {
		process := newProcess()
		return func(ctx context.Context, run *owner.Run[engine.Key, engine.Causes]) queue.Outcome[engine.Causes] {
			req := engine.RequestOf(q.cfg.Controller, &run.Run)
			return engine.AfterRun(&req, process(ctx, req))
		}
	})
	stop()
	watch.Wait()
	return nil
}

// Items implements engine.Queue.
func (q *faultQueue) Items() []engine.Item { return q.owner.Items() }

// Item implements engine.Queue.
func (q *faultQueue) Item(key engine.Key) (engine.Item, bool) { return q.owner.Item(key) }

// Pause implements engine.Queue.
func (q *faultQueue) Pause(key *engine.Key, p *queue.Pause) { q.owner.Pause(key, p) }

// Drop implements engine.Queue.
func (q *faultQueue) Drop(ctx context.Context, key engine.Key) error { return q.owner.Drop(ctx, key) }

// Stats implements engine.Queue.
func (q *faultQueue) Stats() queue.Stats { return q.owner.Stats() }
