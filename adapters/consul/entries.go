package consul

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
)

// EntriesConfig names config entries.
type EntriesConfig struct {
	// Name is that of the source and sink.
	Name string `yaml:"-"`
	// Kind is Consul's: service-defaults, service-intentions, proxy-defaults and so on.
	Kind string `yaml:"kind"`
}

// Validate returns everything that is wrong with the configuration.
func (c EntriesConfig) Validate() error {
	if c.Kind == "" {
		return errors.New("kind: the kind of the config entries is required: service-defaults, say")
	}
	if _, err := api.MakeConfigEntry(c.Kind, ""); err != nil {
		return fmt.Errorf("kind: %q is no kind of config entries; look at Consul's documentation for those there are", c.Kind)
	}
	return nil
}

// Entries are the config entries of one kind, as a source, a reader and a sink. The kind of their keys is consul/ and Consul's; a key's name is
// the entry's. A value is the entry as Consul's HTTP API has it, as JSON; its owner is in its Meta. Create it with NewEntries.
type Entries struct {
	watched

	cfg  EntriesConfig
	kind engine.Kind
}

var (
	_ engine.Source           = (*Entries)(nil)
	_ engine.Reader           = (*Entries)(nil)
	_ engine.Sink             = (*Entries)(nil)
	_ engine.RevisionComparer = (*Entries)(nil)
)

// NewEntries returns the config entries of one kind.
func NewEntries(conn *Connection, cfg EntriesConfig) (*Entries, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Name = cmp.Or(cfg.Name, "consul-"+cfg.Kind)
	e := &Entries{cfg: cfg, kind: engine.KindOf("consul/" + cfg.Kind)}
	e.watched = watched{conn: conn, name: cfg.Name, fetch: e.fetch, key: e.Key}
	return e, nil
}

// Name implements engine.Source and engine.Sink.
func (e *Entries) Name() string { return e.cfg.Name }

// KeepsOwner says that config entries carry owner marks.
func (e *Entries) KeepsOwner() bool { return true }

// Key returns the key of the entry of this name.
func (e *Entries) Key(name string) engine.Key {
	return engine.Key{Kind: e.kind, Scope: e.conn.cfg.Scope, Name: name}
}

// Covers implements engine.Reader and engine.Sink.
func (e *Entries) Covers(key engine.Key) bool { return key == e.Key(key.Name) }

// CompareRevisions implements engine.RevisionComparer.
func (e *Entries) CompareRevisions(a, b string) (int, error) { return compareIndexes(a, b) }

// entry is a config entry, with fields that this package need not know.
type entry map[string]json.RawMessage

// The fields of all config entries that are not of their content.
var bookkeeping = []string{"CreateIndex", "ModifyIndex", "Hash"}

func (e *Entries) object(x entry) (engine.Object, error) {
	var about struct {
		Name                     string
		CreateIndex, ModifyIndex uint64
		Meta                     map[string]string
	}
	text, err := json.Marshal(x)
	if err == nil {
		err = json.Unmarshal(text, &about)
	}
	if err != nil {
		return engine.Object{}, fmt.Errorf("the answer cannot be read: %w", err)
	}
	o := engine.Object{Key: e.Key(cmp.Or(about.Name, e.cfg.Kind)), Revision: revisionOf(about.ModifyIndex), Incarnation: revisionOf(about.CreateIndex), Meta: metaOf(about.Meta)}
	for _, field := range bookkeeping {
		delete(x, field)
	}
	if err := x.setMeta(o.Labels); err != nil {
		return engine.Object{}, err
	}
	o.Value, err = json.Marshal(x)
	return o, err
}

func (x entry) setMeta(meta map[string]string) error {
	if delete(x, "Meta"); len(meta) == 0 {
		return nil
	}
	text, err := json.Marshal(meta)
	x["Meta"] = text
	return err
}

func (e *Entries) fetch(ctx context.Context, opts *api.QueryOptions) (answer, error) {
	var entries []entry
	m, err := e.conn.client.Raw().Query("/v1/config/"+e.cfg.Kind, &entries, opts)
	if err != nil {
		return answer{}, e.understood(err)
	}
	found := make(map[string]item, len(entries))
	for _, x := range entries {
		o, err := e.object(x)
		if err != nil {
			return answer{}, err
		}
		found[o.Key.Name] = item{o.Revision, o.Incarnation, &o.Meta}
	}
	return answer{found: found, index: m.LastIndex}, nil
}

// Get implements engine.Reader.
func (e *Entries) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	opts, err := e.conn.query(ctx)
	if err != nil {
		return engine.Object{}, err
	}
	var x entry
	if _, err := e.conn.client.Raw().Query("/v1/config/"+e.cfg.Kind+"/"+key.Name, &x, opts); err != nil {
		var status api.StatusError
		if errors.As(err, &status) && status.Code == http.StatusNotFound {
			return engine.Object{}, engine.ErrNotFound
		}
		return engine.Object{}, e.understood(err)
	}
	return e.object(x)
}

