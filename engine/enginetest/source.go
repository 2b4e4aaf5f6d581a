package enginetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

// SourceFixture is a source under test and what changes it.
type SourceFixture struct {
	Source engine.Source
	// Key returns the key of the object called name.
	Key func(name string) engine.Key
	// Put makes the object called name exist, with something new about it; Delete removes it.
	Put, Delete func(t *testing.T, name string)
}

// TestSource checks what the engine relies on in a source. Each case gets an empty one.
func TestSource(t *testing.T, newSource func(t *testing.T) SourceFixture) {
	t.Helper()
	check(t, newSource, []testCase[SourceFixture]{
		{"the first list is bracketed and complete", "no controller starts before it has ended", firstList},
		{"changes after the list are told", "a change that nobody tells is never reconciled", liveChanges},
		{"what was told can be read", "a handler reads what it was told of", toldIsReadable},
		{"an event that was not accepted is told again", "accepted means that it is in a queue", refusedEvent},
		{"it lists again when it is run again", "changes while it did not run are found", runAgain},
		{"it returns nil when its context ends", "an end is no failure", endsCleanly},
	})
}

// listener runs a source and remembers what it emits.
type listener struct {
	mu     sync.Mutex
	events []engine.Event
	refuse int // how many events of operation Put are refused
	stop   func() error
}

var errNotAccepted = errors.New("not accepted, as the suite wants")

func listen(ctx context.Context, t *testing.T, s engine.Source) *listener {
	t.Helper()
	l := &listener{}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, func(_ context.Context, e engine.Event) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			if e.Operation == engine.Put && l.refuse > 0 {
				l.refuse--
				return errNotAccepted
			}
			l.events = append(l.events, e)
			return nil
		})
	}()
	l.stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() { _ = l.stop() })
	return l
}

// has says whether an event of one of the operations was told of key.
func (l *listener) has(key engine.Key, operations ...engine.Operation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		for _, o := range operations {
			if e.Key == key && e.Operation == o {
				return true
			}
		}
	}
	return false
}

// listed waits for the end of the first list.
func (l *listener) listed(t *testing.T) {
	t.Helper()
	eventually(t, "the list ends", func() bool { return l.has(engine.Key{}, engine.ListEnded) })
}

func firstList(ctx context.Context, t *testing.T, f SourceFixture) {
	f.Put(t, "a")
	f.Put(t, "b")
	l := listen(ctx, t, f.Source)
	l.listed(t)
	l.mu.Lock()
	defer l.mu.Unlock()
	expect(t, "the first event", l.events[0].Operation, engine.ListStarted)
	seen := map[engine.Key]bool{}
	for _, e := range l.events {
		if e.Operation == engine.ListEnded {
			break
		}
		seen[e.Key] = true
	}
	expect(t, "a was listed", seen[f.Key("a")], true)
	expect(t, "b was listed", seen[f.Key("b")], true)
}

func liveChanges(ctx context.Context, t *testing.T, f SourceFixture) {
	l := listen(ctx, t, f.Source)
	l.listed(t)
	f.Put(t, "a")
	eventually(t, "a put is told", func() bool { return l.has(f.Key("a"), engine.Put) })
	f.Delete(t, "a")
	eventually(t, "a deletion is told", func() bool { return l.has(f.Key("a"), engine.Delete, engine.Purge) })
}

func toldIsReadable(ctx context.Context, t *testing.T, f SourceFixture) {
	r, ok := f.Source.(engine.Reader)
	if !ok {
		t.Skip("the source cannot be read")
	}
	l := listen(ctx, t, f.Source)
	l.listed(t)
	f.Put(t, "a")
	eventually(t, "a put is told", func() bool { return l.has(f.Key("a"), engine.Put) })
	expect(t, "the reader covers the key", r.Covers(f.Key("a")), true)
	o, err := r.Get(ctx, f.Key("a"))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "the key read", o.Key, f.Key("a"))
	objects, err := r.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "objects listed", len(objects), 1)
	expect(t, "the revision listed", objects[0].Revision, o.Revision)
	_, err = r.Get(ctx, f.Key("nobody"))
	wantErr(t, err, engine.ErrNotFound)
}

