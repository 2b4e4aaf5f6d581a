package redis_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/redis"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/internal/link"
	"github.com/windlass-dev/windlass/internal/tlsfile"
	"github.com/windlass-dev/windlass/internal/tlsfile/tlstest"
)

var kind = engine.KindOf("redistest")

func key(name string) engine.Key { return engine.Key{Kind: kind, Namespace: "ns", Name: name} }

// working runs a queue with one handler until the end of the test.
func working(t *testing.T, bus *redis.Bus, cfg engine.QueueConfig, handle func(context.Context, engine.Request) engine.Outcome) engine.Queue {
	t.Helper()
	cfg.Engine, cfg.Controller, cfg.Workers = "shop", "c", 2
	q, err := bus.Queue(t.Context(), cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- q.Run(ctx, ctx, func() engine.Process { return handle }) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return q
}

// counting is a handler that counts.
func counting(n *atomic.Int64) func(context.Context, engine.Request) engine.Outcome {
	return func(context.Context, engine.Request) engine.Outcome {
		n.Add(1)
		return engine.Outcome{}
	}
}

func live(name string) engine.Request { return engine.Request{Controller: "c", Key: key(name)} }

func TestConfigsSayWhatIsWrong(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	for want, cfg := range map[string]redis.ConnectionConfig{
		"address: it is required":                      {},
		`address: "nonsense" is not a host and a port`: {Address: "nonsense"},
		`"…@h:1"`:                        {Address: "user:secret@h:1"},
		"choose one":                     {Address: "h:1", Master: "m", Cluster: true},
		"database: -1":                   {Address: "h:1", Database: -1},
		"a Cluster has only 0":           {Address: "h:1,h:2", Database: 1},
		"certFile and keyFile":           {Address: "h:1", TLS: tlsfile.Files{CertFile: "a"}},
		"passwordFile: stat":             {Address: "h:1", PasswordFile: none},
		"tls.caFile: open":               {Address: "h:1", TLS: tlsfile.Files{CAFile: none}},
		"no server answers there; check": {Address: "127.0.0.1:1"},
	} {
		_, err := redis.Connect(t.Context(), cfg)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "secret")
	}
	err := redis.BusConfig{Partitions: 99, Events: "maybe"}.Validate()
	require.ErrorContains(t, err, "partitions: 99")
	require.ErrorContains(t, err, `events: "maybe"`)
}

func TestServerThatMayDropRequestsIsRefused(t *testing.T) {
	s := newServer(t, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
	_, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: s.address})
	require.ErrorContains(t, err, "maxmemory-policy is allkeys-lru")
}

// permissions are all that a user of the bus needs.
const permissions = "on >open-sesame ~windlass:* &windlass:* -@all +@read +@write +@hash +@sortedset +@stream +@scripting +@pubsub +@transaction +@connection +info +time -@dangerous +info"

func TestUserWithPasswordAndFewRights(t *testing.T) {
	b := newBed(t)
	rules := []any{"ACL", "SETUSER", "windlass"}
	for rule := range strings.FieldsSeq(permissions) {
		rules = append(rules, rule)
	}
	require.NoError(t, b.client.Do(t.Context(), rules...).Err())
	require.NoError(t, b.client.Do(t.Context(), "ACL", "SETUSER", "default", "off").Err())
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("wrong\n"), 0o600))
	cfg := redis.ConnectionConfig{Address: b.address, Username: "windlass", PasswordFile: password, Scope: "main"}
	_, err := redis.Connect(t.Context(), cfg)
	require.ErrorContains(t, err, "the server refuses the credentials")
	require.NoError(t, os.WriteFile(password, []byte("open-sesame\n"), 0o600))
	conn, err := redis.Connect(t.Context(), cfg)
	require.NoError(t, err)
	defer conn.Close()
	require.Equal(t, "main", conn.Scope())
	n := 0
	enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
		n++
		bus, err := redis.NewBus(t.Context(), conn, redis.BusConfig{Engine: fmt.Sprint("acl", n)})
		require.NoError(t, err)
		t.Cleanup(func() { bus.Close(context.Background()) })
		return enginetest.BusFixture{Bus: bus}
	})
}

