package consul

import (
	"context"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
)

// Store is a kv.Store under a prefix of Consul's keys.
type Store struct {
	conn   *Connection
	prefix string
}

var _ kv.Watcher = (*Store)(nil)

// NewStore returns the store under a prefix of keys. The token needs key:write there.
func NewStore(conn *Connection, prefix string) *Store { return &Store{conn, prefix} }

// at is where an entry is kept: its key may be any bytes, Consul's may not. Hexadecimal keeps prefixes what they are.
func (s *Store) at(key string) string { return s.prefix + hex.EncodeToString([]byte(key)) }

func (s *Store) entry(p *api.KVPair) (kv.Entry, error) {
	key, err := hex.DecodeString(p.Key[len(s.prefix):])
	if err != nil {
		return kv.Entry{}, fmt.Errorf("%s is no entry of a store: %w", p.Key, err)
	}
	return kv.Entry{Key: string(key), Value: p.Value, Revision: revisionOf(p.ModifyIndex)}, nil
}

// Get implements kv.Store.
func (s *Store) Get(ctx context.Context, key string) (kv.Entry, error) {
	opts, err := s.conn.query(ctx)
	if err != nil {
		return kv.Entry{}, err
	}
	p, _, err := s.conn.client.KV().Get(s.at(key), opts)
	switch {
	case err != nil:
		return kv.Entry{}, understood(err)
	case p == nil:
		return kv.Entry{}, kv.ErrNotFound
	}
	return s.entry(p)
}

// Put implements kv.Store.
func (s *Store) Put(ctx context.Context, key string, value []byte, revision string) (string, error) {
	index, err := indexOf(revision)
	if err != nil {
		return "", err
	}
	done, err := s.conn.transact(ctx, api.TxnOps{{KV: &api.KVTxnOp{Verb: api.KVCAS, Key: s.at(key), Value: value, Index: index}}})
	if err != nil {
		return "", err
	}
	return revisionOf(done.Results[0].KV.ModifyIndex), nil
}

// indexOf reads a revision; none is 0, at which there is no entry.
func indexOf(revision string) (uint64, error) {
	if revision == "" {
		return 0, nil
	}
	index, err := strconv.ParseUint(revision, 10, 64)
	if err != nil || index == 0 {
		return 0, fmt.Errorf("%w: revision %q is not one of Consul's", engine.ErrConflict, revision)
	}
	return index, nil
}

// Delete implements kv.Store.
func (s *Store) Delete(ctx context.Context, key, revision string) error {
	index, err := indexOf(revision)
	if err != nil {
		return err
	}
	op := &api.KVTxnOp{Verb: api.KVDelete, Key: s.at(key)}
	if index != 0 {
		have, err := s.Get(ctx, key)
		if engine.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if have.Revision != revision {
			return fmt.Errorf("%w: it is at revision %s", kv.ErrConflict, have.Revision)
		}
		op.Verb, op.Index = api.KVDeleteCAS, index
	}
	_, err = s.conn.transact(ctx, api.TxnOps{{KV: op}})
	return err
}

// List implements kv.Store.
func (s *Store) List(ctx context.Context, prefix string) ([]kv.Entry, error) {
	entries, _, err := s.list(ctx, prefix, 0)
	return entries, err
}

func (s *Store) list(ctx context.Context, prefix string, after uint64) ([]kv.Entry, *api.QueryMeta, error) {
	opts, err := s.conn.query(ctx)
	if err != nil {
		return nil, nil, err
	}
	opts.WaitIndex, opts.WaitTime = after, longestWait
	pairs, meta, err := s.conn.client.KV().List(s.at(prefix), opts)
	if err != nil {
		return nil, nil, understood(err)
	}
	entries := make([]kv.Entry, 0, len(pairs))
	for _, p := range pairs {
		e, err := s.entry(p)
		if err != nil {
			return nil, nil, err
		}
		entries = append(entries, e)
	}
	return entries, meta, nil
}

// Watch implements kv.Watcher.
func (s *Store) Watch(ctx context.Context, prefix string) (<-chan kv.Entry, error) {
	entries, meta, err := s.list(ctx, prefix, 0)
	if err != nil {
		return nil, err
	}
	told := make(chan kv.Entry)
	go func() {
		defer close(told)
		known := revisions(entries)
		for index := max(meta.LastIndex, 1); ; {
			entries, meta, err := s.list(ctx, prefix, index)
			if err != nil || meta.LastIndex < index {
				return // something may have been missed
			}
			index = max(meta.LastIndex, 1)
			now := revisions(entries)
			for _, e := range entries {
				if known[e.Key] != e.Revision && !send(ctx, told, e) {
					return
				}
			}
			for key := range known {
				// The index of the answer is no less than that of the deletion.
				if _, there := now[key]; !there && !send(ctx, told, kv.Entry{Key: key, Revision: revisionOf(index), Deleted: true}) {
					return
				}
			}
			known = now
		}
	}()
	return told, nil
}

func revisions(entries []kv.Entry) map[string]string {
	out := make(map[string]string, len(entries))
	for _, e := range entries {
		out[e.Key] = e.Revision
	}
	return out
}

func send(ctx context.Context, to chan<- kv.Entry, e kv.Entry) bool {
	select {
	case to <- e:
		return true
	case <-ctx.Done():
		return false
	}
}
