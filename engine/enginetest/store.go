// Package enginetest has the suites that every implementation of a contract of the engine must pass.
package enginetest

import (
	"context"
	"errors"
	"sort"
	"strings"
	"testing"

	"github.com/windlass-dev/windlass/engine/kv"
)

// TestStore checks that a kv.Store keeps its promises. Each case gets an empty store.
func TestStore(t *testing.T, newStore func(t *testing.T) kv.Store) {
	t.Helper()
	for _, c := range []struct {
		name, why string
		run       func(ctx context.Context, t *testing.T, s kv.Store)
	}{
		{"what was put is got", "a store that forgets is none", putAndGet},
		{"a create refuses an existing entry", "two owners must not claim one target", createTwice},
		{"a write needs the present revision", "a late writer must not undo what came after it", staleWrite},
		{"a delete needs the present revision, if it names one", "the same, for deletions", staleDelete},
		{"what was deleted can be created again", "a marker of a deletion is no entry", createAfterDelete},
		{"a list has the entries under a prefix", "records are loaded at start", list},
		{"a key is any text", "keys come from foreign systems", oddKeys},
		{"a watch tells what others write", "replicas share one table", watch},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Log("because", c.why)
			c.run(t.Context(), t, newStore(t))
		})
	}
}

func must[T any](t *testing.T, v T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantErr(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("got error %v, want %v", got, want)
	}
}

func put(ctx context.Context, t *testing.T, s kv.Store, key, value, revision string) string {
	t.Helper()
	r, err := s.Put(ctx, key, []byte(value), revision)
	return must(t, r, err)
}

func putAndGet(ctx context.Context, t *testing.T, s kv.Store) {
	_, err := s.Get(ctx, "a")
	wantErr(t, err, kv.ErrNotFound)
	r := put(ctx, t, s, "a", "1", "")
	e, err := s.Get(ctx, "a")
	must(t, e, err)
	if e.Key != "a" || string(e.Value) != "1" || e.Revision != r || r == "" {
		t.Fatalf("got %+v, revision %q", e, r)
	}
}

func createTwice(ctx context.Context, t *testing.T, s kv.Store) {
	put(ctx, t, s, "a", "1", "")
	_, err := s.Put(ctx, "a", []byte("2"), "")
	wantErr(t, err, kv.ErrConflict)
}

func staleWrite(ctx context.Context, t *testing.T, s kv.Store) {
	old := put(ctx, t, s, "a", "1", "")
	present := put(ctx, t, s, "a", "2", old)
	if old == present {
		t.Fatal("the revision did not change")
	}
	_, err := s.Put(ctx, "a", []byte("3"), old)
	wantErr(t, err, kv.ErrConflict)
	put(ctx, t, s, "a", "3", present)
}

func staleDelete(ctx context.Context, t *testing.T, s kv.Store) {
	old := put(ctx, t, s, "a", "1", "")
	present := put(ctx, t, s, "a", "2", old)
	wantErr(t, s.Delete(ctx, "a", old), kv.ErrConflict)
	must(t, 0, s.Delete(ctx, "a", present))
	must(t, 0, s.Delete(ctx, "a", ""))
	put(ctx, t, s, "b", "1", "")
	must(t, 0, s.Delete(ctx, "b", ""))
	_, err := s.Get(ctx, "b")
	wantErr(t, err, kv.ErrNotFound)
}

func createAfterDelete(ctx context.Context, t *testing.T, s kv.Store) {
	r := put(ctx, t, s, "a", "1", "")
	must(t, 0, s.Delete(ctx, "a", r))
	put(ctx, t, s, "a", "2", "")
}

func list(ctx context.Context, t *testing.T, s kv.Store) {
	entries, err := s.List(ctx, "x/")
	if must(t, entries, err); len(entries) != 0 {
		t.Fatalf("got %v from an empty store", entries)
	}
	for _, k := range []string{"x/a", "x/b", "x/c", "y/a", "x"} {
		put(ctx, t, s, k, "of "+k, "")
	}
	must(t, 0, s.Delete(ctx, "x/c", ""))
	entries, err = s.List(ctx, "x/")
	must(t, entries, err)
	var got []string
	for _, e := range entries {
		if string(e.Value) != "of "+e.Key || e.Revision == "" {
			t.Fatalf("got %+v", e)
		}
		got = append(got, e.Key)
	}
	if sort.Strings(got); strings.Join(got, " ") != "x/a x/b" {
		t.Fatalf("got %v", got)
	}
}

func watch(ctx context.Context, t *testing.T, s kv.Store) {
	w, ok := s.(kv.Watcher)
	if !ok {
		t.Skip("the store is not shared")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	put(ctx, t, s, "x/before", "1", "")
	gone := put(ctx, t, s, "x/gone", "1", "")
	changes, err := w.Watch(ctx, "x/")
	must(t, changes, err)
	put(ctx, t, s, "y/other", "1", "")
	first := put(ctx, t, s, "x/a", "1", "")
	second := put(ctx, t, s, "x/a", "2", first)
	if !(kv.Entry{Revision: second}).After(first) || (kv.Entry{Revision: first}).After(second) {
		t.Fatalf("revision %q is not after %q", second, first)
	}
	must(t, 0, s.Delete(ctx, "x/gone", gone))
	last := map[string]kv.Entry{}
	for last["x/a"].Revision != second || !last["x/gone"].Deleted {
		select {
		case e, open := <-changes:
			if !open || !strings.HasPrefix(e.Key, "x/") {
				t.Fatalf("got %+v, open %v", e, open)
			}
			if was := last[e.Key]; was.Revision != "" && !e.After(was.Revision) {
				t.Fatalf("%+v came after %+v", e, was)
			}
			last[e.Key] = e
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		}
	}
	if string(last["x/a"].Value) != "2" || !last["x/gone"].After(gone) {
		t.Fatalf("got %+v", last)
	}
	cancel()
	for range changes { // it is closed
		continue
	}
}

func oddKeys(ctx context.Context, t *testing.T, s kv.Store) {
	keys := []string{"", " ", "a.b", "*", ">", "é", "\xff\x00", "=", "=41", "A", "a/b c\n", strings.Repeat("long", 1024), strings.Repeat("long", 1024) + "!"}
	for _, k := range keys {
		put(ctx, t, s, k, k, "")
	}
	for _, k := range keys {
		e, err := s.Get(ctx, k)
		if must(t, e, err); string(e.Value) != k {
			t.Fatalf("key %q holds the value of another", k)
		}
	}
	entries, err := s.List(ctx, "")
	if must(t, entries, err); len(entries) != len(keys) {
		t.Fatalf("got %d of %d entries", len(entries), len(keys))
	}
}
