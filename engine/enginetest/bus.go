package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// BusFixture is a bus under test.
type BusFixture struct {
	Bus engine.Bus
	// Reopen returns the bus as the next process finds it; nil if it keeps nothing beyond its process.
	Reopen func(t *testing.T) engine.Bus
	// Migrate returns the bus with another number of partitions, to which it has brought a queue; nil if it has none.
	Migrate func(t *testing.T, controller string) engine.Bus
}

// TestBus checks the promises of a bus's queues. Each case gets a bus of its own.
func TestBus(t *testing.T, newBus func(t *testing.T) BusFixture) {
	t.Helper()
	check(t, newBus, []testCase[BusFixture]{
		{"a key that waits is run once, with all causes", "promise 1: a burst is one reconcile", waitingOnce},
		{"a key never runs twice at once", "promise 2: handlers rely on being alone with their key", neverTwice},
		{"a change during a run causes exactly one more", "promise 3: the run may have read before the change", onceMore},
		{"what is asked for during any run is run after it", "promise 4: nothing is lost", nothingLost},
		{"a requeue comes after its time, once", "promise 5: one delayed entry a key", requeued},
		{"an event runs a delayed key at once and replaces its requeue", "promise 5: any run supersedes a requeue", superseded},
		{"Retry-After is hard, but not for an operator", "promise 5: a server said not before", hardDelay},
		{"an enqueue for later outlives the runs before it", "promise 5: it was asked for from outside", enqueuedForLater},
		{"live requests overtake listed ones", "promise 6: a cold start does not delay changes", overtaking},
		{"attempts count up and success resets them", "promise 5: backoff grows", attempts},
		{"attempts, delays and parked keys outlive the process", "promise 7: a restart must not forget them", restarted},
		{"another number of partitions changes nothing that is kept", "an engine grows", migrated},
		{"at the end running reconciles finish, and nothing starts", "promise 8: a shutdown is no failure", drained},
		{"an interrupted run counts for nothing", "promise 8: it is done again elsewhere", interruptedRun},
		{"a failing key blocks no other", "promise 9", poison},
		{"a parked key stays until an operator or news brings it back", "promise 9", parkedKey},
		{"a dropped key is forgotten", "an operator settles it otherwise", dropped},
		{"a paused key waits and a deletion does not", "operators stop what runs amok", paused},
	})
}

// gate blocks the runs of one key until it is opened.
func gate(name string) (script func(ctx context.Context, req engine.Request) engine.Outcome, open func()) {
	wait := make(chan struct{})
	return func(_ context.Context, req engine.Request) engine.Outcome {
		if req.Key == keyOf(name) {
			<-wait
		}
		return engine.Outcome{}
	}, sync.OnceFunc(func() { close(wait) })
}

var errSuite = errors.New("failed, as the suite wants")

func waitingOnce(ctx context.Context, t *testing.T, f BusFixture) {
	script, open := gate("first")
	defer open()
	b := work(ctx, t, f.Bus, 1, script)
	b.live(ctx, "first")
	b.reaches("first", queue.Running)
	for range 5 {
		b.live(ctx, "k")
	}
	b.reaches("k", queue.Ready)
	quiet(100 * time.Millisecond) // a broker may deliver one after the other
	open()
	b.ranTimes("k", 1)
	b.idle("k")
	runs := b.runs("k")
	expect(t, "runs", len(runs), 1)
	if n := runs[0].Causes.Count(); n != 5 && runs[0].Causes.Complete() {
		t.Fatalf("%d causes, said to be complete", n)
	}
}

func neverTwice(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 4, func(context.Context, engine.Request) engine.Outcome {
		quiet(time.Millisecond)
		return engine.Outcome{}
	})
	for i := range 60 {
		b.live(ctx, strconv.Itoa(i%2))
	}
	b.idle("0")
	b.idle("1")
}

func onceMore(ctx context.Context, t *testing.T, f BusFixture) {
	script, open := gate("k")
	defer open()
	b := work(ctx, t, f.Bus, 2, script)
	b.live(ctx, "k")
	b.reaches("k", queue.Running)
	for range 3 {
		b.live(ctx, "k")
	}
	eventually(t, "it is known that the key is to run again", func() bool {
		it, _ := b.queue.Item(keyOf("k"))
		return it.Again
	})
	quiet(50 * time.Millisecond)
	open()
	b.idle("k")
	expect(t, "runs", len(b.runs("k")), 2)
}

