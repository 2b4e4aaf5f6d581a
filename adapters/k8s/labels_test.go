package k8s

import (
	"hash/maphash"
	"maps"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestSharedLabelsAreEqualAndShared(t *testing.T) {
	s := &sharedLabels{seed: maphash.MakeSeed()}
	rapid.Check(t, func(t *rapid.T) {
		labels := rapid.MapOfN(rapid.SampledFrom([]string{"app", "tier", "x"}), rapid.StringN(0, 3, -1), 0, 3).Draw(t, "labels")
		want := maps.Clone(labels)
		got := s.of(labels)
		if len(want) == 0 {
			require.Empty(t, got)
			return
		}
		require.Equal(t, want, got)
		again := s.of(maps.Clone(want))
		require.Equal(t, reflect.ValueOf(got).Pointer(), reflect.ValueOf(again).Pointer())
	})
}
