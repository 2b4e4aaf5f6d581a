package nats_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is an embedded server with a connection, and a client that is not ours.
type bed struct {
	t      *testing.T
	dir    string
	sync   string
	server *nats.Server
	conn   *nats.Connection
	client jetstream.JetStream
	stop   func()
}

func logger() *slog.Logger {
	level := slog.LevelError
	if os.Getenv("WINDLASS_TEST_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

func newBed(t *testing.T) *bed {
	t.Helper()
	return newBedThat(t, "interval")
}

// newBedThat syncs its disk as is said.
func newBedThat(t *testing.T, sync string) *bed {
	t.Helper()
	b := &bed{t: t, dir: t.TempDir(), sync: sync}
	b.start()
	t.Cleanup(func() { b.stop() })
	return b
}

func (b *bed) start() {
	b.t.Helper()
	var err error
	b.server, err = nats.StartServer(nats.ServerConfig{DataDir: b.dir, Listen: "127.0.0.1:0", Sync: b.sync, Logger: logger()})
	require.NoError(b.t, err)
	b.conn, err = b.server.Connect(b.t.Context(), "")
	require.NoError(b.t, err)
	nc, err := natsgo.Connect(b.server.URL())
	require.NoError(b.t, err)
	b.client, err = jetstream.New(nc)
	require.NoError(b.t, err)
	b.stop = func() {
		nc.Close()
		b.conn.Close()
		b.server.Shutdown()
	}
}

func (b *bed) bus(name string) *nats.Bus {
	b.t.Helper()
	bus, err := nats.NewBus(b.t.Context(), b.conn, nats.BusConfig{Engine: name, Partitions: 2, GroupCommit: b.sync == "always"})
	require.NoError(b.t, err)
	return bus
}

func (b *bed) bucket(name string) *nats.Bucket {
	b.t.Helper()
	bucket, err := nats.NewBucket(b.t.Context(), b.conn, nats.BucketConfig{Bucket: name, Create: true})
	require.NoError(b.t, err)
	return bucket
}

func (b *bed) kv(name string) jetstream.KeyValue {
	b.t.Helper()
	kv, err := b.client.KeyValue(b.t.Context(), name)
	require.NoError(b.t, err)
	return kv
}

// run runs an engine until the returned function is called.
func run(t *testing.T, cfg engine.Config) (*engine.Engine, func()) {
	t.Helper()
	cfg.Logger = logger()
	e, err := engine.New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	return e, func() {
		cancel()
		require.NoError(t, <-done)
	}
}

// copying makes shipments say what orders say.
func copying(orders, shipments *nats.Bucket) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		target := shipments.Key(req.Key.Name)
		o, err := rt.Get(ctx, req.Key)
		if engine.IsNotFound(err) {
			return engine.Result{}, rt.Delete(ctx, target)
		}
		if err != nil {
			return engine.Result{}, err
		}
		return engine.Result{}, rt.Apply(ctx, engine.Object{Key: target, Value: append([]byte("shipped "), o.Value.([]byte)...)})
	}
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 30*time.Second, 5*time.Millisecond, what)
}

func value(kv jetstream.KeyValue, key string) string {
	e, err := kv.Get(context.Background(), key)
	if err != nil {
		return ""
	}
	return string(e.Value())
}

// TestWhatWasDoneByHandWhileDownIsPutRight changes and deletes targets whose owners are delayed for long: a restart
// alone would not disturb those.
func TestWhatWasDoneByHandWhileDownIsPutRight(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	start := func() func() {
		orders, shipments := b.bucket("orders"), b.bucket("shipments")
		handler := copying(orders, shipments)
		c := engine.NewController("shipping").For(orders).Owns(shipments).WithHandler(
			func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
				_, err := handler(ctx, rt, req)
				return engine.Result{RequeueAfter: time.Hour}, err
			})
		e, stop := run(t, engine.Config{Name: "shop", Controllers: []engine.Controller{c}, Bus: bus})
		eventually(t, "the first lists", func() bool {
			s := e.Sources()
			return s[0].Synced && s[1].Synced
		})
		return stop
	}
	stop := start()
	in, out := b.kv("orders"), b.kv("shipments")
	for _, k := range []string{"changed", "deleted"} {
		_, err := in.PutString(t.Context(), k, "1")
		require.NoError(t, err)
		eventually(t, k, func() bool { return value(out, k) == "shipped 1" })
	}
	stop()
	_, err := out.PutString(t.Context(), "changed", "by hand")
	require.NoError(t, err)
	require.NoError(t, out.Delete(t.Context(), "deleted"))
	defer start()()
	for _, k := range []string{"changed", "deleted"} {
		eventually(t, k, func() bool { return value(out, k) == "shipped 1" })
	}
}

