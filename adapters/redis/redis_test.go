package redis_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/adapters/redis"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/internal/link"
)

func TestMain(m *testing.M) {
	redis.LogTo(logger())
	goleak.VerifyTestMain(m)
}

func logger() *slog.Logger {
	level := slog.LevelError
	if os.Getenv("WINDLASS_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 30*time.Second, 5*time.Millisecond, what)
}

// program returns the path of a program, and skips the test where it is not installed. Where everything must run it fails.
func program(t *testing.T, name string) string {
	t.Helper()
	if other := os.Getenv("REDIS_SERVER"); other != "" && name == "redis-server" {
		name = other // Valkey, say
	}
	path, err := exec.LookPath(name)
	if err != nil && os.Getenv("CI") == "" {
		t.Skipf("%s is not installed (Debian: apt-get install redis-server)", name)
	}
	require.NoError(t, err)
	return path
}

// server is a process of redis-server with its directory and port, which it keeps when it is restarted.
type server struct {
	t       *testing.T
	path    string
	args    []string
	dir     string
	address string
	cmd     *exec.Cmd
}

// newServer starts one that is stopped at the end.
func newServer(t *testing.T, args ...string) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &server{t: t, path: program(t, "redis-server"), args: args, dir: t.TempDir(), address: l.Addr().String()}
	require.NoError(t, l.Close())
	s.start()
	t.Cleanup(s.kill)
	return s
}

func (s *server) start() {
	s.t.Helper()
	_, port, err := net.SplitHostPort(s.address)
	require.NoError(s.t, err)
	args := append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", s.dir, "--save", "", "--appendonly", "yes", "--appendfsync", "always"}, s.args...)
	s.cmd = exec.Command(s.path, args...)
	require.NoError(s.t, s.cmd.Start())
	s.await()
}

func (s *server) await() {
	s.t.Helper()
	eventually(s.t, "Redis answers", func() bool {
		c, err := net.Dial("tcp", s.address)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// client returns a plain client that is closed at the end.
func (s *server) client(t *testing.T) *goredis.Client {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Addr: s.address})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// newSentinel starts a Sentinel that watches a server alone.
func newSentinel(t *testing.T, host, port string) *server {
	t.Helper()
	config := filepath.Join(t.TempDir(), "sentinel.conf")
	require.NoError(t, os.WriteFile(config, []byte(fmt.Sprintf(
		"sentinel monitor mymaster %s %s 1\nsentinel down-after-milliseconds mymaster 1000\nsentinel failover-timeout mymaster 5000\n", host, port)), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &server{t: t, path: program(t, "redis-server"), address: l.Addr().String()}
	require.NoError(t, l.Close())
	_, at, err := net.SplitHostPort(s.address)
	require.NoError(t, err)
	s.cmd = exec.Command(s.path, config, "--sentinel", "--port", at, "--bind", "127.0.0.1")
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.kill)
	s.await()
	return s
}

// bed is a server with a connection of ours and a plain client.
type bed struct {
	*server

	conn   *redis.Connection
	client goredis.UniversalClient
}

func newBed(t *testing.T, args ...string) *bed {
	t.Helper()
	b := &bed{server: newServer(t, args...)}
	b.conn = b.connect()
	b.client = b.server.client(t)
	return b
}

// connect returns a connection that is closed at the end.
func (b *bed) connect() *redis.Connection {
	b.t.Helper()
	conn, err := redis.Connect(b.t.Context(), redis.ConnectionConfig{Address: b.address, Scope: "main", Logger: logger()})
	require.NoError(b.t, err)
	b.t.Cleanup(conn.Close)
	return conn
}

func (b *bed) bus(name string) *redis.Bus {
	b.t.Helper()
	bus, err := redis.NewBus(b.t.Context(), b.conn, redis.BusConfig{Engine: name, Partitions: 2})
	require.NoError(b.t, err)
	b.t.Cleanup(func() { bus.Close(context.Background()) })
	return bus
}

func TestStore(t *testing.T) {
	b := newBed(t)
	n := 0
	enginetest.TestStore(t, func(*testing.T) kv.Store {
		n++
		return redis.NewStore(b.conn, fmt.Sprint("store", n))
	})
}

func TestLease(t *testing.T) {
	b := newBed(t)
	n := 0
	enginetest.TestLease(t, time.Second, func(*testing.T) lease.Store {
		n++
		return b.bus(fmt.Sprint("leases", n)).Leases()
	})
}

func TestBusKeepsThePromises(t *testing.T) {
	b := newBed(t)
	n := 0
	enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
		n++
		name := "suite" + strconv.Itoa(n)
		bus := b.bus(name)
		return enginetest.BusFixture{Bus: bus, Reopen: func(*testing.T) engine.Bus {
			bus.Close(t.Context())
			b.kill()
			b.start()
			return b.bus(name)
		}, Migrate: func(t *testing.T, controller string) engine.Bus {
			t.Helper()
			bus.Close(t.Context())
			bus, err := redis.NewBus(t.Context(), b.conn, redis.BusConfig{Engine: name, Partitions: 5})
			require.NoError(t, err)
			t.Cleanup(func() { bus.Close(context.Background()) })
			_, err = bus.Queue(t.Context(), engine.QueueConfig{Controller: controller})
			require.ErrorContains(t, err, "was made for 2 partitions, and the configuration says 5")
			moved, err := bus.Migrate(t.Context(), controller)
			require.NoError(t, err)
			require.Positive(t, moved)
			moved, err = bus.Migrate(t.Context(), controller)
			require.NoError(t, err)
			require.Zero(t, moved)
			return bus
		}}
	})
}

func TestReplicas(t *testing.T) {
	enginetest.TestReplicas(t, func(t *testing.T) enginetest.ReplicasFixture {
		s := newServer(t)
		return enginetest.ReplicasFixture{
			TTL: 4 * time.Second, Restart: func(*testing.T) { s.kill(); s.start() },
			Open: func(t *testing.T) enginetest.ReplicaFixture {
				l, err := link.New(context.Background(), s.address)
				require.NoError(t, err)
				conn, err := redis.Connect(t.Context(), redis.ConnectionConfig{Address: l.Address(), Logger: logger()})
				require.NoError(t, err)
				bus, err := redis.NewBus(t.Context(), conn, redis.BusConfig{Engine: "suite"})
				require.NoError(t, err)
				return enginetest.ReplicaFixture{Bus: bus, Sever: l.Sever, Close: func() {
					bus.Close(context.Background())
					conn.Close()
					l.Close()
				}}
			},
		}
	})
}

// TestEventsPassWatermillsOwnSuite runs the suite that Watermill has for Pub/Subs on the events half.
func TestEventsPassWatermillsOwnSuite(t *testing.T) {
	log.SetOutput(io.Discard) // the suite tells every step
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	bus := newBed(t).bus("suite")
	of := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		s := bus.Subscriber(group)
		t.Cleanup(func() { _ = s.Close() }) // the suite leaves some open
		return bus.Publisher(), s
	}
	tests.TestPubSub(t, tests.Features{
		ConsumerGroups: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true,
	}, func(t *testing.T) (message.Publisher, message.Subscriber) { return of(t, "suite") }, of)
}
