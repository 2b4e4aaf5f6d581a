//go:build e2e

package consul_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/consul"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/internal/testbed"
	"github.com/windlass-dev/windlass/internal/tlsfile"
	"github.com/windlass-dev/windlass/internal/tlsfile/tlstest"
)

// shared is the server that all tests share, unless they break one.
var shared *testbed.Consul

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "windlass-consul-")
	must(err)
	shared, err = testbed.StartConsul(context.Background(), testbed.ConsulConfig{}, dir, os.Stderr) // there is no test yet
	must(err)
	code := m.Run()
	shared.Stop()
	must(os.RemoveAll(dir))
	os.Exit(code)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func client(t *testing.T, c *testbed.Consul, i int) *api.Client {
	t.Helper()
	config := api.DefaultConfig()
	config.Address, config.Token = c.Addresses[i], c.Token
	out, err := api.NewClient(config)
	require.NoError(t, err)
	return out
}

func connect(t *testing.T, cfg consul.ConnectionConfig) *consul.Connection {
	t.Helper()
	conn, err := consul.Connect(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

var prefixes atomic.Int64

// newKV returns keys under a prefix of their own.
func newKV(t *testing.T, c *testbed.Consul, cfg consul.KVConfig) *consul.KV {
	t.Helper()
	if cfg.KeyPrefix == "" {
		cfg.KeyPrefix = fmt.Sprintf("t%d/", prefixes.Add(1))
	}
	kv, err := consul.NewKV(connect(t, consul.ConnectionConfig{Address: c.Addresses[0]}), cfg)
	require.NoError(t, err)
	return kv
}

func put(t *testing.T, c *api.Client, key, value string) {
	t.Helper()
	_, err := c.KV().Put(&api.KVPair{Key: key, Value: []byte(value)}, nil)
	require.NoError(t, err)
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	require.Eventually(t, f, 30*time.Second, 10*time.Millisecond, what)
}

func TestSource(t *testing.T) {
	c := client(t, shared, 0)
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		kv, n := newKV(t, shared, consul.KVConfig{}), 0
		return enginetest.SourceFixture{
			Source: kv, Key: kv.Key,
			Put: func(t *testing.T, name string) { t.Helper(); n++; put(t, c, kv.Key(name).Name, strconv.Itoa(n)) },
			Delete: func(t *testing.T, name string) {
				t.Helper()
				_, err := c.KV().Delete(kv.Key(name).Name, nil)
				require.NoError(t, err)
			},
		}
	})
}

func TestSink(t *testing.T) {
	for _, trace := range []string{"", "traces/"} {
		t.Run("trace "+trace, func(t *testing.T) {
			enginetest.TestSink(t, func(t *testing.T) enginetest.SinkFixture {
				kv := newKV(t, shared, consul.KVConfig{TracePrefix: trace})
				return enginetest.SinkFixture{Sink: kv, Object: func(name string, version int) engine.Object {
					return engine.Object{Key: kv.Key(name), Value: []byte(strconv.Itoa(version))}
				}}
			})
		})
	}
}

// seen is the last value that a handler read of each key, "" for one that is gone.
type seen struct {
	mu   sync.Mutex
	last map[string]string
	runs int
}

func (s *seen) handle(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
	value := ""
	o, err := rt.Get(ctx, req.Key)
	if err != nil && !engine.IsNotFound(err) {
		return engine.Result{}, err
	}
	if err == nil {
		value = string(o.Value.([]byte))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last[req.Key.Name] = value
	s.runs++
	return engine.Result{}, nil
}

func (s *seen) of(name string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.last[name]
	return v, ok
}

// runEngine runs an engine until the test ends, or until stop is called.
func runEngine(t *testing.T, cfg engine.Config) (stop func()) {
	t.Helper()
	e, err := engine.New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	var stopped atomic.Bool
	stop = func() {
		if stopped.CompareAndSwap(false, true) {
			cancel()
			require.NoError(t, <-done)
		}
	}
	t.Cleanup(stop)
	return stop
}

// reconcile runs an engine on a source until the test ends.
func reconcile(t *testing.T, kv *consul.KV) *seen {
	t.Helper()
	s := &seen{last: make(map[string]string)}
	runEngine(t, engine.Config{Controllers: []engine.Controller{engine.NewController("kv").For(kv).WithConcurrency(4).
		WithBackoff(engine.Backoff{Initial: 10 * time.Millisecond, Max: time.Second}).WithHandler(s.handle)}})
	return s
}

// load changes keys until stop is called, which returns the last value of each that is known to be stored, "" for deleted.
func load(t *testing.T, prefix string, clients ...*api.Client) (stop func() map[string]string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	last := make(map[string]string)
	var group sync.WaitGroup
	for w, c := range clients {
		group.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for n := 0; ctx.Err() == nil; n++ {
				name, value := fmt.Sprintf("%sw%d-%d", prefix, w, rng.IntN(50)), strconv.Itoa(n)
				var err error
				if rng.IntN(10) == 0 {
					value = ""
					_, err = c.KV().Delete(name, nil)
				} else {
					_, err = c.KV().Put(&api.KVPair{Key: name, Value: []byte(value)}, nil)
				}
				mu.Lock()
				if last[name] = value; err != nil {
					delete(last, name) // it may or may not be stored
				}
				mu.Unlock()
				if err != nil {
					time.Sleep(20 * time.Millisecond) // there is nobody to be quick for
				}
			}
		})
	}
	return func() map[string]string {
		cancel()
		group.Wait()
		return last
	}
}

