package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/internal/queue"
)

// world is a registry and a broker that replicas share, each through a link of its own that can be cut.
type world struct {
	mu      sync.Mutex
	seq     uint64
	members map[string]Member
	until   map[string]time.Time
	claims  map[Partition]Claim
	changed chan struct{}

	requests int // ever published
	messages map[string]sent
	states   map[string]stored
	epochs   []uint64 // of the owner that reads a partition
	given    []uint64 // how far owners have read it
	suspect  []uint64 // how far the last one had that died
	crashes  map[string]int
}

type sent struct {
	id    uint64
	key   string
	value int
	opts  queue.Options
}

type stored struct {
	queue.State[string, int]

	seq uint64
}

const (
	testPartitions = 8
	testTTL        = 4 * time.Second
)

func newWorld() *world {
	return &world{
		members: map[string]Member{}, until: map[string]time.Time{}, claims: map[Partition]Claim{}, changed: make(chan struct{}),
		messages: map[string]sent{}, states: map[string]stored{}, epochs: make([]uint64, testPartitions),
		given: make([]uint64, testPartitions), suspect: make([]uint64, testPartitions), crashes: map[string]int{},
	}
}

func partitionOf(key string) int { return int(key[len(key)-1]) % testPartitions }

// tell wakes everybody who waits for something. The world is locked.
func (w *world) tell() {
	w.seq++
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *world) publish(key string, value int, opts queue.Options) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell()
	w.requests++
	subject := key
	if opts.Later != 0 {
		subject += fmt.Sprint("/", w.seq)
	}
	w.messages[subject] = sent{w.seq, key, value, opts}
}

// count is how many requests were ever published.
func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.requests
}

// expire drops the members that were not renewed, and returns when the next one will be. The world is locked.
func (w *world) expire() time.Duration {
	next := time.Hour
	for id, until := range w.until {
		if left := time.Until(until); left > 0 {
			next = min(next, left)
		} else {
			delete(w.members, id)
			delete(w.until, id)
		}
	}
	return next
}

// link is how one replica reaches the world.
type link struct {
	*world

	cut     chan struct{}     // closed: nothing goes through
	records map[string]uint64 // the sequences that this replica knows
}

var errCut = errors.New("the link is cut")

func (w *world) link() *link {
	return &link{world: w, cut: make(chan struct{}), records: map[string]uint64{}}
}

// through locks the world, or waits in vain.
func (l *link) through(ctx context.Context) error {
	time.Sleep(rand.N(20 * time.Millisecond)) // on the way nothing can be cancelled
	l.mu.Lock()
	select {
	case <-l.cut:
	default:
		return nil
	}
	l.mu.Unlock()
	sleep(ctx, 300*time.Millisecond)
	return errCut
}

func (l *link) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.cut)
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = make(chan struct{})
	l.tell()
}

func (l *link) Announce(ctx context.Context, m Member, ttl time.Duration) error {
	if err := l.through(ctx); err != nil {
		return err
	}
	defer l.mu.Unlock()
	l.members[m.ID], l.until[m.ID] = m, time.Now().Add(ttl)
	l.tell()
	return nil
}

func (l *link) Withdraw(ctx context.Context, id string) error {
	if err := l.through(ctx); err != nil {
		return err
	}
	defer l.mu.Unlock()
	delete(l.members, id)
	delete(l.until, id)
	l.tell()
	return nil
}

func (l *link) Claim(ctx context.Context, p Partition, id string, seen uint64) (uint64, error) {
	if err := l.through(ctx); err != nil {
		return 0, err
	}
	defer l.mu.Unlock()
	if l.claims[p].Epoch != seen {
		return 0, ErrOvertaken
	}
	l.tell()
	l.claims[p] = Claim{id, l.seq}
	return l.seq, nil
}

func (l *link) Watch(ctx context.Context, changed func(View)) error {
	for ctx.Err() == nil {
		if err := l.through(ctx); err != nil {
			return err
		}
		next := l.expire()
		v, more, cut := View{Members: maps.Clone(l.members), Claims: maps.Clone(l.claims)}, l.changed, l.cut
		l.mu.Unlock()
		changed(v)
		select {
		case <-more:
		case <-cut:
		case <-time.After(next):
		case <-ctx.Done():
		}
	}
	return nil
}

