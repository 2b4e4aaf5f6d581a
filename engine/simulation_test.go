package engine_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

var (
	simulations = flag.Int("simulations", 300, "how many random lives TestSimulation lives")
	firstSeed   = flag.Uint64("seed", 0, "the seed of the first of them")
)

// TestSimulation lives random lives: things change, handlers fail, ask for more and take their time, the bus repeats,
// reorders, delays, refuses and forgets, and the process crashes. At the end every thing must have been reconciled at its
// last version, no key ever twice at once, and nothing must be left over.
func TestSimulation(t *testing.T) {
	begin := time.Now()
	for i := range *simulations {
		seed := *firstSeed + uint64(i)
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { simulate(t, seed) }) {
			t.Fatalf("to see it again: go test ./engine -run TestSimulation -args -seed %d -simulations 1", seed)
		}
		if i > 0 && i%1000 == 0 {
			t.Logf("%d of %d lives, %s", i, *simulations, time.Since(begin).Round(time.Second))
		}
	}
}

func simulate(t *testing.T, seed uint64) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		bus := enginetest.NewFaultBus(h.T, seed, enginetest.AllFaults)
		rng := rand.New(rand.NewPCG(seed, 1))
		h.Config.Bus, h.Config.DrainTimeout = bus, time.Minute
		things := memory.New[int]("things")
		seen := make(map[string]int)       // the newest version that a run has dealt with
		done := make(map[string]time.Time) // when the last run began that did not fail
		rec := &enginetest.Recorder{}
		fates := rand.New(rand.NewPCG(seed, 2))
		busy := make(chan struct{}, 1)
		rec.Answer = func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			begun := time.Now()
			version, err := engine.Get[int](ctx, rt, req.Key)
			if err != nil && !engine.IsNotFound(err) {
				return engine.Result{}, err
			}
			busy <- struct{}{}
			took, fate := time.Duration(fates.IntN(800))*time.Millisecond, fates.IntN(10)
			<-busy
			select {
			case <-time.After(took):
			case <-ctx.Done():
				return engine.Result{}, context.Cause(ctx)
			}
			switch fate {
			case 0:
				return engine.Result{}, errBroken
			case 1:
				panic("as the seed says")
			case 2:
				return engine.Result{}, engine.RetryAfter(errBroken, time.Second)
			case 3:
				return engine.Result{Defer: time.Second}, nil
			case 4:
				return engine.Result{Backoff: true}, nil
			}
			busy <- struct{}{}
			seen[req.Key.Name] = max(seen[req.Key.Name], version)
			done[req.Key.Name] = begun
			<-busy
			if fate == 5 {
				return engine.Result{RequeueAfter: 2 * time.Second}, nil
			}
			return engine.Result{}, nil
		}
		c := engine.NewController("c").For(things).WithHandler(rec.Handle).WithConcurrency(1 + rng.IntN(3)).
			WithBackoff(engine.Backoff{Initial: 100 * time.Millisecond, Max: 5 * time.Second})
		if rng.IntN(4) == 0 {
			c = c.WithDebounce(engine.Debounce{After: 200 * time.Millisecond, Max: time.Second})
		}
		if rng.IntN(4) == 0 {
			c = c.WithRateLimit(engine.NewRateLimit(20, 2))
		}
		h.Start(c)
		wanted, asked := make(map[string]int), make(map[string]time.Time)
		for step := range 15 {
			select {
			case <-bus.Crashed():
				_ = h.StopErr()
				bus.Restart()
				h.Start(c)
			default:
			}
			name := fmt.Sprint("k", rng.IntN(4))
			switch rng.IntN(10) {
			case 0:
				things.Remove(name)
				delete(wanted, name)
			case 1:
				bus.Crash()
			case 2:
				h.Stop()
				h.Start(c)
			case 3, 4:
				// No list will ever tell of these: only the bus knows that they were asked for.
				name, after := fmt.Sprint("ghost ", step), time.Duration(rng.IntN(3))*time.Second
				if h.Engine.Enqueue(h.T.Context(), "c", things.Key(name), after) == nil {
					asked[name] = time.Now().Add(after)
				}
			default:
				wanted[name] = step + 1
				things.Set(name, step+1)
			}
			h.Advance(time.Duration(rng.IntN(700)) * time.Millisecond)
		}
		bus.Mend()
		if bus.Restart() > 0 {
			_ = h.StopErr()
			h.Start(c)
		}
		h.Advance(10 * time.Minute)
		for name, version := range wanted {
			require.GreaterOrEqual(h.T, seen[name], version, "%s was reconciled at its last version", name)
		}
		for name, at := range asked {
			require.False(h.T, done[name].Before(at), "%s was asked for at %s and ran last at %s", name, at, done[name])
		}
		require.LessOrEqual(h.T, rec.AtOnce(), 1, "no key runs twice at once")
		items, err := h.Engine.Items("c")
		require.NoError(h.T, err)
		require.Empty(h.T, items)
		requests, states := bus.Pending()
		require.Zero(h.T, requests)
		require.Zero(h.T, states)
	})
}