func nothingLost(ctx context.Context, t *testing.T, f BusFixture) {
	var mu sync.Mutex
	asked, seen := make(map[engine.Key]int), make(map[engine.Key]int)
	b := work(ctx, t, f.Bus, 3, func(_ context.Context, req engine.Request) engine.Outcome {
		mu.Lock()
		seen[req.Key] = asked[req.Key]
		mu.Unlock()
		quiet(time.Millisecond)
		return engine.Outcome{}
	})
	const each = 30
	var asking errgroup.Group // all at once: some of what they ask for goes to the server together
	for i := range 40 {
		k := keyOf(strconv.Itoa(i))
		asking.Go(func() error {
			for range each {
				mu.Lock()
				asked[k]++
				mu.Unlock()
				for b.queue.Enqueue(ctx, requestFor(k)) != nil {
					if quiet(time.Millisecond); ctx.Err() != nil {
						return ctx.Err()
					}
				}
			}
			return nil
		})
	}
	if err := asking.Wait(); err != nil {
		t.Fatal(err)
	}
	for k := range asked {
		eventually(t, "a run of "+k.Name+" began after the last request", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return seen[k] == asked[k]
		})
	}
}

// after returns a script that answers the first run of each key with an outcome.
func after(first engine.Outcome) func(context.Context, engine.Request) engine.Outcome {
	var mu sync.Mutex
	ran := make(map[engine.Key]bool)
	return func(_ context.Context, req engine.Request) engine.Outcome {
		mu.Lock()
		defer mu.Unlock()
		if ran[req.Key] {
			return engine.Outcome{}
		}
		ran[req.Key] = true
		return first
	}
}

func requeued(ctx context.Context, t *testing.T, f BusFixture) {
	const d = 150 * time.Millisecond
	b := work(ctx, t, f.Bus, 1, after(engine.Outcome{Result: engine.Result{RequeueAfter: d}}))
	b.live(ctx, "k")
	b.ranTimes("k", 1)
	begin := time.Now()
	b.reaches("k", queue.Requeued)
	b.ranTimes("k", 2)
	if waited := time.Since(begin); waited < d/2 {
		t.Fatalf("it came after %s, want %s", waited, d)
	}
	b.idle("k")
	quiet(2 * d)
	expect(t, "runs", len(b.runs("k")), 2)
	expect(t, "trigger", b.runs("k")[1].Trigger(), engine.Requeued)
}

func superseded(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, after(engine.Outcome{Result: engine.Result{RequeueAfter: 300 * time.Millisecond}}))
	b.live(ctx, "k")
	b.reaches("k", queue.Requeued)
	b.live(ctx, "k")
	b.ranTimes("k", 2)
	b.idle("k")
	quiet(500 * time.Millisecond)
	expect(t, "runs", len(b.runs("k")), 2)
}

func hardDelay(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, after(engine.Outcome{Err: engine.RetryAfter(errSuite, time.Hour)}))
	b.live(ctx, "k")
	b.reaches("k", queue.Backoff)
	b.live(ctx, "k")
	quiet(200 * time.Millisecond)
	expect(t, "runs", len(b.runs("k")), 1)
	b.add(ctx, engine.Request{Key: keyOf("k"), Manual: true})
	b.ranTimes("k", 2)
	b.idle("k")
}

func enqueuedForLater(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, nil)
	due := time.Now().Add(400 * time.Millisecond)
	b.add(ctx, engine.Request{Key: keyOf("k"), Due: due})
	b.live(ctx, "k")
	b.ranTimes("k", 1)
	b.ranTimes("k", 2)
	if early := time.Until(due); early > 0 {
		t.Fatalf("it came %s early", early)
	}
	b.idle("k")
	expect(t, "runs", len(b.runs("k")), 2)
}