func (l *link) Load(ctx context.Context, t Term) ([]queue.State[string, int], error) {
	if err := l.through(ctx); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	if t.Epoch < l.epochs[t.Partition] {
		return nil, ErrOvertaken
	}
	l.epochs[t.Partition] = t.Epoch
	if t.Orphaned {
		l.suspect[t.Partition] = l.given[t.Partition]
	}
	var states []queue.State[string, int]
	for key, s := range l.states {
		if partitionOf(key) == t.Partition {
			l.records[key] = s.seq
			states = append(states, s.State)
		}
	}
	return states, nil
}

func (l *link) Fetch(ctx context.Context, t Term, class queue.Class, take func(Message[string, int])) error {
	if class != queue.Live {
		<-ctx.Done()
		return nil
	}
	if err := l.through(ctx); err != nil {
		return err
	}
	if t.Epoch != l.epochs[t.Partition] {
		l.mu.Unlock()
		sleep(ctx, time.Second)
		return ErrOvertaken
	}
	var found []Message[string, int]
	for subject, m := range l.messages {
		if partitionOf(m.key) == t.Partition {
			l.given[t.Partition] = max(l.given[t.Partition], m.id)
			found = append(found, Message[string, int]{ID: m.id, Key: m.key, Value: m.value, Options: m.opts, Suspect: m.id <= l.suspect[t.Partition], Extend: func() {}, Ack: func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				select {
				case <-l.cut:
					return
				default:
				}
				if l.epochs[t.Partition] == t.Epoch && l.messages[subject].id == m.id {
					delete(l.messages, subject)
				}
			}})
		}
	}
	more := l.changed
	l.mu.Unlock()
	for _, m := range found {
		take(m)
		time.Sleep(rand.N(5 * time.Millisecond))
	}
	select {
	case <-more:
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	return nil
}

func (l *link) Save(ctx context.Context, s queue.State[string, int]) error {
	if err := l.through(ctx); err != nil {
		return err
	}
	defer l.mu.Unlock()
	if there := l.states[s.Key].seq; there != l.records[s.Key] {
		l.records[s.Key] = there
		return ErrOvertaken
	}
	l.seq++
	l.states[s.Key], l.records[s.Key] = stored{s, l.seq}, l.seq
	if s.Empty() {
		delete(l.states, s.Key)
		delete(l.records, s.Key)
	}
	return nil
}

func (l *link) Crashes(ctx context.Context, t Term) (map[string]int, error) {
	if err := l.through(ctx); err != nil {
		return nil, err
	}
	defer l.mu.Unlock()
	crashes := make(map[string]int)
	for key, n := range l.crashes {
		if partitionOf(key) == t.Partition {
			crashes[key] = n
		}
	}
	return crashes, nil
}

func (l *link) Died(context.Context, Term) (int, error) { return 0, nil }

func (l *link) Suspect(ctx context.Context, key string, crashes int) error {
	if err := l.through(ctx); err != nil {
		return err
	}
	defer l.mu.Unlock()
	if l.crashes[key] = crashes; crashes == 0 {
		delete(l.crashes, key)
	}
	return nil
}

func (l *link) Settle(context.Context, Term) error { return nil }

func (l *link) Hand(ctx context.Context, key string, value int) error {
	if err := l.through(ctx); err != nil {
		return err
	}
	l.mu.Unlock()
	l.publish(key, value, queue.Options{})
	return nil
}

var errLost = errors.New("lost")

// mate is a replica with one controller.
type mate struct {
	*link

	replica *Replica
	owner   *Owner[string, int]
	stop    context.CancelFunc
	kill    context.CancelFunc
	done    chan struct{}
}

