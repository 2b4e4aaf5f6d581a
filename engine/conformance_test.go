package engine_test

import (
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
)

func TestMemoryBusKeepsThePromises(t *testing.T) {
	enginetest.TestBus(t, func(*testing.T) enginetest.BusFixture {
		bus := engine.NewMemoryBus()
		return enginetest.BusFixture{Bus: bus, Reopen: func(*testing.T) engine.Bus { return bus }}
	})
}

func TestFaultBusKeepsThePromises(t *testing.T) {
	for _, f := range []enginetest.Faults{{}, {Reorder: .5}} {
		enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
			bus := enginetest.NewFaultBus(t, 1, f)
			return enginetest.BusFixture{Bus: bus, Reopen: func(*testing.T) engine.Bus { return bus }}
		})
	}
}

func TestMemoryLeases(t *testing.T) {
	enginetest.TestLease(t, 20*time.Millisecond, func(*testing.T) lease.Store { return &lease.Memory{} })
}

func TestMemoryStore(t *testing.T) {
	enginetest.TestStore(t, func(*testing.T) kv.Store { return &kv.Memory{} })
}
