package queue

// delays is a heap of the keys with a delay, the earliest first. It has four children a node: half as deep as a binary
// one, and the children are in one cache line.
type delays[K comparable, V any] []delayed[K, V]

type delayed[K comparable, V any] struct {
	wake int64
	item *item[K, V]
}

func (h delays[K, V]) put(i int, x delayed[K, V]) {
	h[i] = x
	x.item.d.slot = i + 1
}

// set makes it wake at a time.
func (h *delays[K, V]) set(it *item[K, V], wake int64) {
	i := it.d.slot - 1
	if i < 0 {
		i = len(*h)
		*h = append(*h, delayed[K, V]{})
	}
	h.settle(i, delayed[K, V]{wake, it})
}

func (h *delays[K, V]) remove(it *item[K, V]) {
	i, last := it.d.slot-1, len(*h)-1
	x := (*h)[last]
	(*h)[last] = delayed[K, V]{}
	*h = (*h)[:last]
	if i != last {
		h.settle(i, x)
	}
	it.d.slot = 0
}

// settle moves x, which belongs at i or above or below it, to where it belongs.
func (h delays[K, V]) settle(i int, x delayed[K, V]) {
	for i > 0 {
		up := (i - 1) / 4
		if h[up].wake <= x.wake {
			break
		}
		h.put(i, h[up])
		i = up
	}
	for {
		first, least := 4*i+1, -1
		for c := first; c < min(first+4, len(h)); c++ {
			if h[c].wake < x.wake && (least < 0 || h[c].wake < h[least].wake) {
				least = c
			}
		}
		if least < 0 {
			break
		}
		h.put(i, h[least])
		i = least
	}
	h.put(i, x)
}