func (w *world) join(t *testing.T, id string, p process) *mate {
	t.Helper()
	m := &mate{link: w.link(), done: make(chan struct{})}
	var err error
	m.replica, err = NewReplica(t.Context(), ReplicaConfig{ID: id, Registry: m.link, TTL: testTTL, Lost: errLost, Failed: func(error) {}})
	require.NoError(t, err)
	m.owner = New(m.link, Config[string, int]{
		Queue: queue.Config[string, int]{Join: func(into *int, from int) { *into = max(*into, from) }}, Partitions: testPartitions,
		Partition: partitionOf, Workers: 3, ExtendEvery: time.Minute, Trusted: m.replica.Trusted, Failed: func(error) {},
	})
	m.replica.Join(t.Context(), "c", testPartitions, m.owner)
	var intake, work context.Context
	intake, m.stop = context.WithCancel(t.Context())
	work, m.kill = context.WithCancel(t.Context())
	go func() {
		defer close(m.done)
		m.owner.Run(intake, work, func() process { return p })
	}()
	return m
}

// leave ends a replica in good order.
func (m *mate) leave() {
	m.stop()
	m.replica.Close(context.Background())
	<-m.done
	m.kill()
}

// crash ends it so that nobody hears of it any more.
func (m *mate) crash() {
	m.sever()
	m.kill()
	m.stop()
	<-m.done
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	m.replica.Close(ctx)
}

func (m *mate) owned() (partitions int) { return len(m.owner.Owned()) }

func idle(context.Context, *Run[string, int]) queue.Outcome[int] { return queue.Outcome[int]{} }

func TestReplicasShareThePartitionsEvenly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		a := w.join(t, "a", idle)
		require.Equal(t, 8, a.owned(), "alone, and at once")
		b := w.join(t, "b", idle)
		require.Equal(t, 4, b.owned(), "Join returns when the share is there")
		c := w.join(t, "c", idle)
		time.Sleep(time.Second) // the others have theirs too
		sum := a.owned() + b.owned() + c.owned()
		require.Equal(t, 8, sum)
		require.LessOrEqual(t, max(a.owned(), b.owned(), c.owned()), 3)
		b.leave()
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, []int{4, 4}, []int{a.owned(), c.owned()}, "a replica that leaves hands over at once")
		start := time.Now()
		a.crash()
		for c.owned() < 8 {
			time.Sleep(50 * time.Millisecond)
		}
		require.LessOrEqual(t, time.Since(start), testTTL+500*time.Millisecond, "what a dead one held is taken over in time")
		c.leave()
	})
}

func TestReplicaThatCannotRenewItsMembershipStopsBeforeOthersBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var mu sync.Mutex
		cancelled, began := map[string]time.Time{}, map[string]time.Time{}
		endless := func(who string) process {
			return func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
				mu.Lock()
				began[who] = time.Now()
				mu.Unlock()
				<-ctx.Done()
				mu.Lock()
				defer mu.Unlock()
				cancelled[who] = time.Now()
				return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
			}
		}
		a := w.join(t, "a", endless("a"))
		w.publish("k", 1, queue.Options{})
		time.Sleep(time.Second)
		b := w.join(t, "b", endless("b"))
		cut := time.Now()
		a.sever()
		time.Sleep(2 * testTTL)
		require.Zero(t, a.owned())
		require.Equal(t, 8, b.owned())
		mu.Lock()
		require.True(t, cancelled["a"].Before(began["b"]), "%v is not before %v", cancelled["a"], began["b"])
		require.Less(t, began["b"].Sub(cut), testTTL+time.Second)
		mu.Unlock()
		a.mend()
		time.Sleep(testTTL)
		require.Equal(t, 8, a.owned()+b.owned(), "it takes part again")
		require.NotZero(t, a.owned())
		a.crash()
		b.crash()
	})
}

func TestWhatOnlyTheOwnerKnewIsHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var mu sync.Mutex
		seen := map[string]string{}
		handle := func(who string) process {
			return func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
				if who == "a" {
					sleep(ctx, time.Minute)
					return queue.Outcome[int]{}
				}
				mu.Lock()
				defer mu.Unlock()
				seen[run.Key] = who
				return queue.Outcome[int]{}
			}
		}
		a := w.join(t, "a", handle("a"))
		keys := []string{"k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"}
		for _, k := range keys {
			require.True(t, a.owner.Add(k, 1, queue.Options{Class: queue.List}))
		}
		synctest.Wait() // three of them run
		go a.leave()
		b := w.join(t, "b", handle("b"))
		require.False(t, a.owner.Add("k0", 1, queue.Options{Class: queue.List}), "it is not a's any more")
		time.Sleep(2 * time.Minute)
		b.leave()
		require.Len(t, seen, 5, "of eight, three ran and ended where they began")
	})
}

