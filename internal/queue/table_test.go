package queue

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestTableIsAMap compares the table with a map. The hashes collide in segment, slot and altogether.
func TestTableIsAMap(t *testing.T) {
	hash := func(k int) uint64 { return uint64(k/2%5)<<58 | uint64(k/3%40)*7 }
	rapid.Check(t, func(t *rapid.T) {
		var tab table[int, int]
		model := map[int]*item[int, int]{}
		key := rapid.IntRange(0, 400)
		check := func(k int) {
			require.Same(t, model[k], tab.find(hash(k), &k), "key %d", k)
		}
		for range rapid.IntRange(0, 600).Draw(t, "steps") {
			k := key.Draw(t, "key")
			check(k)
			if it := model[k]; it != nil {
				tab.remove(it)
				delete(model, k)
			} else {
				model[k] = &item[int, int]{key: k, hash: hash(k)}
				tab.insert(model[k])
			}
			require.Equal(t, len(model), tab.n)
		}
		for k := range 401 {
			check(k)
		}
		n := 0
		for it := range tab.all {
			require.Same(t, model[it.key], it)
			n++
		}
		require.Equal(t, len(model), n)
	})
}
