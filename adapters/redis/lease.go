package redis

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/lease"
)

// Leases is a lease.Store of one engine.
type Leases struct {
	conn   *Connection
	engine string
}

var _ lease.Store = (*Leases)(nil)

func newLeases(conn *Connection, engineName string) *Leases { return &Leases{conn, engineName} }

// TTL is how long leases last that do not say it themselves.
func (l *Leases) TTL() time.Duration { return l.conn.ttl() }

func (l *Leases) keys(name string) []string {
	return []string{engineKey(l.engine, "lease:"+escaped(name))}
}

// Acquire implements lease.Store.
func (l *Leases) Acquire(ctx context.Context, name, holder string, ttl time.Duration) (held bool, epoch uint64, err error) {
	answer, err := acquireScript.Run(ctx, l.conn.client, l.keys(name), holder, ttl.Milliseconds()).StringSlice()
	if err != nil {
		return false, 0, fmt.Errorf("lease %s: %w", name, understood(err))
	}
	if len(answer) == 2 {
		epoch, err = strconv.ParseUint(answer[1], 10, 64)
	}
	if err != nil || epoch == 0 {
		return false, 0, fmt.Errorf("lease %s: %w: Redis answers %q", name, engine.ErrMalformed, answer)
	}
	return answer[0] == "1", epoch, nil
}

// Release implements lease.Store.
func (l *Leases) Release(ctx context.Context, name, holder string) error {
	if err := releaseScript.Run(ctx, l.conn.client, l.keys(name), holder).Err(); err != nil {
		return fmt.Errorf("lease %s: %w", name, understood(err))
	}
	return nil
}