func refusedEvent(ctx context.Context, t *testing.T, f SourceFixture) {
	l := listen(ctx, t, f.Source)
	l.listed(t)
	l.mu.Lock()
	l.refuse = 1
	l.mu.Unlock()
	f.Put(t, "a")
	eventually(t, "the put is told again", func() bool { return l.has(f.Key("a"), engine.Put, engine.Resync) })
}

func runAgain(ctx context.Context, t *testing.T, f SourceFixture) {
	f.Put(t, "stays")
	f.Put(t, "goes")
	first := listen(ctx, t, f.Source)
	first.listed(t)
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	f.Delete(t, "goes")
	f.Put(t, "comes")
	l := listen(ctx, t, f.Source)
	l.listed(t)
	told := []engine.Operation{engine.Put, engine.Resync}
	eventually(t, "what came meanwhile is told", func() bool { return l.has(f.Key("comes"), told...) })
	expect(t, "what stayed is listed", l.has(f.Key("stays"), told...), true)
	expect(t, "what went is listed", l.has(f.Key("goes"), told...), false)
}

func endsCleanly(ctx context.Context, t *testing.T, f SourceFixture) {
	l := listen(ctx, t, f.Source)
	l.listed(t)
	begin := time.Now()
	if err := l.stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > patience {
		t.Fatalf("it took %s", took)
	}
}

// SinkFixture is a sink under test.
type SinkFixture struct {
	Sink engine.Sink
	// Object returns an object called name, a different one for each version.
	Object func(name string, version int) engine.Object
}

// TestSink checks what the engine relies on in a sink. Each case gets an empty one. What needs reading is skipped for sinks
// that cannot be read.
func TestSink(t *testing.T, newSink func(t *testing.T) SinkFixture) {
	t.Helper()
	check(t, newSink, []testCase[SinkFixture]{
		{"what was applied is there, at the revision that was returned", "an echo is recognised by its revision", applied},
		{"a create refuses what exists", "an object of somebody else must not be overwritten", createdTwice},
		{"a write needs the revision that it names", "a late write must not undo a newer one", staleApply},
		{"a deletion needs the revision that it names", "the same, for deletions", staleRemoval},
		{"what is not there cannot be deleted", "the engine tells a deletion that was done from one that was not", removedTwice},
		{"many changes are carried out in their order", "what one call writes is written together", batched},
		{"a batch says how far it came", "what was not done is done again, and nothing else", batchRefused},
	})
}

func apply(ctx context.Context, t *testing.T, f SinkFixture, version int, w engine.Write) (string, error) {
	t.Helper()
	w.Intent = "suite"
	return f.Sink.Apply(ctx, f.Object("a", version), w)
}

func applied(ctx context.Context, t *testing.T, f SinkFixture) {
	r, ok := f.Sink.(engine.Reader)
	if !ok {
		t.Skip("the sink cannot be read")
	}
	for version := range 2 {
		revision, err := apply(ctx, t, f, version, engine.Write{Absent: version == 0})
		if err != nil {
			t.Fatal(err)
		}
		o, err := r.Get(ctx, f.Object("a", version).Key)
		if err != nil {
			t.Fatal(err)
		}
		expect(t, "revision", o.Revision, revision)
	}
}

// batches returns the sink under test as what it must be for this case.
func batches(t *testing.T, f SinkFixture) (engine.Batcher, engine.Reader) {
	t.Helper()
	b, ok := f.Sink.(engine.Batcher)
	r, readable := f.Sink.(engine.Reader)
	if !ok || !readable {
		t.Skip("the sink writes one object at a time, or cannot be read")
	}
	return b, r
}

func create(f SinkFixture, n int) engine.Change {
	return engine.Change{Object: f.Object(fmt.Sprintf("b%d", n), n), Write: engine.Write{Absent: true, Intent: "suite", Traceparent: "suite"}}
}

