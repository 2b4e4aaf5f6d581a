package enginetest

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/queue"
)

// ReplicasFixture is a bus that several replicas of an engine share.
type ReplicasFixture struct {
	// Open returns the bus as one more replica has it, over a link of its own.
	Open func(t *testing.T) ReplicaFixture
	// Restart stops the broker and starts it again.
	Restart func(t *testing.T)
	// TTL is how long the others believe that a silent replica lives.
	TTL time.Duration
}

// ReplicaFixture is one replica's side of a bus.
type ReplicaFixture struct {
	Bus engine.Bus
	// Sever cuts the link or mends it.
	Sever func(cut bool)
	// Close ends the replica's membership and its link.
	Close func()
}

var chaosSeed = flag.Uint64("chaos", 0, "the seed of TestReplicas; 0 is a new one each time")

// TestReplicas checks what a bus promises to replicas that join, leave, crash, are cut off and go on as if nothing had
// happened, while their broker is restarted: no key runs twice at once in those that may run it, fences never go back, and
// every request leads to a run that begins after it.
func TestReplicas(t *testing.T, newBus func(t *testing.T) ReplicasFixture) {
	t.Helper()
	check(t, newBus, []testCase[ReplicasFixture]{
		{"a leaving replica waits for its runs and hands over the rest", "a rolling update loses nothing", leaving},
		{"what a dead replica left goes on elsewhere, with its attempts and its time", "a crash loses nothing", dying},
		{"a key that ends its process is parked by the one that knows", "it must not take all replicas with it, one by one", deadly},
		{"any replica can be asked about any key", "an operator does not know which one works on it", asking},
		{"chaos", "nothing of it is as rare as it seems", chaos},
	})
}

// crew are replicas at work, and what they did.
type crew struct {
	t    *testing.T
	f    ReplicasFixture
	rng  *rand.Rand
	all  []*hand
	next int

	mu      sync.Mutex
	asked   map[string]int // by key: how many requests were accepted
	seen    map[string]int // by key: how many a run that ended well has seen
	running map[string]context.Context
	fences  map[string]uint64
	ran     map[string][]ran
	script  func(ctx context.Context, replica int, req engine.Request) engine.Outcome
}

// ran is a run.
type ran struct {
	replica int
	at      time.Time
	req     engine.Request
}

func (r ran) String() string {
	return fmt.Sprintf("in replica %d at %s with fence %d because %s", r.replica, r.at.Format("05.000"), r.req.Fence, r.req.Trigger())
}

// hand is one replica.
type hand struct {
	ReplicaFixture

	id    int
	queue engine.Queue
	stop  context.CancelFunc
	kill  context.CancelFunc
	done  chan error
}

func newCrew(t *testing.T, f ReplicasFixture) *crew {
	t.Helper()
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64() //nolint:gosec // it is told.
	}
	t.Logf("seed: -args -chaos %d", seed)
	c := &crew{
		t: t, f: f, rng: rand.New(rand.NewPCG(seed, 0)), //nolint:gosec // faults are no secret.
		asked: map[string]int{}, seen: map[string]int{}, running: map[string]context.Context{}, fences: map[string]uint64{}, ran: map[string][]ran{},
	}
	t.Cleanup(func() {
		for len(c.all) > 0 {
			c.all[0].Sever(false)
			c.all[0].kill() // or a run that waits for its end would be waited for
			c.leave(0)
		}
	})
	return c
}

// join starts one more replica.
func (c *crew) join() {
	c.t.Helper()
	h := &hand{ReplicaFixture: c.f.Open(c.t), id: c.next, done: make(chan error, 1)}
	c.next++
	intake, stop := context.WithCancel(context.WithoutCancel(c.t.Context()))
	work, kill := context.WithCancel(context.WithoutCancel(c.t.Context()))
	h.stop, h.kill = stop, kill
	q, err := h.Bus.Queue(intake, engine.QueueConfig{Engine: "suite", Controller: "suite", Workers: 4})
	if err != nil {
		c.t.Fatal(err)
	}
	h.queue = q
	go func() {
		h.done <- q.Run(intake, work, func() engine.Process {
			return func(ctx context.Context, req engine.Request) engine.Outcome { return c.process(ctx, h.id, req) }
		})
	}()
	c.all = append(c.all, h)
}

