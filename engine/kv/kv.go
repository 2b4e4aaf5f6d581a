// Package kv is the engine's one seam to small durable state: who owns which object. An implementation keeps each
// entry under a revision and writes only if the revision is the one that the writer knows.
package kv

import (
	"context"
	"errors"
)

// The errors of a Store.
var (
	// ErrNotFound says that there is no such entry.
	ErrNotFound = errors.New("not found")
	// ErrConflict says that the entry is not at the revision that the writer named.
	ErrConflict = errors.New("conflict")
)

// Entry is one entry of a store.
type Entry struct {
	Key   string
	Value []byte
	// Revision differs whenever the value was written anew. It is opaque, but of two revisions of a key the later is the
	// longer text, or of two equally long ones the greater.
	Revision string
	// Deleted says, in what Watch tells, that the entry is gone.
	Deleted bool
}

// After says whether e is later than a revision of its key.
func (e Entry) After(revision string) bool {
	if len(e.Revision) != len(revision) {
		return len(e.Revision) > len(revision)
	}
	return e.Revision > revision
}

// Store keeps entries by key. A key is any text, however odd. Its methods are safe for concurrent use and return once
// the store has accepted the write.
type Store interface {
	// Get returns the entry, or ErrNotFound.
	Get(ctx context.Context, key string) (Entry, error)
	// Put writes the entry if it is at revision, and returns the new one. An empty revision means that there must be
	// no entry. It returns ErrConflict otherwise.
	Put(ctx context.Context, key string, value []byte, revision string) (string, error)
	// Delete removes the entry if it is at revision; an empty revision means whatever it is at. It returns ErrConflict
	// otherwise, and nil if there is no entry.
	Delete(ctx context.Context, key, revision string) error
	// List returns the entries whose key begins with prefix, in no order.
	List(ctx context.Context, prefix string) ([]Entry, error)
}

// Watcher is a Store that several processes share.
type Watcher interface {
	Store
	// Watch tells every write and deletion of an entry whose key begins with prefix, by whomever, from its return on; it may
	// tell earlier ones too. Of several of one key at least the last is told. The channel is closed when ctx ends, or when
	// something may have been missed: then watch again, and list.
	Watch(ctx context.Context, prefix string) (<-chan Entry, error)
}
