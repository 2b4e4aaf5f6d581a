//go:build e2e

package consul_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/adapters/consul"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
)

// newInstances returns the instances of a node of their own.
func newInstances(t *testing.T, cfg consul.InstancesConfig) *consul.Instances {
	t.Helper()
	if cfg.Node == "" {
		cfg.Node = fmt.Sprintf("synthetic-%d", prefixes.Add(1))
	}
	i, err := consul.NewInstances(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), cfg)
	require.NoError(t, err)
	return i
}

func instance(i *consul.Instances, id string, version int) engine.Object {
	return engine.Object{Key: i.Key(id), Value: fmt.Appendf(nil, `{"service":"conformance","port":%d,"status":"passing"}`, version)}
}

func TestInstancesSource(t *testing.T) {
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		i, n := newInstances(t, consul.InstancesConfig{Address: "10.1.1.1"}), 0
		return enginetest.SourceFixture{
			Source: i, Key: i.Key,
			Put: func(t *testing.T, name string) {
				t.Helper()
				n++
				_, err := i.Apply(t.Context(), instance(i, name, n), engine.Write{})
				require.NoError(t, err)
			},
			Delete: func(t *testing.T, name string) {
				t.Helper()
				require.NoError(t, i.Delete(t.Context(), i.Key(name), engine.Write{}))
			},
		}
	})
}

func TestInstancesSink(t *testing.T) {
	enginetest.TestSink(t, func(t *testing.T) enginetest.SinkFixture {
		i := newInstances(t, consul.InstancesConfig{Address: "10.1.1.1", TracePrefix: "traces/"})
		return enginetest.SinkFixture{Sink: i, Object: func(name string, version int) engine.Object { return instance(i, name, version) }}
	})
}

func newEntries(t *testing.T, kind string) *consul.Entries {
	t.Helper()
	e, err := consul.NewEntries(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), consul.EntriesConfig{Kind: kind})
	require.NoError(t, err)
	return e
}

func defaults(e *consul.Entries, name string, version int) engine.Object {
	return engine.Object{Key: e.Key(name), Value: fmt.Appendf(nil, `{"Protocol":"http","MaxInboundConnections":%d}`, version+1)}
}

func TestEntriesSource(t *testing.T) {
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		e, n, scope := newEntries(t, "service-defaults"), 0, fmt.Sprintf("e%d-", prefixes.Add(1))
		return enginetest.SourceFixture{
			Source: e, Key: func(name string) engine.Key { return e.Key(scope + name) },
			Put: func(t *testing.T, name string) {
				t.Helper()
				n++
				_, err := e.Apply(t.Context(), defaults(e, scope+name, n), engine.Write{})
				require.NoError(t, err)
				t.Cleanup(func() { _ = e.Delete(context.Background(), e.Key(scope+name), engine.Write{}) }) // the list is everybody's
			},
			Delete: func(t *testing.T, name string) {
				t.Helper()
				require.NoError(t, e.Delete(t.Context(), e.Key(scope+name), engine.Write{}))
			},
		}
	})
}

func TestEntriesSink(t *testing.T) {
	enginetest.TestSink(t, func(t *testing.T) enginetest.SinkFixture {
		e, scope := newEntries(t, "service-defaults"), fmt.Sprintf("e%d-", prefixes.Add(1))
		return enginetest.SinkFixture{Sink: e, Object: func(name string, version int) engine.Object { return defaults(e, scope+name, version) }}
	})
}

func TestNodesSource(t *testing.T) {
	c := client(t, shared, 0)
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		scope, n := fmt.Sprintf("n%d-", prefixes.Add(1)), 0
		nodes, err := consul.NewNodes(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), consul.NodesConfig{Filter: `Meta.scope == "` + scope + `"`})
		require.NoError(t, err)
		return enginetest.SourceFixture{
			Source: nodes, Key: func(name string) engine.Key { return nodes.Key(scope + name) },
			Put: func(t *testing.T, name string) {
				t.Helper()
				n++
				_, err := c.Catalog().Register(&api.CatalogRegistration{Node: scope + name, Address: fmt.Sprintf("10.2.0.%d", n), NodeMeta: map[string]string{"scope": scope}}, nil)
				require.NoError(t, err)
			},
			Delete: func(t *testing.T, name string) {
				t.Helper()
				_, err := c.Catalog().Deregister(&api.CatalogDeregistration{Node: scope + name}, nil)
				require.NoError(t, err)
			},
		}
	})
}

