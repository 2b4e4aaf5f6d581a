package consul

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"golang.org/x/time/rate"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/lanes"
)

// item is one thing in an answer.
type item struct {
	revision, incarnation string
	meta                  *engine.Meta
}

// watched is something that a blocking query answers with: it is the Run of the sources of this package.
type watched struct {
	conn *Connection
	name string
	// fetch asks for all there is, once the index has moved past that of the options.
	fetch func(ctx context.Context, opts *api.QueryOptions) (map[string]item, *api.QueryMeta, error)
	key   func(name string) engine.Key
	// trace returns the trace context of the last write, "" if there is none. Nil is none ever.
	trace func(ctx context.Context, name string) string

	mu     sync.Mutex
	known  map[string]item // what was told
	status error
}

// The bounds of a blocking query. Consul answers after the wait at the latest, and up to a sixteenth later.
const (
	longestWait   = 5 * time.Minute
	shortestWait  = longestWait - longestWait/10
	queriesSecond = 50
	firstBackoff  = 100 * time.Millisecond
	longBackoff   = 10 * time.Second
)

// Status is why Consul cannot be watched at present, nil if it can.
func (w *watched) Status() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status
}

func (w *watched) setStatus(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.status = err
}

// Run implements engine.Source.
func (w *watched) Run(ctx context.Context, emit engine.Emit) error {
	if err := emit(ctx, engine.Event{Operation: engine.ListStarted}); err != nil {
		return err
	}
	l := lanes.New(func(e engine.Event) error { return w.tell(ctx, emit, e) }, func() {})
	defer l.Close()
	limit := rate.NewLimiter(queriesSecond, queriesSecond)
	var index uint64
	first, backoff := true, firstBackoff
	for ctx.Err() == nil {
		if err := limit.Wait(ctx); err != nil {
			return nil // an ended context is how a source ends
		}
		asked := time.Now()
		found, meta, err := w.ask(ctx, index)
		if err != nil {
			if ctx.Err() == nil {
				w.conn.log.WarnContext(ctx, "Consul cannot be watched; it is tried again", "source", w.name, "err", err, "after", backoff)
			}
			w.setStatus(err)
			pause(ctx, backoff+rand.N(backoff/2)) //nolint:gosec // jitter is no secret.
			index, backoff = 0, min(2*backoff, longBackoff)
			continue
		}
		backoff = firstBackoff
		index = next(meta, index, asked)
		if err := w.compare(l, found, first); err != nil || ctx.Err() != nil {
			return cmp.Or(err, nil)
		}
		if first {
			first = false
			if err := emit(ctx, engine.Event{Operation: engine.ListEnded}); err != nil {
				return err
			}
		}
		w.setStatus(nil)
	}
	return nil
}

func (w *watched) ask(ctx context.Context, index uint64) (map[string]item, *api.QueryMeta, error) {
	opts, err := w.conn.query(ctx)
	if err != nil {
		return nil, nil, err
	}
	opts.WaitIndex, opts.WaitTime = index, shortestWait+rand.N(longestWait-shortestWait) //nolint:gosec // jitter is no secret.
	found, meta, err := w.fetch(ctx, opts)
	return found, meta, understood(err)
}

// compare tells what differs from what was told, and in a first list everything. It returns once that was accepted.
func (w *watched) compare(l *lanes.Lanes, found map[string]item, first bool) error {
	w.mu.Lock()
	if w.known == nil {
		w.known = make(map[string]item, len(found))
	}
	known := w.known
	w.known = maps.Clone(known) // it changes while events are accepted
	w.mu.Unlock()
	for name, now := range found {
		was, ok := known[name]
		switch {
		case first:
			if err := l.Add(engine.Event{Operation: engine.Resync, Key: w.key(name), Revision: now.revision, Incarnation: now.incarnation, Old: now.meta, New: now.meta}); err != nil {
				return err
			}
		case !ok || was.revision != now.revision:
			e := engine.Event{Operation: engine.Put, Key: w.key(name), Revision: now.revision, Incarnation: now.incarnation, New: now.meta}
			if ok {
				e.Old = was.meta
			}
			if err := l.Add(e); err != nil {
				return err
			}
		}
	}
	for name, was := range known {
		if _, there := found[name]; there {
			continue
		}
		if err := l.Add(engine.Event{Operation: engine.Delete, Key: w.key(name), Revision: was.revision, Incarnation: was.incarnation, Old: was.meta, Repaired: first}); err != nil {
			return err
		}
	}
	return l.Flush()
}

// tell emits an event until it is accepted, and notes that.
func (w *watched) tell(ctx context.Context, emit engine.Emit, e engine.Event) error {
	if w.trace != nil && e.Operation == engine.Put {
		e.Traceparent = w.trace(ctx, e.Key.Name)
	}
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		err := emit(ctx, e)
		if err == nil {
			break
		}
		w.conn.log.InfoContext(ctx, "an event was not accepted; it is emitted again", "source", w.name, "key", e.Key.String(), "err", err, "after", wait)
		if pause(ctx, wait); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Operation == engine.Delete {
		delete(w.known, e.Key.Name)
	} else {
		w.known[e.Key.Name] = item{e.Revision, e.Incarnation, e.New}
	}
	return nil
}

// next is the index to wait behind after an answer.
func next(meta *api.QueryMeta, after uint64, asked time.Time) uint64 {
	if meta.LastIndex < after || meta.LastIndex == after && time.Since(asked) < shortestWait {
		return 0 // a snapshot was restored: a query that this wakes answers with what was before
	}
	return max(meta.LastIndex, 1) // 0 would not block
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
