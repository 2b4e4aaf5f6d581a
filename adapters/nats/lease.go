package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/lease"
)

// Leases is a lease.Store of one engine: messages that the server drops when they are not renewed, each written only
// over the sequence that its writer knows. The epoch of a grant is the sequence of its first message, so it grows for
// all leases of the engine together.
type Leases struct {
	conn   *Connection
	stream jetstream.Stream
	prefix string

	mu    sync.Mutex
	known map[string]grant // what was last read or written
}

// grant is the content of a lease's message.
type grant struct {
	// Holder is empty once the lease was given back.
	Holder string `json:"holder,omitempty"`
	// Epoch is 0 in the first message of a grant: it is that message's sequence.
	Epoch uint64 `json:"epoch,omitempty"`

	seq uint64 // of the message; 0: there is none
}

var _ lease.Store = (*Leases)(nil)

func newLeases(conn *Connection, stream jetstream.Stream, eng string) *Leases {
	return &Leases{conn: conn, stream: stream, prefix: "rqc." + token(eng) + ".l.", known: make(map[string]grant)}
}

// TTL is how long leases last that do not say it themselves.
func (l *Leases) TTL() time.Duration { return memberTTL }

// Acquire implements lease.Store. The ttl is rounded up to whole seconds: the server knows nothing shorter.
func (l *Leases) Acquire(ctx context.Context, name, holder string, ttl time.Duration) (bool, uint64, error) {
	l.mu.Lock()
	g, known := l.known[name]
	l.mu.Unlock()
	for ctx.Err() == nil {
		if !known || g.Holder != holder {
			var err error
			if g, err = l.read(ctx, name); err != nil {
				return false, 0, err
			}
			if g.Holder != "" && g.Holder != holder {
				return false, g.Epoch, nil
			}
		}
		if g.Holder != holder {
			g.Holder, g.Epoch = holder, 0
		}
		written, err := l.write(ctx, name, g, ttl)
		if err == nil {
			return true, written.Epoch, nil
		}
		if !errors.Is(err, engine.ErrConflict) {
			return false, 0, err
		}
		known = false // it ran out, or somebody was quicker
	}
	return false, 0, ctx.Err()
}

// Release implements lease.Store.
func (l *Leases) Release(ctx context.Context, name, holder string) error {
	g, err := l.read(ctx, name)
	if err != nil || g.Holder != holder {
		return err
	}
	if _, err = l.write(ctx, name, grant{seq: g.seq}, goneFor); errors.Is(err, engine.ErrConflict) {
		return nil // it ran out, and somebody else has it
	}
	return err
}

func (l *Leases) read(ctx context.Context, name string) (grant, error) {
	m, err := l.conn.last(ctx, l.stream, l.prefix+token(name))
	var g grant
	switch {
	case errors.Is(err, engine.ErrNotFound):
	case err != nil:
		return g, fmt.Errorf("lease %s: %w", name, err)
	default:
		if len(m.Data) > 0 { // it is empty in the marker of a message that ran out
			if err := json.Unmarshal(m.Data, &g); err != nil {
				return g, fmt.Errorf("lease %s: message %d cannot be read: %w", name, m.Sequence, err)
			}
		}
		g.seq = m.Sequence
		if g.Epoch == 0 {
			g.Epoch = m.Sequence
		}
	}
	l.remember(name, g)
	return g, nil
}

func (l *Leases) remember(name string, g grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.known[name] = g
}

// write replaces the message that g was read from.
func (l *Leases) write(ctx context.Context, name string, g grant, ttl time.Duration) (grant, error) {
	data, err := json.Marshal(g)
	if err != nil {
		return g, fmt.Errorf("lease %s: %w", name, err)
	}
	m := natsgo.NewMsg(l.prefix + token(name))
	m.Data = data
	g.seq, err = l.conn.publish(ctx, m, jetstream.WithExpectLastSequencePerSubject(g.seq), jetstream.WithMsgTTL(wholeSeconds(ttl)))
	if err != nil {
		return g, fmt.Errorf("lease %s: %w", name, err)
	}
	if g.Epoch == 0 {
		g.Epoch = g.seq
	}
	l.remember(name, g)
	return g, nil
}