// apps keeps an instance and a config entry for each key under a prefix, until the test ends.
func apps(t *testing.T, kv *consul.KV, i *consul.Instances, e *consul.Entries) {
	t.Helper()
	handle := func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		name := strings.TrimPrefix(req.Key.Name, kv.Key("").Name)
		instance, entry := engine.Effect{Verb: engine.DeleteObject, Object: engine.Object{Key: i.Key(name)}}, engine.Effect{Verb: engine.DeleteObject, Object: engine.Object{Key: e.Key(name)}}
		switch o, err := rt.Get(ctx, req.Key); {
		case err == nil:
			instance.Verb, instance.Object.Value = engine.ApplyObject, consul.Instance{Address: string(o.Value.([]byte)), Port: 80, Status: api.HealthPassing, Meta: map[string]string{"team": "a"}}
			entry.Verb, entry.Object.Value = engine.ApplyObject, []byte(`{"Protocol": "http", "Meta": {"team": "a"}}`)
		case !engine.IsNotFound(err):
			return engine.Result{}, err
		}
		return engine.Result{}, rt.Do(ctx, instance, entry)
	}
	runEngine(t, engine.Config{Controllers: []engine.Controller{engine.NewController("apps").For(kv).Owns(i).Owns(e).WithConcurrency(4).
		WithBackoff(engine.Backoff{Initial: 10 * time.Millisecond, Max: 200 * time.Millisecond}).WithHandler(handle)}})
}

func TestWhatIsOwnedInTheCatalogIsPutRight(t *testing.T) {
	x := fmt.Sprintf("x%d", prefixes.Add(1))
	node := "node-" + x
	c := client(t, shared, 0)
	kv, i, e := newKV(t, shared, consul.KVConfig{KeyPrefix: "owned/"}), newInstances(t, consul.InstancesConfig{Node: node}), newEntries(t, "service-defaults")
	// Somebody else's, before the engine.
	_, err := c.Catalog().Register(&api.CatalogRegistration{Node: node, Address: "10.3.0.1", NodeMeta: map[string]string{"a": "b"}, Service: &api.AgentService{ID: "foreign", Service: "foreign"}}, nil)
	require.NoError(t, err)
	apps(t, kv, i, e)
	put(t, c, "owned/"+x, "10.3.0.2")
	put(t, c, "owned/foreign", "10.3.0.3")
	is := func(what, address string) {
		t.Helper()
		eventually(t, what, func() bool {
			o, err := i.Get(t.Context(), i.Key(x))
			if err != nil {
				return address == "" && engine.IsNotFound(err)
			}
			have, err := engine.As[consul.Instance](o)
			require.NoError(t, err)
			return have.Address == address && have.Status == api.HealthPassing && have.Port == 80 && o.Owner == kv.Key(x)
		})
	}
	is("registered", "10.3.0.2")
	services, _, err := c.Health().Service(x, "", true, nil)
	require.NoError(t, err)
	require.Len(t, services, 1, "it passes")
	require.Equal(t, "b", services[0].Node.Meta["a"], "the node is as it was")
	require.Equal(t, "10.3.0.1", services[0].Node.Address)
	require.Equal(t, map[string]string{"team": "a", consul.OwnerMeta: kv.Key(x).String()}, services[0].Service.Meta)

	put(t, c, "owned/"+x, "10.3.0.4")
	is("changed", "10.3.0.4")
	_, err = c.Catalog().Register(&api.CatalogRegistration{Node: node, SkipNodeUpdate: true, Check: &api.AgentCheck{Node: node, CheckID: "windlass-" + x, ServiceID: x, Status: api.HealthCritical}}, nil)
	require.NoError(t, err)
	is("its status is put right", "10.3.0.4")
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: node, ServiceID: x}, nil)
	require.NoError(t, err)
	is("registered again", "10.3.0.4")
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: node, ServiceID: "foreign"}, nil)
	require.NoError(t, err)
	eventually(t, "where somebody else's was", func() bool {
		o, err := i.Get(t.Context(), i.Key("foreign"))
		return err == nil && o.Owner == kv.Key("foreign")
	})
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: node}, nil)
	require.NoError(t, err)
	is("with its node", "10.3.0.4")

	entry := func() api.ConfigEntry {
		found, _, err := c.ConfigEntries().Get("service-defaults", x, nil)
		if err != nil {
			return nil
		}
		return found
	}
	eventually(t, "a config entry", func() bool { e := entry(); return e != nil && e.GetMeta()[consul.OwnerMeta] == kv.Key(x).String() })
	_, _, err = c.ConfigEntries().Set(&api.ServiceConfigEntry{Kind: "service-defaults", Name: x, Protocol: "tcp", Meta: entry().GetMeta()}, nil)
	require.NoError(t, err)
	eventually(t, "the entry is put right", func() bool { return entry().(*api.ServiceConfigEntry).Protocol == "http" })

	require.NoError(t, kv.Delete(t.Context(), kv.Key(x), engine.Write{}))
	is("deregistered", "")
	eventually(t, "the entry has gone", func() bool { return entry() == nil })
	require.NoError(t, kv.Delete(t.Context(), kv.Key("foreign"), engine.Write{}))
}

