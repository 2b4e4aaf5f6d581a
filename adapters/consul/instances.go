package consul

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
)

// KindInstance is the kind of the service instances of one node of the catalog. The node is the key's namespace, the instance's ID its name.
const KindInstance = "consul/instance"

// InstancesConfig names a node of the catalog.
type InstancesConfig struct {
	// Name is that of the source and sink.
	Name string `yaml:"-"`
	// Node is a node that no agent runs on: an agent undoes what is registered on its own. Default: windlass. It is made with the first instance, and stays.
	Node string `yaml:"node"`
	// Address is the node's, and that of instances without one. Default: 127.0.0.1 for a new node, and then every instance needs its own.
	Address string `yaml:"address"`
	// TracePrefix is under which the trace context of a write is kept, in a key beside it. Empty: it is not kept.
	TracePrefix string `yaml:"tracePrefix"`
}

// Validate returns everything that is wrong with the configuration.
func (c InstancesConfig) Validate() error {
	if strings.HasPrefix(c.TracePrefix, "/") {
		return fmt.Errorf("tracePrefix: %q begins with a slash, as no key of Consul does", c.TracePrefix)
	}
	return nil
}

// Instances are the service instances of one node, as a source, a reader and a sink. A value is an [Instance], as JSON. Its owner is in its
// Meta, and its status in a check that is registered with it. Create it with NewInstances.
type Instances struct {
	watched

	cfg  InstancesConfig
	kind engine.Kind

	// What the last answers said; the goroutine of Run alone uses them.
	queries  queries
	services []*api.AgentService
	statuses map[string]*api.HealthCheck // our checks, by the instance's ID
}

var (
	_ engine.Source = (*Instances)(nil)
	_ engine.Reader = (*Instances)(nil)
	_ engine.Sink   = (*Instances)(nil)
)

// NewInstances returns the service instances of one node.
func NewInstances(conn *Connection, cfg InstancesConfig) (*Instances, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Name, cfg.Node = cmp.Or(cfg.Name, "consul-instances"), cmp.Or(cfg.Node, "windlass")
	i := &Instances{cfg: cfg, kind: engine.KindOf(KindInstance)}
	i.watched = watched{conn: conn, name: cfg.Name, fetch: i.fetch, key: i.Key}
	if cfg.TracePrefix != "" {
		i.trace = func(ctx context.Context, id string) string { return conn.traceOf(ctx, i.traceKey(id)) }
	}
	i.queries = queries{conn: conn, all: []*query{{ask: i.askServices}, {ask: i.askChecks}}}
	return i, nil
}

// Name implements engine.Source and engine.Sink.
func (i *Instances) Name() string { return i.cfg.Name }

// KeepsOwner says that instances carry owner marks.
func (i *Instances) KeepsOwner() bool { return true }

// Key returns the key of the instance with this ID.
func (i *Instances) Key(id string) engine.Key {
	return engine.Key{Kind: i.kind, Scope: i.conn.cfg.Scope, Namespace: i.cfg.Node, Name: id}
}

// Covers implements engine.Reader and engine.Sink.
func (i *Instances) Covers(key engine.Key) bool { return key == i.Key(key.Name) }

func (i *Instances) traceKey(id string) string { return i.cfg.TracePrefix + i.cfg.Node + "/" + id }

// checkOf is the ID of the check that holds the status of an instance.
func checkOf(id string) string { return "windlass-" + id }

// indexes is the revision of an instance: the index of its service, and of the check that holds its status.
func indexes(service, check uint64) string {
	if check == 0 {
		return revisionOf(service)
	}
	return revisionOf(service) + "-" + revisionOf(check)
}

func indexesOf(revision string) (service, check uint64, err error) {
	s, c, checked := strings.Cut(revision, "-")
	if service, err = indexOf(s); err == nil && checked {
		check, err = indexOf(c)
	}
	return service, check, err
}

func (i *Instances) askServices(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	list, m, err := i.conn.client.Catalog().NodeServiceList(i.cfg.Node, opts)
	return func(bool) {
		if i.services = nil; list != nil {
			i.services = list.Services
		}
	}, m, err
}

func (i *Instances) askChecks(ctx context.Context, opts *api.QueryOptions) (func(moved bool), *api.QueryMeta, error) {
	checks, m, err := i.conn.client.Health().Node(i.cfg.Node, opts)
	return func(bool) { i.statuses = statuses(checks) }, m, err
}

func statuses(checks api.HealthChecks) map[string]*api.HealthCheck {
	out := make(map[string]*api.HealthCheck)
	for _, c := range checks {
		if c.CheckID == checkOf(c.ServiceID) {
			out[c.ServiceID] = c
		}
	}
	return out
}

