package consul

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"

	"github.com/hashicorp/consul/api"
	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/engine"
)

// KindService is the kind of the services of the catalog. A service's name is the key's; it has no namespace.
const KindService = "consul/service"

// ServicesConfig names services of the catalog.
type ServicesConfig struct {
	// Name is that of the source.
	Name string `yaml:"-"`
	// Service is the only one that is watched. Default: all.
	Service string `yaml:"service"`
	// Tag bounds the instances to those that have it, and Filter to those that an expression of Consul's chooses.
	Tag    string `yaml:"tag"`
	Filter string `yaml:"filter"`
}

// Service is the value of a service, as JSON.
type Service struct {
	Name      string     `json:"name"`
	Instances []Instance `json:"instances"`
}

// Instance is an instance of a service.
type Instance struct {
	// Service is the name of the service, left out within a Service.
	Service string `json:"service,omitempty"`
	ID      string `json:"id"`
	Node    string `json:"node"`
	// Address is the instance's own, or, within a Service, its node's.
	Address string            `json:"address"`
	Port    int               `json:"port"`
	Tags    []string          `json:"tags,omitempty"`
	Meta    map[string]string `json:"meta,omitempty"`
	// Status is passing, warning, critical or maintenance: within a Service the worst of its checks and its node's, otherwise that of its
	// own check, empty if it has none.
	Status string `json:"status,omitempty"`
}

// Services are services of the catalog, with the health of their instances, as a source and a reader. A service without an instance that is
// chosen is not there. Create it with NewServices.
type Services struct {
	watched

	cfg  ServicesConfig
	kind engine.Kind

	// What the last answers said; the goroutine of Run alone uses them.
	queries queries
	listed  []string // the catalog, and whether it has moved
	moved   bool
	checks  map[string]uint64 // of each service's checks, a sum, and which of them is another one
	changed []string
	read    map[string]*Service
}

var (
	_ engine.Source = (*Services)(nil)
	_ engine.Reader = (*Services)(nil)
)

// NewServices returns services of the catalog.
func NewServices(conn *Connection, cfg ServicesConfig) (*Services, error) {
	cfg.Name = cmp.Or(cfg.Name, "consul-services")
	s := &Services{cfg: cfg, kind: engine.KindOf(KindService)}
	s.watched = watched{conn: conn, name: cfg.Name, fetch: s.fetch, key: s.Key}
	s.queries = queries{conn: conn, all: []*query{{ask: s.askCatalog}, {ask: s.askHealth}}}
	return s, nil
}

// Name implements engine.Source.
func (s *Services) Name() string { return s.cfg.Name }

// Key returns the key of the service of this name.
func (s *Services) Key(name string) engine.Key {
	return engine.Key{Kind: s.kind, Scope: s.conn.cfg.Scope, Name: name}
}

// Covers implements engine.Reader.
func (s *Services) Covers(key engine.Key) bool {
	return key.Kind == s.kind && key.Scope == s.conn.cfg.Scope && (s.cfg.Service == "" || key.Name == s.cfg.Service)
}

// Get implements engine.Reader.
func (s *Services) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	found, _, err := s.service(ctx, key.Name, 0)
	switch {
	case err != nil:
		return engine.Object{}, understood(err)
	case found == nil:
		return engine.Object{}, engine.ErrNotFound
	}
	return s.object(found), nil
}

// List implements engine.Reader.
func (s *Services) List(ctx context.Context) ([]engine.Object, error) {
	names, err := s.names(ctx)
	if err != nil {
		return nil, understood(err)
	}
	found, err := s.services(ctx, names)
	if err != nil {
		return nil, understood(err)
	}
	objects := make([]engine.Object, 0, len(found))
	for _, x := range found {
		if x != nil {
			objects = append(objects, s.object(x))
		}
	}
	return objects, nil
}

func (s *Services) object(x *Service) engine.Object {
	text := x.json()
	return engine.Object{Key: s.Key(x.Name), Revision: digest(text), Value: text}
}

func (x *Service) json() []byte {
	text, err := json.Marshal(x)
	if err != nil {
		panic(err) // strings and numbers
	}
	return text
}

