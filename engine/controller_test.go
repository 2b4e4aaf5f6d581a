package engine_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

func nop(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
	return engine.Result{}, nil
}

// readOnly is a source and nothing else.
type readOnly struct{ engine.Source }

// uncomparable is a source that == would panic on.
type uncomparable struct {
	readOnly

	_ []int
}

func TestSourceThatCannotBeComparedIsRefused(t *testing.T) {
	c := engine.NewController("c").For(uncomparable{readOnly: readOnly{memory.New[int]("things")}}).WithHandler(nop)
	_, err := engine.New(engine.Config{Controllers: []engine.Controller{c, c}})
	require.ErrorContains(t, err, `source "things": a engine_test.uncomparable cannot be compared with ==; use a pointer`)
}

func TestNewReportsEveryMistakeAtOnce(t *testing.T) {
	things := memory.New[int]("things")
	var nilSource *memory.Map[int]
	bad := engine.NewController("Not A Name").For(nilSource).Owns(readOnly{things}).Watches(things, nil).Reads(nil).WritesTo(nil).
		WithReconciler(nil).WithHandler(nil).WithConcurrency(0).WithTimeout(0).WithResync(-1).WithPlacement("moon").WithLogger(nil).
		WithBackoff(engine.Backoff{Initial: time.Hour, Max: time.Second})
	twin := engine.NewController("twin").For(things).WithHandler(nop)
	other := engine.NewController("other").For(memory.New[int]("things")).WithHandler(nop).For(things)
	_, err := engine.New(engine.Config{Name: "X", Controllers: []engine.Controller{bad, twin, twin, other}})
	for _, want := range []string{
		`engine "X": the name`, `controller "Not A Name": the name`, "For: the source is nil", `Owns: "things" cannot be written`,
		`Watches: the mapper of "things" is nil`, "Reads: the source is nil", "WritesTo: the sink is nil", "the reconciler is nil",
		"the handler is nil", "WithConcurrency: 0", "WithTimeout: 0", "WithResync: -1ns", `WithPlacement: "moon"`, "WithLogger: the logger is nil",
		"WithBackoff: initial 1h0m0s is longer than max 1s", "no primary source", "no handler", `controller "twin": there are two`,
		`controller "other": source "things": another source has this name`, `there is a primary source already, "things"`,
	} {
		require.ErrorContains(t, err, want)
	}
	_, err = engine.New(engine.Config{})
	require.ErrorContains(t, err, "no controllers")
}

func TestTwoControllersCanGrowFromOne(t *testing.T) {
	a, b, c := memory.New[int]("a"), memory.New[int]("b"), memory.New[int]("c")
	base := engine.NewController("base").For(a).Watches(b, engine.MapOwner)
	one, two := base.Watches(c, engine.MapOwner), base.Reads(c).Owns(b)
	require.Contains(t, base.String(), "watches=[b], reads=[]")
	require.Contains(t, one.String(), "owns=[], watches=[b c], reads=[]")
	require.Contains(t, two.String(), "owns=[b], watches=[b], reads=[c]")
}

func TestStringShowsEffectiveSettings(t *testing.T) {
	c := engine.NewController("c").For(memory.New[int]("a")).WithPlacement(engine.Singleton)
	require.Equal(t, `<Controller name="c", for="a", owns=[], watches=[], reads=[], concurrency=1, timeout=30s, `+
		`backoff=<initial=5ms, max=16m40s, multiplier=2, maxAttempts=0>, placement="singleton">`, c.String())
}
