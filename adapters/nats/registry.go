package nats

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/owner"
)

// registry is an owner.Registry: messages of members, which the server drops when they are not renewed, and of claims,
// each written only over the one that was seen. A claim's epoch is the sequence of its message.
type registry struct {
	conn   *Connection
	stream jetstream.Stream
	prefix string
}

var _ owner.Registry = (*registry)(nil)

// coordination sets up the stream of members, claims and leases.
func (b *Bus) coordination(ctx context.Context) (jetstream.Stream, error) {
	return b.stream(ctx, jetstream.StreamConfig{
		Name: coordinationStream(b.cfg.Engine), Subjects: []string{"rqc." + token(b.cfg.Engine) + ".>"}, MaxMsgsPerSubject: 1,
		AllowMsgTTL: true, SubjectDeleteMarkerTTL: goneFor,
	})
}

// goneFor is how long it stays to be seen that a member or a lease has ended.
const goneFor = 10 * time.Second

// bury drops all members and leases: their processes are known to be dead.
func (g *registry) bury(ctx context.Context) error {
	for _, of := range []string{"m.>", "l.>"} {
		if err := g.stream.Purge(ctx, jetstream.WithPurgeSubject(g.prefix+of)); err != nil {
			return fmt.Errorf("forget the members of an earlier process: %w", err)
		}
	}
	return nil
}

// Announce implements owner.Registry.
func (g *registry) Announce(ctx context.Context, m owner.Member, ttl time.Duration) error {
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("announce this replica: %w", err)
	}
	if _, err = g.publish(ctx, "m."+token(m.ID), data, jetstream.WithMsgTTL(wholeSeconds(ttl))); err != nil {
		return fmt.Errorf("announce this replica: %w", err)
	}
	return nil
}

// wholeSeconds rounds up: the server knows nothing shorter.
func wholeSeconds(d time.Duration) time.Duration { return (d + time.Second - 1).Truncate(time.Second) }

// Withdraw implements owner.Registry.
func (g *registry) Withdraw(ctx context.Context, id string) error {
	if _, err := g.publish(ctx, "m."+token(id), nil, jetstream.WithMsgTTL(goneFor)); err != nil {
		return fmt.Errorf("withdraw this replica: %w", err)
	}
	return nil
}

// Claim implements owner.Registry.
func (g *registry) Claim(ctx context.Context, p owner.Partition, id string, seen uint64) (uint64, error) {
	epoch, err := g.publish(ctx, "c."+token(p.Group)+"."+strconv.Itoa(p.Number), []byte(id), jetstream.WithExpectLastSequencePerSubject(seen))
	switch {
	case errors.Is(err, engine.ErrConflict):
		return 0, owner.ErrOvertaken
	case err != nil:
		return 0, fmt.Errorf("claim partition %d of controller %s: %w", p.Number, p.Group, err)
	default:
		return epoch, nil
	}
}

func (g *registry) publish(ctx context.Context, subject string, data []byte, opts ...jetstream.PublishOpt) (uint64, error) {
	m := natsgo.NewMsg(g.prefix + subject)
	m.Data = data
	return g.conn.publish(ctx, m, opts...)
}

// Watch implements owner.Registry.
func (g *registry) Watch(ctx context.Context, changed func(owner.View)) error {
	c, err := newCursor(ctx, g.conn, g.stream, g.prefix+">", false)
	if err != nil {
		return err
	}
	defer c.close(ctx)
	view := owner.View{Members: make(map[string]owner.Member), Claims: make(map[owner.Partition]owner.Claim)}
	settled := false
	tell := func() { changed(owner.View{Members: maps.Clone(view.Members), Claims: maps.Clone(view.Claims)}) }
	see := func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if g.see(view, strings.TrimPrefix(m.Subject(), g.prefix), m.Data(), meta.Sequence.Stream) && settled {
			tell()
		}
		return nil
	}
	for !settled {
		if settled, err = c.settled(ctx); err == nil && !settled {
			err = c.fetchPending(ctx, see)
		}
		if err != nil {
			return err
		}
	}
	tell()
	for ctx.Err() == nil {
		if err := cmp.Or(c.fetch(ctx, see), c.stillThere(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// see changes what is known by a message. It returns false if that is nothing new.
func (g *registry) see(view owner.View, subject string, data []byte, seq uint64) bool {
	sort, name, _ := strings.Cut(subject, ".")
	switch sort {
	case "m":
		id, err := untoken(name)
		if err != nil {
			return false // not one of ours
		}
		was, known := view.Members[id]
		var m owner.Member
		if len(data) == 0 || json.Unmarshal(data, &m) != nil { // the marker of one that ran out is empty
			delete(view.Members, id)
			return known
		}
		view.Members[id] = m
		return !known || !reflect.DeepEqual(was, m)
	case "c":
		of, number, _ := strings.Cut(name, ".")
		controller, err := untoken(of)
		p, err2 := strconv.Atoi(number)
		if err != nil || err2 != nil {
			return false
		}
		view.Claims[owner.Partition{Group: controller, Number: p}] = owner.Claim{Holder: string(data), Epoch: seq}
		return true
	default:
		return false
	}
}
