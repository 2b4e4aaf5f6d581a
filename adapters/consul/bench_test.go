//go:build e2e

package consul_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/consul"
	"github.com/windlass-dev/windlass/engine"
)

// BenchmarkAmongTenThousandKeys measures a cold start of 10,000 keys, the age of a change of one of them at its handler, and what an idle
// watch of them takes of a core.
func BenchmarkAmongTenThousandKeys(b *testing.B) {
	config := api.DefaultConfig()
	config.Address = shared.Addresses[0]
	c, err := api.NewClient(config)
	require.NoError(b, err)
	const n = 10000
	for i := 0; i < n; i += 64 {
		var ops api.TxnOps
		for k := i; k < min(i+64, n); k++ {
			ops = append(ops, &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVSet, Key: fmt.Sprintf("bench/%d", k), Value: []byte("0")}})
		}
		ok, _, _, err := c.Txn().Txn(ops, nil)
		require.NoError(b, err)
		require.True(b, ok)
	}
	conn, err := consul.Connect(b.Context(), consul.ConnectionConfig{Address: shared.Addresses[0]})
	require.NoError(b, err)
	kv, err := consul.NewKV(conn, consul.KVConfig{KeyPrefix: "bench/"})
	require.NoError(b, err)
	var seen atomic.Int64
	var mu sync.Mutex
	var written time.Time
	ages := make(chan time.Duration, 1)
	e, err := engine.New(engine.Config{Controllers: []engine.Controller{engine.NewController("kv").For(kv).WithConcurrency(8).
		WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if seen.Add(1) > n {
				mu.Lock()
				defer mu.Unlock()
				ages <- time.Since(written)
			}
			return engine.Result{}, nil
		})}})
	require.NoError(b, err)
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan error, 1)
	start := time.Now()
	go func() { done <- e.Run(ctx) }()
	for seen.Load() < n {
		time.Sleep(time.Millisecond)
	}
	cold := time.Since(start)
	before := cpu()
	time.Sleep(5 * time.Second)
	idle := 100 * (cpu() - before).Seconds() / 5
	var all []time.Duration
	b.ResetTimer()
	for i := 0; b.Loop(); i++ {
		mu.Lock()
		written = time.Now()
		mu.Unlock()
		_, err := c.KV().Put(&api.KVPair{Key: fmt.Sprintf("bench/%d", i%n), Value: []byte(strconv.Itoa(i + 1))}, nil)
		require.NoError(b, err)
		all = append(all, <-ages)
	}
	slices.Sort(all)
	b.ReportMetric(cold.Seconds(), "s/cold-start")
	b.ReportMetric(idle, "%core/idle")
	b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "ms/p50")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "ms/p99")
	stop()
	require.NoError(b, <-done)
}

// cpu is the time that this process has computed.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSetOfKeys measures how long it takes to write a thousand keys: one by one, and as the set that one call of Runtime.Do makes of them.
func BenchmarkSetOfKeys(b *testing.B) {
	conn, err := consul.Connect(b.Context(), consul.ConnectionConfig{Address: shared.Addresses[0]})
	require.NoError(b, err)
	kv, err := consul.NewKV(conn, consul.KVConfig{KeyPrefix: "set/"})
	require.NoError(b, err)
	changes := make([]engine.Change, 1000)
	for _, together := range []bool{false, true} {
		b.Run(fmt.Sprintf("together=%v", together), func(b *testing.B) {
			for n := 0; b.Loop(); n++ {
				for i := range changes {
					changes[i].Object = engine.Object{Key: kv.Key(strconv.Itoa(i)), Value: []byte(strconv.Itoa(n))}
				}
				if together {
					_, err := kv.Batch(b.Context(), changes)
					require.NoError(b, err)
					continue
				}
				for _, c := range changes {
					_, err := kv.Apply(b.Context(), c.Object, c.Write)
					require.NoError(b, err)
				}
			}
		})
	}
}