func TestTLS(t *testing.T) {
	certFile, keyFile := tlstest.Certificate(t)
	s := newServer(t, "--tls-port", "0")
	s.kill()
	_, port, err := net.SplitHostPort(s.address)
	require.NoError(t, err)
	s.args = []string{
		"--port", "0", "--tls-port", port, "--tls-cert-file", certFile, "--tls-key-file", keyFile, "--tls-ca-cert-file", certFile, "--tls-auth-clients", "yes",
	}
	s.start()
	good := tlsfile.Files{CAFile: certFile, CertFile: certFile, KeyFile: keyFile}
	conn, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: s.address, TLS: good})
	require.NoError(t, err)
	conn.Close()
	other, _ := tlstest.Certificate(t)
	_, err = redis.Connect(t.Context(), redis.ConnectionConfig{Address: s.address, TLS: tlsfile.Files{CAFile: other, CertFile: certFile, KeyFile: keyFile}})
	var unknown *tls.CertificateVerificationError
	require.ErrorAs(t, err, &unknown)
	require.ErrorContains(t, err, "check address, tls and the credentials")
}

func TestAnotherNumberOfPartitionsIsRefused(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	_, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c"})
	require.NoError(t, err)
	other, err := redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: "shop", Partitions: 3})
	require.NoError(t, err)
	defer other.Close(t.Context())
	_, err = other.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c"})
	require.ErrorContains(t, err, "was made for 2 partitions, and the configuration says 3")
}

func TestAPendingKeyIsOneEntry(t *testing.T) {
	b := newBed(t)
	q, err := b.bus("shop").Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c"})
	require.NoError(t, err)
	for range 10 {
		require.NoError(t, q.Enqueue(t.Context(), live("k")))
	}
	waiting := int64(0)
	for p := range 2 {
		waiting += b.client.ZCard(t.Context(), fmt.Sprintf("windlass:{shop:c:%d}:h", p)).Val()
	}
	require.EqualValues(t, 1, waiting)
}

func TestMalformedIsSetAsideAndTold(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	// A record and a request of partition 0 that nobody can read.
	require.NoError(t, b.client.HSet(t.Context(), "windlass:{shop:c:0}:states", "x", "garbage").Err())
	require.NoError(t, b.client.ZAdd(t.Context(), "windlass:{shop:c:0}:h", goredis.Z{Score: 1, Member: "y"}).Err())
	require.NoError(t, b.client.HSet(t.Context(), "windlass:{shop:c:0}:requests", "hy", `{"id":"1"}`).Err())
	var told atomic.Int64
	working(t, bus, engine.QueueConfig{Malformed: func(string, error) { told.Add(1) }}, counting(&atomic.Int64{}))
	eventually(t, "both are told, kept apart and gone", func() bool {
		return told.Load() == 2 && b.client.XLen(t.Context(), "windlass:{shop}:dead").Val() == 2 &&
			b.client.Exists(t.Context(), "windlass:{shop:c:0}:states", "windlass:{shop:c:0}:h", "windlass:{shop:c:0}:requests").Val() == 0
	})
}

func TestNothingIsLeftOfWhatIsDone(t *testing.T) {
	b := newBed(t)
	var runs atomic.Int64
	q := working(t, b.bus("shop"), engine.QueueConfig{}, func(_ context.Context, req engine.Request) engine.Outcome {
		runs.Add(1)
		if req.Attempt == 0 {
			return engine.Outcome{Err: engine.RetryAfter(errors.New("once"), time.Millisecond)}
		}
		return engine.Outcome{}
	})
	for i := range 50 {
		require.NoError(t, q.Enqueue(t.Context(), live(fmt.Sprint(i))))
	}
	eventually(t, "all ran and nothing waits", func() bool {
		left := int64(0)
		for p := range 2 {
			for _, what := range []string{"h", "requests", "states"} {
				left += b.client.Exists(t.Context(), fmt.Sprintf("windlass:{shop:c:%d}:%s", p, what)).Val()
			}
		}
		return runs.Load() >= 100 && left == 0
	})
}

