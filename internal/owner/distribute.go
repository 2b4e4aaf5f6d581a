package owner

import (
	"cmp"
	"hash/fnv"
	"slices"
	"strconv"
)

// distribute returns the holder of each partition: the member for which a hash of both is highest, of those that have
// not their share already. Whoever knows the same members comes to the same result, and a member that joins or leaves
// moves few partitions of others.
func distribute(group string, partitions int, members []string) []string {
	holders := make([]string, partitions)
	if len(members) == 0 {
		return holders
	}
	type bid struct {
		score     uint64
		partition int
		member    string
	}
	bids := make([]bid, 0, partitions*len(members))
	for p := range partitions {
		for _, m := range members {
			h := fnv.New64a()
			_, _ = h.Write([]byte(group + "\x00" + strconv.Itoa(p) + "\x00" + m)) // it never fails
			bids = append(bids, bid{mixed(h.Sum64()), p, m})
		}
	}
	slices.SortFunc(bids, func(a, b bid) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.partition, b.partition), cmp.Compare(a.member, b.member))
	})
	share := (partitions + len(members) - 1) / len(members)
	load := make(map[string]int)
	for _, b := range bids {
		if holders[b.partition] == "" && load[b.member] < share {
			holders[b.partition] = b.member
			load[b.member]++
		}
	}
	return holders
}

// mixed spreads the bits of a hash whose last bytes differ little (the finalizer of MurmurHash3).
func mixed(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
