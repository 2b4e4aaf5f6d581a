package queue

// Forget drops all that is known of the keys that match, as if they had never been added, and calls dropped for each
// request that waited. A key that is locked stays so; unless locked ones are to be forgotten too, only the request that
// waits is dropped, so that Finish still tells all that is to be written down. Dropped must not call back.
func (q *Queue[K, V]) Forget(match func(key K) bool, locked bool, dropped func(key K, value V)) {
	q.lock()
	defer q.mu.Unlock()
	var matching []*item[K, V]
	for it := range q.items.all {
		if match(it.key) {
			matching = append(matching, it)
		}
	}
	for _, it := range matching {
		if it.waiting {
			dropped(it.key, it.value)
		}
		switch {
		case !it.running:
			q.forget(it)
			q.discard(it)
		case locked:
			q.forget(it)
		default:
			q.forgetRequest(it)
		}
	}
}

// Abandon unlocks a key that Next has locked, and forgets it.
func (q *Queue[K, V]) Abandon(key K) {
	q.lock()
	defer q.mu.Unlock()
	it := q.find(key)
	q.forget(it)
	it.running = false
	q.running--
	q.discard(it)
}

func (q *Queue[K, V]) forget(it *item[K, V]) {
	q.unlist(it)
	if d := it.d; d != nil {
		if d.slot > 0 {
			q.delayed.remove(it)
		}
		if d.parked {
			q.parked--
		}
		it.d = nil
	}
	q.forgetRequest(it)
}

func (q *Queue[K, V]) forgetRequest(it *item[K, V]) {
	var none V
	it.value, it.waiting, it.manual, it.deletion = none, false, false, false
}
