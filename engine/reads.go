package engine

import (
	"context"
	"sync"
)

// reads are what the keys of a controller read in their last runs, so that a change of it reconciles them again.
type reads struct {
	mu      sync.Mutex
	readers map[reading]map[Key]string // the keys that read something, and at which revision
	of      map[Key][]reading
}

// reading is an object that was read, or with only a source, a list of all that it holds.
type reading struct {
	key    Key
	source string
}

// maxReadings is how many objects of one run are remembered. A run that reads more had better read a list.
const maxReadings = 512

// seen is what a run has read so far.
type seen struct {
	what     reading
	revision string
}

// readBy notes that the run under way read something.
func (s *runState) readBy(what reading, revision string) {
	if s.c.tracked == nil || what.key == s.req.Key {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) < maxReadings {
		s.seen = append(s.seen, seen{what, revision})
	} else if len(s.seen) == maxReadings {
		s.seen = append(s.seen, seen{})
		s.c.log.Warn("a run reads more objects than are remembered; changes of the rest do not reconcile it", "key", s.req.Key.String(), "remembered", maxReadings)
	}
}

// keep replaces what is remembered of a key.
func (r *reads) keep(key Key, now []seen) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.readers == nil {
		r.readers, r.of = make(map[reading]map[Key]string), make(map[Key][]reading)
	}
	for _, what := range r.of[key] {
		delete(r.readers[what], key)
		if len(r.readers[what]) == 0 {
			delete(r.readers, what)
		}
	}
	delete(r.of, key)
	for _, x := range now[:min(len(now), maxReadings)] {
		if r.readers[x.what] == nil {
			r.readers[x.what] = make(map[Key]string)
		}
		r.readers[x.what][key] = x.revision
		r.of[key] = append(r.of[key], x.what)
	}
}

// dependents returns the keys that read what an event speaks of. What is only listed again, at the revision that was
// read, is no news.
func (r *reads) dependents(e *Event) (keys []Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, revision := range r.readers[reading{key: e.Key}] {
		if e.Operation != Resync || revision != e.Revision {
			keys = append(keys, k)
		}
	}
	if e.Operation != Resync {
		for k := range r.readers[reading{source: e.Source}] {
			keys = append(keys, k)
		}
	}
	return keys
}

// followReads adds what an event means to the keys that read its object.
func (c *runner) followReads(ctx context.Context, e *Event) error {
	keys := c.tracked.dependents(e)
	if len(keys) == 0 {
		return nil
	}
	if e.Operation == Resync {
		found := *e
		found.Operation = Put // a list found a change that no event told of
		e = &found
	}
	return c.enqueueMapped(ctx, e, keys)
}
