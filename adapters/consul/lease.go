package consul

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine/lease"
)

// Leases are locks of Consul's sessions as a lease.Store: a key for each lease, which a session of the holder's locks.
//
// The epoch is the key's lock index, which Consul raises with every holder; the keys are never deleted. Consul ends a session that is
// not renewed after twice its time to live, of ten seconds at least, so a session has half of the lease's. The holder has stopped by its own
// clock by then. So the sessions have a lock-delay of a millisecond, the least there is: it protects from holders that do not know the
// time, and would only make others wait.
type Leases struct {
	conn   *Connection
	prefix string

	mu       sync.Mutex
	sessions map[grant]string
}

type grant struct{ name, holder string }

var _ lease.Store = (*Leases)(nil)

// shortest is what a lease lasts at least: twice Consul's bound for a session.
const shortest = 20 * time.Second

// NewLeases returns the leases under a prefix of keys. The token needs key:write there and session:write on the agent's node.
func NewLeases(conn *Connection, prefix string) *Leases {
	return &Leases{conn: conn, prefix: prefix, sessions: make(map[grant]string)}
}

// TTL is what a lease lasts unless more is asked for: the shortest that there is.
func (l *Leases) TTL() time.Duration { return shortest }

// Acquire implements lease.Store.
func (l *Leases) Acquire(ctx context.Context, name, holder string, ttl time.Duration) (held bool, epoch uint64, err error) {
	session, err := l.session(ctx, grant{name, holder}, max(ttl, shortest))
	if err != nil {
		return false, 0, fmt.Errorf("lease %s: %w", name, err)
	}
	opts, err := l.conn.writes(ctx)
	if err != nil {
		return false, 0, err
	}
	if held, _, err = l.conn.client.KV().Acquire(&api.KVPair{Key: l.prefix + name, Value: []byte(holder), Session: session}, opts); err != nil {
		return false, 0, fmt.Errorf("lease %s: %w", name, understood(err))
	}
	query, err := l.conn.query(ctx)
	if err != nil {
		return false, 0, err
	}
	query.AllowStale, query.RequireConsistent = false, true
	p, _, err := l.conn.client.KV().Get(l.prefix+name, query)
	switch {
	case err != nil:
		return false, 0, fmt.Errorf("lease %s: %w", name, understood(err))
	case p == nil: // somebody deletes what is not theirs
		return false, 0, nil
	}
	return held && p.Session == session, p.LockIndex, nil
}

// session returns the holder's session, renewed, or a new one.
func (l *Leases) session(ctx context.Context, g grant, ttl time.Duration) (string, error) {
	l.mu.Lock()
	id := l.sessions[g]
	l.mu.Unlock()
	opts, err := l.conn.writes(ctx)
	if err != nil {
		return "", err
	}
	if id != "" {
		entry, _, err := l.conn.client.Session().Renew(id, opts)
		if err != nil {
			return "", understood(err)
		}
		if entry != nil {
			return id, nil
		}
	}
	id, _, err = l.conn.client.Session().CreateNoChecks(&api.SessionEntry{
		Name: "windlass " + g.name, TTL: (ttl / 2).String(), Behavior: api.SessionBehaviorRelease, LockDelay: time.Millisecond,
	}, opts)
	if err != nil {
		return "", understood(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions[g] = id
	return id, nil
}

// Release implements lease.Store.
func (l *Leases) Release(ctx context.Context, name, holder string) error {
	g := grant{name, holder}
	l.mu.Lock()
	id, ok := l.sessions[g]
	delete(l.sessions, g)
	l.mu.Unlock()
	if !ok {
		return nil
	}
	opts, err := l.conn.writes(ctx)
	if err != nil {
		return err
	}
	// A lock that is given up has no lock-delay; one whose session ends has.
	if _, _, err := l.conn.client.KV().Release(&api.KVPair{Key: l.prefix + name, Value: []byte(holder), Session: id}, opts); err != nil {
		return fmt.Errorf("release lease %s: %w", name, understood(err))
	}
	if _, err := l.conn.client.Session().Destroy(id, opts); err != nil {
		return fmt.Errorf("release lease %s: %w", name, understood(err))
	}
	return nil
}