func requireSeen(t *testing.T, s *seen, last map[string]string) {
	t.Helper()
	require.Greater(t, len(last), 20)
	for name, value := range last {
		eventually(t, name+" is "+value, func() bool {
			got, ok := s.of(name)
			return got == value && (ok || value == "")
		})
	}
	t.Logf("%d runs; the last values of %d keys were reconciled", s.runs, len(last))
}

func TestNothingIsLostWhenTheAgentIsKilledUnderLoad(t *testing.T) {
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	kv := newKV(t, own, consul.KVConfig{KeyPrefix: "a/"})
	s := reconcile(t, kv)
	c := client(t, own, 0)
	stop := load(t, "a/", c, c)
	for range 2 {
		time.Sleep(time.Second) // the load is what takes time
		own.Kill(0)
		eventually(t, "not ready, and why", func() bool {
			err := kv.Status()
			return err != nil && strings.Contains(err.Error(), "no agent answers there: check the address and that it is running")
		})
		require.NoError(t, own.Start(t.Context(), 0))
	}
	time.Sleep(time.Second)
	last := stop()
	requireSeen(t, s, last)
	eventually(t, "ready", func() bool { return kv.Status() == nil })
}

func TestNothingIsLostWhenTheLeaderIsKilledUnderLoad(t *testing.T) {
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{Servers: 3}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	var leader int
	eventually(t, "a leader", func() bool { leader = own.LeaderIndex(t.Context(), 0); return leader >= 0 })
	follower := (leader + 1) % 3
	kv, err := consul.NewKV(connect(t, consul.ConnectionConfig{Address: own.Addresses[follower]}), consul.KVConfig{KeyPrefix: "a/"})
	require.NoError(t, err)
	s := reconcile(t, kv)
	stop := load(t, "a/", client(t, own, follower), client(t, own, follower))
	time.Sleep(time.Second) // the load is what takes time
	own.Kill(leader)
	eventually(t, "another leader", func() bool { l := own.LeaderIndex(t.Context(), follower); return l >= 0 && l != leader })
	time.Sleep(time.Second)
	requireSeen(t, s, stop())
}

func TestASnapshotThatTurnsTheIndexBackIsSeen(t *testing.T) {
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	c := client(t, own, 0)
	kv := newKV(t, own, consul.KVConfig{KeyPrefix: "a/"})
	s := reconcile(t, kv)
	put(t, c, "a/x", "old")
	eventually(t, "old", func() bool { v, _ := s.of("a/x"); return v == "old" })
	snapshot, _, err := c.Snapshot().Save(nil)
	require.NoError(t, err)
	for i := range 50 {
		put(t, c, "a/x", strconv.Itoa(i))
	}
	put(t, c, "a/y", "new")
	eventually(t, "new", func() bool { v, _ := s.of("a/y"); return v == "new" })
	require.NoError(t, c.Snapshot().Restore(nil, snapshot))
	eventually(t, "turned back", func() bool { x, _ := s.of("a/x"); y, ok := s.of("a/y"); return x == "old" && ok && y == "" })
	put(t, c, "a/y", "again")
	eventually(t, "goes on", func() bool { v, _ := s.of("a/y"); return v == "again" })
}