func overtaking(ctx context.Context, t *testing.T, f BusFixture) {
	script, open := gate("first")
	defer open()
	b := work(ctx, t, f.Bus, 1, script)
	b.live(ctx, "first")
	b.reaches("first", queue.Running)
	for i := range 10 {
		b.add(ctx, engine.Request{Key: keyOf(fmt.Sprint("listed", i)), Priority: engine.PriorityList})
	}
	b.live(ctx, "live")
	b.reaches("listed9", queue.Ready)
	b.reaches("live", queue.Ready)
	open()
	b.ranTimes("live", 1)
	b.idle("listed9")
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, r := range b.ran {
		if r.Key == keyOf("live") && i > 3 {
			t.Fatalf("the live request ran as number %d", i)
		}
	}
}

func attempts(ctx context.Context, t *testing.T, f BusFixture) {
	n := 0
	b := work(ctx, t, f.Bus, 1, func(context.Context, engine.Request) engine.Outcome {
		if n++; n <= 3 {
			return engine.Outcome{Err: errSuite}
		}
		return engine.Outcome{}
	})
	b.live(ctx, "k")
	b.ranTimes("k", 4)
	b.idle("k")
	b.live(ctx, "k")
	b.ranTimes("k", 5)
	for i, want := range []int{0, 1, 2, 3, 0} {
		expect(t, fmt.Sprintf("attempt of run %d", i), b.runs("k")[i].Attempt, want)
	}
}

func restarted(ctx context.Context, t *testing.T, f BusFixture) {
	if f.Reopen == nil {
		t.Skip("the bus keeps nothing beyond its process")
	}
	due := time.Hour
	b := work(ctx, t, f.Bus, 1, func(_ context.Context, req engine.Request) engine.Outcome {
		switch req.Key.Name {
		case "parked":
			return engine.Outcome{Err: engine.Terminal(errSuite)}
		case "failed":
			return engine.Outcome{Err: engine.RetryAfter(errSuite, 200*time.Millisecond)}
		default:
			return engine.Outcome{Result: engine.Result{RequeueAfter: due}}
		}
	})
	for _, name := range []string{"parked", "failed", "delayed"} {
		b.live(ctx, name)
	}
	b.reaches("parked", queue.Parked)
	b.reaches("failed", queue.Backoff)
	b.reaches("delayed", queue.Requeued)
	before, _ := b.queue.Item(keyOf("delayed"))
	b.stop()

	b = work(ctx, t, f.Reopen(t), 1, nil)
	b.ranTimes("failed", 1)
	expect(t, "attempt", b.runs("failed")[0].Attempt >= 1, true)
	b.reaches("parked", queue.Parked)
	after, _ := b.queue.Item(keyOf("delayed"))
	expect(t, "due", after.Due, before.Due)
	parked, _ := b.queue.Item(keyOf("parked"))
	expect(t, "error", parked.Err, errSuite.Error())
}

func migrated(ctx context.Context, t *testing.T, f BusFixture) {
	if f.Migrate == nil {
		t.Skip("the bus has no partitions")
	}
	b := work(ctx, t, f.Bus, 4, func(_ context.Context, req engine.Request) engine.Outcome {
		if strings.HasPrefix(req.Key.Name, "parked") {
			return engine.Outcome{Err: engine.Terminal(errSuite)}
		}
		return engine.Outcome{Result: engine.Result{RequeueAfter: time.Hour}}
	})
	const n = 20
	for i := range n {
		b.live(ctx, fmt.Sprint("parked", i))
		b.live(ctx, fmt.Sprint("delayed", i))
	}
	for i := range n {
		b.reaches(fmt.Sprint("parked", i), queue.Parked)
		b.reaches(fmt.Sprint("delayed", i), queue.Requeued)
	}
	b.stop()
	for i := range n {
		b.live(ctx, fmt.Sprint("pending", i))
		b.add(ctx, engine.Request{Key: keyOf(fmt.Sprint("later", i)), Due: time.Now().Add(time.Hour)})
	}
	b = work(ctx, t, f.Migrate(t, "suite"), 4, nil)
	for i := range n {
		b.ranTimes(fmt.Sprint("pending", i), 1)
		b.reaches(fmt.Sprint("parked", i), queue.Parked)
		b.reaches(fmt.Sprint("delayed", i), queue.Requeued)
		b.reaches(fmt.Sprint("later", i), queue.Requeued)
	}
	for i := range n {
		expect(t, "runs", len(b.runs(fmt.Sprint("pending", i))), 1)
		expect(t, "runs of what is parked", len(b.runs(fmt.Sprint("parked", i))), 0)
	}
	expect(t, "keys", len(b.queue.Items()), 3*n)
}