// fetch waits until something of the node has changed.
func (i *Instances) fetch(ctx context.Context, opts *api.QueryOptions) (answer, error) {
	index, err := i.queries.snapshot(ctx, opts.WaitIndex == 0)
	if err != nil {
		return answer{}, err
	}
	found := make(map[string]item, len(i.services))
	for _, s := range i.services {
		o, err := i.object(s, i.statuses[s.ID])
		if err != nil {
			return answer{}, err
		}
		found[s.ID] = item{o.Revision, o.Incarnation, &o.Meta}
	}
	return answer{found: found, index: index}, nil
}

func (i *Instances) object(s *api.AgentService, check *api.HealthCheck) (engine.Object, error) {
	o := engine.Object{Key: i.Key(s.ID), Revision: indexes(s.ModifyIndex, 0), Incarnation: revisionOf(s.CreateIndex), Meta: metaOf(s.Meta)}
	x := Instance{Service: s.Service, ID: s.ID, Node: i.cfg.Node, Address: s.Address, Port: s.Port, Tags: s.Tags, Meta: o.Labels}
	if check != nil {
		x.Status, o.Revision = check.Status, indexes(s.ModifyIndex, check.ModifyIndex)
	}
	var err error
	o.Value, err = json.Marshal(x)
	return o, err
}

// Get implements engine.Reader.
func (i *Instances) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	objects, _, err := i.read(ctx, key.Name)
	if err == nil && len(objects) == 0 {
		err = engine.ErrNotFound
	}
	if err != nil {
		return engine.Object{}, err
	}
	return objects[0], nil
}

// List implements engine.Reader.
func (i *Instances) List(ctx context.Context) ([]engine.Object, error) {
	objects, _, err := i.read(ctx, "")
	return objects, err
}

// read returns the instances, or the one with an ID, and the node.
func (i *Instances) read(ctx context.Context, id string) ([]engine.Object, *api.Node, error) {
	services, err := i.conn.query(ctx)
	if err != nil {
		return nil, nil, err
	}
	checks := *services
	if id != "" {
		services.Filter, checks.Filter = "ID == "+strconv.Quote(id), "ServiceID == "+strconv.Quote(id)
	}
	list, _, err := i.conn.client.Catalog().NodeServiceList(i.cfg.Node, services)
	if err != nil {
		return nil, nil, understood(err)
	}
	found, _, err := i.conn.client.Health().Node(i.cfg.Node, &checks)
	if err != nil {
		return nil, nil, understood(err)
	}
	if list == nil {
		return nil, nil, nil // no such node
	}
	status, objects := statuses(found), make([]engine.Object, len(list.Services))
	for n, s := range list.Services {
		if objects[n], err = i.object(s, status[s.ID]); err != nil {
			return nil, nil, err
		}
	}
	return objects, list.Node, nil
}

// Same says whether an instance is as wanted.
func (i *Instances) Same(have, want engine.Object) bool {
	x, err := i.instance(want)
	if err != nil {
		return false
	}
	text, err := json.Marshal(x)
	return err == nil && bytes.Equal(text, have.Value.([]byte))
}

// instance reads a value, and says what is wrong with it.
func (i *Instances) instance(o engine.Object) (Instance, error) {
	x, ok := o.Value.(Instance)
	if text, isText := o.Value.([]byte); isText {
		d := json.NewDecoder(bytes.NewReader(text))
		d.DisallowUnknownFields()
		if err := d.Decode(&x); err != nil {
			return x, fmt.Errorf("%w: %s is no service instance: %w", engine.ErrInvalid, o.Key, err)
		}
	} else if !ok {
		return x, fmt.Errorf("%w: a service instance is JSON or an Instance, not %T", engine.ErrInvalid, o.Value)
	}
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if x.ID != "" && x.ID != o.Key.Name {
		refuse("id: it is %q, but the key's name is %q; leave it out", x.ID, o.Key.Name)
	}
	if x.Node != "" && x.Node != i.cfg.Node {
		refuse("node: it is %q, but the sink's is %q; leave it out", x.Node, i.cfg.Node)
	}
	if ip, err := netip.ParseAddr(x.Address); err == nil && ip.IsUnspecified() {
		refuse("address: nobody can connect to %s", x.Address)
	}
	if x.Address == "" && i.cfg.Address == "" {
		refuse("address: it is required where the sink has none")
	}
	if x.Port < 0 || x.Port > 65535 {
		refuse("port: %d is none", x.Port)
	}
	if known := []string{"", api.HealthPassing, api.HealthWarning, api.HealthCritical}; !slices.Contains(known, x.Status) {
		refuse("status: %q is none of passing, warning, critical", x.Status)
	}
	if _, ok := x.Meta[OwnerMeta]; ok {
		refuse("meta: %s is the engine's", OwnerMeta)
	}
	for name, value := range x.Meta {
		if len(value) > longestMeta {
			refuse("meta.%s: longer than the %d bytes that Consul takes", name, longestMeta)
		}
	}
	if len(errs) > 0 {
		return x, fmt.Errorf("%w: %s: %w", engine.ErrInvalid, o.Key, errors.Join(errs...))
	}
	x.ID, x.Node, x.Service = o.Key.Name, i.cfg.Node, cmp.Or(x.Service, o.Key.Name)
	if len(x.Tags) == 0 {
		x.Tags = nil
	}
	return x, nil
}