func TestTokensAreReadAgainAndTheirErrorsExplained(t *testing.T) {
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{ACL: true}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	c := client(t, own, 0)
	make := func(rules string) *api.ACLToken {
		name := fmt.Sprint("p", prefixes.Add(1))
		_, _, err := c.ACL().PolicyCreate(&api.ACLPolicy{Name: name, Rules: rules}, nil)
		require.NoError(t, err)
		token, _, err := c.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{Name: name}}}, nil)
		require.NoError(t, err)
		return token
	}
	file := filepath.Join(t.TempDir(), "token")
	use := func(token string) { require.NoError(t, os.WriteFile(file, []byte(token+"\n"), 0o600)) }
	first := make(`key_prefix "a/" { policy = "write" }`)
	use(first.SecretID)
	kv, err := consul.NewKV(connect(t, consul.ConnectionConfig{Address: own.Addresses[0], TokenFile: file}), consul.KVConfig{KeyPrefix: "a/"})
	require.NoError(t, err)
	s := reconcile(t, kv)
	put(t, c, "a/x", "1")
	eventually(t, "seen", func() bool { v, _ := s.of("a/x"); return v == "1" })
	_, err = kv.Apply(t.Context(), engine.Object{Key: engine.Key{Kind: engine.KindOf(consul.KindKV), Name: "b/x"}, Value: []byte("1")}, engine.Write{})
	require.ErrorContains(t, err, "a right is missing: give the token a policy that has it")

	_, err = c.ACL().TokenDelete(first.AccessorID, nil)
	require.NoError(t, err)
	put(t, c, "a/x", "2")
	eventually(t, "not ready", func() bool { return kv.Status() != nil })
	require.ErrorContains(t, kv.Status(), "the token is not known to Consul: renew tokenFile")
	use(make(`key_prefix "a/" { policy = "read" }`).SecretID)
	eventually(t, "seen with another token", func() bool { v, _ := s.of("a/x"); return v == "2" })
	_, err = kv.Apply(t.Context(), engine.Object{Key: kv.Key("a/x"), Value: []byte("3")}, engine.Write{})
	require.ErrorContains(t, err, "a right is missing")
	require.NoError(t, os.Remove(file))
	_, err = kv.Get(t.Context(), kv.Key("a/x"))
	require.ErrorContains(t, err, "tokenFile: stat "+file)
}

func TestWhatConsulWouldNotTake(t *testing.T) {
	kv := newKV(t, shared, consul.KVConfig{})
	for name, o := range map[string]engine.Object{
		"larger than Consul takes in a transaction (512 KiB of text, a value of about 380 KiB)": {Key: kv.Key("large"), Value: []byte(strings.Repeat("x", 1<<20))},
		"cannot be a key of Consul":             {Key: engine.Key{Kind: engine.KindOf(consul.KindKV), Name: "/x"}, Value: []byte("1")},
		"Consul's keys hold bytes, not float64": {Key: kv.Key("x"), Value: 1.5},
	} {
		_, err := kv.Apply(t.Context(), o, engine.Write{})
		require.ErrorIs(t, err, engine.ErrInvalid, name)
		require.ErrorContains(t, err, name)
	}
}

func TestAWriteCarriesItsTraceInOneStep(t *testing.T) {
	const tp = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	c := client(t, shared, 0)
	kv := newKV(t, shared, consul.KVConfig{KeyPrefix: "traced/", TracePrefix: "traced/.trace/"})
	var told atomic.Pointer[engine.Event]
	var others atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	listed := make(chan struct{})
	go func() {
		done <- kv.Run(ctx, func(_ context.Context, e engine.Event) error {
			switch {
			case e.Operation == engine.ListEnded:
				close(listed)
			case e.Key.Name == "traced/x":
				told.Store(&e)
			case !e.Key.IsZero():
				others.Add(1)
			}
			return nil
		})
	}()
	<-listed
	revision, err := kv.Apply(t.Context(), engine.Object{Key: kv.Key("x"), Value: []byte("1")}, engine.Write{Absent: true, Traceparent: tp})
	require.NoError(t, err)
	eventually(t, "told", func() bool { e := told.Load(); return e != nil && e.Operation == engine.Put })
	require.Equal(t, tp, told.Load().Traceparent)
	_, err = kv.Apply(t.Context(), engine.Object{Key: kv.Key("x"), Value: []byte("2")}, engine.Write{Revision: "1", Traceparent: "another"})
	require.ErrorIs(t, err, engine.ErrConflict)
	side, _, err := c.KV().Get("traced/.trace/traced/x", nil)
	require.NoError(t, err)
	require.Equal(t, tp, string(side.Value), "a write that was refused leaves no trace")
	require.NoError(t, kv.Delete(t.Context(), kv.Key("x"), engine.Write{Revision: revision}))
	eventually(t, "told as deleted", func() bool { return told.Load().Operation == engine.Delete })
	side, _, err = c.KV().Get("traced/.trace/traced/x", nil)
	require.NoError(t, err)
	require.Nil(t, side)
	require.Zero(t, others.Load(), "traces are no keys")
	stop()
	require.NoError(t, <-done)
}

