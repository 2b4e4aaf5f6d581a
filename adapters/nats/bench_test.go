package nats_test

import (
	"context"
	"fmt"
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