// Apply implements engine.Sink. The instance, its status and its trace are written in one transaction.
func (i *Instances) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	x, err := i.instance(o)
	if err != nil {
		return "", err
	}
	marked, err := withOwner(x.Meta, o.Owner)
	if err != nil {
		return "", err
	}
	have, node, err := i.read(ctx, x.ID)
	if err != nil {
		return "", fmt.Errorf("write %s: %w", o.Key, err)
	}
	service := &api.ServiceTxnOp{Verb: api.ServiceSet, Node: i.cfg.Node, Service: api.AgentService{
		ID: x.ID, Service: x.Service, Tags: x.Tags, Meta: marked, Port: x.Port, Address: x.Address, Weights: api.AgentWeights{Passing: 1, Warning: 1},
	}}
	var was, status uint64 // the indexes of what is there
	if len(have) > 0 {
		if was, status, err = indexesOf(have[0].Revision); err != nil {
			return "", err
		}
	}
	if w.Absent || w.Revision != "" {
		if w.Absent != (len(have) == 0) || w.Revision != "" && w.Revision != have[0].Revision {
			return "", fmt.Errorf("write %s: %w: somebody has changed it", o.Key, engine.ErrConflict)
		}
		service.Verb, service.Service.ModifyIndex = api.ServiceCAS, was
	}
	ops, err := i.nodeOps(node)
	if err != nil {
		return "", err
	}
	ops = append(ops, &api.TxnOp{Service: service})
	if check := checkOf(x.ID); x.Status != "" {
		op := &api.CheckTxnOp{Verb: api.CheckSet, Check: api.HealthCheck{
			Node: i.cfg.Node, CheckID: check, Name: "status", ServiceID: x.ID, ServiceName: x.Service, Status: x.Status,
		}}
		if service.Verb == api.ServiceCAS && status != 0 {
			op.Verb, op.Check.ModifyIndex = api.CheckCAS, status
		}
		ops = append(ops, &api.TxnOp{Check: op})
	} else if status != 0 {
		ops = append(ops, &api.TxnOp{Check: &api.CheckTxnOp{Verb: api.CheckDelete, Check: api.HealthCheck{Node: i.cfg.Node, CheckID: check}}})
	}
	if i.cfg.TracePrefix != "" && w.Traceparent != "" {
		ops = append(ops, setTrace(i.traceKey(x.ID), w.Traceparent))
	}
	done, err := i.conn.transact(ctx, ops)
	if err != nil {
		return "", fmt.Errorf("write %s: %w", o.Key, err)
	}
	was, status = 0, 0
	for _, r := range done.Results {
		switch {
		case r.Service != nil:
			was = r.Service.ModifyIndex
		case r.Check != nil:
			status = r.Check.ModifyIndex
		}
	}
	return indexes(was, status), nil
}

// nodeOps make the node, where it is not there or has another address.
func (i *Instances) nodeOps(have *api.Node) (api.TxnOps, error) {
	node := api.Node{Node: i.cfg.Node, Address: cmp.Or(i.cfg.Address, "127.0.0.1"), Meta: map[string]string{"external-source": "windlass"}}
	if have != nil {
		if have.ID != "" {
			return nil, fmt.Errorf("%w: node %s is an agent's own, which would undo what is registered there: name another node", engine.ErrInvalid, i.cfg.Node)
		}
		if i.cfg.Address == "" || i.cfg.Address == have.Address {
			return nil, nil
		}
		node = api.Node{Node: have.Node, Address: i.cfg.Address, Datacenter: have.Datacenter, Meta: have.Meta}
	}
	return api.TxnOps{{Node: &api.NodeTxnOp{Verb: api.NodeSet, Node: node}}}, nil
}

// Delete implements engine.Sink. The node stays.
func (i *Instances) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	have, err := i.Get(ctx, key)
	if err != nil {
		return err
	}
	if w.Revision != "" && w.Revision != have.Revision {
		return fmt.Errorf("delete %s: %w: it is at revision %s", key, engine.ErrConflict, have.Revision)
	}
	index, _, err := indexesOf(have.Revision)
	if err != nil {
		return err
	}
	x, err := engine.As[Instance](have)
	if err != nil {
		return err
	}
	ops := api.TxnOps{{Service: &api.ServiceTxnOp{
		Verb: api.ServiceDeleteCAS, Node: i.cfg.Node, Service: api.AgentService{ID: key.Name, Service: x.Service, ModifyIndex: index},
	}}}
	if i.cfg.TracePrefix != "" {
		ops = append(ops, deleteTrace(i.traceKey(key.Name)))
	}
	if _, err := i.conn.transact(ctx, ops); err != nil {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return nil
}