func TestServerThatHasForgottenTheScriptsIsTold(t *testing.T) {
	b := newBed(t)
	var runs atomic.Int64
	q := working(t, b.bus("shop"), engine.QueueConfig{}, counting(&runs))
	for i := range 5 {
		require.NoError(t, b.client.ScriptFlush(t.Context()).Err())
		require.NoError(t, q.Enqueue(t.Context(), live(fmt.Sprint(i))))
		eventually(t, "it runs", func() bool { return runs.Load() >= int64(i+1) })
	}
}

// What a failover may do: what was acknowledged last is gone, claims included.
func TestClaimsThatRedisHasLostAreMadeAnew(t *testing.T) {
	b := newBed(t)
	var runs atomic.Int64
	var fence atomic.Uint64
	bus := b.bus("shop")
	q := working(t, bus, engine.QueueConfig{}, func(_ context.Context, req engine.Request) engine.Outcome {
		runs.Add(1)
		fence.Store(req.Fence)
		return engine.Outcome{}
	})
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	eventually(t, "it runs", func() bool { return runs.Load() == 1 })
	before := fence.Load()
	require.NoError(t, b.client.FlushAll(t.Context()).Err())
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	eventually(t, "it runs again", func() bool { return runs.Load() == 2 })
	require.Greater(t, fence.Load(), before, "a fence never goes back")
	require.NoError(t, bus.Status())
}

func TestStatusTellsOfAnOutage(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	require.NoError(t, bus.Status())
	b.kill()
	eventually(t, "it is told", func() bool { return bus.Status() != nil })
	require.ErrorContains(t, bus.Status(), b.address+" cannot be reached")
	eventually(t, "the trust ends", func() bool { return !bus.Trusted() })
	b.start()
	eventually(t, "and comes back", func() bool { return bus.Status() == nil && bus.Trusted() })
}

func TestEventsCanBeOff(t *testing.T) {
	b := newBed(t)
	bus, err := redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: "shop", Events: "off"})
	require.NoError(t, err)
	defer bus.Close(t.Context())
	require.Nil(t, bus.Publisher())
	_, err = bus.Subscriber("").Subscribe(t.Context(), "x")
	require.ErrorContains(t, err, "events are off")
}

func TestClusterKeepsThePromises(t *testing.T) {
	const nodes = 3
	var addresses []string
	var clients []*goredis.Client
	for i := range nodes {
		s := newServer(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
		c := s.client(t)
		addresses, clients = append(addresses, s.address), append(clients, c)
		require.NoError(t, c.ClusterAddSlotsRange(t.Context(), i*16384/nodes, (i+1)*16384/nodes-1).Err())
		host, port, err := net.SplitHostPort(addresses[0])
		require.NoError(t, err)
		require.NoError(t, c.ClusterMeet(t.Context(), host, port).Err())
	}
	for _, c := range clients {
		eventually(t, "the cluster is whole", func() bool {
			info, err := c.ClusterInfo(t.Context()).Result()
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		})
	}
	t.Run("bus", func(t *testing.T) {
		conn, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: strings.Join(addresses, ",")})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		n := 0
		enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
			n++
			bus, err := redis.NewBus(t.Context(), conn, redis.BusConfig{Engine: fmt.Sprint("cluster", n)})
			require.NoError(t, err)
			t.Cleanup(func() { bus.Close(context.Background()) })
			return enginetest.BusFixture{Bus: bus}
		})
	})
}