// List implements engine.Reader.
func (e *Entries) List(ctx context.Context) ([]engine.Object, error) {
	opts, err := e.conn.query(ctx)
	if err != nil {
		return nil, err
	}
	var entries []entry
	if _, err := e.conn.client.Raw().Query("/v1/config/"+e.cfg.Kind, &entries, opts); err != nil {
		return nil, e.understood(err)
	}
	objects := make([]engine.Object, len(entries))
	for i, x := range entries {
		if objects[i], err = e.object(x); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// understood says of a refusal that it does not become right by trying again.
func (e *Entries) understood(err error) error {
	var status api.StatusError
	if errors.As(err, &status) && status.Code == http.StatusBadRequest {
		return fmt.Errorf("%w: %w", engine.ErrInvalid, err)
	}
	return understood(err)
}

// entry reads a value, with the kind and the name that it must have.
func (e *Entries) entry(o engine.Object) (x entry, meta map[string]string, err error) {
	text, ok := o.Value.([]byte)
	if !ok {
		if text, err = json.Marshal(o.Value); err != nil {
			return nil, nil, fmt.Errorf("%w: %s: %w", engine.ErrInvalid, o.Key, err)
		}
	}
	if err := json.Unmarshal(text, &x); err != nil {
		return nil, nil, fmt.Errorf("%w: %s is no config entry: %w", engine.ErrInvalid, o.Key, err)
	}
	own := map[string]string{"Kind": e.cfg.Kind, "Name": o.Key.Name}
	if e.cfg.Kind == api.MeshConfig { // of which there is one, without a name
		if delete(own, "Name"); o.Key.Name != api.MeshConfigMesh {
			return nil, nil, fmt.Errorf("%w: %s: there is one entry of this kind, and its name is %s", engine.ErrInvalid, o.Key, api.MeshConfigMesh)
		}
	}
	for field, want := range own {
		quoted, err := json.Marshal(want)
		if err != nil {
			return nil, nil, err
		}
		if have, ok := x[field]; ok && !bytes.Equal(have, quoted) {
			return nil, nil, fmt.Errorf("%w: %s: %s: it is %s, and must be %s; leave it out", engine.ErrInvalid, o.Key, field, have, quoted)
		}
		x[field] = quoted
	}
	if text, ok := x["Meta"]; ok {
		if err := json.Unmarshal(text, &meta); err != nil {
			return nil, nil, fmt.Errorf("%w: %s: Meta: %w", engine.ErrInvalid, o.Key, err)
		}
	}
	return x, meta, nil
}

// Same says whether an entry is as wanted, what is empty left aside. What Consul puts in for a field that was left out makes a difference, and
// then a write, of which Consul itself says that it changes nothing.
func (e *Entries) Same(have, want engine.Object) bool {
	x, _, err := e.entry(want)
	if err != nil {
		return false
	}
	wanted, err := json.Marshal(x)
	if err != nil {
		return false
	}
	var a, b any
	if json.Unmarshal(have.Value.([]byte), &a) != nil || json.Unmarshal(wanted, &b) != nil {
		return false
	}
	return reflect.DeepEqual(withoutEmpty(a), withoutEmpty(b))
}

// withoutEmpty leaves out the fields that are empty, and is nil if nothing is left.
func withoutEmpty(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name, field := range v {
			if v[name] = withoutEmpty(field); v[name] == nil {
				delete(v, name)
			}
		}
		if len(v) == 0 {
			return nil
		}
	case []any:
		for i := range v {
			v[i] = withoutEmpty(v[i])
		}
		if len(v) == 0 {
			return nil
		}
	case string, bool, float64:
		if reflect.ValueOf(v).IsZero() {
			return nil
		}
	}
	return v
}

// rawEntry is an entry for the client, which would lose the fields that it does not know.
type rawEntry struct {
	api.ConfigEntry // for its methods, which are not called

	fields entry
}

// MarshalJSON writes the fields.
func (r rawEntry) MarshalJSON() ([]byte, error) { return json.Marshal(r.fields) }

// Apply implements engine.Sink.
func (e *Entries) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	x, meta, err := e.entry(o)
	if err != nil {
		return "", err
	}
	marked, err := withOwner(meta, o.Owner)
	if err != nil {
		return "", err
	}
	if err := x.setMeta(marked); err != nil {
		return "", err
	}
	opts, err := e.conn.writes(ctx)
	if err != nil {
		return "", err
	}
	entries, done := e.conn.client.ConfigEntries(), true
	if w.Absent || w.Revision != "" {
		var index uint64 // 0: there must be none
		if index, err = indexOf(w.Revision); err != nil {
			return "", err
		}
		done, _, err = entries.CAS(rawEntry{fields: x}, index, opts)
	} else {
		_, _, err = entries.Set(rawEntry{fields: x}, opts)
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("write %s: %w", o.Key, e.understood(err))
	case !done:
		return "", fmt.Errorf("write %s: %w: somebody has changed it", o.Key, engine.ErrConflict)
	}
	// Consul does not say which revision it made: what is there now is taken for it.
	have, err := e.Get(ctx, o.Key)
	if err != nil || have.Owner != o.Owner {
		return "", nil //nolint:nilerr // what was asked for is done.
	}
	return have.Revision, nil
}

// Delete implements engine.Sink.
func (e *Entries) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	have, err := e.Get(ctx, key)
	if err != nil {
		return err
	}
	if w.Revision != "" && w.Revision != have.Revision {
		return fmt.Errorf("delete %s: %w: it is at revision %s", key, engine.ErrConflict, have.Revision)
	}
	index, err := indexOf(have.Revision)
	if err != nil {
		return err
	}
	opts, err := e.conn.writes(ctx)
	if err != nil {
		return err
	}
	done, _, err := e.conn.client.ConfigEntries().DeleteCAS(e.cfg.Kind, key.Name, index, opts)
	switch {
	case err != nil:
		return fmt.Errorf("delete %s: %w", key, understood(err))
	case !done:
		return fmt.Errorf("delete %s: %w: somebody has changed it", key, engine.ErrConflict)
	}
	return nil
}
