package nats

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// cursor reads the last message of every subject under a filter, and then everything that comes, in order. It is a
// consumer that acks nothing and lives in the server's memory, read by our own fetch loop: the client's Consume can
// lose a pull and stall for twice its heartbeat, and its ordered consumer is built on it.
type cursor struct {
	conn     *Connection
	stream   jetstream.Stream
	consumer jetstream.Consumer
	next     uint64 // the consumer sequence that must come next
	// behind is how many messages the server had not delivered after the last one.
	behind uint64
}

const (
	fetchBatch     = 256
	fetchWait      = 30 * time.Second
	fetchHeartbeat = 5 * time.Second
)

// errGap says that a message was lost on its way: the reader must start again.
var errGap = errors.New("a message was lost on its way")

func newCursor(ctx context.Context, conn *Connection, stream jetstream.Stream, filter string, headersOnly bool) (*cursor, error) {
	consumer, err := ask(ctx, conn, func(ctx context.Context) (jetstream.Consumer, error) {
		return stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
			FilterSubject: filter, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, AckPolicy: jetstream.AckNonePolicy,
			MemoryStorage: true, Replicas: 1, HeadersOnly: headersOnly, InactiveThreshold: 2 * fetchWait, MaxDeliver: -1,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", filter, err)
	}
	return &cursor{conn: conn, stream: stream, consumer: consumer, next: 1, behind: consumer.CachedInfo().NumPending}, nil
}

// close removes the consumer; the server would after a while.
func (c *cursor) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = c.stream.DeleteConsumer(ctx, c.consumer.CachedInfo().Name) // the server removes it if this fails
}

// fetch passes on what comes, until a batch is full or nothing has come for a while.
func (c *cursor) fetch(ctx context.Context, yield func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	ctx, cancel := c.conn.during(ctx)
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, fetchWait)
	defer stop()
	batch, err := c.consumer.Fetch(fetchBatch, jetstream.FetchContext(ctx), jetstream.FetchHeartbeat(fetchHeartbeat))
	if err != nil {
		return fetchError(err)
	}
	return c.pass(batch, yield)
}

// fetchPending passes on what is there now. It does not wait: the server would go on sending for a moment when a short
// wait is over, and what it sends then is lost.
func (c *cursor) fetchPending(ctx context.Context, yield func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	batch, err := c.consumer.FetchNoWait(fetchBatch)
	if err == nil {
		err = c.pass(batch, yield)
	}
	return errors.Join(err, ctx.Err())
}

func (c *cursor) pass(batch jetstream.MessageBatch, yield func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	for m := range batch.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("message on %s: %w", m.Subject(), err)
		}
		if meta.Sequence.Consumer != c.next {
			return errGap
		}
		c.next++
		c.behind = meta.NumPending
		if err := yield(m, meta); err != nil {
			return err
		}
	}
	return fetchError(batch.Error())
}

// fetchError drops what only says that nothing came.
func fetchError(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// settled says whether everything that was there has been delivered. It asks the server: messages that are replaced
// or removed before they are delivered never come, and never say so.
func (c *cursor) settled(ctx context.Context) (bool, error) {
	if c.behind == 0 {
		return true, nil
	}
	info, err := ask(ctx, c.conn, c.consumer.Info)
	if err != nil {
		return false, fmt.Errorf("how far a read has come: %w", err)
	}
	return info.NumPending == 0 && info.Delivered.Consumer < c.next, nil
}

// stillThere finds out whether the server has forgotten the consumer, which an ended fetch alone does not say.
func (c *cursor) stillThere(ctx context.Context) error {
	if _, err := ask(ctx, c.conn, c.consumer.Info); err != nil && ctx.Err() == nil {
		return fmt.Errorf("the watch has ended: %w", err)
	}
	return nil
}

// snapshot passes on the last message of every subject under a filter.
func snapshot(ctx context.Context, conn *Connection, stream jetstream.Stream, filter string, yield func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	c, err := newCursor(ctx, conn, stream, filter, false)
	if err != nil {
		return err
	}
	defer c.close(ctx)
	for {
		done, err := c.settled(ctx)
		if err != nil || done {
			return err
		}
		if err := c.fetchPending(ctx, yield); err != nil {
			return err
		}
	}
}