func TestSentinelReplacesTheServer(t *testing.T) {
	first := newBed(t)
	second := newServer(t)
	host, port, err := net.SplitHostPort(first.address)
	require.NoError(t, err)
	follower := second.client(t)
	require.NoError(t, follower.Do(t.Context(), "REPLICAOF", host, port).Err())
	watch := newSentinel(t, host, port)
	conn, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: watch.address, Master: "mymaster", Logger: logger()})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	bus, err := redis.NewBus(t.Context(), conn, redis.BusConfig{Engine: "shop", Partitions: 2})
	require.NoError(t, err)
	t.Cleanup(func() { bus.Close(context.Background()) })
	var runs atomic.Int64
	q := working(t, bus, engine.QueueConfig{}, counting(&runs))
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	eventually(t, "it runs", func() bool { return runs.Load() == 1 })
	eventually(t, "Sentinel knows the follower, and the follower all", func() bool {
		info := follower.Info(t.Context(), "replication").Val()
		known := watch.client(t).Do(t.Context(), "SENTINEL", "REPLICAS", "mymaster")
		list, _ := known.Slice()
		return strings.Contains(info, "master_link_status:up") && len(list) == 1
	})
	first.kill()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		return q.Enqueue(ctx, live("k")) == nil
	}, time.Minute, 100*time.Millisecond, "the new server accepts requests")
	eventually(t, "it runs again", func() bool { return runs.Load() >= 2 })
}

func TestOnlyReplicaGoesOnDuringAnOutageIfItIsTold(t *testing.T) {
	b := newBed(t)
	bus, err := redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: "shop", Outage: "continue"})
	require.NoError(t, err)
	t.Cleanup(func() { bus.Close(context.Background()) })
	for _, outage := range []string{"stop", "continue"} {
		_, err = redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: "shop", Outage: outage})
		require.ErrorContains(t, err, "there is another replica: ")
	}
	var runs atomic.Int64
	q := working(t, bus, engine.QueueConfig{}, counting(&runs))
	b.kill()
	begin := time.Now()
	eventually(t, "another replica could have taken over", func() bool { return time.Since(begin) > 5*time.Second })
	require.Error(t, bus.Status())
	listed := live("listed")
	listed.Priority = engine.PriorityList
	require.NoError(t, q.Enqueue(t.Context(), listed))
	eventually(t, "what is in hand runs", func() bool { return runs.Load() == 1 })
	b.start()
	eventually(t, "it is over", func() bool { return bus.Status() == nil })
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	eventually(t, "everything runs", func() bool { return runs.Load() == 2 })
}

func TestReplicaThatIsToBeAloneWaitsForOneThatHasDied(t *testing.T) {
	b := newBed(t)
	dead := b.connect()
	former, err := redis.NewBus(t.Context(), dead, redis.BusConfig{Engine: "shop"})
	require.NoError(t, err)
	t.Cleanup(func() { former.Close(context.Background()) })
	dead.Close() // it can tell nobody
	bus, err := redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: "shop", Outage: "continue"})
	require.NoError(t, err)
	bus.Close(t.Context())
}

func TestServerRefusesAFormerOwner(t *testing.T) {
	b := newBed(t)
	q, err := b.bus("shop").Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c"})
	require.NoError(t, err)
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	for p := range 2 {
		keys := []string{fmt.Sprintf("windlass:{shop:c:%d}:owner", p), fmt.Sprintf("windlass:{shop:c:%d}:h", p), fmt.Sprintf("windlass:{shop:c:%d}:requests", p)}
		epoch, err := b.client.HGet(t.Context(), keys[0], "epoch").Uint64()
		require.NoError(t, err)
		for script, args := range redis.OwnersScripts() {
			use := keys
			if len(args) == 2 {
				use = []string{keys[0], fmt.Sprintf("windlass:{shop:c:%d}:states", p)}
			}
			require.NoError(t, script.Run(t.Context(), b.client, use, append([]any{epoch}, args...)...).Err())
			err := script.Run(t.Context(), b.client, use, append([]any{epoch - 1}, args...)...).Err()
			require.True(t, goredis.HasErrorPrefix(err, "FENCED"), "%v", err)
		}
	}
}