func TestConnectionsThatCannotBeMade(t *testing.T) {
	for want, cfg := range map[string]consul.ConnectionConfig{
		"127.0.0.1:1: Get": {Address: "127.0.0.1:1"},
		"no agent answers there: check the address and that it is running": {Address: "127.0.0.1:1"},
		"namespace: it needs Consul Enterprise":                            {Namespace: "x"},
		"partition: it needs Consul Enterprise":                            {Partition: "x"},
		`reads: "fresh" is none of default, stale, consistent`:             {Reads: "fresh"},
		"tokenFile: stat /nowhere":                                         {Address: shared.Addresses[0], TokenFile: "/nowhere"},
	} {
		_, err := consul.Connect(t.Context(), cfg)
		require.ErrorContains(t, err, want)
	}
}

func TestAddressesByURLSocketAndEnvironment(t *testing.T) {
	t.Setenv("CONSUL_HTTP_ADDR", shared.Addresses[0])
	for _, address := range []string{"", "http://" + shared.Addresses[0]} {
		kv, err := consul.NewKV(connect(t, consul.ConnectionConfig{Address: address, Reads: "stale"}), consul.KVConfig{})
		require.NoError(t, err)
		_, err = kv.Get(t.Context(), kv.Key("nothing"))
		require.ErrorIs(t, err, engine.ErrNotFound)
	}
}

func TestLease(t *testing.T) {
	enginetest.TestLease(t, 20*time.Second, func(t *testing.T) lease.Store {
		return consul.NewLeases(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), fmt.Sprintf("leases%d/", prefixes.Add(1)))
	})
}

func TestStore(t *testing.T) {
	enginetest.TestStore(t, func(t *testing.T) kv.Store {
		return consul.NewStore(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), fmt.Sprintf("store%d/", prefixes.Add(1)))
	})
}

// register puts an instance into the catalog, under a node of the test's own.
func register(t *testing.T, c *api.Client, service, id string, port int, status string, tags ...string) {
	t.Helper()
	_, err := c.Catalog().Register(&api.CatalogRegistration{
		Node: "node-" + service, Address: "10.0.0.1", Service: &api.AgentService{ID: id, Service: service, Port: port, Tags: tags},
		Checks: api.HealthChecks{{Node: "node-" + service, CheckID: "check-" + id, ServiceID: id, ServiceName: service, Status: status}},
	}, nil)
	require.NoError(t, err)
}

func newServices(t *testing.T, cfg consul.ServicesConfig) *consul.Services {
	t.Helper()
	s, err := consul.NewServices(connect(t, consul.ConnectionConfig{Address: shared.Addresses[0]}), cfg)
	require.NoError(t, err)
	return s
}

func TestServicesSource(t *testing.T) {
	c := client(t, shared, 0)
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		n, scope := 0, fmt.Sprintf("s%d-", prefixes.Add(1)) // a case sees only what has its tag
		services := newServices(t, consul.ServicesConfig{Tag: scope})
		return enginetest.SourceFixture{
			Source: services, Key: func(name string) engine.Key { return services.Key(scope + name) },
			Put: func(t *testing.T, name string) {
				t.Helper()
				n++
				register(t, c, scope+name, "1", n, api.HealthPassing, scope)
			},
			Delete: func(t *testing.T, name string) {
				t.Helper()
				_, err := c.Catalog().Deregister(&api.CatalogDeregistration{Node: "node-" + scope + name}, nil)
				require.NoError(t, err)
			},
		}
	})
}

