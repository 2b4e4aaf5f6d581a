package engine_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
)

func TestWhatIsNewsToAParkedOrDelayedKey(t *testing.T) {
	cause := func(tr engine.Trigger, op engine.Operation, revision, incarnation string) engine.Cause {
		return engine.Cause{Trigger: tr, Operation: op, Revision: revision, Incarnation: incarnation}
	}
	known := cause(engine.Updated, engine.Put, "5", "u")
	unknown := cause(engine.Dependency, engine.Put, "9", "")
	for _, c := range []struct {
		name               string
		kept, arrived      engine.Cause
		revives, unchanged bool
	}{
		{"listed at the same revision", known, cause(engine.Resynced, engine.Resync, "5", "u"), false, true},
		{"listed at another", known, cause(engine.Resynced, engine.Resync, "6", "u"), true, false},
		{"listed as another incarnation", known, cause(engine.Resynced, engine.Resync, "5", "v"), true, false},
		{"listed without a revision", known, cause(engine.Resynced, engine.Resync, "", ""), false, false},
		{"listed, and nothing to compare with", unknown, cause(engine.Resynced, engine.Resync, "5", "u"), false, false},
		{"changed", known, cause(engine.Updated, engine.Put, "6", "u"), true, false},
		{"told again of the same revision", known, known, false, true},
		{"changed, and nothing to compare with", unknown, cause(engine.Updated, engine.Put, "6", "u"), true, false},
		{"deleted, without a revision", known, cause(engine.Deleted, engine.Delete, "", ""), true, false},
		{"a dependency changed", known, cause(engine.Dependency, engine.Put, "1", ""), true, false},
		{"a dependency was listed", known, cause(engine.Dependency, engine.Resync, "1", ""), false, true},
		{"by hand", known, cause(engine.Manual, engine.Put, "", ""), true, false},
	} {
		kept, arrived := engine.CausesOf(c.kept), engine.CausesOf(c.arrived)
		require.Equal(t, c.revives, kept.Revives(arrived), "%s: revives", c.name)
		require.Equal(t, c.unchanged, kept.Unchanged(arrived), "%s: unchanged", c.name)
	}
}
