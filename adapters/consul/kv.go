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
	value, ok := o.Value.([]byte)
	switch {
	case !ok:
		return "", fmt.Errorf("%w: Consul's keys hold bytes, not %T", engine.ErrInvalid, o.Value)
	case o.Key.Name == "" || strings.HasPrefix(o.Key.Name, "/"):
		return "", fmt.Errorf("%w: %q cannot be a key of Consul: it is empty or begins with a slash", engine.ErrInvalid, o.Key.Name)
	}
	op := &api.KVTxnOp{Verb: api.KVSet, Key: o.Key.Name, Value: value}
	switch {
	case w.Absent:
		op.Verb = api.KVCAS // index 0: there must be none
	case w.Revision != "":
		index, err := indexOf(w.Revision)
		if err != nil {
			return "", err
		}
		op.Verb, op.Index = api.KVCAS, index
	}
	ops := api.TxnOps{{KV: op}}
	if k.cfg.TracePrefix != "" && w.Traceparent != "" {
		ops = append(ops, setTrace(k.cfg.TracePrefix+o.Key.Name, w.Traceparent))
	}
	done, err := k.conn.transact(ctx, ops)
	if err != nil {
		return "", fmt.Errorf("write %s: %w", o.Key.Name, err)
	}
	return revisionOf(done.Results[0].KV.ModifyIndex), nil
}

// Delete implements engine.Sink.
func (k *KV) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	have, err := k.Get(ctx, key)
	if err != nil {
		return err
	}
	if w.Revision != "" && w.Revision != have.Revision {
		return fmt.Errorf("delete %s: %w: it is at revision %s", key.Name, engine.ErrConflict, have.Revision)
	}
	index, err := strconv.ParseUint(have.Revision, 10, 64)
	if err != nil {
		return err
	}
	ops := api.TxnOps{{KV: &api.KVTxnOp{Verb: api.KVDeleteCAS, Key: key.Name, Index: index}}}
	if k.cfg.TracePrefix != "" {
		ops = append(ops, deleteTrace(k.cfg.TracePrefix+key.Name))
	}
	if _, err := k.conn.transact(ctx, ops); err != nil {
		return fmt.Errorf("delete %s: %w", key.Name, err)
	}
	return nil
}
