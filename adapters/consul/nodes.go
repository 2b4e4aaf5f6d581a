package consul

import (
	"cmp"
	"context"
	"encoding/json"
	"strconv"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
)

// KindNode is the kind of the nodes of the catalog. A node's name is the key's; it has no namespace.
const KindNode = "consul/node"

// NodesConfig names nodes of the catalog.
type NodesConfig struct {
	// Name is that of the source.
	Name string `yaml:"-"`
	// Filter is an expression of Consul's that chooses nodes. Default: all.
	Filter string `yaml:"filter"`
}

// Node is the value of a node, as JSON.
type Node struct {
	Name    string            `json:"name"`
	ID      string            `json:"id,omitempty"`
	Address string            `json:"address"`
	Meta    map[string]string `json:"meta,omitempty"`
	// Status is the worst of the node's own checks: passing, warning, critical or maintenance.
	Status string `json:"status"`
}

// Nodes are the nodes of the catalog and their health, as a source and a reader. Create it with NewNodes.
type Nodes struct {
	watched

	cfg  NodesConfig
	kind engine.Kind

	// What the last answers said; the goroutine of Run alone uses them.
	queries queries
	nodes   []*api.Node
	checks  map[string]api.HealthChecks
}

var (
	_ engine.Source = (*Nodes)(nil)
	_ engine.Reader = (*Nodes)(nil)
)

// NewNodes returns nodes of the catalog.
func NewNodes(conn *Connection, cfg NodesConfig) (*Nodes, error) {
	cfg.Name = cmp.Or(cfg.Name, "consul-nodes")
	n := &Nodes{cfg: cfg, kind: engine.KindOf(KindNode)}
	n.watched = watched{conn: conn, name: cfg.Name, fetch: n.fetch, key: n.Key}
	n.queries = queries{conn: conn, all: []*query{{ask: n.askNodes}, {ask: n.askChecks}}}
	return n, nil
}

// Name implements engine.Source.
func (n *Nodes) Name() string { return n.cfg.Name }

// Key returns the key of the node of this name.
func (n *Nodes) Key(name string) engine.Key {
	return engine.Key{Kind: n.kind, Scope: n.conn.cfg.Scope, Name: name}
}

// Covers implements engine.Reader.
func (n *Nodes) Covers(key engine.Key) bool { return key == n.Key(key.Name) }

// Get implements engine.Reader.
func (n *Nodes) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	filter := "Node == " + strconv.Quote(key.Name)
	if n.cfg.Filter != "" {
		filter += " and (" + n.cfg.Filter + ")"
	}
	objects, err := n.read(ctx, filter)
	if err == nil && len(objects) == 0 {
		err = engine.ErrNotFound
	}
	if err != nil {
		return engine.Object{}, err
	}
	return objects[0], nil
}

// List implements engine.Reader.
func (n *Nodes) List(ctx context.Context) ([]engine.Object, error) { return n.read(ctx, n.cfg.Filter) }

func (n *Nodes) read(ctx context.Context, filter string) ([]engine.Object, error) {
	opts, err := n.conn.query(ctx)
	if err != nil {
		return nil, err
	}
	checks := *opts
	opts.Filter, checks.Filter = filter, ofNodes
	nodes, _, err := n.conn.client.Catalog().Nodes(opts)
	if err != nil {
		return nil, understood(err)
	}
	found, _, err := n.conn.client.Health().State(api.HealthAny, &checks)
	if err != nil {
		return nil, understood(err)
	}
	objects, byNode := make([]engine.Object, len(nodes)), byNode(found)
	for i, x := range nodes {
		if objects[i], err = n.object(x, byNode[x.Node]); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// ofNodes chooses the checks that are of nodes, not of what runs there.
const ofNodes = `ServiceID == ""`

func byNode(checks api.HealthChecks) map[string]api.HealthChecks {
	out := make(map[string]api.HealthChecks)
	for _, c := range checks {
		out[c.Node] = append(out[c.Node], c)
	}
	return out
}

func (n *Nodes) object(x *api.Node, checks api.HealthChecks) (engine.Object, error) {
	text, err := json.Marshal(Node{Name: x.Node, ID: x.ID, Address: x.Address, Meta: x.Meta, Status: checks.AggregatedStatus()})
	return engine.Object{
		Key: n.Key(x.Node), Revision: digest(text), Incarnation: revisionOf(x.CreateIndex), Meta: engine.Meta{Labels: x.Meta}, Value: text,
	}, err
}

func (n *Nodes) askNodes(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	opts.Filter = n.cfg.Filter
	nodes, m, err := n.conn.client.Catalog().Nodes(opts)
	return func(bool) { n.nodes = nodes }, m, err
}

func (n *Nodes) askChecks(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	opts.Filter = ofNodes
	checks, m, err := n.conn.client.Health().State(api.HealthAny, opts)
	return func(bool) { n.checks = byNode(checks) }, m, err
}

func (n *Nodes) fetch(ctx context.Context, opts *api.QueryOptions) (answer, error) {
	index, err := n.queries.snapshot(ctx, opts.WaitIndex == 0)
	if err != nil {
		return answer{}, err
	}
	found := make(map[string]item, len(n.nodes))
	for _, x := range n.nodes {
		o, err := n.object(x, n.checks[x.Node])
		if err != nil {
			return answer{}, err
		}
		found[x.Node] = item{o.Revision, o.Incarnation, &o.Meta}
	}
	return answer{found: found, index: index}, nil
}
