package enginetest

import (
	"context"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine/lease"
)

// TestLease checks that a lease.Store keeps its promises. Each case gets a store without leases. The shortest time to
// live that the store can do is ttl.
func TestLease(t *testing.T, ttl time.Duration, newStore func(t *testing.T) lease.Store) {
	t.Helper()
	type held struct {
		ok    bool
		epoch uint64
	}
	acquire := func(ctx context.Context, t *testing.T, s lease.Store, holder string) held {
		t.Helper()
		ok, epoch, err := s.Acquire(ctx, "name/with odd ✓ text", holder, ttl)
		if err != nil {
			t.Fatal(err)
		}
		return held{ok, epoch}
	}
	check(t, newStore, []testCase[lease.Store]{
		{"one holder at a time", "two would do the same thing at once", func(ctx context.Context, t *testing.T, s lease.Store) {
			expect(t, "the first takes it", acquire(ctx, t, s, "a").ok, true)
			expect(t, "the second has it", acquire(ctx, t, s, "b").ok, false)
			expect(t, "the first renews it", acquire(ctx, t, s, "a").ok, true)
		}},
		{"names are apart", "controllers have a lease each", func(ctx context.Context, t *testing.T, s lease.Store) {
			acquire(ctx, t, s, "a")
			ok, _, err := s.Acquire(ctx, "another", "b", ttl)
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "the other lease is free", ok, true)
		}},
		{"it ends unless it is renewed", "a holder that died must not hold for ever", func(ctx context.Context, t *testing.T, s lease.Store) {
			first := acquire(ctx, t, s, "a")
			eventually(t, "somebody else takes it", func() bool { return acquire(ctx, t, s, "b").ok })
			expect(t, "the epoch grew", acquire(ctx, t, s, "b").epoch > first.epoch, true)
			expect(t, "the first has it still", acquire(ctx, t, s, "a").ok, false)
		}},
		{"a released lease is free at once", "a shutdown hands over without a gap", func(ctx context.Context, t *testing.T, s lease.Store) {
			first := acquire(ctx, t, s, "a")
			if err := s.Release(ctx, "name/with odd ✓ text", "a"); err != nil {
				t.Fatal(err)
			}
			second := acquire(ctx, t, s, "b")
			expect(t, "the second takes it", second.ok, true)
			expect(t, "the epoch grew", second.epoch > first.epoch, true)
		}},
		{"only the holder releases", "a late release must not end somebody else's grant", func(ctx context.Context, t *testing.T, s lease.Store) {
			acquire(ctx, t, s, "a")
			if err := s.Release(ctx, "name/with odd ✓ text", "b"); err != nil {
				t.Fatal(err)
			}
			expect(t, "the second has it", acquire(ctx, t, s, "b").ok, false)
		}},
		{"the epoch stays while the holder does", "it tells writes of former holders, and only those", func(ctx context.Context, t *testing.T, s lease.Store) {
			first := acquire(ctx, t, s, "a")
			expect(t, "epoch after a renewal", acquire(ctx, t, s, "a").epoch, first.epoch)
		}},
	})
}