// leave stops a replica in good order.
func (c *crew) leave(i int) {
	c.t.Helper()
	h := c.all[i]
	c.all = append(c.all[:i], c.all[i+1:]...)
	h.stop()
	if err := <-h.done; err != nil {
		c.t.Error(err)
	}
	h.kill()
	h.Close()
}

// crash ends a replica that can tell nobody.
func (c *crew) crash(i int) {
	c.t.Helper()
	c.all[i].Sever(true)
	c.all[i].kill()
	c.leave(i)
}

func (c *crew) process(ctx context.Context, replica int, req engine.Request) engine.Outcome {
	key := req.Key.Name
	c.mu.Lock()
	if other := c.running[key]; other != nil && other.Err() == nil {
		c.t.Errorf("%s runs twice at once, in replica %d as well", key, replica)
	}
	if req.Fence < c.fences[key] && ctx.Err() == nil {
		c.t.Errorf("%s ran with fence %d after %d", key, req.Fence, c.fences[key])
	}
	c.running[key] = ctx //nolint:fatcontext // of a run; nothing is made of it.
	c.fences[key] = max(req.Fence, c.fences[key])
	asked, script := c.asked[key], c.script
	c.ran[key] = append(c.ran[key], ran{replica, time.Now(), req})
	c.mu.Unlock()
	out := script(ctx, replica, req)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running[key] == ctx {
		delete(c.running, key)
	}
	if ctx.Err() != nil {
		return engine.Outcome{Err: ctx.Err(), Interrupted: true}
	}
	if out.Err == nil {
		c.seen[key] = max(c.seen[key], asked)
	}
	return out
}

// ask adds a request by a replica, until one accepts it.
func (c *crew) ask(key string, req engine.Request) {
	c.t.Helper()
	req.Controller, req.Key = "suite", keyOf(key)
	req.Causes = engine.CausesOf(engine.Cause{Trigger: engine.Updated, Operation: engine.Put, Time: time.Now()})
	eventually(c.t, "a request for "+key+" is accepted", func() bool {
		c.mu.Lock()
		c.asked[key]++ // before: a run may see it at once
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
		defer cancel()
		return c.all[c.rng.IntN(len(c.all))].queue.Enqueue(ctx, req) == nil
	})
}

func (c *crew) runs(key string) []ran {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]ran(nil), c.ran[key]...)
}

// settled waits until all that was asked for was seen.
func (c *crew) settled() {
	c.t.Helper()
	eventually(c.t, "every request has led to a run that began after it", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for key, n := range c.asked {
			if c.seen[key] < n {
				return false
			}
		}
		return true
	})
}

func leaving(_ context.Context, t *testing.T, f ReplicasFixture) {
	c := newCrew(t, f)
	gate := make(chan struct{})
	c.script = func(context.Context, int, engine.Request) engine.Outcome {
		<-gate
		return engine.Outcome{}
	}
	c.join()
	for i := range 20 {
		c.ask(strconv.Itoa(i), engine.Request{})
		c.ask("listed"+strconv.Itoa(i), engine.Request{Priority: engine.PriorityList})
	}
	eventually(t, "all workers of the first are busy", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.running) == 4
	})
	c.join()
	left := make(chan struct{})
	go func() {
		defer close(left)
		c.leave(0)
	}()
	quiet(50 * time.Millisecond)
	close(gate)
	<-left
	c.settled()
	for i := range 20 {
		if runs := c.runs(strconv.Itoa(i)); len(runs) != 1 {
			t.Errorf("%d ran %d times: %v", i, len(runs), runs)
		}
	}
}

