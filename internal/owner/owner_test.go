package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/internal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// disk is a broker that outlives its owners, and fails, repeats and delays as a seed says. A key's pending message is
// there once, as in a stream with one message per subject.
type disk struct {
	mu       sync.Mutex
	rng      *rand.Rand
	seq      uint64
	messages map[string]Message[string, int] // by subject
	states   map[string]queue.State[string, int]
	crashes  map[string]int
	deaths   int
	given    uint64 // messages up to here were an earlier owner's
	blind    bool   // that is not known
	changed  chan struct{}
	flaky    bool
	away     bool // nothing can be stored
	dead     bool // so is the process: it stores nothing any more
}

func newDisk(seed uint64) *disk {
	return &disk{
		rng: rand.New(rand.NewPCG(seed, 0)), messages: map[string]Message[string, int]{}, states: map[string]queue.State[string, int]{},
		crashes: map[string]int{}, changed: make(chan struct{}),
	}
}

var errAway = errors.New("the broker is away")

func (d *disk) fails() bool { return d.flaky && d.rng.IntN(4) == 0 }

func (d *disk) publish(key string, value int, opts queue.Options) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seq++
	id, subject := d.seq, key
	if opts.Later != 0 {
		subject = fmt.Sprint(key, ".", id)
	}
	d.messages[subject] = Message[string, int]{ID: id, Key: key, Value: value, Options: opts, Extend: func() {}, Ack: func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.messages[subject].ID == id && !d.fails() { // a lost ack leads to another delivery
			delete(d.messages, subject)
		}
	}}
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *disk) Load(context.Context, Term) ([]queue.State[string, int], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Values(d.states)), nil
}

func (d *disk) Fetch(ctx context.Context, _ Term, class queue.Class, take func(Message[string, int])) error {
	if class != queue.Live {
		<-ctx.Done()
		return nil
	}
	d.mu.Lock()
	if d.fails() {
		d.mu.Unlock()
		return errAway
	}
	messages, changed := slices.Collect(maps.Values(d.messages)), d.changed
	d.mu.Unlock()
	for _, m := range messages {
		m.Suspect = m.ID <= d.given && !d.blind
		take(m) // the same one again and again
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-time.After(time.Second):
	}
	return nil
}

func (d *disk) Save(_ context.Context, s queue.State[string, int]) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fails() || d.away {
		return errAway
	}
	if s.Empty() {
		delete(d.states, s.Key)
	} else {
		d.states[s.Key] = s
	}
	return nil
}

func (d *disk) Crashes(context.Context, Term) (map[string]int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.crashes), nil
}

func (d *disk) Died(context.Context, Term) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.deaths++
	return d.deaths, nil
}

func (d *disk) Suspect(_ context.Context, key string, crashes int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return errAway
	}
	if crashes == 0 {
		delete(d.crashes, key)
	} else {
		d.crashes[key] = crashes
	}
	return nil
}

func (d *disk) Settle(context.Context, Term) error { return nil }

func (d *disk) Hand(context.Context, string, int) error { return nil }

func (d *disk) left() (messages, states int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.messages), len(d.states)
}

type process = Process[string, int]

// life runs an owner on the disk until the returned function is called, which drains it; crash ends it without.
func life(t *testing.T, d *disk, workers int, p process) (drain, crash func()) {
	t.Helper()
	o := New(d, Config[string, int]{
		Queue: queue.Config[string, int]{Join: func(into *int, from int) { *into = max(*into, from) }}, Partitions: 1, Partition: func(string) int { return 0 }, Workers: workers,
		ExtendEvery: time.Minute, Failed: func(error) {},
	})
	require.NoError(t, o.AcquireAll(t.Context(), 1))
	intake, stop := context.WithCancel(t.Context())
	work, kill := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { o.Run(intake, work, func() process { return p }) })
	return func() { stop(); group.Wait(); kill() }, func() { kill(); stop(); group.Wait() }
}

// heir is a life that begins with what a dead one left.
func heir(t *testing.T, d *disk, epoch uint64, workers int, p process, listed ...string) (drain, crash func()) {
	t.Helper()
	d.mu.Lock()
	d.dead = false
	if epoch > 1 {
		d.given = d.seq
	}
	d.mu.Unlock()
	o := New(d, Config[string, int]{
		Queue: queue.Config[string, int]{Join: func(into *int, from int) { *into = max(*into, from) }}, Partitions: 1, Partition: func(string) int { return 0 }, Workers: workers,
		ExtendEvery: time.Minute, Failed: func(error) {},
	})
	require.NoError(t, o.Acquire(t.Context(), Term{Epoch: epoch, Orphaned: epoch > 1}))
	intake, stop := context.WithCancel(t.Context())
	work, kill := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { o.Run(intake, work, func() process { return p }) })
	for _, key := range listed {
		require.True(t, o.Add(key, 1, queue.Options{Class: queue.List}))
	}
	return func() { stop(); group.Wait(); kill() }, func() {
		d.mu.Lock()
		d.dead = true
		d.mu.Unlock()
		kill()
		stop()
		group.Wait()
	}
}

