package consul

import (
	"cmp"
	"context"
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

// answer is what Consul has under watch.
type answer struct {
	found map[string]item
	// changed is, of an answer that is partial, what may differ from the one before, each name once.
	changed []string
	partial bool
	index   uint64
}

// watched is something that a blocking query answers with: it is the Run of the sources of this package.
type watched struct {
	conn *Connection
	name string
	// fetch asks for all there is, once the index has moved past that of the options.
	fetch func(ctx context.Context, opts *api.QueryOptions) (answer, error)
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
	queriesSecond = 200
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
		found, err := w.ask(ctx, index)
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
		index = next(found.index, index, asked)
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

func (w *watched) ask(ctx context.Context, index uint64) (answer, error) {
	opts, err := w.conn.query(ctx)
	if err != nil {
		return answer{}, err
	}
	opts.WaitIndex, opts.WaitTime = index, someWait()
	found, err := w.fetch(ctx, opts)
	return found, understood(err)
}

// compare tells what differs from what was told, and in a first list everything. It returns once that was accepted.
func (w *watched) compare(l *lanes.Lanes, a answer, first bool) error {
	for _, e := range w.differences(a, first) {
		if err := l.Add(e); err != nil {
			return err
		}
	}
	return l.Flush()
}

func (w *watched) differences(a answer, first bool) (events []engine.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.known == nil {
		w.known = make(map[string]item, len(a.found))
	}
	look := func(name string) {
		now, there := a.found[name]
		was, known := w.known[name]
		e := engine.Event{Key: w.key(name), Revision: now.revision, Incarnation: now.incarnation, New: now.meta}
		switch {
		case there && first:
			e.Operation, e.Old = engine.Resync, now.meta
		case there && (!known || was.revision != now.revision):
			e.Operation, e.Old = engine.Put, was.meta
		case !there && known:
			e = engine.Event{Operation: engine.Delete, Key: e.Key, Revision: was.revision, Incarnation: was.incarnation, Old: was.meta, Repaired: first}
		default:
			return
		}
		events = append(events, e)
	}
	if a.partial && !first {
		for _, name := range a.changed {
			look(name)
		}
		return events
	}
	for name := range a.found {
		look(name)
	}
	for name := range w.known {
		if _, there := a.found[name]; !there {
			look(name)
		}
	}
	return events
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
func next(index, after uint64, asked time.Time) uint64 {
	if index < after || index == after && time.Since(asked) < shortestWait {
		return 0 // a snapshot was restored: a query that this wakes answers with what was before
	}
	return max(index, 1) // 0 would not block
}

// someWait is how long a query waits: not all for the same time.
func someWait() time.Duration {
	return shortestWait + rand.N(longestWait-shortestWait) //nolint:gosec // jitter is no secret.
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
