package nats

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
)

// Store is a kv.Watcher in a bucket.
type Store struct{ table table }

var _ kv.Watcher = (*Store)(nil)

// OpenStore opens the bucket, and creates it if need be.
func OpenStore(ctx context.Context, conn *Connection, bucket string) (*Store, error) {
	t, err := openTable(ctx, conn, bucket, true)
	if err != nil {
		return nil, err
	}
	return &Store{t}, nil
}

// storeKey is where an entry is kept: its key as a token, or its hash where that would be too long for a subject. The
// key itself is in a header.
func storeKey(key string) string {
	t := token(key)
	if len(t) > maxKeyTokens {
		sum := sha256.Sum256([]byte(key))
		return "=H" + hex.EncodeToString(sum[:])
	}
	return t
}

// Get implements kv.Store.
func (s *Store) Get(ctx context.Context, key string) (kv.Entry, error) {
	m, err := s.table.get(ctx, storeKey(key))
	if err != nil {
		return kv.Entry{}, err
	}
	return kv.Entry{Key: key, Value: m.Data, Revision: strconv.FormatUint(m.Sequence, 10)}, nil
}

// Put implements kv.Store.
func (s *Store) Put(ctx context.Context, key string, value []byte, revision string) (string, error) {
	m := natsgo.NewMsg("")
	m.Header.Set(headerKey, token(key))
	m.Data = value
	return s.table.write(ctx, storeKey(key), m, engine.Write{Absent: revision == "", Revision: revision})
}

// Delete implements kv.Store.
func (s *Store) Delete(ctx context.Context, key, revision string) error {
	if _, err := s.table.get(ctx, storeKey(key)); err != nil {
		if errors.Is(err, kv.ErrNotFound) {
			return nil
		}
		return err
	}
	m := natsgo.NewMsg("")
	m.Header.Set(headerOperation, "DEL")
	m.Header.Set(headerKey, token(key)) // for those who watch
	_, err := s.table.write(ctx, storeKey(key), m, engine.Write{Revision: revision})
	return err
}

// List implements kv.Store.
func (s *Store) List(ctx context.Context, prefix string) ([]kv.Entry, error) {
	var entries []kv.Entry
	err := snapshot(ctx, s.table.conn, s.table.stream, s.table.prefix+">", func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if e, ok := entryOf(m, meta, prefix); ok && !e.Deleted {
			entries = append(entries, e)
		}
		return nil
	})
	return entries, err
}

// entryOf reads an entry; false means that it is not under prefix, or not one of ours.
func entryOf(m jetstream.Msg, meta *jetstream.MsgMetadata, prefix string) (kv.Entry, bool) {
	key, err := untoken(m.Headers().Get(headerKey))
	if m.Headers()[headerKey] == nil || err != nil || !strings.HasPrefix(key, prefix) {
		return kv.Entry{}, false
	}
	return kv.Entry{
		Key: key, Value: m.Data(), Revision: strconv.FormatUint(meta.Sequence.Stream, 10), Deleted: operationOf(m.Headers()) != engine.Put,
	}, true
}

// Watch implements kv.Watcher. It begins with the last write or deletion of every key.
func (s *Store) Watch(ctx context.Context, prefix string) (<-chan kv.Entry, error) {
	c, err := newCursor(ctx, s.table.conn, s.table.stream, s.table.prefix+">", false)
	if err != nil {
		return nil, err
	}
	changes := make(chan kv.Entry)
	go func() {
		defer close(changes)
		defer c.close(ctx)
		for ctx.Err() == nil {
			err := c.fetch(ctx, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
				if e, ok := entryOf(m, meta, prefix); ok {
					select {
					case changes <- e:
					case <-ctx.Done():
					}
				}
				return nil
			})
			if err != nil || c.stillThere(ctx) != nil {
				return
			}
		}
	}()
	return changes, nil
}