// digest is the revision of a service: Consul has none for all of its instances and checks together.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// service reads one service, nil if it has no instance.
func (s *Services) service(ctx context.Context, name string, after uint64) (*Service, *api.QueryMeta, error) {
	opts, err := s.conn.query(ctx)
	if err != nil {
		return nil, nil, err
	}
	opts.WaitIndex, opts.Filter = after, s.cfg.Filter
	if after != 0 {
		opts.WaitTime = someWait()
	}
	entries, meta, err := s.conn.client.Health().Service(name, s.cfg.Tag, false, opts)
	if err != nil || len(entries) == 0 {
		return nil, meta, err
	}
	x := &Service{Name: name}
	for _, e := range entries {
		x.Instances = append(x.Instances, Instance{
			ID: e.Service.ID, Node: e.Node.Node, Address: cmp.Or(e.Service.Address, e.Node.Address), Port: e.Service.Port,
			Tags: e.Service.Tags, Meta: e.Service.Meta, Status: e.Checks.AggregatedStatus(),
		})
	}
	slices.SortFunc(x.Instances, func(a, b Instance) int { return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Node, b.Node)) })
	return x, meta, nil
}

// readers is how many services are read at once: an agent takes 200 connections of a client.
const readers = 16

// services reads services by name.
func (s *Services) services(ctx context.Context, names []string) (map[string]*Service, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	var mu sync.Mutex
	found := make(map[string]*Service, len(names))
	for _, name := range names {
		group.Go(func() error {
			x, _, err := s.service(ctx, name, 0)
			mu.Lock()
			defer mu.Unlock()
			found[name] = x
			return err
		})
	}
	return found, group.Wait()
}

func (s *Services) names(ctx context.Context) ([]string, error) {
	if s.cfg.Service != "" {
		return []string{s.cfg.Service}, nil
	}
	opts, err := s.conn.query(ctx)
	if err != nil {
		return nil, err
	}
	services, _, err := s.conn.client.Catalog().Services(opts)
	names := make([]string, 0, len(services))
	for name := range services {
		names = append(names, name)
	}
	return names, err
}

// fetch waits until something has changed, and answers with all there is. The catalog's list of services does not say which of them changed,
// and nothing of their health; the list of checks does not know of services without one. Both are watched. A move of the checks has only
// those services read whose checks changed, a move of the catalog all.
func (s *Services) fetch(ctx context.Context, opts *api.QueryOptions) (answer, error) {
	if s.cfg.Service != "" {
		x, m, err := s.service(ctx, s.cfg.Service, opts.WaitIndex)
		if err != nil {
			return answer{}, err
		}
		found := make(map[string]item, 1)
		if x != nil {
			found[x.Name] = item{revision: digest(x.json()), meta: meta}
		}
		return answer{found: found, index: m.LastIndex}, nil
	}
	if opts.WaitIndex == 0 {
		s.read, s.checks = nil, nil
	}
	s.moved, s.changed = false, nil
	index, err := s.queries.await(ctx, opts.WaitIndex == 0)
	if err != nil {
		return answer{}, err
	}
	changed := s.changed
	if s.read == nil || s.moved || slices.Contains(changed, "") { // a node's check counts for all that is on it
		s.read, changed = make(map[string]*Service), s.listed
	}
	fresh, err := s.services(ctx, changed)
	if err != nil {
		return answer{}, err
	}
	for name, x := range fresh {
		if s.read[name] = x; x == nil {
			delete(s.read, name)
		}
	}
	found := make(map[string]item, len(s.read))
	for name, x := range s.read {
		found[name] = item{revision: digest(x.json()), meta: meta}
	}
	return answer{found: found, index: index}, nil
}

func (s *Services) askCatalog(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	services, m, err := s.conn.client.Catalog().Services(opts)
	return func(moved bool) {
		s.listed, s.moved = slices.Collect(maps.Keys(services)), moved
	}, m, err
}

func (s *Services) askHealth(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	checks, m, err := s.conn.client.Health().State(api.HealthAny, opts)
	return func(bool) {
		sums := make(map[string]uint64)
		for _, c := range checks {
			h := fnv.New64a()
			_, _ = fmt.Fprint(h, c.Node, "\x00", c.CheckID, "\x00", c.ModifyIndex)
			sums[c.ServiceName] += h.Sum64() // in any order; those of nodes are under ""
		}
		s.changed, s.checks = differ(s.checks, sums), sums
	}, m, err
}

// differ returns the names for which two sums are not the same.
func differ(a, b map[string]uint64) (names []string) {
	for name, sum := range b {
		if was, ok := a[name]; !ok || was != sum {
			names = append(names, name)
		}
	}
	for name := range a {
		if _, there := b[name]; !there {
			names = append(names, name)
		}
	}
	return names
}