func TestNothingIsWrittenToTheCatalogWhereNothingDiffers(t *testing.T) {
	c := client(t, shared, 0)
	kv, i, e := newKV(t, shared, consul.KVConfig{KeyPrefix: "idle/"}), newInstances(t, consul.InstancesConfig{}), newEntries(t, "service-defaults")
	apps(t, kv, i, e)
	x := fmt.Sprintf("x%d", prefixes.Add(1))
	put(t, c, "idle/"+x, "10.3.0.2")
	revisions := func() (all [2]string) {
		a, err1 := i.Get(t.Context(), i.Key(x))
		b, err2 := e.Get(t.Context(), e.Key(x))
		if err1 != nil || err2 != nil {
			return all
		}
		return [2]string{a.Revision, b.Revision}
	}
	eventually(t, "written", func() bool { return revisions()[1] != "" })
	before := revisions()
	for n := range 5 {
		put(t, c, "idle/marker", fmt.Sprintf("10.3.1.%d", n))
		put(t, c, "idle/"+x, "10.3.0.2") // a change, by its index
		eventually(t, "reconciled", func() bool {
			o, err := i.Get(t.Context(), i.Key("marker"))
			return err == nil && strings.Contains(string(o.Value.([]byte)), fmt.Sprintf("10.3.1.%d", n))
		})
	}
	require.Equal(t, before, revisions())
}

func TestConsulSaysWhenAnEntryWithItsDefaultsIsNoChange(t *testing.T) {
	e := newEntries(t, "mesh")
	o := engine.Object{Key: e.Key("mesh"), Value: []byte(`{"TransparentProxy": {"MeshDestinationsOnly": true}, "Peering": {}}`)}
	first, err := e.Apply(t.Context(), o, engine.Write{Absent: true})
	require.NoError(t, err)
	have, err := e.Get(t.Context(), o.Key)
	require.NoError(t, err)
	require.True(t, e.Same(have, o), string(have.Value.([]byte)))
	again, err := e.Apply(t.Context(), o, engine.Write{Revision: first})
	require.NoError(t, err)
	require.Equal(t, first, again)
	require.NoError(t, e.Delete(t.Context(), o.Key, engine.Write{}))
}

