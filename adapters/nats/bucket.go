package nats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/lanes"
)

// KindKV is the kind of the keys of buckets. The bucket is the namespace, the connection the scope.
const KindKV = "nats/kv"

// BucketConfig names a key-value bucket.
type BucketConfig struct {
	// Name is that of the source and sink.
	Name string `yaml:"-"`
	// Bucket is the bucket's name.
	Bucket string `yaml:"bucket"`
	// Create makes the bucket if there is none.
	Create bool `yaml:"create"`
}

var validBucket = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)

// Validate returns everything that is wrong with the configuration.
func (c BucketConfig) Validate() error {
	switch {
	case c.Bucket == "":
		return errors.New("bucket: it is required")
	case !validBucket.MatchString(c.Bucket):
		return fmt.Errorf("bucket: %q may hold only letters, digits, - and _", c.Bucket)
	}
	return nil
}

// Bucket is a key-value bucket as a source, a reader and a sink. Values are bytes. It emits put, delete and purge as
// NATS tells them; after every reconnection it lists again, and emits what it finds that no event had told.
type Bucket struct {
	cfg   BucketConfig
	kind  engine.Kind
	table table

	mu sync.Mutex
	// known is what this bucket has emitted, key to revision: what a later list is compared with. It outlives a Run.
	known   map[string]uint64
	listed  bool
	created time.Time // the bucket that known speaks of
}

var (
	_ engine.Source = (*Bucket)(nil)
	_ engine.Reader = (*Bucket)(nil)
	_ engine.Sink   = (*Bucket)(nil)
)

// NewBucket opens a bucket.
func NewBucket(ctx context.Context, conn *Connection, cfg BucketConfig) (*Bucket, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Name == "" {
		cfg.Name = cfg.Bucket
	}
	t, err := openTable(ctx, conn, cfg.Bucket, cfg.Create)
	if err != nil {
		return nil, err
	}
	return &Bucket{cfg: cfg, kind: engine.KindOf(KindKV), table: t, known: make(map[string]uint64)}, nil
}

// Name implements engine.Source and engine.Sink.
func (b *Bucket) Name() string { return b.cfg.Name }

// Key returns the key of the value called name.
func (b *Bucket) Key(name string) engine.Key {
	return engine.Key{Kind: b.kind, Scope: b.table.conn.scope, Namespace: b.cfg.Bucket, Name: name}
}

// Like returns the bucket's keys without their name.
func (b *Bucket) Like() engine.Key { return b.Key("") }

// Covers implements engine.Reader and engine.Sink.
func (b *Bucket) Covers(key engine.Key) bool {
	return key.Kind == b.kind && key.Namespace == b.cfg.Bucket && key.Scope == b.table.conn.scope
}

// Get implements engine.Reader.
func (b *Bucket) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	if !subjectKey(key.Name) {
		return engine.Object{}, engine.ErrNotFound // no bucket can hold it
	}
	m, err := b.table.get(ctx, key.Name)
	if err != nil {
		return engine.Object{}, err
	}
	return object(key, m.Sequence, m.Header, m.Data), nil
}

func object(key engine.Key, seq uint64, h natsgo.Header, data []byte) engine.Object {
	o := engine.Object{Key: key, Revision: strconv.FormatUint(seq, 10), Value: data}
	if intent := h.Get(headerIntent); intent != "" {
		o.Annotations = map[string]string{engine.IntentAnnotation: intent}
	}
	return o
}

// List implements engine.Reader.
func (b *Bucket) List(ctx context.Context) ([]engine.Object, error) {
	var objects []engine.Object
	err := snapshot(ctx, b.table.conn, b.table.stream, b.table.prefix+">", func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		if operationOf(m.Headers()) == engine.Put {
			key := b.Key(strings.TrimPrefix(m.Subject(), b.table.prefix))
			objects = append(objects, object(key, meta.Sequence.Stream, m.Headers(), m.Data()))
		}
		return nil
	})
	return objects, err
}

// Apply implements engine.Sink.
func (b *Bucket) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	if !validKey.MatchString(o.Key.Name) || !subjectKey(o.Key.Name) {
		return "", fmt.Errorf("%w: %q cannot be a key of a NATS bucket: letters, digits and -/_=. only, no dot first, last or twice",
			engine.ErrInvalid, o.Key.Name)
	}
	value, ok := o.Value.([]byte)
	if !ok {
		return "", fmt.Errorf("%w: a NATS bucket holds bytes, not %T", engine.ErrInvalid, o.Value)
	}
	m := natsgo.NewMsg("")
	m.Data = value
	if w.Intent != "" {
		m.Header.Set(headerIntent, w.Intent)
	}
	return b.table.write(ctx, o.Key.Name, m, w)
}

// Delete implements engine.Sink.
func (b *Bucket) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	if _, err := b.Get(ctx, key); err != nil {
		return err
	}
	return b.table.remove(ctx, key.Name, w)
}

var validKey = regexp.MustCompile(`^[-/_=\.a-zA-Z0-9]+$`)

// subjectKey says whether name can be part of a subject: a foreign client may have written more than Apply would.
func subjectKey(name string) bool {
	if name == "" || len(name) > 3<<10 || strings.ContainsAny(name, " \t\r\n\x00") {
		return false
	}
	for t := range strings.SplitSeq(name, ".") {
		if t == "" || t == "*" || t == ">" {
			return false
		}
	}
	return true
}

