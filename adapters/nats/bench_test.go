package nats_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
)

// BenchmarkReplicas works off keys whose handlers take 5 ms, 16 at once in each replica.
func BenchmarkReplicas(b *testing.B) {
	for replicas := 1; replicas <= 2; replicas++ {
		b.Run(fmt.Sprint(replicas), func(b *testing.B) {
			server, err := nats.StartServer(nats.ServerConfig{DataDir: b.TempDir(), Sync: "interval"})
			require.NoError(b, err)
			defer server.Shutdown()
			conn, err := server.Connect(b.Context(), "")
			require.NoError(b, err)
			defer conn.Close()
			var ran atomic.Int64
			ctx, cancel := context.WithCancel(b.Context())
			var queues []engine.Queue
			done := make(chan error, replicas)
			gate := make(chan struct{})
			for range replicas {
				bus, err := nats.NewBus(b.Context(), conn, nats.BusConfig{Engine: "bench", Partitions: 16, Events: "off"})
				require.NoError(b, err)
				defer bus.Close(b.Context())
				q, err := bus.Queue(b.Context(), engine.QueueConfig{Engine: "bench", Controller: "c", Workers: 16})
				require.NoError(b, err)
				queues = append(queues, q)
				go func() {
					done <- q.Run(ctx, ctx, func() engine.Process {
						return func(context.Context, engine.Request) engine.Outcome {
							<-gate
							time.Sleep(5 * time.Millisecond)
							ran.Add(1)
							return engine.Outcome{}
						}
					})
				}()
			}
			keys := orders(b, conn)
			for i := range b.N {
				require.NoError(b, queues[0].Enqueue(b.Context(), engine.Request{Controller: "c", Key: keys.Key(fmt.Sprint(i))}))
			}
			b.ResetTimer()
			close(gate)
			for ran.Load() < int64(b.N) {
				time.Sleep(time.Millisecond)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "reconciles/s")
			b.StopTimer()
			cancel()
			for range replicas {
				require.NoError(b, <-done)
			}
		})
	}
}

func orders(b *testing.B, conn *nats.Connection) *nats.Bucket {
	b.Helper()
	bucket, err := nats.NewBucket(b.Context(), conn, nats.BucketConfig{Bucket: "orders", Create: true})
	require.NoError(b, err)
	return bucket
}

// BenchmarkAsk asks one of two replicas about a key that the other works on, and about all of its thousand parked keys.
func BenchmarkAsk(b *testing.B) {
	server, err := nats.StartServer(nats.ServerConfig{DataDir: b.TempDir(), Sync: "interval"})
	require.NoError(b, err)
	defer server.Shutdown()
	ctx, cancel := context.WithCancel(b.Context())
	var engines []*engine.Engine
	var keys *nats.Bucket
	done := make(chan error, 2)
	for range 2 {
		conn, err := server.Connect(b.Context(), "")
		require.NoError(b, err)
		defer conn.Close()
		bus, err := nats.NewBus(b.Context(), conn, nats.BusConfig{Engine: "bench"})
		require.NoError(b, err)
		defer bus.Close(b.Context())
		keys = orders(b, conn)
		e, err := engine.New(engine.Config{Name: "bench", Bus: bus, Controllers: []engine.Controller{engine.NewController("c").For(keys).WithHandler(
			func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
				return engine.Result{}, engine.Terminal(errors.New("parked"))
			})}})
		require.NoError(b, err)
		engines = append(engines, e)
		go func() { done <- e.Run(ctx) }()
	}
	const n = 1000
	for i := range n {
		require.Eventually(b, func() bool { return engines[0].Enqueue(b.Context(), "c", keys.Key(fmt.Sprint(i)), 0) == nil }, time.Minute, time.Millisecond)
	}
	far := "" // one that is the other's
	require.Eventually(b, func() bool {
		_, total, err := engines[0].ItemsAnywhere(b.Context(), "c", n)
		here, _ := engines[0].Items("c")
		for i := range n {
			if !slices.ContainsFunc(here, func(it engine.Item) bool { return it.Key == keys.Key(fmt.Sprint(i)) }) {
				far = fmt.Sprint(i)
			}
		}
		return err == nil && total == n && far != ""
	}, time.Minute, 100*time.Millisecond)
	b.Run("one", func(b *testing.B) {
		for b.Loop() {
			x, err := engines[0].ExplainAnywhere(b.Context(), "c", keys.Key(far))
			require.NoError(b, err)
			require.Equal(b, "parked", x.State)
		}
	})
	b.Run("thousand", func(b *testing.B) {
		for b.Loop() {
			_, total, err := engines[0].ItemsAnywhere(b.Context(), "c", n)
			require.NoError(b, err)
			require.Equal(b, n, total)
		}
	})
	cancel()
	for range 2 {
		require.NoError(b, <-done)
	}
}
