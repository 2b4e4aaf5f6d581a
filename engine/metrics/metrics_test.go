package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/metrics"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestWhatHappensIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewPedanticRegistry()
		m := metrics.New(registry)
		things := memory.New[int]("things")
		c := engine.NewController("c").For(things).WithConcurrency(3).WithTimeout(time.Second).WithBackoff(engine.Backoff{Initial: time.Hour, Max: time.Hour}).
			WithHandler(func(ctx context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
				switch req.Key.Name {
				case "fails":
					return engine.Result{}, errors.New("broken")
				case "panics":
					panic("oh")
				case "parks":
					return engine.Result{}, engine.Terminal(errors.New("broken"))
				case "slow":
					<-ctx.Done()
					return engine.Result{}, ctx.Err()
				case "later":
					return engine.Result{RequeueAfter: time.Hour}, nil
				}
				return engine.Result{}, nil
			})
		e, err := engine.New(engine.Config{Controllers: []engine.Controller{c}, Hooks: m.Hooks()})
		require.NoError(t, err)
		m.Observe(e)
		require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP controller_runtime_reconcile_errors_total Reconciles that failed.
# TYPE controller_runtime_reconcile_errors_total counter
controller_runtime_reconcile_errors_total{controller="c"} 0
`), "controller_runtime_reconcile_errors_total"), "series are there before anything happens")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		synctest.Wait()
		for _, name := range []string{"fails", "panics", "parks", "slow", "later", "fine"} {
			things.Set(name, 1)
		}
		synctest.Wait()
		require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP controller_runtime_active_workers Reconciles that run.
# TYPE controller_runtime_active_workers gauge
controller_runtime_active_workers{controller="c"} 1
# HELP controller_runtime_max_concurrent_reconciles Reconciles that may run at once.
# TYPE controller_runtime_max_concurrent_reconciles gauge
controller_runtime_max_concurrent_reconciles{controller="c"} 3
`), "controller_runtime_active_workers", "controller_runtime_max_concurrent_reconciles"))
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP controller_runtime_reconcile_total Reconciles, by result.
# TYPE controller_runtime_reconcile_total counter
controller_runtime_reconcile_total{controller="c",result="error"} 4
controller_runtime_reconcile_total{controller="c",result="requeue"} 0
controller_runtime_reconcile_total{controller="c",result="requeue_after"} 1
controller_runtime_reconcile_total{controller="c",result="success"} 1
# HELP controller_runtime_reconcile_panics_total Reconciles that panicked.
# TYPE controller_runtime_reconcile_panics_total counter
controller_runtime_reconcile_panics_total{controller="c"} 1
# HELP controller_runtime_reconcile_timeouts_total Reconciles that exceeded their deadline.
# TYPE controller_runtime_reconcile_timeouts_total counter
controller_runtime_reconcile_timeouts_total{controller="c"} 1
# HELP controller_runtime_terminal_reconcile_errors_total Reconciles that failed for good.
# TYPE controller_runtime_terminal_reconcile_errors_total counter
controller_runtime_terminal_reconcile_errors_total{controller="c"} 1
# HELP windlass_items Keys that are not idle, by state.
# TYPE windlass_items gauge
windlass_items{controller="c",state="delayed"} 4
windlass_items{controller="c",state="parked"} 1
windlass_items{controller="c",state="ready"} 0
windlass_items{controller="c",state="running"} 0
# HELP workqueue_adds_total Requests added to the queue, merged ones included.
# TYPE workqueue_adds_total counter
workqueue_adds_total{controller="c",name="c"} 6
# HELP workqueue_retries_total Failed requests that are tried again.
# TYPE workqueue_retries_total counter
workqueue_retries_total{controller="c",name="c"} 3
# HELP windlass_source_synced Whether the source has ended its first list and runs.
# TYPE windlass_source_synced gauge
windlass_source_synced{source="things"} 1
`), "controller_runtime_reconcile_total", "controller_runtime_reconcile_panics_total", "controller_runtime_reconcile_timeouts_total",
			"controller_runtime_terminal_reconcile_errors_total", "windlass_items", "workqueue_adds_total", "workqueue_retries_total", "windlass_source_synced"))
		problems, err := testutil.GatherAndLint(registry)
		require.NoError(t, err)
		for _, p := range problems {
			require.NotContains(t, p.Metric, "windlass_", p.Text)
		}
		cancel()
		require.NoError(t, <-done)
	})
}

// crowd is a bus that says who shares it.
type crowd struct {
	engine.Bus
	err error
}

func (c *crowd) Status() error { return c.err }

func (c *crowd) Replicas() ([]engine.Member, []engine.Partition) {
	return []engine.Member{{ID: "a", Self: true, Controllers: []string{"c", "idle"}}, {ID: "b", Controllers: []string{"c"}}}, []engine.Partition{
		{Controller: "c", Number: 0, Owner: "a"}, {Controller: "c", Number: 1, Owner: "b"}, {Controller: "c", Number: 2, Owner: "a"},
	}
}

func (c *crowd) PartitionOf(engine.Key) int { return 0 }

func (c *crowd) Ask(context.Context, string, []byte) ([]byte, error) {
	return nil, errors.New("nobody is there")
}

func (c *crowd) Answer(context.Context, func(context.Context, []byte) []byte) error { return nil }

func TestSharedBusIsTold(t *testing.T) {
	bus := &crowd{Bus: engine.NewMemoryBus()}
	e, err := engine.New(engine.Config{Name: "e", Bus: bus, Controllers: []engine.Controller{
		engine.NewController("c").For(memory.New[int]("things")).WithHandler(func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, nil
		}),
	}})
	require.NoError(t, err)
	watched := prometheus.NewPedanticRegistry()
	metrics.New(watched).Observe(e)
	want := func(up int) string {
		return fmt.Sprintf(`
# HELP windlass_bus_up Whether the bus answers and this replica may work. Absent where the bus is in memory.
# TYPE windlass_bus_up gauge
windlass_bus_up %d
# HELP windlass_members Replicas of the engine, this one included. Absent where the bus is not shared.
# TYPE windlass_members gauge
windlass_members 2
# HELP windlass_owned_partitions Partitions of the controller that this replica works on.
# TYPE windlass_owned_partitions gauge
windlass_owned_partitions{controller="c"} 2
windlass_owned_partitions{controller="idle"} 0
`, up)
	}
	names := []string{"windlass_bus_up", "windlass_members", "windlass_owned_partitions"}
	require.NoError(t, testutil.GatherAndCompare(watched, strings.NewReader(want(1)), names...))
	bus.err = errors.New("away")
	require.NoError(t, testutil.GatherAndCompare(watched, strings.NewReader(want(0)), names...))
}
