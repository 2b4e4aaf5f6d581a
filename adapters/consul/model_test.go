//go:build e2e

package consul_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/consul"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
)

// TestAControllerOverKindsOfConsul is the model of Consul's own controllers, on kinds that they can watch from outside: a managed kind, one that
// is mapped by its name, one by its owner, and a custom source.
func TestAControllerOverKindsOfConsul(t *testing.T) {
	c := client(t, shared, 0)
	scope := fmt.Sprintf("m%d-", prefixes.Add(1))
	entries, services, instances := newEntries(t, "service-defaults"), newServices(t, consul.ServicesConfig{}), newInstances(t, consul.InstancesConfig{Address: "10.5.0.1"})
	custom := newKV(t, shared, consul.KVConfig{Name: "custom", KeyPrefix: scope})
	rec := &enginetest.Recorder{}
	var delayed, failed, panicked atomic.Bool
	rec.Answer = func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
		switch name := strings.TrimPrefix(req.Key.Name, scope); {
		case name == "delayed" && delayed.CompareAndSwap(false, true):
			return engine.Result{}, fmt.Errorf("not yet: %w", engine.RequeueAfter(time.Second))
		case name == "failed" && failed.CompareAndSwap(false, true):
			return engine.Result{}, errors.New("once")
		case name == "panicked" && panicked.CompareAndSwap(false, true):
			panic("once")
		}
		return engine.Result{}, nil
	}
	// Two controllers grow from one, and share nothing.
	base := engine.NewController("entries").For(entries).Watches(services, engine.MapToKind(entries.Key("").Kind)).WithHandler(rec.Handle)
	other := base.Watches(custom, engine.MapSameName(entries.Key("")))
	mine := base.Watches(instances, engine.MapOwnerOf(entries.Key("").Kind)).Watches(custom, func(_ context.Context, e engine.Event) ([]engine.Key, error) {
		return []engine.Key{entries.Key(e.Key.Name), {Kind: engine.KindOf("another"), Name: "dropped"}}, nil
	})
	require.NotContains(t, other.String(), "consul-instances")
	require.Contains(t, mine.String(), "watches=[consul-instances consul-services custom]")
	runs := func(name string) []enginetest.Recorded { return rec.Runs(scope + name) }
	trigger := func(name string, n int) engine.Trigger { return runs(name)[n].Request.Trigger() }
	apply := func(name string) {
		t.Helper()
		_, err := entries.Apply(t.Context(), defaults(entries, scope+name, 1), engine.Write{})
		require.NoError(t, err)
		t.Cleanup(func() { _ = entries.Delete(context.Background(), entries.Key(scope+name), engine.Write{}) })
	}
	apply("before")
	runEngine(t, engine.Config{Controllers: []engine.Controller{mine}})
	eventually(t, "what was there before", func() bool { return len(runs("before")) == 1 && trigger("before", 0) == engine.Resynced })
	apply("managed")
	eventually(t, "the managed kind", func() bool { return len(runs("managed")) == 1 && trigger("managed", 0) == engine.Created })
	for _, name := range []string{"failed", "panicked"} {
		apply(name)
		eventually(t, name+" is tried again", func() bool { return len(runs(name)) == 2 && trigger(name, 1) == engine.Retried })
	}
	apply("delayed")
	eventually(t, "delayed", func() bool { return len(runs("delayed")) == 2 && trigger("delayed", 1) == engine.Requeued })
	require.GreaterOrEqual(t, runs("delayed")[1].At.Sub(runs("delayed")[0].At), time.Second)

	register(t, c, scope+"watched", "1", 80, api.HealthPassing)
	eventually(t, "a watched kind, by name", func() bool { return len(runs("watched")) > 0 && trigger("watched", 0) == engine.Dependency })
	before := len(runs("managed"))
	_, err := instances.Apply(t.Context(), engine.Object{
		Key: instances.Key("owned"), Value: []byte(`{"service": "conformance"}`), Meta: engine.Meta{Owner: entries.Key(scope + "managed")},
	}, engine.Write{})
	require.NoError(t, err)
	eventually(t, "a watched kind, by owner", func() bool { return len(runs("managed")) > before })
	put(t, c, scope+"custom", "1")
	eventually(t, "a custom source", func() bool { return len(runs("custom")) == 1 })
	require.Empty(t, rec.Runs("dropped"))
	require.NoError(t, entries.Delete(t.Context(), entries.Key(scope+"managed"), engine.Write{}))
	eventually(t, "a deletion", func() bool { r := runs("managed"); return r[len(r)-1].Request.Trigger() == engine.Deleted })
	require.Equal(t, 1, rec.AtOnce())
}

func TestPlacementWithLeasesOfConsul(t *testing.T) {
	for _, placement := range []engine.Placement{engine.Singleton, engine.Each} {
		t.Run(string(placement), func(t *testing.T) {
			c := client(t, shared, 0)
			prefix := fmt.Sprintf("placed%d/", prefixes.Add(1))
			put(t, c, prefix+"before", "1")
			recs, stops := []*enginetest.Recorder{{}, {}}, make([]func(), 2)
			for i, rec := range recs {
				conn := connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]})
				kv, err := consul.NewKV(conn, consul.KVConfig{KeyPrefix: prefix})
				require.NoError(t, err)
				stops[i] = runEngine(t, engine.Config{
					Controllers: []engine.Controller{engine.NewController("placed").For(kv).WithPlacement(placement).WithHandler(rec.Handle)},
					Leases:      consul.NewLeases(conn, "leases/"+prefix), Replica: fmt.Sprint("r", i),
				})
				eventually(t, "the first has its lease", func() bool { return len(recs[0].Runs(prefix+"before")) == 1 })
			}
			put(t, c, prefix+"a", "1")
			eventually(t, "reconciled", func() bool { return len(recs[0].Runs(prefix+"a")) == 1 })
			if placement == engine.Each {
				eventually(t, "by both", func() bool { return len(recs[1].Runs(prefix+"a")) == 1 })
				return
			}
			require.Zero(t, recs[1].Count())
			stops[0]()
			eventually(t, "the other takes over what is there", func() bool {
				return len(recs[1].Runs(prefix+"before")) == 1 && len(recs[1].Runs(prefix+"a")) == 1
			})
			put(t, c, prefix+"b", "1")
			eventually(t, "and goes on", func() bool { return len(recs[1].Runs(prefix+"b")) == 1 })
			require.Empty(t, recs[0].Runs(prefix+"b"))
		})
	}
}
