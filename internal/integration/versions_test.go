//go:build e2e

package integration

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/internal/testbed"
)

func TestExampleOnTheOldestServerThatWillDo(t *testing.T) {
	address, stop, err := testbed.StartNATS(t.Context(), testbed.NATSOldest, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(stop)
	onTheUsersServer(t, "nats://"+address, "")
}

func TestAServerThatIsTooOldIsRefused(t *testing.T) {
	address, stop, err := testbed.StartNATS(t.Context(), testbed.NATSTooOld, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(stop)
	p := start(t, exampleOn(t, "nats://"+address, ""), nil, binary, "run", "-c", "engine.yaml")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.output(), "it is version 2.10.29, and 2.11 or later is needed")
}
