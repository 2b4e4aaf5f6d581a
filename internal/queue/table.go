package queue

// table finds items by key: open addressing with linear probing, in segments that grow and shrink each for itself, so
// that no single Add pays for moving a million keys. The hash beside each pointer spares most looks at other items: at a
// million keys every look is a cache miss.
type table[K comparable, V any] struct {
	segments [segments]segment[K, V]
	n        int
}

const segments = 64

type segment[K comparable, V any] struct {
	slots []slot[K, V] // a power of two, or none
	n     int
}

// mask cuts a hash down to a place. There must be slots.
func (s *segment[K, V]) mask() uint64 { return uint64(len(s.slots)) - 1 }

type slot[K comparable, V any] struct {
	hash uint64
	item *item[K, V]
}

// The segment is chosen by the highest bits of the hash and the slot by the lowest.
func (t *table[K, V]) segment(hash uint64) *segment[K, V] { return &t.segments[hash>>58] }

func (t *table[K, V]) find(hash uint64, key *K) *item[K, V] {
	s := t.segment(hash)
	if s.n == 0 {
		return nil
	}
	mask := s.mask()
	for i := hash & mask; ; i = (i + 1) & mask {
		switch x := &s.slots[i]; {
		case x.item == nil:
			return nil
		case x.hash == hash && x.item.key == *key:
			return x.item
		}
	}
}

// touch brings the place of a hash into the cache.
func (t *table[K, V]) touch(hash uint64) uint64 {
	if s := t.segment(hash); s.n > 0 {
		return s.slots[hash&s.mask()].hash
	}
	return 0
}

// insert adds an item whose key is not there.
func (t *table[K, V]) insert(it *item[K, V]) {
	s := t.segment(it.hash)
	if 4*(s.n+1) > 3*len(s.slots) {
		s.resize(max(8, 2*len(s.slots)))
	}
	s.put(slot[K, V]{it.hash, it})
	s.n++
	t.n++
}

func (s *segment[K, V]) put(x slot[K, V]) {
	mask := s.mask()
	i := x.hash & mask
	for s.slots[i].item != nil {
		i = (i + 1) & mask
	}
	s.slots[i] = x
}

func (s *segment[K, V]) resize(size int) {
	old := s.slots
	s.slots = make([]slot[K, V], size)
	for _, x := range old {
		if x.item != nil {
			s.put(x)
		}
	}
}

// remove forgets an item, and moves up those behind it that would not be found any more.
func (t *table[K, V]) remove(it *item[K, V]) {
	s := t.segment(it.hash)
	mask := s.mask()
	hole := it.hash & mask
	for s.slots[hole].item != it {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; s.slots[i].item != nil; i = (i + 1) & mask {
		// One that belongs behind the hole stays.
		if home := s.slots[i].hash & mask; (i-home)&mask >= (i-hole)&mask {
			s.slots[hole] = s.slots[i]
			hole = i
		}
	}
	s.slots[hole] = slot[K, V]{}
	s.n--
	t.n--
	if len(s.slots) > 64 && 8*s.n < len(s.slots) {
		s.resize(len(s.slots) / 4)
	}
}

// all calls yield for each item. Keys must not be added or forgotten meanwhile.
func (t *table[K, V]) all(yield func(*item[K, V]) bool) {
	for i := range t.segments {
		for _, x := range t.segments[i].slots {
			if x.item != nil && !yield(x.item) {
				return
			}
		}
	}
}