func drained(ctx context.Context, t *testing.T, f BusFixture) {
	script, open := gate("slow")
	defer open()
	b := work(ctx, t, f.Bus, 1, script)
	b.live(ctx, "slow")
	b.reaches("slow", queue.Running)
	b.live(ctx, "waiting")
	b.reaches("waiting", queue.Ready)
	go func() {
		quiet(100 * time.Millisecond)
		open()
	}()
	b.stop()
	expect(t, "runs of what waited", len(b.runs("waiting")), 0)
	expect(t, "runs of what ran", len(b.runs("slow")), 1)
}

func interruptedRun(ctx context.Context, t *testing.T, f BusFixture) {
	n := 0
	b := work(ctx, t, f.Bus, 1, func(context.Context, engine.Request) engine.Outcome {
		if n++; n == 1 {
			return engine.Outcome{Err: errSuite, Interrupted: true}
		}
		return engine.Outcome{}
	})
	b.live(ctx, "k")
	b.ranTimes("k", 2)
	expect(t, "attempt", b.runs("k")[1].Attempt, 0)
	b.idle("k")
}

func poison(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, func(_ context.Context, req engine.Request) engine.Outcome {
		if req.Key.Name == "poison" {
			return engine.Outcome{Err: engine.RetryAfter(errSuite, 10*time.Millisecond)}
		}
		return engine.Outcome{}
	})
	b.live(ctx, "poison")
	b.ranTimes("poison", 2)
	for i := range 20 {
		b.live(ctx, strconv.Itoa(i))
	}
	for i := range 20 {
		b.ranTimes(strconv.Itoa(i), 1)
	}
}

func parkedKey(ctx context.Context, t *testing.T, f BusFixture) {
	known := engine.Cause{Trigger: engine.Updated, Operation: engine.Put, Revision: "1", Time: time.Now()}
	listed := engine.Cause{Trigger: engine.Resynced, Operation: engine.Resync, Revision: "1", Time: time.Now()}
	b := work(ctx, t, f.Bus, 1, func(_ context.Context, req engine.Request) engine.Outcome {
		return engine.Outcome{Err: engine.Terminal(errSuite)}
	})
	b.add(ctx, engine.Request{Key: keyOf("k"), Causes: engine.CausesOf(known)})
	b.reaches("k", queue.Parked)
	b.add(ctx, engine.Request{Key: keyOf("k"), Priority: engine.PriorityList, Causes: engine.CausesOf(listed)})
	quiet(100 * time.Millisecond)
	expect(t, "runs after it was listed unchanged", len(b.runs("k")), 1)
	b.add(ctx, engine.Request{Key: keyOf("k"), Manual: true, Causes: engine.CausesOf(engine.Cause{Trigger: engine.Manual, Time: time.Now()})})
	b.ranTimes("k", 2)
	b.reaches("k", queue.Parked)
	known.Revision = "2"
	b.add(ctx, engine.Request{Key: keyOf("k"), Causes: engine.CausesOf(known)})
	b.ranTimes("k", 3)
	for _, r := range b.runs("k") {
		expect(t, "attempt", r.Attempt, 0)
	}
}

func dropped(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, after(engine.Outcome{Err: engine.Terminal(errSuite)}))
	b.live(ctx, "k")
	b.reaches("k", queue.Parked)
	if err := b.queue.Drop(ctx, keyOf("k")); err != nil {
		t.Fatal(err)
	}
	b.idle("k")
	b.live(ctx, "k")
	b.ranTimes("k", 2)
}

func paused(ctx context.Context, t *testing.T, f BusFixture) {
	b := work(ctx, t, f.Bus, 1, nil)
	k := keyOf("k")
	b.queue.Pause(&k, &queue.Pause{})
	b.live(ctx, "k")
	b.live(ctx, "other")
	b.ranTimes("other", 1)
	b.reaches("k", queue.Paused)
	b.queue.Pause(&k, nil)
	b.ranTimes("k", 1)
	b.idle("k")
	b.queue.Pause(nil, &queue.Pause{})
	b.live(ctx, "k")
	b.reaches("k", queue.Paused)
	b.add(ctx, engine.Request{Key: k, Deletion: true})
	b.ranTimes("k", 2)
	b.queue.Pause(nil, nil)
}
