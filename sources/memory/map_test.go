package memory_test

import (
	"testing"

	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

func TestMapIsASource(t *testing.T) {
	enginetest.TestSource(t, func(*testing.T) enginetest.SourceFixture {
		m, n := memory.New[int]("numbers"), 0
		return enginetest.SourceFixture{
			Source: m, Key: m.Key,
			Put:    func(_ *testing.T, name string) { n++; m.Set(name, n) },
			Delete: func(_ *testing.T, name string) { m.Remove(name) },
		}
	})
}

func TestMapIsASink(t *testing.T) {
	enginetest.TestSink(t, func(*testing.T) enginetest.SinkFixture {
		m := memory.New[int]("numbers")
		return enginetest.SinkFixture{Sink: m, Object: m.Object}
	})
}
