package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
)

const (
	helperDir  = "WINDLASS_TEST_HELPER_DIR"
	helperPort = "WINDLASS_TEST_HELPER_PORT"

	requeueAfter = 10 * time.Second
	firstWait    = 2 * time.Second // then 4, 8
	failures     = 3
)

// helperRun is a line that the helper prints for each run that starts.
type helperRun struct {
	Key     string
	Attempt int
	Trigger string
	At      time.Time
}

// helper is an engine in a process of its own, to be killed.
func helper() int {
	if err := runHelper(context.Background(), os.Getenv(helperDir), os.Getenv(helperPort)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runHelper(ctx context.Context, dir, port string) error {
	server, err := nats.StartServer(nats.ServerConfig{DataDir: dir, Listen: "127.0.0.1:" + port})
	if err != nil {
		return err
	}
	conn, err := server.Connect(ctx, "")
	if err != nil {
		return err
	}
	bus, err := nats.NewBus(ctx, conn, nats.BusConfig{Engine: "kill", SoleServer: true})
	if err != nil {
		return err
	}
	orders, err := nats.NewBucket(ctx, conn, nats.BucketConfig{Bucket: "orders", Create: true})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	say := func(req engine.Request) {
		mu.Lock()
		defer mu.Unlock()
		line, err := json.Marshal(helperRun{req.Key.Name, req.Attempt, req.Trigger().String(), time.Now()})
		if err == nil {
			fmt.Println(string(line))
		}
	}
	c := engine.NewController("c").For(orders).WithConcurrency(4).WithBackoff(engine.Backoff{Initial: firstWait}).
		WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			say(req)
			switch kind, _, _ := strings.Cut(req.Key.Name, "-"); {
			case kind == "slow":
				time.Sleep(300 * time.Millisecond)
			case kind == "later" && req.Trigger() != engine.Requeued:
				return engine.Result{RequeueAfter: requeueAfter}, nil
			case kind == "failing" && req.Attempt < failures:
				return engine.Result{}, errors.New("not yet")
			}
			return engine.Result{}, nil
		})
	e, err := engine.New(engine.Config{Name: "kill", Bus: bus, Controllers: []engine.Controller{c}})
	if err != nil {
		return err
	}
	return e.Run(ctx)
}

// runsOf reads what a helper printed.
func runsOf(t *testing.T, p *process) map[string][]helperRun {
	t.Helper()
	runs := map[string][]helperRun{}
	for line := range strings.SplitSeq(p.output(), "\n") {
		var r helperRun
		if json.Unmarshal([]byte(line), &r) == nil {
			runs[r.Key] = append(runs[r.Key], r)
		}
	}
	return runs
}

// requireAt demands that a run started at its time: not before, and not long after, on a machine that may be busy.
func requireAt(t *testing.T, due, at time.Time, key string) {
	t.Helper()
	late := at.Sub(due)
	require.Greater(t, late, -20*time.Millisecond, "%s runs before its time", key)
	require.Less(t, late, 5*time.Second, "%s runs long after its time", key)
	t.Logf("%s ran %s after its time", key, late)
}

// TestKilledEngineLosesNothing kills an engine while requests are pending, delayed and failing. A second process on the
// same directory finishes every one of them, at its time and with its attempt number.
func TestKilledEngineLosesNothing(t *testing.T) {
	const slow, other = 60, 5
	dir, port := t.TempDir(), freePort(t)
	env := []string{helperDir + "=" + dir, fmt.Sprintf("%s=%d", helperPort, port)}
	first := start(t, ".", env, os.Args[0])
	orders := bucket(t, client(t, port), "orders")
	eachKey := func(f func(kind, key string)) {
		for i := range other {
			for _, kind := range []string{"later", "failing"} {
				f(kind, fmt.Sprintf("%s-%d", kind, i))
			}
		}
	}
	eachKey(func(_, key string) { put(t, orders, key, "1") })
	eventually(t, "all wait for their time, the failing ones for the second time", func() bool {
		runs, ready := runsOf(t, first), true
		eachKey(func(kind, key string) {
			ready = ready && len(runs[key]) >= map[string]int{"later": 1, "failing": 2}[kind]
		})
		return ready
	})
	for i := range slow {
		put(t, orders, fmt.Sprintf("slow-%d", i), "1")
	}
	eventually(t, "some of the slow ones ran", func() bool { return len(runsOf(t, first)["slow-3"]) > 0 })
	first.signal(syscall.SIGKILL)
	first.wait()
	before := runsOf(t, first)
	pending := 0
	for i := range slow {
		if len(before[fmt.Sprintf("slow-%d", i)]) == 0 {
			pending++
		}
	}
	require.Greater(t, pending, slow/2, "most are pending")

	second := start(t, ".", env, os.Args[0])
	last := func(key string) (helperRun, bool) {
		runs := runsOf(t, second)[key]
		if len(runs) == 0 {
			return helperRun{}, false
		}
		return runs[len(runs)-1], true
	}
	for i := range slow {
		key := fmt.Sprintf("slow-%d", i)
		eventually(t, key, func() bool { _, ok := last(key); return ok || len(before[key]) > 0 })
	}
	eachKey(func(kind, key string) {
		if kind == "later" {
			eventually(t, key, func() bool { r, ok := last(key); return ok && r.Trigger == "requeue" })
			r, _ := last(key)
			due := before[key][0].At.Add(requeueAfter)
			requireAt(t, due, r.At, key)
			require.Len(t, runsOf(t, second)[key], 1, "and once")
			return
		}
		eventually(t, key, func() bool { r, ok := last(key); return ok && r.Attempt == failures })
		runs := runsOf(t, second)[key]
		was := before[key][len(before[key])-1]
		require.Contains(t, []int{was.Attempt, was.Attempt + 1}, runs[0].Attempt, "%s goes on with its attempt number", key)
		if runs[0].Attempt == was.Attempt+1 {
			due := was.At.Add(firstWait << was.Attempt)
			requireAt(t, due, runs[0].At, key)
		}
		for i := 1; i < len(runs); i++ {
			require.Equal(t, runs[i-1].Attempt+1, runs[i].Attempt, "%s: no attempt is skipped or repeated", key)
		}
	})
}