// A key that ends its process is found out: those that ran with it are not taken for it, and the fifth process knows.
func TestKeyThatEndsItsProcessIsToldApart(t *testing.T) {
	for name, publish := range map[string]func(d *disk){
		"a message": func(d *disk) { d.publish("poison", 1, queue.Options{}) },
		"a retry": func(d *disk) {
			d.states["poison"] = queue.State[string, int]{Key: "poison", Attempt: 1, Retry: true, Due: time.Now().UnixNano()}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDisk(0)
				publish(d)
				for i := range 6 {
					d.publish(fmt.Sprint("innocent", i), 1, queue.Options{})
				}
				var told []int // with each run of the poison
				for epoch := uint64(1); ; epoch++ {
					fatal, trials := make(chan struct{}), 0
					drain, crash := heir(t, d, epoch, 8, func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
						d.mu.Lock()
						if run.Crashes > 0 {
							trials++
						}
						alone := trials <= 1
						if run.Key == "poison" {
							told = append(told, run.Crashes)
						}
						d.mu.Unlock()
						require.True(t, alone, "a key that has crashed runs alone of its kind")
						switch {
						case run.Key == "poison" && run.Crashes == 3:
							d.mu.Lock()
							defer d.mu.Unlock()
							trials--
							return queue.Outcome[int]{Verdict: queue.Park, Err: "enough"}
						case run.Key == "poison":
							close(fatal)
							<-ctx.Done()
							return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
						}
						wait := time.Millisecond
						if epoch < 3 {
							wait = time.Hour // it is running when the process ends
						}
						select {
						case <-time.After(wait):
						case <-ctx.Done():
							return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
						}
						d.mu.Lock()
						defer d.mu.Unlock()
						if run.Crashes > 0 {
							trials--
						}
						return queue.Outcome[int]{}
					})
					time.Sleep(time.Minute)
					select {
					case <-fatal:
						crash()
						continue
					default:
					}
					drain()
					break
				}
				require.Equal(t, []int{0, 0, 1, 2, 3}, told)
				messages, states := d.left()
				require.Zero(t, messages)
				require.Equal(t, 1, states)
				require.True(t, d.states["poison"].Parked)
				require.Empty(t, d.crashes, "nobody is suspected any more")
			})
		})
	}
}

func TestMessageIsAckedAfterItsRunAndNotBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		d.publish("k", 1, queue.Options{})
		during := 0
		drain, _ := life(t, d, 1, func(context.Context, *Run[string, int]) queue.Outcome[int] {
			during, _ = d.left()
			return queue.Outcome[int]{}
		})
		time.Sleep(10 * time.Second)
		drain()
		require.Equal(t, 1, during)
		messages, states := d.left()
		require.Zero(t, messages)
		require.Zero(t, states)
	})
}

func TestDelayIsStoredBeforeTheAck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		d.publish("k", 1, queue.Options{})
		drain, _ := life(t, d, 1, func(context.Context, *Run[string, int]) queue.Outcome[int] {
			return queue.Outcome[int]{Verdict: queue.Retry, After: time.Hour, Value: 7}
		})
		time.Sleep(time.Minute)
		drain()
		messages, _ := d.left()
		require.Zero(t, messages, "a key in backoff holds no message")
		require.Equal(t, 1, d.states["k"].Attempt)
		require.Equal(t, 7, d.states["k"].Value)
	})
}

func TestNothingIsAckedThatCouldNotBeStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		d.publish("k", 1, queue.Options{})
		d.away = true
		_, crash := life(t, d, 1, func(context.Context, *Run[string, int]) queue.Outcome[int] {
			return queue.Outcome[int]{Verdict: queue.Retry, After: time.Hour}
		})
		time.Sleep(time.Minute)
		crash()
		messages, states := d.left()
		require.Equal(t, 1, messages)
		require.Zero(t, states)
	})
}

func TestSecondDeliveryOfWhatIsInHandIsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		d.publish("k", 1, queue.Options{})
		runs := 0
		drain, _ := life(t, d, 4, func(context.Context, *Run[string, int]) queue.Outcome[int] {
			runs++
			time.Sleep(time.Minute + time.Second/2) // sixty deliveries, none of them at the moment of the ack
			return queue.Outcome[int]{}
		})
		time.Sleep(5 * time.Minute)
		drain()
		require.Equal(t, 1, runs)
	})
}

func TestCrashDuringARunRepeatsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		d.states["k"] = queue.State[string, int]{Key: "k", Attempt: 3, Due: time.Now().UnixNano(), Retry: true, Value: 5}
		_, crash := life(t, d, 1, func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
			<-ctx.Done()
			return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
		})
		time.Sleep(time.Minute)
		crash()
		var got Run[string, int]
		drain, _ := life(t, d, 1, func(_ context.Context, run *Run[string, int]) queue.Outcome[int] {
			got = *run
			return queue.Outcome[int]{}
		})
		time.Sleep(time.Minute)
		drain()
		require.Equal(t, 3, got.Attempt)
		require.Equal(t, 5, got.Value)
		_, states := d.left()
		require.Zero(t, states)
	})
}

func TestRequestForLaterBecomesPartOfTheRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(0)
		at := time.Now().Add(time.Hour)
		d.publish("k", 1, queue.Options{Later: at.UnixNano()})
		drain, _ := life(t, d, 1, func(context.Context, *Run[string, int]) queue.Outcome[int] { return queue.Outcome[int]{} })
		time.Sleep(time.Minute)
		drain()
		messages, _ := d.left()
		require.Zero(t, messages)
		require.Equal(t, at.UnixNano(), d.states["k"].Later)
		var ran time.Time
		drain, _ = life(t, d, 1, func(context.Context, *Run[string, int]) queue.Outcome[int] {
			ran = time.Now()
			return queue.Outcome[int]{}
		})
		time.Sleep(2 * time.Hour)
		drain()
		require.Equal(t, at, ran.Add(0))
	})
}

// TestNothingIsLost publishes versions of keys while owners crash, brokers fail and acks are lost, and demands that
// the newest version of every key was seen at the end, and that no key ever ran twice at once.
func TestNothingIsLost(t *testing.T) {
	for seed := range uint64(300) {
		synctest.Test(t, func(t *testing.T) {
			d := newDisk(seed)
			d.flaky = true
			fates, rng := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
			published, seen, running := map[string]int{}, map[string]int{}, map[string]bool{}
			var mu sync.Mutex
			handle := func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
				mu.Lock()
				if running[run.Key] {
					t.Errorf("seed %d: %s runs twice at once", seed, run.Key)
				}
				running[run.Key] = true
				took, fate := time.Duration(fates.IntN(2000))*time.Millisecond, fates.IntN(4)
				mu.Unlock()
				defer func() { mu.Lock(); defer mu.Unlock(); running[run.Key] = false }()
				select {
				case <-time.After(took):
				case <-ctx.Done():
					return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
				}
				if fate == 0 {
					return queue.Outcome[int]{Verdict: queue.Retry, After: time.Second, Value: run.Value}
				}
				mu.Lock()
				seen[run.Key] = max(seen[run.Key], run.Value)
				mu.Unlock()
				if fate == 1 {
					return queue.Outcome[int]{Verdict: queue.Requeue, After: 2 * time.Second, Value: run.Value}
				}
				return queue.Outcome[int]{}
			}
			for range 3 {
				drain, crash := life(t, d, 2, handle)
				for range 10 {
					key := string(rune('a' + rng.IntN(4)))
					opts := queue.Options{}
					if rng.IntN(5) == 0 {
						opts.Later = time.Now().Add(3 * time.Second).UnixNano()
					}
					published[key]++
					d.publish(key, published[key], opts)
					time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond)
				}
				if rng.IntN(2) == 0 {
					crash()
				} else {
					drain()
				}
			}
			d.mu.Lock()
			d.flaky = false
			d.mu.Unlock()
			drain, _ := life(t, d, 2, handle)
			time.Sleep(time.Minute)
			drain()
			require.Equal(t, published, seen, "seed %d", seed)
		})
	}
}

// The broker does not know of the run of a key that ends its process when that was only listed, or has changed again.
func TestKeyThatEndsItsProcessIsFoundWithoutItsMessage(t *testing.T) {
	for name, again := range map[string]func(d *disk) (listed []string){
		"listed": func(*disk) []string { return []string{"poison", "innocent"} },
		"changed before each takeover": func(d *disk) []string {
			d.publish("poison", 1, queue.Options{})
			d.publish("innocent", 1, queue.Options{})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDisk(0)
				d.blind = true
				var told []int // with each run of the poison
				for epoch := uint64(1); !d.states["poison"].Parked; epoch++ {
					drain, crash := heir(t, d, epoch, 8, func(ctx context.Context, run *Run[string, int]) queue.Outcome[int] {
						if run.Key != "poison" {
							return queue.Outcome[int]{}
						}
						d.mu.Lock()
						told = append(told, run.Crashes)
						d.mu.Unlock()
						if run.Crashes == 3 {
							return queue.Outcome[int]{Verdict: queue.Park, Err: "enough"}
						}
						<-ctx.Done()
						return queue.Outcome[int]{Verdict: queue.Interrupt, Value: run.Value}
					}, again(d)...)
					time.Sleep(time.Minute)
					d.mu.Lock()
					found := slices.Contains(told, 3)
					d.mu.Unlock()
					if found || epoch == 10 {
						drain()
						break
					}
					crash()
				}
				require.Equal(t, []int{0, 0, 0, 1, 2, 3}, told)
				require.True(t, d.states["poison"].Parked)
				require.Empty(t, d.crashes, "nobody is suspected any more")
			})
		})
	}
}