func TestServicesShowInstancesAndTheirHealth(t *testing.T) {
	c := client(t, shared, 0)
	all, tagged, filtered := newServices(t, consul.ServicesConfig{}), newServices(t, consul.ServicesConfig{Tag: "blue"}), newServices(t, consul.ServicesConfig{Filter: "Service.Port == 81"})
	var mu sync.Mutex
	told := map[string]int{}
	single := newServices(t, consul.ServicesConfig{Service: "web"})
	for name, s := range map[string]*consul.Services{"all": all, "tagged": tagged, "filtered": filtered, "single": single} {
		ctx, stop := context.WithCancel(t.Context())
		done, listed := make(chan error, 1), make(chan struct{})
		go func() {
			done <- s.Run(ctx, func(_ context.Context, e engine.Event) error {
				mu.Lock()
				defer mu.Unlock()
				if e.Operation == engine.ListEnded {
					close(listed)
				}
				if e.Key.Name == "web" {
					told[name]++
				}
				return nil
			})
		}()
		t.Cleanup(func() { stop(); require.NoError(t, <-done) })
		<-listed
	}
	count := func(name string) int {
		mu.Lock()
		defer mu.Unlock()
		return told[name]
	}
	value := func(s *consul.Services) string {
		o, err := s.Get(t.Context(), s.Key("web"))
		if engine.IsNotFound(err) {
			return ""
		}
		require.NoError(t, err)
		return string(o.Value.([]byte))
	}
	one := `{"id":"1","node":"node-web","address":"10.0.0.1","port":80,"tags":["blue"],"status":"%s"}`
	register(t, c, "web", "1", 80, api.HealthPassing, "blue")
	eventually(t, "told", func() bool { return count("all") == 1 && count("tagged") == 1 })
	require.Equal(t, fmt.Sprintf(`{"name":"web","instances":[`+one+`]}`, "passing"), value(all))
	require.Empty(t, value(filtered))
	register(t, c, "web", "1", 80, api.HealthCritical, "blue")
	eventually(t, "its health is told", func() bool { return count("all") == 2 && count("tagged") == 2 })
	require.Equal(t, fmt.Sprintf(`{"name":"web","instances":[`+one+`]}`, "critical"), value(all))
	register(t, c, "web", "2", 81, api.HealthPassing)
	eventually(t, "another instance is told", func() bool { return count("all") == 3 && count("filtered") == 1 })
	require.Contains(t, value(filtered), `"port":81`)
	require.NotContains(t, value(filtered), `"port":80`)
	_, err := c.Catalog().Register(&api.CatalogRegistration{Node: "node-web", Address: "10.0.0.1", Check: &api.AgentCheck{Node: "node-web", CheckID: "disk", Status: api.HealthWarning}}, nil)
	require.NoError(t, err)
	eventually(t, "its node's health is told", func() bool { return count("all") == 4 && count("single") == 4 })
	require.Contains(t, value(filtered), `"status":"warning"`)
	// A move of the index without a change tells nothing.
	before := count("all")
	register(t, c, "web", "2", 81, api.HealthPassing)
	register(t, c, "other", "1", 1, api.HealthPassing)
	eventually(t, "the other is there", func() bool { _, err := all.Get(t.Context(), all.Key("other")); return err == nil })
	require.Equal(t, before, count("all"))
	_, err = c.Catalog().Deregister(&api.CatalogDeregistration{Node: "node-web"}, nil)
	require.NoError(t, err)
	eventually(t, "its end is told", func() bool { return count("all") == before+1 && count("single") == before+1 && value(all) == "" })
}

func TestThousandsOfServicesAreReadWithFewConnections(t *testing.T) {
	c := client(t, shared, 0)
	const n = 2000
	var group sync.WaitGroup
	for w := range 8 {
		group.Go(func() {
			for i := w; i < n; i += 8 {
				register(t, c, fmt.Sprintf("many-%d", i), "1", i+1, api.HealthPassing)
			}
		})
	}
	group.Wait()
	s := newServices(t, consul.ServicesConfig{})
	var told atomic.Int64
	var last atomic.Pointer[string]
	ctx, stop := context.WithCancel(t.Context())
	done, listed := make(chan error, 1), make(chan struct{})
	go func() {
		done <- s.Run(ctx, func(_ context.Context, e engine.Event) error {
			switch {
			case e.Operation == engine.ListEnded:
				close(listed)
			case e.Operation == engine.Resync && strings.HasPrefix(e.Key.Name, "many-"):
				told.Add(1)
			case e.Operation == engine.Put:
				last.Store(&e.Key.Name)
			}
			return nil
		})
	}()
	<-listed
	require.EqualValues(t, n, told.Load())
	register(t, c, "many-7", "1", 8, api.HealthCritical)
	eventually(t, "a change among many", func() bool { x := last.Load(); return x != nil && *x == "many-7" })
	stop()
	require.NoError(t, <-done)
	for i := range n {
		_, err := c.Catalog().Deregister(&api.CatalogDeregistration{Node: fmt.Sprintf("node-many-%d", i)}, nil)
		require.NoError(t, err)
	}
}