func batched(ctx context.Context, t *testing.T, f SinkFixture) {
	b, r := batches(t, f)
	var changes []engine.Change
	for n := range 150 {
		changes = append(changes, create(f, n))
	}
	revisions, err := b.Batch(ctx, changes)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "revisions", len(revisions), len(changes))
	for n := range changes {
		o, err := r.Get(ctx, changes[n].Object.Key)
		if err != nil {
			t.Fatal(err)
		}
		expect(t, "revision", o.Revision, revisions[n])
		changes[n].Object = f.Object(fmt.Sprintf("b%d", n), n+1)
		changes[n].Write = engine.Write{Revision: revisions[n], Intent: "suite"}
		changes[n].Delete = n%2 == 0
	}
	if revisions, err = b.Batch(ctx, changes); err != nil {
		t.Fatal(err)
	}
	expect(t, "revisions", len(revisions), len(changes))
	objects, err := r.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, "objects that are left", len(objects), len(changes)/2)
}

func batchRefused(ctx context.Context, t *testing.T, f SinkFixture) {
	b, r := batches(t, f)
	var changes []engine.Change
	for n := range 150 {
		changes = append(changes, create(f, n))
	}
	if _, err := f.Sink.Apply(ctx, changes[100].Object, engine.Write{Absent: true, Intent: "suite"}); err != nil {
		t.Fatal(err)
	}
	revisions, err := b.Batch(ctx, changes)
	wantErr(t, err, engine.ErrConflict)
	if len(revisions) > 100 {
		t.Fatalf("%d changes were carried out, past the one that is refused", len(revisions))
	}
	for n, c := range changes {
		switch o, err := r.Get(ctx, c.Object.Key); {
		case n == 100:
		case n < len(revisions):
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "revision", o.Revision, revisions[n])
		default:
			wantErr(t, err, engine.ErrNotFound)
		}
	}
}

func createdTwice(ctx context.Context, t *testing.T, f SinkFixture) {
	if _, err := apply(ctx, t, f, 0, engine.Write{Absent: true}); err != nil {
		t.Fatal(err)
	}
	_, err := apply(ctx, t, f, 1, engine.Write{Absent: true})
	wantErr(t, err, engine.ErrConflict)
}

func staleApply(ctx context.Context, t *testing.T, f SinkFixture) {
	first, err := apply(ctx, t, f, 0, engine.Write{Absent: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := apply(ctx, t, f, 1, engine.Write{Revision: first}); err != nil {
		t.Fatal(err)
	}
	_, err = apply(ctx, t, f, 2, engine.Write{Revision: first})
	wantErr(t, err, engine.ErrConflict)
}

func staleRemoval(ctx context.Context, t *testing.T, f SinkFixture) {
	first, err := apply(ctx, t, f, 0, engine.Write{Absent: true})
	if err != nil {
		t.Fatal(err)
	}
	second, err := apply(ctx, t, f, 1, engine.Write{Revision: first})
	if err != nil {
		t.Fatal(err)
	}
	key := f.Object("a", 0).Key
	wantErr(t, f.Sink.Delete(ctx, key, engine.Write{Revision: first}), engine.ErrConflict)
	if err := f.Sink.Delete(ctx, key, engine.Write{Revision: second}); err != nil {
		t.Fatal(err)
	}
}

func removedTwice(ctx context.Context, t *testing.T, f SinkFixture) {
	key := f.Object("a", 0).Key
	wantErr(t, f.Sink.Delete(ctx, key, engine.Write{}), engine.ErrNotFound)
	if _, err := apply(ctx, t, f, 0, engine.Write{Absent: true}); err != nil {
		t.Fatal(err)
	}
	if err := f.Sink.Delete(ctx, key, engine.Write{}); err != nil {
		t.Fatal(err)
	}
	wantErr(t, f.Sink.Delete(ctx, key, engine.Write{}), engine.ErrNotFound)
}