func TestInterruptedRunIsNotHandedOverOnceMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		a := w.join(t, "a", func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
			sleep(ctx, time.Minute)
			return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
		})
		w.publish("k1", 1, queue.Options{})
		time.Sleep(time.Second)
		a.kill()
		time.Sleep(time.Second) // the key waits again, but nobody works
		w.publish("k1", 2, queue.Options{})
		published := w.count()
		a.leave()
		require.Equal(t, published, w.count(), "the broker has the message already")
	})
}

func TestHandoverRepeatsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var mu sync.Mutex
		runs := map[string]int{}
		handle := func(who string) process {
			return func(context.Context, *Run[string, int]) queue.Outcome[int] {
				mu.Lock()
				runs[who]++
				mu.Unlock()
				time.Sleep(10 * time.Second)
				return queue.Outcome[int]{}
			}
		}
		a := w.join(t, "a", handle("a"))
		for i := range testPartitions {
			w.publish(fmt.Sprint("k", i), 1, queue.Options{})
		}
		time.Sleep(time.Second)
		go a.leave()
		b := w.join(t, "b", handle("b"))
		start := time.Now()
		for b.owned() < testPartitions-3 {
			time.Sleep(10 * time.Millisecond)
		}
		require.Less(t, time.Since(start), 500*time.Millisecond, "what does not run is handed over at once")
		time.Sleep(time.Minute)
		b.leave()
		require.Equal(t, map[string]int{"a": 3, "b": 5}, runs)
	})
}

func TestNoRunStartsWithoutTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		var trusted atomic.Bool
		var ran atomic.Int32
		o := New(d, Config[string, int]{
			Queue: queue.Config[string, int]{Join: func(into *int, from int) { *into = max(*into, from) }}, Partitions: 1,
			Partition: func(string) int { return 0 }, Workers: 1, ExtendEvery: time.Minute, Trusted: trusted.Load, Failed: func(error) {},
		})
		require.NoError(t, o.AcquireAll(t.Context(), 1))
		intake, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			o.Run(intake, t.Context(), func() process {
				return func(context.Context, *Run[string, int]) queue.Outcome[int] { ran.Add(1); return queue.Outcome[int]{} }
			})
		}()
		d.publish("k", 1, queue.Options{})
		time.Sleep(time.Minute)
		require.Zero(t, ran.Load())
		trusted.Store(true)
		time.Sleep(time.Second)
		require.EqualValues(t, 1, ran.Load(), "it waited, and was not forgotten")
		trusted.Store(false)
		d.publish("k", 2, queue.Options{})
		time.Sleep(time.Second)
		o.Revoke(0, errLost)
		time.Sleep(time.Second)
		trusted.Store(true)
		time.Sleep(time.Minute)
		require.EqualValues(t, 1, ran.Load(), "the term has ended before")
		require.NoError(t, o.Acquire(t.Context(), Term{Epoch: 2}))
		time.Sleep(time.Second)
		require.EqualValues(t, 2, ran.Load(), "and the next one has it again")
		stop()
		<-done
	})
}

func TestRunThatOutlastsItsTermChangesNothingInTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		due := time.Now().Add(time.Hour).UnixNano()
		d.states["k"] = queue.State[string, int]{Key: "k", Due: due, Value: 5}
		d.publish("k", 1, queue.Options{})
		o := New(d, Config[string, int]{
			Queue: queue.Config[string, int]{Join: func(into *int, from int) { *into = max(*into, from) }}, Partitions: 1,
			Partition: func(string) int { return 0 }, Workers: 2, ExtendEvery: time.Minute, Failed: func(error) {},
		})
		require.NoError(t, o.AcquireAll(t.Context(), 1))
		intake, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			o.Run(intake, t.Context(), func() process {
				return func(context.Context, *Run[string, int]) queue.Outcome[int] {
					time.Sleep(10 * time.Second) // whatever its context says
					return queue.Outcome[int]{}
				}
			})
		}()
		time.Sleep(5 * time.Second)
		o.Revoke(0, errLost)
		require.NoError(t, o.Acquire(t.Context(), Term{Epoch: 2}))
		time.Sleep(10 * time.Second) // the first run has ended, the second is under way
		it, ok := o.Item("k")
		require.True(t, ok)
		require.Equal(t, queue.Running, it.Phase)
		require.Equal(t, due, it.Due, "what was loaded is still known")
		messages, _ := d.left()
		require.Equal(t, 1, messages, "and the message is acked by the second")
		time.Sleep(10 * time.Second)
		messages, states := d.left()
		require.Zero(t, messages+states)
		stop()
		<-done
	})
}

