package consul

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestPairsAgainstAModel compares what is known after a row of answers with the answers themselves.
func TestPairsAgainstAModel(t *testing.T) {
	keys := []string{"a", "b", `c},{"LockIndex":0,"Key":"x`, `d"]`, "e/[", "f\n", "g", "h\\"}
	rapid.Check(t, func(t *rapid.T) {
		var p pairs
		have := map[string]*api.KVPair{}
		known := map[string]item{}
		index := uint64(1)
		for range rapid.IntRange(1, 12).Draw(t, "answers") {
			for range rapid.IntRange(0, 3).Draw(t, "changes") {
				index++
				key := rapid.SampledFrom(keys).Draw(t, "key")
				if rapid.Bool().Draw(t, "put") {
					created := index
					if was := have[key]; was != nil {
						created = was.CreateIndex
					}
					have[key] = &api.KVPair{Key: key, Value: []byte(rapid.SampledFrom([]string{"", "1", "}", "long value"}).Draw(t, "value")), CreateIndex: created, ModifyIndex: index}
				} else {
					delete(have, key)
				}
			}
			list := api.KVPairs{}
			for _, k := range slices.Sorted(maps.Keys(have)) {
				list = append(list, have[k])
			}
			body, err := json.Marshal(list)
			require.NoError(t, err)
			if len(list) == 0 {
				body = nil // Consul answers 404
			}
			changed, err := p.take(body)
			require.NoError(t, err)
			for _, name := range changed { // as who is told of these would know
				if x, ok := p.items[name]; ok {
					known[name] = x
				} else {
					delete(known, name)
				}
			}
			want := map[string]item{}
			for k, v := range have {
				want[k] = item{revisionOf(v.ModifyIndex), revisionOf(v.CreateIndex), meta}
			}
			require.Equal(t, want, p.items)
			require.Equal(t, want, known)
		}
	})
}
