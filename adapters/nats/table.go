package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
)

// The headers of key-value buckets (ADR-8) and ours.
const (
	headerOperation   = "KV-Operation"
	headerTraceparent = "traceparent"
	headerIntent      = "Windlass-Intent"
	headerKey         = "Windlass-Key"
	headerFence       = "Windlass-Fence"
)

// table is a bucket at the level of its stream, because the client's KeyValue shows no headers and takes none.
type table struct {
	conn   *Connection
	stream jetstream.Stream
	prefix string
}

// openTable opens a bucket, and creates it if it may.
func openTable(ctx context.Context, conn *Connection, bucket string, create bool) (table, error) {
	stream, err := conn.js.Stream(ctx, "KV_"+bucket)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if !create {
			return table{}, fmt.Errorf("bucket %q does not exist on NATS at %s: create it, or set create: true", bucket, conn.url)
		}
		if _, err = conn.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: bucket}); err == nil || errors.Is(err, jetstream.ErrBucketExists) {
			stream, err = conn.js.Stream(ctx, "KV_"+bucket)
		}
	}
	if err != nil {
		return table{}, fmt.Errorf("bucket %q on NATS at %s: %w", bucket, conn.url, err)
	}
	return table{conn: conn, stream: readAtLeader(stream), prefix: "$KV." + bucket + "."}, nil
}

// operationOf reads what happened from the headers of a bucket's message.
func operationOf(h natsgo.Header) engine.Operation {
	switch h.Get(headerOperation) {
	case "DEL":
		return engine.Delete
	case "PURGE":
		return engine.Purge
	}
	switch h.Get(jetstream.MarkerReasonHeader) {
	case "":
		return engine.Put
	case "Remove":
		return engine.Delete
	default: // MaxAge, Purge
		return engine.Purge
	}
}

// last returns the newest message of a key, a deletion's too, and ErrNotFound if there is none.
func (t table) last(ctx context.Context, key string) (*jetstream.RawStreamMsg, error) {
	return t.conn.last(ctx, t.stream, t.prefix+key)
}

// get returns the message that is a key's present value.
func (t table) get(ctx context.Context, key string) (*jetstream.RawStreamMsg, error) {
	m, err := t.last(ctx, key)
	if err == nil && operationOf(m.Header) != engine.Put {
		return nil, engine.ErrNotFound
	}
	return m, err
}

// write publishes a value or a deletion. Of the preconditions of w it honours Absent and Revision.
func (t table) write(ctx context.Context, key string, m *natsgo.Msg, w engine.Write) (string, error) {
	m.Subject = t.prefix + key
	if w.Traceparent != "" {
		m.Header.Set(headerTraceparent, w.Traceparent)
	}
	if w.Fence != 0 {
		m.Header.Set(headerFence, strconv.FormatUint(w.Fence, 10))
	}
	var opts []jetstream.PublishOpt
	switch {
	case w.Absent:
		return t.create(ctx, key, m)
	case w.Revision != "":
		seq, err := strconv.ParseUint(w.Revision, 10, 64)
		if err != nil {
			return "", fmt.Errorf("%w: revision %q is not one of NATS", engine.ErrInvalid, w.Revision)
		}
		opts = append(opts, jetstream.WithExpectLastSequencePerSubject(seq))
	}
	return t.publish(ctx, m, opts...)
}

// create writes where there is nothing, or nothing but the marker of a deletion.
func (t table) create(ctx context.Context, key string, m *natsgo.Msg) (string, error) {
	revision, err := t.publish(ctx, m, jetstream.WithExpectLastSequencePerSubject(0))
	if !errors.Is(err, engine.ErrConflict) {
		return revision, err
	}
	last, lastErr := t.last(ctx, key)
	if lastErr != nil || operationOf(last.Header) == engine.Put {
		return "", err
	}
	return t.publish(ctx, m, jetstream.WithExpectLastSequencePerSubject(last.Sequence))
}

func (t table) publish(ctx context.Context, m *natsgo.Msg, opts ...jetstream.PublishOpt) (string, error) {
	seq, err := t.conn.publish(ctx, m, opts...)
	if err != nil {
		return "", err
	}
	return strconv.FormatUint(seq, 10), nil
}

// remove writes the marker of a deletion.
func (t table) remove(ctx context.Context, key string, w engine.Write) error {
	m := natsgo.NewMsg("")
	m.Header.Set(headerOperation, "DEL")
	_, err := t.write(ctx, key, m, w)
	return err
}