func dying(_ context.Context, t *testing.T, f ReplicasFixture) {
	c := newCrew(t, f)
	const later = 2 * time.Second
	c.script = func(ctx context.Context, replica int, req engine.Request) engine.Outcome {
		switch {
		case req.Key.Name == "failing" && req.Attempt < 2:
			return engine.Outcome{Err: engine.RetryAfter(errSuite, 10*time.Millisecond)}
		case req.Key.Name == "failing" && req.Attempt == 2:
			return engine.Outcome{Err: engine.RetryAfter(errSuite, later)}
		case req.Key.Name == "stuck" && replica == 0:
			<-ctx.Done()
		}
		return engine.Outcome{}
	}
	c.join()
	for _, key := range []string{"failing", "stuck"} {
		c.ask(key, engine.Request{})
	}
	eventually(t, "the first replica has work that it will not end", func() bool {
		it, ok := c.all[0].queue.Item(keyOf("failing"))
		return len(c.runs("stuck")) == 1 && ok && it.Attempt == 3
	})
	it, _ := c.all[0].queue.Item(keyOf("failing"))
	c.join()
	c.crash(0)
	c.settled()
	last := c.runs("failing")[len(c.runs("failing"))-1]
	expect(t, "attempt", last.req.Attempt, 3)
	expect(t, "trigger", last.req.Trigger(), engine.Retried)
	expect(t, "early", time.Now().UnixNano() < it.Due, false)
	expect(t, "replica", last.replica, 1)
}

func deadly(_ context.Context, t *testing.T, f ReplicasFixture) {
	c := newCrew(t, f)
	c.script = func(ctx context.Context, _ int, req engine.Request) engine.Outcome {
		switch {
		case req.Key.Name == "deadly" && req.Crashes >= 3:
			return engine.Outcome{Err: engine.Terminal(errSuite)}
		case req.Key.Name == "deadly":
			<-ctx.Done()
		}
		return engine.Outcome{}
	}
	c.join()
	parked := func() bool {
		it, ok := c.all[0].queue.Item(keyOf("deadly"))
		return ok && it.Phase == queue.Parked
	}
	c.ask("deadly", engine.Request{})
	for deaths := 0; ; deaths++ {
		eventually(t, "the key runs in the only replica, or is parked", func() bool {
			runs := c.runs("deadly")
			if len(runs) == 0 || parked() {
				return parked()
			}
			last := runs[len(runs)-1]
			return last.replica == c.all[0].id && last.req.Crashes < 3
		})
		if parked() {
			break
		}
		if deaths == 4 {
			t.Fatalf("four replicas have died of it, and the fifth runs it: %v", c.runs("deadly"))
		}
		c.join()
		c.crash(0)
	}
	c.ask("other", engine.Request{})
	eventually(t, "others run", func() bool { return len(c.runs("other")) == 1 })
}

// fixed is a source of a list that never changes.
type fixed []string

func (l *fixed) Name() string { return "fixed" }

