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
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		FilterSubject: filter, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, AckPolicy: jetstream.AckNonePolicy,
		MemoryStorage: true, Replicas: 1, HeadersOnly: headersOnly, InactiveThreshold: 2 * fetchWait, MaxDeliver: -1,
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

// fetch passes on what comes until a batch or the wait is over.
func (c *cursor) fetch(ctx context.Context, wait time.Duration, yield func(jetstream.Msg, *jetstream.MsgMetadata) error) error {
	ctx, cancel := c.conn.during(ctx)
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, wait)
	defer stop()
	opts := []jetstream.FetchOpt{jetstream.FetchContext(ctx)}
	if wait > 2*fetchHeartbeat {
		opts = append(opts, jetstream.FetchHeartbeat(fetchHeartbeat))
	}
	batch, err := c.consumer.Fetch(fetchBatch, opts...)
	if err != nil {
		return fetchError(err)
	}
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
	info, err := c.consumer.Info(ctx)
	if err != nil {
		return false, fmt.Errorf("how far a read has come: %w", err)
	}
	return info.NumPending == 0 && info.Delivered.Consumer < c.next, nil
}

// stillThere finds out whether the server has forgotten the consumer, which an ended fetch alone does not say.
func (c *cursor) stillThere(ctx context.Context) error {
	if _, err := c.consumer.Info(ctx); err != nil && ctx.Err() == nil {
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
		if err := c.fetch(ctx, 100*time.Millisecond, yield); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}