func TestWhatTheCatalogWouldNotTake(t *testing.T) {
	i, e := newInstances(t, consul.InstancesConfig{}), newEntries(t, "service-defaults")
	for want, value := range map[string]string{
		"id: it is \"y\", but the key's name is \"x\"; leave it out": `{"id": "y", "address": "10.0.0.1"}`,
		"node: it is \"y\", but the sink's is \"":                    `{"node": "y", "address": "10.0.0.1"}`,
		"address: it is required where the sink has none":            `{}`,
		"address: nobody can connect to 0.0.0.0":                     `{"address": "0.0.0.0"}`,
		"port: 70000 is none":                                        `{"address": "10.0.0.1", "port": 70000}`,
		"status: \"good\" is none of passing, warning, critical":     `{"address": "10.0.0.1", "status": "good"}`,
		"meta: windlass-owner is the engine's":                       `{"address": "10.0.0.1", "meta": {"windlass-owner": "x"}}`,
		"meta.long: longer than the 512 bytes that Consul takes":     `{"address": "10.0.0.1", "meta": {"long": "` + strings.Repeat("x", 513) + `"}}`,
		"unknown field \"adr\"":                                      `{"adr": "10.0.0.1"}`,
	} {
		_, err := i.Apply(t.Context(), engine.Object{Key: i.Key("x"), Value: []byte(value)}, engine.Write{})
		require.ErrorIs(t, err, engine.ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
	for want, value := range map[string]string{
		"Kind: it is \"mesh\", and must be \"service-defaults\"; leave it out": `{"Kind": "mesh"}`,
		"Name: it is \"y\", and must be \"x\"; leave it out":                   `{"Name": "y"}`,
		"invalid config key \"Protokoll\"":                                     `{"Protokoll": "http"}`,
		"is no config entry":                                                   `[]`,
	} {
		_, err := e.Apply(t.Context(), engine.Object{Key: e.Key("x"), Value: []byte(value)}, engine.Write{})
		require.ErrorIs(t, err, engine.ErrInvalid, want)
		require.ErrorContains(t, err, want)
	}
	nodes, _, err := client(t, shared, 0).Catalog().Nodes(&api.QueryOptions{Filter: `ID != ""`})
	require.NoError(t, err)
	own := newInstances(t, consul.InstancesConfig{Node: nodes[0].Node})
	_, err = own.Apply(t.Context(), engine.Object{Key: own.Key("x"), Value: []byte(`{"address": "10.0.0.1"}`)}, engine.Write{})
	require.ErrorIs(t, err, engine.ErrInvalid)
	require.ErrorContains(t, err, "is an agent's own, which would undo what is registered there: name another node")
	_, err = consul.NewEntries(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), consul.EntriesConfig{Kind: "service-defalts"})
	require.ErrorContains(t, err, `kind: "service-defalts" is no kind of config entries`)
	mesh := newEntries(t, "mesh")
	_, err = mesh.Apply(t.Context(), engine.Object{Key: mesh.Key("x"), Value: []byte(`{}`)}, engine.Write{})
	require.ErrorContains(t, err, "there is one entry of this kind, and its name is mesh")
	_, err = consul.NewEntries(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), consul.EntriesConfig{})
	require.ErrorContains(t, err, "kind: the kind of the config entries is required")
}

