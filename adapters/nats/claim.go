package nats

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
)

// claimTTL is how long a claim outlives its last renewal, judged by the server.
const claimTTL = 4 * time.Second

// ErrNameClaimed says that another engine of this name works on the same NATS.
var ErrNameClaimed = errors.New("another engine of this name is running")

// claim is the hold on an engine's name: a message that the server drops when it is not renewed, written only over the
// sequence that its holder knows. It keeps two engines from working on one set of keys.
type claim struct {
	conn    *Connection
	stream  jetstream.Stream
	subject string
	holder  string
	seq     uint64
	epoch   uint64        // of the stream when the name was taken: it grows from holder to holder
	lost    chan struct{} // closed when somebody else holds it
	err     error         // why, once lost is closed

	stop context.CancelFunc
	done sync.WaitGroup
}

// takeClaim takes the name. A claim that is there is given the time that a dead process's claim would need to vanish,
// unless it is known to be dead.
func takeClaim(ctx context.Context, conn *Connection, eng string, holderIsDead bool) (*claim, error) {
	stream, err := conn.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: claimStream(eng), Subjects: []string{"rqc." + token(eng) + ".>"}, MaxMsgsPerSubject: 1,
		Storage: jetstream.FileStorage, AllowMsgTTL: true, SubjectDeleteMarkerTTL: 10 * time.Second, AllowDirect: true,
	})
	if err != nil {
		return nil, streamError(claimStream(eng), err)
	}
	host, _ := os.Hostname() // only for the message to a human
	c := &claim{
		conn: conn, stream: stream, subject: "rqc." + token(eng) + ".engine", lost: make(chan struct{}),
		holder: fmt.Sprintf("process %d on %s, since %s", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339)),
	}
	deadline := time.Now().Add(claimTTL + time.Second)
	for {
		last, err := stream.GetLastMsgForSubject(ctx, c.subject)
		vacant := errors.Is(err, jetstream.ErrMsgNotFound) || err == nil && (len(last.Data) == 0 || holderIsDead)
		if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil, fmt.Errorf("claim the name %q: %w", eng, err)
		}
		if last != nil {
			c.seq = last.Sequence
		}
		if vacant {
			err := c.write(ctx, c.holder)
			if err == nil {
				c.epoch = c.seq
				break
			}
			if !errors.Is(err, engine.ErrConflict) {
				return nil, fmt.Errorf("claim the name %q: %w", eng, err)
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("%w: %q on NATS at %s is held by %s: stop it, or give this engine another metadata.name",
				ErrNameClaimed, eng, conn.url, strings.TrimSpace(string(last.Data)))
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("claim the name %q: %w", eng, ctx.Err())
		}
	}
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	c.stop = stop
	c.done.Go(func() { c.renew(renewing) })
	return c, nil
}

func (c *claim) write(ctx context.Context, holder string) error {
	m := natsgo.NewMsg(c.subject)
	m.Data = []byte(holder)
	ctx, cancel := context.WithTimeout(ctx, claimTTL/2)
	defer cancel()
	ack, err := c.conn.js.PublishMsg(ctx, m, jetstream.WithExpectLastSequencePerSubject(c.seq), jetstream.WithMsgTTL(claimTTL))
	if err != nil {
		return understood(err)
	}
	c.seq = ack.Sequence
	return nil
}

// renew writes the claim again until it is released, or until somebody else has it.
func (c *claim) renew(ctx context.Context) {
	ticker := time.NewTicker(claimTTL / 3)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		err := c.write(ctx, c.holder)
		if !errors.Is(err, engine.ErrConflict) {
			continue // an unreachable server is asked again
		}
		last, err := c.stream.GetLastMsgForSubject(ctx, c.subject)
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			c.seq = 0 // it ran out while the server was away: nobody took it
		case err != nil:
		case len(last.Data) == 0 || string(last.Data) == c.holder:
			c.seq = last.Sequence // its expiry marker, or a renewal whose answer was lost
		default:
			c.err = fmt.Errorf("%w: %s has taken the name over", ErrNameClaimed, last.Data)
			close(c.lost)
			return
		}
	}
}

// release gives the name up at once.
func (c *claim) release(ctx context.Context) {
	c.stop()
	c.done.Wait()
	select {
	case <-c.lost:
	default:
		_ = c.write(ctx, "") // it runs out by itself if this fails
	}
}

// streamError says what to do about a stream that cannot be set up.
func streamError(name string, err error) error {
	return fmt.Errorf("set up stream %s: %w: NATS 2.11 or later is needed, and the right to manage streams", name, err)
}