func TestAckOfAReplacedRequestLeavesTheNewOne(t *testing.T) {
	b := newBed(t)
	q, err := b.bus("shop").Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c"})
	require.NoError(t, err)
	var ack *goredis.Script
	for script, args := range redis.OwnersScripts() {
		if len(args) == 3 && args[2] == "k" {
			ack = script
		}
	}
	member := key("k").String()
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	p := 0
	if b.client.ZCard(t.Context(), "windlass:{shop:c:1}:h").Val() == 1 {
		p = 1
	}
	keys := []string{fmt.Sprintf("windlass:{shop:c:%d}:owner", p), fmt.Sprintf("windlass:{shop:c:%d}:h", p), fmt.Sprintf("windlass:{shop:c:%d}:requests", p)}
	sequence := func() string { return fmt.Sprintf("%.0f", b.client.ZScore(t.Context(), keys[1], member).Val()) }
	former := sequence()
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	require.NotEqual(t, former, sequence())
	epoch := b.client.HGet(t.Context(), keys[0], "epoch").Val()
	require.NoError(t, ack.Run(t.Context(), b.client, keys, epoch, "h", former, member).Err())
	require.EqualValues(t, 1, b.client.ZCard(t.Context(), keys[1]).Val())
	require.NoError(t, ack.Run(t.Context(), b.client, keys, epoch, "h", sequence(), member).Err())
	require.Zero(t, b.client.Exists(t.Context(), keys[1], keys[2]).Val())
}

func TestOwnerThatWaitsIsWoken(t *testing.T) {
	b := newBed(t)
	var runs atomic.Int64
	q := working(t, b.bus("shop"), engine.QueueConfig{}, counting(&runs))
	n := int64(0)
	// Each waits for the one before: if nobody woke the owner, for five seconds.
	eventually(t, "thirty ran, one after the other", func() bool {
		if runs.Load() == n && n < 30 {
			n++
			require.NoError(t, q.Enqueue(t.Context(), live(fmt.Sprint(n))))
		}
		return runs.Load() == 30
	})
}

// linked is a bus behind a link that can be cut.
func linked(t *testing.T, b *bed) (*redis.Connection, *redis.Bus, *link.Link) {
	t.Helper()
	l, err := link.New(context.WithoutCancel(t.Context()), b.address)
	require.NoError(t, err)
	t.Cleanup(l.Close)
	conn, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: l.Address(), Logger: logger()})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	bus, err := redis.NewBus(t.Context(), conn, redis.BusConfig{Engine: "shop", Partitions: 2})
	require.NoError(t, err)
	t.Cleanup(func() { bus.Close(context.Background()) })
	return conn, bus, l
}

func TestRequestWhoseAckWasLostDoesNotStayForGood(t *testing.T) {
	b := newBed(t)
	_, bus, l := linked(t, b)
	var cut atomic.Bool
	q := working(t, bus, engine.QueueConfig{}, func(context.Context, engine.Request) engine.Outcome {
		if !cut.Swap(true) {
			l.Sever(true)
			time.AfterFunc(time.Second, func() { l.Sever(false) })
		}
		return engine.Outcome{}
	})
	require.NoError(t, q.Enqueue(t.Context(), live("k")))
	eventually(t, "it is removed", func() bool {
		return cut.Load() && b.client.Exists(t.Context(), "windlass:{shop:c:0}:h", "windlass:{shop:c:1}:h").Val() == 0
	})
}

func TestWatchEndsWhenSomethingMayHaveBeenMissed(t *testing.T) {
	b := newBed(t)
	conn, _, l := linked(t, b)
	changes, err := redis.NewStore(conn, "shop").Watch(t.Context(), "")
	require.NoError(t, err)
	l.Sever(true)
	l.Sever(false)
	eventually(t, "the channel is closed", func() bool {
		select {
		case _, open := <-changes:
			return !open
		default:
			return false
		}
	})
}
