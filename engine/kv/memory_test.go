package kv_test

import (
	"testing"

	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
)

func TestMemory(t *testing.T) {
	enginetest.TestStore(t, func(*testing.T) kv.Store { return &kv.Memory{} })
}