// TestReplicasLoseNothing publishes versions of keys while replicas join, leave, crash and are cut off, and demands that
// the newest version of every key was seen in the end, and that no key ever ran twice at once.
func TestReplicasLoseNothing(t *testing.T) {
	for seed := range uint64(150) {
		synctest.Test(t, func(t *testing.T) { liveTogether(t, seed) })
	}
}

func liveTogether(t *testing.T, seed uint64) {
	t.Helper()
	w := newWorld()
	fates, rng := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
	published, seen := map[string]int{}, map[string]int{}
	running, fences := map[string]context.Context{}, map[string]uint64{}
	var mu sync.Mutex
	handle := func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
		mu.Lock()
		if other := running[run.Key]; other != nil && other.Err() == nil {
			t.Errorf("seed %d: %s runs twice at once", seed, run.Key)
		}
		if run.Fence < fences[run.Key] {
			t.Errorf("seed %d: %s runs with fence %d after %d", seed, run.Key, run.Fence, fences[run.Key])
		}
		running[run.Key], fences[run.Key] = ctx, run.Fence
		took, fate, deaf := time.Duration(fates.IntN(1500))*time.Millisecond, fates.IntN(5), fates.IntN(8) == 0
		mu.Unlock()
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			if running[run.Key] == ctx {
				delete(running, run.Key)
			}
		}()
		if deaf { // to the end of its context
			time.Sleep(5 * took)
		} else if !sleep(ctx, took) {
			return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
		}
		if fate == 0 {
			return queue.Outcome[int]{Verdict: queue.Retry, After: time.Second, Value: run.Value}
		}
		mu.Lock()
		if ctx.Err() == nil { // else it writes with a fence that is not valid any more
			seen[run.Key] = max(seen[run.Key], run.Value)
		}
		mu.Unlock()
		if fate == 1 {
			return queue.Outcome[int]{Verdict: queue.Requeue, After: 2 * time.Second, Value: run.Value}
		}
		return queue.Outcome[int]{}
	}
	names := 0
	join := func() *mate {
		names++
		return w.join(t, fmt.Sprint("replica-", names), handle)
	}
	mates := []*mate{join(), join()}
	var ending sync.WaitGroup
	for range 80 {
		key := fmt.Sprint("k", rng.IntN(12))
		opts := queue.Options{}
		if rng.IntN(6) == 0 {
			opts.Later = time.Now().Add(3 * time.Second).UnixNano()
		}
		published[key]++
		w.publish(key, published[key], opts)
		time.Sleep(time.Duration(rng.IntN(600)) * time.Millisecond)
		i := rng.IntN(len(mates))
		switch fate := rng.IntN(40); {
		case fate < 2 && len(mates) < 4:
			mates = append(mates, join())
		case fate < 4 && len(mates) > 1:
			ending.Go(mates[i].leave)
			mates = append(mates[:i], mates[i+1:]...)
		case fate < 6 && len(mates) > 1:
			ending.Go(mates[i].crash)
			mates = append(mates[:i], mates[i+1:]...)
		case fate < 8:
			m, away := mates[i], time.Duration(rng.IntN(8000))*time.Millisecond
			m.sever()
			time.Sleep(away)
			m.mend()
		}
	}
	ending.Wait()
	time.Sleep(2 * time.Minute)
	for _, m := range mates {
		m.leave()
	}
	require.Equal(t, published, seen, "seed %d", seed)
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Empty(t, w.messages, "seed %d", seed)
}
