package lease

import (
	"context"
	"sync"
	"time"
)

// Memory is a Store within one process. Its zero value is ready for use.
type Memory struct {
	mu     sync.Mutex
	grants map[string]grant
}

type grant struct {
	holder string
	until  time.Time
	epoch  uint64
}

var _ Store = (*Memory)(nil)

// Acquire implements Store.
func (m *Memory) Acquire(_ context.Context, name, holder string, ttl time.Duration) (bool, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, now := m.grants[name], time.Now()
	if g.holder != holder {
		if g.holder != "" && now.Before(g.until) {
			return false, g.epoch, nil
		}
		g.holder = holder
		g.epoch++
	}
	g.until = now.Add(ttl)
	if m.grants == nil {
		m.grants = make(map[string]grant)
	}
	m.grants[name] = g
	return true, g.epoch, nil
}

// Release implements Store.
func (m *Memory) Release(_ context.Context, name, holder string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.grants[name]; g.holder == holder {
		g.holder = ""
		m.grants[name] = g
	}
	return nil
}