// Run implements engine.Source. It lists everything once; after an interruption it tells only what has changed since.
func (b *Bucket) Run(ctx context.Context, emit engine.Emit) error {
	b.mu.Lock()
	b.listed = false
	b.mu.Unlock()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		start := time.Now()
		err := b.watch(ctx, emit)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // an ended context is how a source ends.
		}
		if time.Since(start) > 10*time.Second {
			wait = 50 * time.Millisecond
		}
		b.table.conn.log.Info("watch interrupted; it is taken up again", "source", b.cfg.Name, "err", err, "after", wait)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

// meta is what events of a bucket say about an object: nothing, but that there was or is one.
var meta = &engine.Meta{}

// watch lists and then follows the bucket, through one consumer: nothing can fall between.
func (b *Bucket) watch(ctx context.Context, emit engine.Emit) error {
	// A bucket may have been removed and made again.
	t, err := openTable(ctx, b.table.conn, b.cfg.Bucket, b.cfg.Create)
	if err != nil {
		return err
	}
	b.forgetRevisionsOfAnother(t.stream.CachedInfo().Created)
	c, err := newCursor(ctx, t.conn, t.stream, t.prefix+">", true)
	if err != nil {
		return err
	}
	defer c.close(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	l := lanes.New(func(e engine.Event) error { return b.follow(ctx, emit, e) }, stop)
	defer l.Close()
	if err := b.list(ctx, c, emit, l); err != nil {
		return cmp.Or(l.Failure(), err)
	}
	for ctx.Err() == nil {
		err := c.fetch(ctx, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error { return l.Add(b.event(m, meta)) })
		if err != nil {
			return err
		}
		if err := c.stillThere(ctx); err != nil {
			return err
		}
	}
	return l.Flush()
}

// forgetRevisionsOfAnother keeps a bucket that was removed and made again from passing for the old one: its revisions
// begin anew, so equal ones mean nothing.
func (b *Bucket) forgetRevisionsOfAnother(created time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.created.IsZero() && !b.created.Equal(created) {
		for name := range b.known {
			b.known[name] = 0
		}
	}
	b.created = created
}

// list emits what is there. In a first list that is everything, as a resync; in a later one, what no event has told, and
// that is no list to whoever counts what a list lacks.
func (b *Bucket) list(ctx context.Context, c *cursor, emit engine.Emit, l *lanes.Lanes) error {
	gone := make(map[string]struct{})
	b.mu.Lock()
	first := !b.listed
	if first {
		clear(b.known) // an earlier attempt may have been cut short
	}
	for name := range b.known {
		gone[name] = struct{}{}
	}
	b.mu.Unlock()
	if first {
		if err := emit(ctx, engine.Event{Operation: engine.ListStarted}); err != nil {
			return err
		}
	}
	for {
		done, err := c.settled(ctx)
		if err != nil {
			return err
		}
		if done {
			break
		}
		err = c.fetchPending(ctx, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
			e := b.event(m, meta)
			delete(gone, e.Key.Name)
			if e.Operation == engine.Put && first {
				e.Operation, e.Old = engine.Resync, e.New
			} else {
				e.Repaired = true
			}
			return l.Add(e)
		})
		if err != nil {
			return err
		}
	}
	for name := range gone {
		if err := l.Add(engine.Event{Operation: engine.Purge, Key: b.Key(name), Old: meta, Repaired: true}); err != nil {
			return err
		}
	}
	if err := l.Flush(); err != nil {
		return err
	}
	if first {
		if err := emit(ctx, engine.Event{Operation: engine.ListEnded}); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listed = true
	return nil
}

func (b *Bucket) event(m jetstream.Msg, md *jetstream.MsgMetadata) engine.Event {
	e := engine.Event{
		Operation: operationOf(m.Headers()), Key: b.Key(strings.TrimPrefix(m.Subject(), b.table.prefix)),
		Revision: strconv.FormatUint(md.Sequence.Stream, 10), Time: md.Timestamp, New: meta,
		Traceparent: m.Headers().Get(headerTraceparent),
	}
	if intent := m.Headers().Get(headerIntent); intent != "" {
		e.New = &engine.Meta{Annotations: map[string]string{engine.IntentAnnotation: intent}}
	}
	return e
}

// follow emits an event unless it was emitted before, and remembers it.
func (b *Bucket) follow(ctx context.Context, emit engine.Emit, e engine.Event) error {
	revision, _ := strconv.ParseUint(e.Revision, 10, 64) // ours, or empty for what has gone without a trace
	b.mu.Lock()
	was, known := b.known[e.Key.Name]
	b.mu.Unlock()
	deleted := e.Operation == engine.Delete || e.Operation == engine.Purge
	if known && was == revision || deleted && !known {
		return nil
	}
	if known {
		e.Old = meta
	}
	if deleted {
		e.Old, e.New = meta, nil
	}
	if err := emit(ctx, e); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if deleted {
		delete(b.known, e.Key.Name)
	} else {
		b.known[e.Key.Name] = revision
	}
	return nil
}
