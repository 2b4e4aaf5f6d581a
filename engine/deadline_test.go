package engine_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
)

// TestContextOfARunIsLikeAnyOther looks at the deadline in every way that code does.
func TestContextOfARunIsLikeAnyOther(t *testing.T) {
	type key struct{}
	for name, wait := range map[string]func(ctx context.Context) error{
		"Done":        func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"Err, polled": func(ctx context.Context) error { time.Sleep(2 * time.Minute); return ctx.Err() },
		"a derived one": func(ctx context.Context) error {
			c, stop := context.WithCancel(ctx)
			defer stop()
			<-c.Done()
			return c.Err()
		},
		"a deadline in it": func(ctx context.Context) error {
			c, stop := context.WithTimeout(ctx, time.Hour)
			defer stop()
			<-c.Done()
			return c.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(b *bundle) {
				var err, cause error
				var value any
				var at time.Time
				var kept context.Context
				b.rec.Answer = func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
					kept = ctx
					at, _ = ctx.Deadline()
					value = context.WithValue(ctx, key{}, "v").Value(key{})
					require.NoError(b.t, ctx.Err())
					err = wait(ctx)
					cause = context.Cause(ctx)
					return engine.Result{}, nil
				}
				b.things.Set("a", 1)
				b.start(b.controller().WithTimeout(time.Minute))
				b.Advance(time.Hour)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.ErrorIs(t, cause, engine.ErrDeadline)
				require.True(t, at.Equal(epoch.Add(time.Minute)), at)
				require.Equal(t, "v", value)
				require.Error(t, kept.Err())
			})
		})
	}
}

func TestContextOfARunEndsWithIt(t *testing.T) {
	bubble(t, func(b *bundle) {
		var kept context.Context
		b.rec.Answer = func(ctx context.Context, _ engine.Runtime, _ engine.Request) (engine.Result, error) {
			kept = ctx
			return engine.Result{}, nil
		}
		b.things.Set("a", 1)
		b.start()
		require.ErrorIs(t, kept.Err(), context.Canceled)
		<-kept.Done()
	})
}
