package owner

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine/kv"
)

func TestDeathsInARowAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var store kv.Memory
		s := Suspects[string]{Store: &store, Prefix: "crashes/c/", Parse: func(text string) (string, error) { return text, nil }}
		died := func(partition, want int) {
			t.Helper()
			got, err := s.Died(t.Context(), partition)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		died(1, 1)
		died(2, 1)
		time.Sleep(DeathsTell)
		died(1, 2)
		died(1, 3)
		time.Sleep(DeathsTell + time.Second)
		died(1, 1)
		crashes, err := s.Crashes(t.Context(), func(string) bool { return true })
		require.NoError(t, err)
		require.Empty(t, crashes, "a partition is no key")
		_, err = store.Put(t.Context(), "crashes/c/partition 1", []byte("?"), "")
		require.ErrorIs(t, err, kv.ErrConflict)
	})
}
