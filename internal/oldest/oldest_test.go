package oldest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/internal/oldest"
)

func TestCheck(t *testing.T) {
	for version, old := range map[string]bool{"2.10.29": true, "2.11.0": false, "v2.11.0": false, "2.12": false, "1.99.1": true, "3.0.1": false, "": false, "dev": false} {
		require.Equal(t, old, oldest.Check(version, "2.11") != nil, version)
	}
	require.EqualError(t, oldest.Check("6.0.16", "6.2"), "it is version 6.0.16, and 6.2 or later is needed")
}