func TestNothingIsLostWhenTheServerLimitsRequests(t *testing.T) {
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{Rate: 20}, t.TempDir(), t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	kv := newKV(t, own, consul.KVConfig{KeyPrefix: "a/"})
	s := reconcile(t, kv)
	c := client(t, own, 0)
	stop := load(t, "a/", c, c)
	limited := false
	for range 200 {
		if _, err := kv.Get(t.Context(), kv.Key("a/x")); err != nil && !engine.IsNotFound(err) {
			require.ErrorContains(t, err, "rate limit")
			limited = true
			break
		}
	}
	require.True(t, limited)
	time.Sleep(3 * time.Second) // the load is what takes time
	requireSeen(t, s, stop())
}

func TestTLSAndSocket(t *testing.T) {
	cert, key := tlstest.Certificate(t)
	dir, err := os.MkdirTemp("", "c") //nolint:usetesting // a socket's path may not be long.
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	own, err := testbed.StartConsul(t.Context(), testbed.ConsulConfig{CertFile: cert, KeyFile: key}, dir, t.Output())
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	for _, cfg := range []consul.ConnectionConfig{
		{Address: own.Secure, TLS: tlsfile.Files{CAFile: cert}}, {Address: "https://" + own.Secure, TLS: tlsfile.Files{CAFile: cert}}, {Address: "unix://" + own.Socket},
	} {
		kv, err := consul.NewKV(connect(t, cfg), consul.KVConfig{KeyPrefix: "a/"})
		require.NoError(t, err)
		s := reconcile(t, kv)
		value := strconv.FormatInt(prefixes.Add(1), 10)
		_, err = kv.Apply(t.Context(), engine.Object{Key: kv.Key("x"), Value: []byte(value)}, engine.Write{})
		require.NoError(t, err)
		eventually(t, cfg.Address, func() bool { v, _ := s.of("a/x"); return v == value })
	}
	_, err = consul.Connect(t.Context(), consul.ConnectionConfig{Address: "https://" + own.Secure})
	require.ErrorContains(t, err, "certificate")
}

func TestASetOfKeysIsWrittenInTransactions(t *testing.T) {
	source := newKV(t, shared, consul.KVConfig{})
	target := newKV(t, shared, consul.KVConfig{Name: "target", KeyPrefix: fmt.Sprintf("set%d/", prefixes.Add(1)), TracePrefix: "traces/"})
	large := []byte(strings.Repeat("x", 100<<10))
	handle := func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		rt.SetTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		var effects []engine.Effect
		for n := range 100 {
			effects = append(effects, engine.Effect{Object: engine.Object{Key: target.Key(fmt.Sprintf("small%d", n)), Value: []byte("x")}})
		}
		for n := range 20 {
			effects = append(effects, engine.Effect{Object: engine.Object{Key: target.Key(fmt.Sprintf("large%d", n)), Value: large}})
		}
		_, err := rt.Get(ctx, req.Key)
		for i := range effects {
			if engine.IsNotFound(err) {
				effects[i].Verb = engine.DeleteObject
			}
		}
		return engine.Result{}, rt.Do(ctx, effects...)
	}
	runEngine(t, engine.Config{Controllers: []engine.Controller{engine.NewController("set").For(source).Owns(target).WithHandler(handle)}})
	c := client(t, shared, 0)
	put(t, c, source.Key("x").Name, "1")
	count := func() int {
		objects, err := target.List(t.Context())
		require.NoError(t, err)
		return len(objects)
	}
	eventually(t, "written", func() bool { return count() == 120 })
	pairs, _, err := c.KV().List(target.Key("").Name, nil)
	require.NoError(t, err)
	steps := make(map[uint64]int)
	for _, p := range pairs {
		steps[p.ModifyIndex]++
	}
	// 100 of two operations are 3 steps and a part; of the large ones, 3 are one step.
	require.LessOrEqual(t, len(steps), 3+1+7)
	traces, _, err := c.KV().List("traces/"+target.Key("").Name, nil)
	require.NoError(t, err)
	require.Len(t, traces, 120)
	_, err = c.KV().Delete(source.Key("x").Name, nil)
	require.NoError(t, err)
	eventually(t, "deleted", func() bool { return count() == 0 })
}
