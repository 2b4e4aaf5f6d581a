//go:build e2e

package k8s_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/sources/memory"
)

func (c *cluster) leases() *k8s.Leases {
	c.t.Helper()
	l, err := k8s.NewLeases(c.conn, c.namespace)
	require.NoError(c.t, err)
	return l
}

func TestLease(t *testing.T) {
	enginetest.TestLease(t, time.Second, func(t *testing.T) lease.Store { return newCluster(t).leases() })
}

func TestAnEpochOutlivesItsObject(t *testing.T) {
	c := newCluster(t)
	l := c.leases()
	_, first, err := l.Acquire(t.Context(), "x", "a", time.Second)
	require.NoError(t, err)
	list, err := c.kube.CoordinationV1().Leases(c.namespace).List(t.Context(), listAll)
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	require.NoError(t, c.kube.CoordinationV1().Leases(c.namespace).Delete(t.Context(), list.Items[0].Name, deleteNow))
	held, second, err := l.Acquire(t.Context(), "x", "b", time.Second)
	require.NoError(t, err)
	require.True(t, held)
	require.Greater(t, second, first)
}

// TestASingletonMovesWithinItsLease stops one of two engines without a farewell, as a crash does, by taking its API away.
func TestASingletonMovesWithinItsLease(t *testing.T) {
	c := newCluster(t)
	const ttl = 2 * time.Second
	var at [2]atomic.Int64
	engineOf := func(i int, leases lease.Store) (stop func()) {
		apps := memory.New[string]("apps")
		apps.Set("a", "1")
		e, err := engine.New(engine.Config{Leases: leases, Replica: string(rune('a' + i)), Controllers: []engine.Controller{
			engine.NewController("one").For(apps).WithPlacement(engine.Singleton).
				WithHandler(func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
					at[i].Store(time.Now().UnixNano())
					return engine.Result{RequeueAfter: 20 * time.Millisecond}, nil
				}),
		}})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		stopped := false
		stop = func() {
			if !stopped {
				stopped = true
				cancel()
				require.NoError(t, <-done)
			}
		}
		t.Cleanup(stop)
		return stop
	}
	broken := &cutLeases{Leases: c.leases(), ttl: ttl}
	engineOf(0, broken)
	eventually(t, "the first works", func() bool { return at[0].Load() != 0 })
	engineOf(1, &cutLeases{Leases: c.leases(), ttl: ttl})
	broken.cut.Store(true)
	eventually(t, "the second works", func() bool { return at[1].Load() != 0 })
	last := at[0].Load()
	require.Less(t, last, at[1].Load(), "the first stopped before the second began")
	broken.cut.Store(false)
	eventually(t, "the second goes on", func() bool { return at[1].Load() > time.Now().Add(-50*time.Millisecond).UnixNano() })
	require.Equal(t, last, at[0].Load())
}

// cutLeases are out of reach at will.
type cutLeases struct {
	*k8s.Leases

	ttl time.Duration
	cut atomic.Bool
}

func (l *cutLeases) TTL() time.Duration { return l.ttl }

func (l *cutLeases) Acquire(ctx context.Context, name, holder string, ttl time.Duration) (bool, uint64, error) {
	if l.cut.Load() {
		<-ctx.Done()
		return false, 0, context.Cause(ctx)
	}
	return l.Leases.Acquire(ctx, name, holder, ttl)
}

func TestStore(t *testing.T) {
	enginetest.TestStore(t, func(t *testing.T) kv.Store {
		c := newCluster(t)
		s, err := k8s.NewStore(c.conn, c.namespace, "suite")
		require.NoError(t, err)
		return s
	})
}