func TestNodesShowTheirHealth(t *testing.T) {
	c := client(t, shared, 0)
	nodes, err := consul.NewNodes(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), consul.NodesConfig{})
	require.NoError(t, err)
	register := func(status string) {
		_, err := c.Catalog().Register(&api.CatalogRegistration{
			Node: "sick", Address: "10.4.0.1", NodeMeta: map[string]string{"rack": "1"}, Check: &api.AgentCheck{Node: "sick", CheckID: "disk", Status: status},
		}, nil)
		require.NoError(t, err)
	}
	register(api.HealthPassing)
	told := make(chan engine.Event, 100)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- nodes.Run(ctx, func(_ context.Context, e engine.Event) error {
			if e.Key.Name == "sick" || e.Operation == engine.ListEnded {
				told <- e
			}
			return nil
		})
	}()
	for e := range told {
		if e.Operation == engine.ListEnded {
			break
		}
		require.Equal(t, map[string]string{"rack": "1"}, e.New.Labels)
	}
	register(api.HealthCritical)
	require.Equal(t, engine.Put, (<-told).Operation)
	o, err := nodes.Get(t.Context(), nodes.Key("sick"))
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"sick","address":"10.4.0.1","meta":{"rack":"1"},"status":"critical"}`, string(o.Value.([]byte)))
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: "sick"}, nil)
	require.NoError(t, err)
	require.Equal(t, engine.Delete, (<-told).Operation)
	stop()
	require.NoError(t, <-done)
}

func TestAnInstanceComesAndGoesWithItsTraceAndItsStatus(t *testing.T) {
	const tp = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	i := newInstances(t, consul.InstancesConfig{TracePrefix: "traces/", Address: "10.0.0.1"})
	told, listed := make(chan engine.Event, 10), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- i.Run(ctx, func(_ context.Context, e engine.Event) error {
			if e.Operation == engine.ListEnded {
				close(listed)
			} else if !e.Key.IsZero() {
				told <- e
			}
			return nil
		})
	}()
	<-listed
	revision, err := i.Apply(t.Context(), engine.Object{Key: i.Key("x"), Value: []byte(`{"status": "passing"}`)}, engine.Write{Absent: true, Traceparent: tp})
	require.NoError(t, err)
	e := <-told
	require.Equal(t, tp, e.Traceparent)
	require.Equal(t, revision, e.Revision, "one event, at the revision that was returned")
	_, err = i.Apply(t.Context(), engine.Object{Key: i.Key("x"), Value: []byte(`{}`)}, engine.Write{Revision: revision})
	require.NoError(t, err)
	o, err := i.Get(t.Context(), i.Key("x"))
	require.NoError(t, err)
	require.NotContains(t, string(o.Value.([]byte)), "status", "a status that is not wanted any more")
	require.Equal(t, engine.Put, (<-told).Operation)
	require.NoError(t, i.Delete(t.Context(), i.Key("x"), engine.Write{}))
	require.Equal(t, engine.Delete, (<-told).Operation)
	// A node that is removed takes what has no check with it, too.
	_, err = i.Apply(t.Context(), engine.Object{Key: i.Key("y"), Value: []byte(`{}`)}, engine.Write{})
	require.NoError(t, err)
	require.Equal(t, engine.Put, (<-told).Operation)
	_, err = client(t, shared, 0).Catalog().Deregister(&api.CatalogDeregistration{Node: i.Key("").Namespace}, nil)
	require.NoError(t, err)
	require.Equal(t, engine.Delete, (<-told).Operation)
	side, _, err := client(t, shared, 0).KV().Get("traces/"+i.Key("x").Namespace+"/x", nil)
	require.NoError(t, err)
	require.Nil(t, side)
	stop()
	require.NoError(t, <-done)
}

func TestNoWriteOfAnInstanceIsLostAmongOthers(t *testing.T) {
	i := newInstances(t, consul.InstancesConfig{Address: "10.0.0.1"})
	states := []string{api.HealthPassing, api.HealthWarning, api.HealthCritical}
	write := func(x consul.Instance, w engine.Write) error {
		_, err := i.Apply(t.Context(), engine.Object{Key: i.Key("x"), Value: x}, w)
		return err
	}
	require.NoError(t, write(consul.Instance{Port: 1, Status: states[0]}, engine.Write{Absent: true}))
	var ports, turns, conflicts atomic.Int64
	var group errgroup.Group
	for w := range 4 {
		group.Go(func() error {
			for range 30 {
				o, err1 := i.Get(t.Context(), i.Key("x"))
				x, err2 := engine.As[consul.Instance](o)
				if err := errors.Join(err1, err2); err != nil {
					return err
				}
				done := &ports
				if w%2 == 0 {
					x.Port++
				} else {
					done, x.Status = &turns, states[(slices.Index(states, x.Status)+1)%3]
				}
				switch err := write(x, engine.Write{Revision: o.Revision}); {
				case err == nil:
					done.Add(1)
				case errors.Is(err, engine.ErrConflict):
					conflicts.Add(1)
				default:
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	o, err := i.Get(t.Context(), i.Key("x"))
	require.NoError(t, err)
	x, err := engine.As[consul.Instance](o)
	require.NoError(t, err)
	require.EqualValues(t, 1+ports.Load(), x.Port)
	require.Equal(t, states[turns.Load()%3], x.Status)
	t.Logf("%d and %d writes, %d refused", ports.Load(), turns.Load(), conflicts.Load())
}

func TestWhatIsReleasedStaysAsItIsWithoutAnOwner(t *testing.T) {
	i, e := newInstances(t, consul.InstancesConfig{Address: "10.0.0.1"}), newEntries(t, "service-defaults")
	owner := engine.Key{Kind: engine.KindOf("nats/kv"), Name: "app"}
	name := fmt.Sprintf("released%d", prefixes.Add(1))
	for sink, o := range map[interface {
		engine.Sink
		engine.Reader
	}]engine.Object{i: instance(i, name, 80), e: defaults(e, name, 1)} {
		o.Owner = owner
		_, err := sink.Apply(t.Context(), o, engine.Write{Absent: true})
		require.NoError(t, err)
		have, err := sink.Get(t.Context(), o.Key)
		require.NoError(t, err)
		require.Equal(t, owner, have.Owner)
		released := have
		released.Owner = engine.Key{}
		_, err = sink.Apply(t.Context(), released, engine.Write{Revision: have.Revision, Release: true})
		require.NoError(t, err)
		now, err := sink.Get(t.Context(), o.Key)
		require.NoError(t, err)
		require.True(t, now.Owner.IsZero())
		require.Equal(t, have.Value, now.Value)
		require.NoError(t, sink.Delete(t.Context(), o.Key, engine.Write{Revision: now.Revision}))
	}
	long := instance(i, name, 80)
	long.Owner = engine.Key{Kind: engine.KindOf("nats/kv"), Name: strings.Repeat("x", 512)}
	_, err := i.Apply(t.Context(), long, engine.Write{})
	require.ErrorContains(t, err, "is longer than the 512 bytes that Meta takes")
}
