package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A key whose reconcile causes its own next one, by what it writes or by asking for it at once, runs as fast as the
// machine lets it and costs whatever it writes to. Rate alone does not tell it from a key that is changed often. So runs
// know which runs caused them: lineage remembers who made the last writes, and a cause that comes of one says so. A key
// that finds itself often enough among its own ancestors is slowed, never dropped: its request is not a reason to run for
// a while, and any other cause runs it at once.
//
// It is best effort: the memory is bounded, in this process alone, and an event that overtakes the return of the write
// that made it is not recognised.
type lineage struct {
	noted atomic.Bool // writes holds something: what nobody here writes costs nothing

	mu     sync.Mutex
	writes map[Key]write
	order  []Key // of writes, a ring
	next   int
}

// write is the last write of an object.
type write struct {
	revision string // empty: under way
	by       *ancestry
}

// ancestry are the runs that led to something, the nearest last.
type ancestry struct{ runs []ancestor }

type ancestor struct {
	controller string
	key        Key
	loops      int // how often this key was among its own ancestors
}

const (
	// lineageWrites is how many objects' writers are remembered.
	lineageWrites = 4096
	// lineageDepth is how many controllers a loop may lead through and be found.
	lineageDepth = 16
	// freeLoops is how often a key may cause itself before it is slowed: some need a few rounds to settle.
	freeLoops = 10
	firstSlow = 10 * time.Millisecond
	mostSlow  = time.Minute
)

// note remembers a write. It comes before it with an empty revision, for its event may be quick, and again after it.
func (l *lineage) note(target Key, revision string, by *ancestry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.writes[target]; !known {
		if l.writes == nil {
			l.writes, l.order = make(map[Key]write), make([]Key, lineageWrites)
			l.noted.Store(true)
		}
		delete(l.writes, l.order[l.next])
		l.order[l.next] = target
		l.next = (l.next + 1) % lineageWrites
	}
	l.writes[target] = write{revision, by}
}

// of returns who made an event, nil if nobody here did.
func (l *lineage) of(e *Event) *ancestry {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w, ok := l.writes[e.Key]; ok && (w.revision == "" || w.revision == e.Revision) {
		return w.by
	}
	return nil
}

// descend returns the ancestry of what a run of key does.
func (s *runState) descend() *ancestry {
	if s.lineage != nil {
		return s.lineage
	}
	// Only if all that caused the run comes of runs is it no news.
	var from *ancestry
	for x := range s.req.Causes.each {
		if x.by() == nil {
			from = nil
			break
		}
		from = x.by()
	}
	me := ancestor{controller: s.c.name, key: s.req.Key}
	a := &ancestry{}
	if from != nil {
		me.loops = from.loops(me.controller, me.key)
		a.runs = slices.Clone(from.runs[max(0, len(from.runs)-lineageDepth+1):])
	}
	a.runs = append(a.runs, me)
	s.lineage = a
	return a
}

// descendLocked is descend for what a handler may call from several goroutines.
func (s *runState) descendLocked() *ancestry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.descend()
}

// loops is how often a key has caused itself when its next run comes of a.
func (a *ancestry) loops(controller string, key Key) int {
	for _, x := range slices.Backward(a.runs) {
		if x.controller == controller && x.key == key {
			return x.loops + 1
		}
	}
	return 0
}

// slow returns how long a request is held back because its key causes itself, and says so the first time and now and then.
func (c *runner) slow(ctx context.Context, key Key, by *ancestry) time.Duration {
	loops := by.loops(c.name, key)
	if loops <= freeLoops {
		return 0
	}
	wait := mostSlow
	if n := loops - freeLoops - 1; n < 16 {
		wait = min(firstSlow<<n, mostSlow)
	}
	if loops == freeLoops+1 || loops%100 == 0 {
		c.log.WarnContext(ctx, "a key causes its own reconcile again and again; it is slowed", "key", key.String(), "rounds", loops, "wait", wait)
	}
	if f := c.engine.cfg.Hooks.KeySlowed; f != nil {
		f(c.name, key, wait)
	}
	return wait
}
