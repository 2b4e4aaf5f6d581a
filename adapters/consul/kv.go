package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
)

// KindKV is the kind of the keys of the KV store. A key is all name; it has no namespace.
const KindKV = "consul/kv"

// KVConfig names keys.
type KVConfig struct {
	// Name is that of the source and sink.
	Name string `yaml:"-"`
	// KeyPrefix is what the names of the keys begin with. It is part of them.
	KeyPrefix string `yaml:"keyPrefix"`
	// TracePrefix is under which the trace context of a write is kept, in a key of its own beside it. Empty: it is not kept.
	TracePrefix string `yaml:"tracePrefix"`
}

// Validate returns everything that is wrong with the configuration.
func (c KVConfig) Validate() error {
	var errs []error
	for field, prefix := range map[string]string{"keyPrefix": c.KeyPrefix, "tracePrefix": c.TracePrefix} {
		if strings.HasPrefix(prefix, "/") {
			errs = append(errs, fmt.Errorf("%s: %q begins with a slash, as no key of Consul does", field, prefix))
		}
	}
	if c.TracePrefix != "" && strings.HasPrefix(c.KeyPrefix, c.TracePrefix) {
		errs = append(errs, fmt.Errorf("tracePrefix: the keys under %q would be traces", c.KeyPrefix))
	}
	return errors.Join(errs...)
}

// KV is the keys under a prefix as a source, a reader and a sink. Values are bytes. Create it with NewKV.
type KV struct {
	watched

	cfg     KVConfig
	kind    engine.Kind
	answers pairs // of Consul, to Run alone
}

var (
	_ engine.Source           = (*KV)(nil)
	_ engine.Reader           = (*KV)(nil)
	_ engine.Sink             = (*KV)(nil)
	_ engine.Batcher          = (*KV)(nil)
	_ engine.RevisionComparer = (*KV)(nil)
)

// NewKV returns the keys under a prefix.
func NewKV(conn *Connection, cfg KVConfig) (*KV, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Name = cmp.Or(cfg.Name, "consul-kv")
	k := &KV{cfg: cfg, kind: engine.KindOf(KindKV)}
	k.watched = watched{conn: conn, name: cfg.Name, fetch: k.fetch, key: k.keyOf}
	k.answers.skip = k.isTrace
	if cfg.TracePrefix != "" {
		k.trace = func(ctx context.Context, name string) string { return conn.traceOf(ctx, cfg.TracePrefix+name) }
	}
	return k, nil
}

// Name implements engine.Source and engine.Sink.
func (k *KV) Name() string { return k.cfg.Name }

// Key returns the key of this name, which need not have the prefix.
func (k *KV) Key(name string) engine.Key {
	if !strings.HasPrefix(name, k.cfg.KeyPrefix) {
		name = k.cfg.KeyPrefix + name
	}
	return k.keyOf(name)
}

func (k *KV) keyOf(name string) engine.Key {
	return engine.Key{Kind: k.kind, Scope: k.conn.cfg.Scope, Name: name}
}

// Covers implements engine.Reader and engine.Sink.
func (k *KV) Covers(key engine.Key) bool {
	return key.Kind == k.kind && key.Scope == k.conn.cfg.Scope && key.Namespace == "" && strings.HasPrefix(key.Name, k.cfg.KeyPrefix) && !k.isTrace(key.Name)
}

func (k *KV) isTrace(name string) bool {
	return k.cfg.TracePrefix != "" && strings.HasPrefix(name, k.cfg.TracePrefix)
}

// CompareRevisions implements engine.RevisionComparer.
func (k *KV) CompareRevisions(a, b string) (int, error) { return compareIndexes(a, b) }

func compareIndexes(a, b string) (int, error) {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return cmp.Compare(x, y), errors.Join(err1, err2)
}

func revisionOf(index uint64) string { return strconv.FormatUint(index, 10) }

// meta is what events of keys say about a value: nothing, but that there was or is one.
var meta = &engine.Meta{}

func (k *KV) fetch(ctx context.Context, opts *api.QueryOptions) (answer, error) {
	body, m, err := k.conn.keys(ctx, k.cfg.KeyPrefix, len(k.answers.body), opts)
	if err != nil {
		return answer{}, err
	}
	changed, err := k.answers.take(body)
	if err != nil {
		return answer{}, fmt.Errorf("the answer cannot be read: %w", err)
	}
	return answer{found: k.answers.items, changed: changed, partial: true, index: m.LastIndex}, nil
}

