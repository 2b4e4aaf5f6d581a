package queue

import "time"

// Pause holds keys back. What is asked for meanwhile waits.
type Pause struct {
	// Until is when the pause ends by itself; 0 is never.
	Until int64
	// Deletions are held back too.
	Deletions bool
}

type pauses[K comparable] struct {
	all  *Pause
	keys map[K]Pause
}

func (p *pauses[K]) any() bool { return p.all != nil || len(p.keys) > 0 }

func (p *pauses[K]) of(key K) (Pause, bool) {
	if x, ok := p.keys[key]; ok {
		return x, true
	}
	if p.all != nil {
		return *p.all, true
	}
	return Pause{}, false
}

// Pause holds back a key, or with a nil key all of them; a nil pause ends that. A key with a pause of its own keeps to
// that one.
func (q *Queue[K, V]) Pause(key *K, p *Pause) {
	q.lock()
	defer q.mu.Unlock()
	switch {
	case key == nil:
		q.pauses.all = p
		q.placeAll()
		return
	case p == nil:
		delete(q.pauses.keys, *key)
	default:
		if q.pauses.keys == nil {
			q.pauses.keys = make(map[K]Pause)
		}
		q.pauses.keys[*key] = *p
	}
	if it := q.find(*key); it != nil && !it.running {
		q.unlist(it)
		q.place(it, time.Now().UnixNano())
	}
}

// Drop forgets what is parked for a key, and says whether anything was.
func (q *Queue[K, V]) Drop(key K) bool {
	q.lock()
	defer q.mu.Unlock()
	it := q.find(key)
	if it == nil || it.running || it.d == nil || !it.d.parked {
		return false
	}
	q.revive(it)
	q.place(it, time.Now().UnixNano())
	return true
}

// placeAll puts every key where it belongs, in no order.
func (q *Queue[K, V]) placeAll() {
	waiting := make([]*item[K, V], 0, q.items.n)
	// Those that are ready first, so that their order stays.
	for i := range q.ready {
		for it := q.ready[i].head; it != nil; it = it.next {
			waiting = append(waiting, it)
		}
	}
	for it := range q.items.all {
		if it.in == nowhere && !it.running {
			waiting = append(waiting, it)
		}
	}
	now := time.Now().UnixNano()
	for _, it := range waiting {
		since := it.since
		ready := it.in != nowhere
		q.unlist(it)
		q.place(it, now)
		if ready && it.in != nowhere {
			it.since = since
		}
	}
}
