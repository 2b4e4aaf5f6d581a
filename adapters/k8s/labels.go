package k8s

import (
	"hash/maphash"
	"maps"
	"sync"
)

// sharedLabels keeps one map for the many objects with the same labels: the pods of a Deployment, all that one controller made.
// Such a map is a third of a kilobyte. The table is of a fixed size, so that nothing has to be removed from it.
type sharedLabels struct {
	mu    sync.Mutex
	seed  maphash.Seed
	table [256]map[string]string
}

// of returns a map that equals labels. It is shared: nobody may change it.
func (s *sharedLabels) of(labels map[string]string) map[string]string {
	if len(labels) == 0 {
		return nil
	}
	var sum uint64
	for k, v := range labels {
		sum += maphash.Comparable(s.seed, [2]string{k, v}) // in any order
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := &s.table[sum%uint64(len(s.table))]
	if !maps.Equal(*slot, labels) {
		*slot = labels
	}
	return *slot
}
