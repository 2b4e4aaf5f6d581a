package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/engine/kv"
)

// Store is a kv.Watcher in a hash: each entry is its revision, a line's end, and its value.
type Store struct {
	conn    *Connection
	keys    []string // the entries, the last revision
	channel string
}

var _ kv.Watcher = (*Store)(nil)

// NewStore returns the store of an engine. Redis makes it with the first entry.
func NewStore(conn *Connection, engineName string) *Store {
	return &Store{
		conn: conn, keys: []string{engineKey(engineName, "store"), engineKey(engineName, "store:last")}, channel: engineKey(engineName, "store"),
	}
}

func (s *Store) fail(what, key string, err error) error {
	return fmt.Errorf("%s %q: %w", what, key, understood(err))
}

func entryOf(key, text string) (kv.Entry, error) {
	revision, value, ok := strings.Cut(text, "\n")
	if _, err := strconv.ParseUint(revision, 10, 64); err != nil || !ok {
		return kv.Entry{}, fmt.Errorf("entry %q of the engine's store cannot be read: it does not begin with a revision", key)
	}
	return kv.Entry{Key: key, Value: []byte(value), Revision: revision}, nil
}

// Get implements kv.Store.
func (s *Store) Get(ctx context.Context, key string) (kv.Entry, error) {
	text, err := s.conn.client.HGet(ctx, s.keys[0], key).Result()
	switch {
	case errors.Is(err, goredis.Nil):
		return kv.Entry{}, kv.ErrNotFound
	case err != nil:
		return kv.Entry{}, s.fail("get", key, err)
	default:
		return entryOf(key, text)
	}
}

// Put implements kv.Store.
func (s *Store) Put(ctx context.Context, key string, value []byte, revision string) (string, error) {
	next, err := putScript.Run(ctx, s.conn.client, s.keys, key, value, revision, s.channel).Text()
	switch {
	case err != nil:
		return "", s.fail("put", key, err)
	case next == "":
		return "", kv.ErrConflict
	default:
		return next, nil
	}
}

// Delete implements kv.Store.
func (s *Store) Delete(ctx context.Context, key, revision string) error {
	done, err := deleteScript.Run(ctx, s.conn.client, s.keys, key, revision, s.channel).Int()
	switch {
	case err != nil:
		return s.fail("delete", key, err)
	case done == 0:
		return kv.ErrConflict
	default:
		return nil
	}
}

// globEscape writes a text so that a pattern of Redis means just that text.
var globEscape = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// List implements kv.Store.
func (s *Store) List(ctx context.Context, prefix string) ([]kv.Entry, error) {
	var entries []kv.Entry
	err := scan(ctx, s.conn.client, s.keys[0], globEscape.Replace(prefix)+"*", func(key, text string) error {
		e, err := entryOf(key, text)
		entries = append(entries, e)
		return err
	})
	if err != nil {
		return nil, s.fail("list", prefix, err)
	}
	return entries, nil
}

// scan passes on the fields of a hash that match, each once.
func scan(ctx context.Context, client goredis.UniversalClient, key, match string, yield func(field, value string) error) error {
	seen := make(map[string]bool) // a hash that grows meanwhile repeats some
	for cursor := uint64(0); ; {
		found, next, err := client.HScan(ctx, key, cursor, match, 1000).Result()
		if err != nil {
			return err
		}
		for i := 0; i+1 < len(found); i += 2 {
			if seen[found[i]] {
				continue
			}
			seen[found[i]] = true
			if err := yield(found[i], found[i+1]); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// Watch implements kv.Watcher.
func (s *Store) Watch(ctx context.Context, prefix string) (<-chan kv.Entry, error) {
	sub := s.conn.client.Subscribe(ctx, s.channel)
	if _, err := sub.Receive(ctx); err != nil { // from here on nothing is missed
		_ = sub.Close()
		return nil, s.fail("watch", prefix, err)
	}
	changes := make(chan kv.Entry)
	go func() {
		defer close(changes)
		defer func() { _ = sub.Close() }()
		told := sub.ChannelWithSubscriptions()
		for {
			select {
			case m, ok := <-told:
				said, isMessage := m.(*goredis.Message)
				if !ok || !isMessage {
					return // the connection was lost, and what was said meanwhile
				}
				e, err := changeOf(said.Payload)
				if err != nil {
					return
				}
				if !strings.HasPrefix(e.Key, prefix) {
					continue
				}
				select {
				case changes <- e:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return changes, nil
}

// changeOf reads what the scripts publish: the revision, the length of the key, the key, P or D, and the value.
func changeOf(text string) (kv.Entry, error) {
	revision, rest, ok := strings.Cut(text, "\n")
	length, rest, ok2 := strings.Cut(rest, "\n")
	n, err := strconv.Atoi(length)
	if !ok || !ok2 || err != nil || len(rest) <= n {
		return kv.Entry{}, fmt.Errorf("a change of the engine's store cannot be read: %q", text)
	}
	return kv.Entry{Key: rest[:n], Value: []byte(rest[n+1:]), Revision: revision, Deleted: rest[n] == 'D'}, nil
}