func (l *fixed) Run(ctx context.Context, emit engine.Emit) error {
	events := []engine.Event{{Operation: engine.ListStarted}}
	for _, name := range *l {
		events = append(events, engine.Event{Operation: engine.Resync, Key: keyOf(name), Revision: "1"})
	}
	for _, e := range append(events, engine.Event{Operation: engine.ListEnded}) {
		if err := emit(ctx, e); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

func asking(ctx context.Context, t *testing.T, f ReplicasFixture) {
	var names fixed
	for i := range 20 {
		names = append(names, strconv.Itoa(i))
	}
	var engines []*engine.Engine
	for range 2 {
		r := f.Open(t)
		e, err := engine.New(engine.Config{Name: "suite", Bus: r.Bus, Controllers: []engine.Controller{
			engine.NewController("suite").For(&names).WithHandler(func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
				return engine.Result{}, engine.Terminal(errSuite)
			}),
		}})
		if err != nil {
			t.Fatal(err)
		}
		run, stop := context.WithCancel(context.WithoutCancel(ctx))
		done := make(chan error, 1)
		go func() { done <- e.Run(run) }()
		t.Cleanup(func() {
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
			r.Close()
		})
		engines = append(engines, e)
	}
	for _, e := range engines {
		eventually(t, "both work", func() bool {
			members, partitions := e.Replicas()
			owned, self := 0, 0
			for _, m := range members {
				if m.Partitions > 0 {
					owned++
				}
				if m.Self {
					self++
				}
			}
			return len(members) == 2 && owned == 2 && self == 1 && len(partitions) == 8
		})
	}
	for _, e := range engines {
		eventually(t, "all keys are known to be parked", func() bool {
			items, total, err := e.ItemsAnywhere(ctx, "suite", 100)
			return err == nil && total == len(names) && len(items) == len(names) && items[0].State == "parked"
		})
		items, total, err := e.ItemsAnywhere(ctx, "suite", 3)
		expect(t, "error", err, nil)
		expect(t, "items of three a replica", len(items) <= 6 && total == len(names), true)
		local, err := e.Items("suite")
		expect(t, "error", err, nil)
		expect(t, "some are the other's", len(local) > 0 && len(local) < len(names), true)
		for i, name := range names {
			x, err := e.ExplainAnywhere(ctx, "suite", keyOf(name))
			if err != nil || x.State != "parked" || x.Error != errSuite.Error() || x.Key != keyOf(name) {
				t.Fatalf("%s: %+v, %v", name, x, err)
			}
			token := fmt.Sprint("token", i)
			run, err := e.Reconcile(ctx, "suite", keyOf(name), token)
			if err != nil || run.Outcome != "parked" || run.Key != keyOf(name) {
				t.Fatalf("%s: %+v, %v", name, run, err)
			}
			x, err = e.ExplainAnywhere(ctx, "suite", keyOf(name))
			if err != nil || len(x.Runs) == 0 || x.Runs[0].Causes[len(x.Runs[0].Causes)-1].Token != token {
				t.Fatalf("%s: the run with %s is not told: %+v, %v", name, token, x.Runs, err)
			}
		}
	}
	if _, err := engines[0].ExplainAnywhere(ctx, "other", keyOf("0")); err == nil {
		t.Fatal("a controller that does not exist is explained")
	}
}

func chaos(_ context.Context, t *testing.T, f ReplicasFixture) {
	c := newCrew(t, f)
	var luck sync.Mutex
	fails := rand.New(rand.NewPCG(c.rng.Uint64(), 1)) //nolint:gosec // faults are no secret.
	c.script = func(ctx context.Context, _ int, _ engine.Request) engine.Outcome {
		luck.Lock()
		wait, fail := time.Duration(fails.Int64N(int64(20*time.Millisecond))), fails.IntN(10) == 0
		luck.Unlock()
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		if fail {
			return engine.Outcome{Err: engine.RetryAfter(errSuite, 50*time.Millisecond)}
		}
		return engine.Outcome{}
	}
	c.join()
	c.join()
	for step := range 8 {
		i := c.rng.IntN(len(c.all))
		what := c.rng.IntN(5)
		t.Log("step", step, []string{"join", "leave", "crash", "cut off", "restart"}[what])
		switch {
		case what == 0 && len(c.all) < 3:
			c.join()
		case what == 1 && len(c.all) > 1:
			c.leave(i)
		case what == 2 && len(c.all) > 1:
			c.crash(i)
		case what == 3 && len(c.all) > 1:
			c.all[i].Sever(true)
			quiet(f.TTL + time.Second)
			c.all[i].Sever(false)
		case what == 4:
			f.Restart(t)
		}
		for range 60 {
			c.ask(fmt.Sprint("k", c.rng.IntN(25)), engine.Request{Priority: engine.Priority(c.rng.IntN(2))}) //nolint:gosec // live or dependency.
			quiet(time.Duration(c.rng.Int64N(int64(2 * time.Millisecond))))
		}
	}
	c.settled()
}
