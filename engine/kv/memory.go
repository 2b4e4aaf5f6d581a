package kv

import (
	"bytes"
	"context"
	"strconv"
	"strings"
	"sync"
)

// Memory is a Store that lives as long as its process. Its zero value is ready for use.
type Memory struct {
	mu      sync.Mutex
	entries map[string]Entry
	last    uint64
}

var _ Store = (*Memory)(nil)

// Get implements Store.
func (m *Memory) Get(_ context.Context, key string) (Entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	if !ok {
		return Entry{}, ErrNotFound
	}
	e.Value = bytes.Clone(e.Value)
	return e, nil
}

// Put implements Store.
func (m *Memory) Put(_ context.Context, key string, value []byte, revision string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries[key].Revision != revision {
		return "", ErrConflict
	}
	if m.entries == nil {
		m.entries = make(map[string]Entry)
	}
	m.last++
	e := Entry{Key: key, Value: bytes.Clone(value), Revision: strconv.FormatUint(m.last, 10)}
	m.entries[key] = e
	return e.Revision, nil
}

// Delete implements Store.
func (m *Memory) Delete(_ context.Context, key, revision string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[key]
	if ok && revision != "" && e.Revision != revision {
		return ErrConflict
	}
	delete(m.entries, key)
	return nil
}

// List implements Store.
func (m *Memory) List(_ context.Context, prefix string) ([]Entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Entry
	for key, e := range m.entries {
		if strings.HasPrefix(key, prefix) {
			e.Value = bytes.Clone(e.Value)
			out = append(out, e)
		}
	}
	return out, nil
}