func TestBucketsAreKeptInStep(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	orders, shipments := b.bucket("orders"), b.bucket("shipments")
	in, out := b.kv("orders"), b.kv("shipments")
	_, err := in.PutString(t.Context(), "before", "1")
	require.NoError(t, err)
	_, err = out.PutString(t.Context(), "taken", "by hand")
	require.NoError(t, err)

	c := engine.NewController("shipping").For(orders).Owns(shipments).WithHandler(copying(orders, shipments))
	_, stop := run(t, engine.Config{Name: "shop", Controllers: []engine.Controller{c}, Bus: bus})
	eventually(t, "what was there before is caught up", func() bool { return value(out, "before") == "shipped 1" })

	start := time.Now()
	_, err = in.PutString(t.Context(), "a", "2")
	require.NoError(t, err)
	eventually(t, "a put", func() bool { return value(out, "a") == "shipped 2" })
	t.Log("a put took", time.Since(start))
	_, err = in.PutString(t.Context(), "a", "3")
	require.NoError(t, err)
	eventually(t, "an update", func() bool { return value(out, "a") == "shipped 3" })
	_, err = out.PutString(t.Context(), "a", "changed by hand")
	require.NoError(t, err)
	eventually(t, "a change by hand is put right", func() bool { return value(out, "a") == "shipped 3" })
	require.NoError(t, out.Delete(t.Context(), "a"))
	eventually(t, "a deletion by hand is put right", func() bool { return value(out, "a") == "shipped 3" })
	require.NoError(t, in.Delete(t.Context(), "a"))
	eventually(t, "a delete", func() bool { return value(out, "a") == "" })
	_, err = in.PutString(t.Context(), "b", "4")
	require.NoError(t, err)
	eventually(t, "another put", func() bool { return value(out, "b") == "shipped 4" })
	require.NoError(t, in.Purge(t.Context(), "b"))
	eventually(t, "a purge", func() bool { return value(out, "b") == "" })

	_, err = in.PutString(t.Context(), "taken", "5")
	require.NoError(t, err)
	_, err = in.PutString(t.Context(), "last", "6")
	require.NoError(t, err)
	eventually(t, "others go on", func() bool { return value(out, "last") == "shipped 6" })
	require.Equal(t, "by hand", value(out, "taken"), "an unowned object is not touched")
	stop()

	// While the engine is down.
	require.NoError(t, in.Purge(t.Context(), "last"))
	_, err = in.PutString(t.Context(), "before", "7")
	require.NoError(t, err)
	orders, shipments = b.bucket("orders"), b.bucket("shipments")
	c = engine.NewController("shipping").For(orders).Owns(shipments).WithHandler(copying(orders, shipments))
	_, stop = run(t, engine.Config{Name: "shop", Controllers: []engine.Controller{c}, Bus: bus})
	defer stop()
	eventually(t, "a change missed", func() bool { return value(out, "before") == "shipped 7" })
	eventually(t, "a deletion missed", func() bool { return value(out, "last") == "" })
}

func TestBucketIsASource(t *testing.T) {
	b, n := newBed(t), 0
	enginetest.TestSource(t, func(t *testing.T) enginetest.SourceFixture {
		n++
		name, version := fmt.Sprint("suite-", n), 0
		source := b.bucket(name)
		return enginetest.SourceFixture{
			Source: source, Key: source.Key,
			Put: func(t *testing.T, key string) {
				version++
				_, err := b.kv(name).PutString(t.Context(), key, strconv.Itoa(version))
				require.NoError(t, err)
			},
			Delete: func(t *testing.T, key string) { require.NoError(t, b.kv(name).Delete(t.Context(), key)) },
		}
	})
}

func TestBucketIsASink(t *testing.T) {
	b, n := newBed(t), 0
	enginetest.TestSink(t, func(*testing.T) enginetest.SinkFixture {
		n++
		sink := b.bucket(fmt.Sprint("sink-", n))
		return enginetest.SinkFixture{Sink: sink, Object: func(name string, version int) engine.Object {
			return engine.Object{Key: sink.Key(name), Value: []byte(strconv.Itoa(version))}
		}}
	})
}