func (k *KV) object(p *api.KVPair) engine.Object {
	value := p.Value
	if value == nil {
		value = []byte{}
	}
	return engine.Object{Key: k.keyOf(p.Key), Revision: revisionOf(p.ModifyIndex), Incarnation: revisionOf(p.CreateIndex), Value: value}
}

// Get implements engine.Reader.
func (k *KV) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	opts, err := k.conn.query(ctx)
	if err != nil {
		return engine.Object{}, err
	}
	p, _, err := k.conn.client.KV().Get(key.Name, opts)
	switch {
	case err != nil:
		return engine.Object{}, understood(err)
	case p == nil:
		return engine.Object{}, engine.ErrNotFound
	}
	return k.object(p), nil
}

// List implements engine.Reader.
func (k *KV) List(ctx context.Context) ([]engine.Object, error) {
	opts, err := k.conn.query(ctx)
	if err != nil {
		return nil, err
	}
	pairs, _, err := k.conn.client.KV().List(k.cfg.KeyPrefix, opts)
	if err != nil {
		return nil, understood(err)
	}
	objects := make([]engine.Object, 0, len(pairs))
	for _, p := range pairs {
		if !k.isTrace(p.Key) {
			objects = append(objects, k.object(p))
		}
	}
	return objects, nil
}

// Apply implements engine.Sink.
func (k *KV) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	revisions, err := k.Batch(ctx, []engine.Change{{Object: o, Write: w}})
	if err != nil {
		return "", fmt.Errorf("write %s: %w", o.Key.Name, err)
	}
	return revisions[0], nil
}

// Delete implements engine.Sink.
func (k *KV) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	have, err := k.Get(ctx, key)
	if err != nil {
		return err
	}
	w.Revision = cmp.Or(w.Revision, have.Revision)
	if _, err := k.Batch(ctx, []engine.Change{{Object: have, Delete: true, Write: w}}); err != nil {
		return fmt.Errorf("delete %s: %w", key.Name, err)
	}
	return nil
}

// Batch implements engine.Batcher. A step is a transaction of at most 64 operations and about 500 KiB: a change is one operation, and one more for
// its trace.
func (k *KV) Batch(ctx context.Context, changes []engine.Change) (revisions []string, err error) {
	for len(changes) > 0 {
		var ops api.TxnOps
		n, size := 0, 0
		for ; n < len(changes); n++ {
			more, err := k.operations(changes[n])
			if err != nil {
				return revisions, err
			}
			size += textSize(more)
			if n > 0 && (len(ops)+len(more) > mostOperations || size > mostText) {
				break
			}
			ops = append(ops, more...)
		}
		done, err := k.conn.transact(ctx, ops)
		if err != nil {
			return revisions, err
		}
		written := make(map[string]string, n)
		for _, r := range done.Results {
			written[r.KV.Key] = revisionOf(r.KV.ModifyIndex)
		}
		for _, c := range changes[:n] {
			revisions = append(revisions, written[c.Object.Key.Name])
		}
		changes = changes[n:]
	}
	return revisions, nil
}

// operations are what a change comes to.
func (k *KV) operations(c engine.Change) (api.TxnOps, error) {
	name, w := c.Object.Key.Name, c.Write
	op := &api.KVTxnOp{Verb: api.KVSet, Key: name}
	value, ok := c.Object.Value.([]byte)
	switch {
	case name == "" || strings.HasPrefix(name, "/"):
		return nil, fmt.Errorf("%w: %q cannot be a key of Consul: it is empty or begins with a slash", engine.ErrInvalid, name)
	case c.Delete:
		op.Verb = api.KVDelete
	case !ok:
		return nil, fmt.Errorf("%w: %s: Consul's keys hold bytes, not %T", engine.ErrInvalid, name, c.Object.Value)
	default:
		op.Value = value
	}
	if w.Absent || w.Revision != "" {
		var err error
		if op.Index, err = indexOf(w.Revision); err != nil { // index 0: there must be none
			return nil, err
		}
		if op.Verb = api.KVCAS; c.Delete {
			op.Verb = api.KVDeleteCAS
		}
	}
	ops := api.TxnOps{{KV: op}}
	switch trace := k.cfg.TracePrefix + name; {
	case k.cfg.TracePrefix == "":
	case c.Delete:
		ops = append(ops, deleteTrace(trace))
	case w.Traceparent != "":
		ops = append(ops, setTrace(trace, w.Traceparent))
	}
	return ops, nil
}
