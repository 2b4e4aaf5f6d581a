package engine_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
)

// numbered emits b.N events over a number of keys.
type numbered struct{ events, keys int }

func (s numbered) Name() string { return "numbered" }

func (s numbered) Run(ctx context.Context, emit engine.Emit) error {
	for _, op := range []engine.Operation{engine.ListStarted, engine.ListEnded} {
		if err := emit(ctx, engine.Event{Operation: op}); err != nil {
			return err
		}
	}
	kind, meta := engine.KindOf("bench"), &engine.Meta{}
	keys := make([]engine.Key, s.keys)
	for i := range keys {
		keys[i] = engine.Key{Kind: kind, Namespace: "default", Name: strconv.Itoa(i)}
	}
	for i := range s.events {
		if err := emit(ctx, engine.Event{Operation: engine.Put, Key: keys[i%s.keys], Revision: "1", Old: meta, New: meta}); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

// BenchmarkPath is the whole path of a change: event, mapping, queue, default middleware, a handler that does nothing.
func BenchmarkPath(b *testing.B) {
	for name, perKey := range map[string]int{"distinct": 1, "coalesce": 10} {
		b.Run(name, func(b *testing.B) {
			src := &numbered{b.N, max(b.N/perKey, 1)}
			ctx, cancel := context.WithCancel(b.Context())
			seen := make([]atomic.Bool, src.keys)
			var distinct atomic.Int64
			c := engine.NewController("bench").For(src).WithConcurrency(8).WithHandler(
				func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
					i, err := strconv.Atoi(req.Key.Name)
					if err == nil && !seen[i].Swap(true) && distinct.Add(1) == int64(src.keys) {
						cancel()
					}
					return engine.Result{}, err
				})
			e, err := engine.New(engine.Config{Controllers: []engine.Controller{c}})
			require.NoError(b, err)
			b.ReportAllocs()
			b.ResetTimer()
			require.NoError(b, e.Run(ctx))
		})
	}
}
