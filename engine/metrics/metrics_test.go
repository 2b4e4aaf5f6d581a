package metrics_test

import (
	"context"
	"errors"
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
