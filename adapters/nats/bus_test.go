package nats_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	natsserver "github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/internal/queue"
)

func TestStore(t *testing.T) {
	b := newBed(t)
	n := 0
	enginetest.TestStore(t, func(t *testing.T) kv.Store {
		n++
		s, err := nats.OpenStore(t.Context(), b.conn, fmt.Sprintf("store-%d", n))
		require.NoError(t, err)
		return s
	})
}

func TestLease(t *testing.T) {
	b := newBed(t)
	n := 0
	enginetest.TestLease(t, 3*time.Second, func(t *testing.T) lease.Store {
		n++
		bus := b.bus(fmt.Sprintf("leases-%d", n))
		t.Cleanup(func() { bus.Close(context.Background()) })
		return bus.Leases()
	})
}

// runs is a handler's memory.
type runs struct {
	mu   sync.Mutex
	reqs []engine.Request
}

func (r *runs) add(req engine.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reqs = append(r.reqs, req)
}

func (r *runs) of(name string) []engine.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []engine.Request
	for _, x := range r.reqs {
		if x.Key.Name == name {
			out = append(out, x)
		}
	}
	return out
}

func TestDelayAttemptAndParkedStateSurviveARestart(t *testing.T) {
	b := newBed(t)
	_, err := b.client.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "orders"})
	require.NoError(t, err)
	life := func() (*runs, *engine.Engine, func()) {
		bus, orders, seen := b.bus("shop"), b.bucket("orders"), &runs{}
		c := engine.NewController("c").For(orders).WithConcurrency(4).
			WithBackoff(engine.Backoff{Initial: 3 * time.Second, MaxAttempts: 9}).
			WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
				seen.add(req)
				switch {
				case req.Key.Name == "later" && req.Trigger() != engine.Requeued:
					return engine.Result{RequeueAfter: 3 * time.Second}, nil
				case req.Key.Name == "failing" && req.Attempt < 1:
					return engine.Result{}, errors.New("not yet")
				case req.Key.Name == "poison":
					return engine.Result{}, engine.Terminal(errors.New("never"))
				}
				return engine.Result{}, nil
			})
		e, stop := run(t, engine.Config{Name: "shop", Controllers: []engine.Controller{c}, Bus: bus})
		return seen, e, func() { stop(); bus.Close(t.Context()) }
	}
	seen, _, stop := life()
	start := time.Now()
	for _, name := range []string{"later", "failing", "poison"} {
		_, err := b.kv("orders").PutString(t.Context(), name, "1")
		require.NoError(t, err)
		eventually(t, name, func() bool { return len(seen.of(name)) == 1 })
	}
	// The client that asks is told at the end of the run; the record is there shortly after.
	eventually(t, "the records are stored", func() bool {
		s, err := b.client.Stream(t.Context(), "RQS_shop")
		require.NoError(t, err)
		i, err := s.Info(t.Context())
		require.NoError(t, err)
		return i.State.Msgs == 3
	})
	stop()
	b.stop()
	b.start()

	seen, e, stop := life()
	defer stop()
	eventually(t, "the requeue fires", func() bool { return len(seen.of("later")) == 1 })
	eventually(t, "the retry fires", func() bool { return len(seen.of("failing")) == 1 })
	require.Greater(t, time.Since(start), 3*time.Second, "at their time, not before")
	require.Equal(t, engine.Requeued, seen.of("later")[0].Trigger())
	retry := seen.of("failing")[0]
	require.Equal(t, engine.Retried, retry.Trigger())
	require.Equal(t, 1, retry.Attempt)
	require.Equal(t, engine.Created, retry.Causes.All()[0].Trigger, "the first cause is still known")
	require.Empty(t, seen.of("poison"), "a restart alone does not revive a parked key")
	var items []engine.Item
	eventually(t, "only the parked key is left", func() bool {
		items, err = e.Items("c")
		require.NoError(t, err)
		return len(items) == 1
	})
	require.Equal(t, queue.Parked, items[0].Phase)
	require.Equal(t, "never", items[0].Err)
	_, err = b.kv("orders").PutString(t.Context(), "poison", "2")
	require.NoError(t, err)
	eventually(t, "news of it does", func() bool { return len(seen.of("poison")) == 1 })
}

func TestRequestForLaterIsDurable(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	key := b.bucket("orders").Key("k")
	due := time.Now().Add(2 * time.Second)
	require.NoError(t, q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: key, Due: due}))
	// It is taken into the state record, and survives there.
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	require.NoError(t, q.Run(ctx, t.Context(), workers(func(context.Context, engine.Request) engine.Outcome {
		t.Error("it ran too early")
		return engine.Outcome{}
	})))
	bus.Close(t.Context())

	bus = b.bus("shop")
	defer bus.Close(t.Context())
	q, err = bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var ran time.Time
	require.NoError(t, q.Run(ctx, t.Context(), workers(func(_ context.Context, req engine.Request) engine.Outcome {
		ran = time.Now()
		require.Equal(t, key, req.Key)
		cancel()
		return engine.Outcome{}
	})))
	require.WithinDuration(t, due, ran, 2*time.Second)
	require.False(t, ran.Before(due.Add(-time.Millisecond)), "never early")
}

func TestUnfinishedRunIsRepeatedByTheNextProcess(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	key := b.bucket("orders").Key("k")
	require.NoError(t, q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: key}))
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, q.Run(ctx, t.Context(), workers(func(context.Context, engine.Request) engine.Outcome {
		cancel()
		return engine.Outcome{Err: errors.New("cut short"), Interrupted: true}
	})))
	q, err = bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	ctx, cancel = context.WithCancel(t.Context())
	n := 0
	require.NoError(t, q.Run(ctx, t.Context(), workers(func(_ context.Context, req engine.Request) engine.Outcome {
		n++
		require.Zero(t, req.Attempt, "an interruption is no failure")
		cancel()
		return engine.Outcome{}
	})))
	require.Equal(t, 1, n)
	bus.Close(t.Context())
}

// TestRecordThatIsGoneCanBeRemoved takes the record of a failing key away, as a delete whose answer was lost does.
func TestRecordThatIsGoneCanBeRemoved(t *testing.T) {
	b := newBed(t)
	for name, vanish := range map[string]func(ctx context.Context, states jetstream.Stream){
		"alone": func(ctx context.Context, states jetstream.Stream) {
			_ = states.DeleteMsg(ctx, 1) // the check below would show a failure
		},
		"before": func(ctx context.Context, states jetstream.Stream) {
			_, _ = b.client.Publish(ctx, "rqs.before.other", nil)
			_ = states.DeleteMsg(ctx, 1)
		},
		"purged": func(ctx context.Context, states jetstream.Stream) { _ = states.Purge(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			bus := b.bus(name)
			defer bus.Close(t.Context())
			q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: name, Controller: "c", Workers: 1})
			require.NoError(t, err)
			require.NoError(t, q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: b.bucket("orders").Key("k")}))
			states, err := b.client.Stream(t.Context(), "RQS_"+name)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			var runs atomic.Int32
			go func() {
				done <- q.Run(ctx, t.Context(), workers(func(ctx context.Context, _ engine.Request) engine.Outcome {
					if runs.Add(1) == 1 {
						return engine.Outcome{Err: errors.New("once")}
					}
					vanish(ctx, states)
					return engine.Outcome{}
				}))
			}()
			eventually(t, "the key is idle, without a record", func() bool {
				return runs.Load() == 2 && len(q.Items()) == 0
			})
			cancel()
			require.NoError(t, <-done)
		})
	}
}

func TestMalformedRequestIsSetAsideAndTold(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	told := make(chan string, 1)
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1, Malformed: func(topic string, _ error) { told <- topic }})
	require.NoError(t, err)
	garbage := natsgo.NewMsg("rq.shop.c.0.h.=.x.=.y")
	garbage.Data = []byte("garbage")
	for name, value := range map[string]string{"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"} {
		garbage.Header.Set(name, value) // they stay in what was published together
	}
	_, err = b.client.PublishMsg(t.Context(), garbage)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- q.Run(ctx, t.Context(), workers(func(context.Context, engine.Request) engine.Outcome { return engine.Outcome{} }))
	}()
	require.Equal(t, "rq.shop.c.0.h.=.x.=.y", <-told)
	s, err := b.client.Stream(t.Context(), "DEAD_shop")
	require.NoError(t, err)
	m, err := s.GetLastMsgForSubject(t.Context(), "dead.shop.rq.shop.c.0.h.=.x.=.y")
	require.NoError(t, err)
	require.Equal(t, "garbage", string(m.Data))
	require.Contains(t, m.Header.Get("Windlass-Error"), "malformed message")
	s, err = b.client.Stream(t.Context(), "RQ_shop_c")
	require.NoError(t, err)
	eventually(t, "it is gone from the queue", func() bool {
		i, err := s.Info(t.Context())
		return err == nil && i.State.Msgs == 0
	})
	cancel()
	require.NoError(t, <-done)
}

// What is done and not yet removed when a replica leaves would be run again by the next.
func TestNothingIsRunAgainAfterAHandover(t *testing.T) {
	for _, sync := range []string{"interval", "always"} {
		t.Run(sync, func(t *testing.T) {
			b := newBedThat(t, sync)
			const n = 300
			keys := b.bucket("orders")
			for range 5 {
				bus := b.bus("shop")
				q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 4})
				require.NoError(t, err)
				var asking errgroup.Group
				for i := range n {
					asking.Go(func() error {
						return q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: keys.Key(strconv.Itoa(i))})
					})
				}
				require.NoError(t, asking.Wait())
				ctx, leave := context.WithCancel(t.Context())
				var ran atomic.Int64
				require.NoError(t, q.Run(ctx, t.Context(), workers(func(context.Context, engine.Request) engine.Outcome {
					if ran.Add(1) == n {
						leave()
					}
					return engine.Outcome{}
				})))
				bus.Close(t.Context())
				s, err := b.client.Stream(t.Context(), "RQ_shop_c")
				require.NoError(t, err)
				i, err := s.Info(t.Context())
				require.NoError(t, err)
				require.Zero(t, i.State.Msgs, "the next owner would get it")
			}
		})
	}
}

// A fetch that had less time left than two heartbeats would be refused, and its consumer made anew.
func TestAWindowThatIsFullForLongIsNoFailure(t *testing.T) {
	t.Parallel() // it waits most of the time
	b := newBedThat(t, "always")
	bus, err := nats.NewBus(t.Context(), b.conn, nats.BusConfig{Engine: "shop", Partitions: 1, GroupCommit: true})
	require.NoError(t, err)
	defer bus.Close(context.WithoutCancel(t.Context()))
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	const n = 700 // more than a window
	keys := b.bucket("orders")
	var asking errgroup.Group
	for i := range n {
		asking.Go(func() error {
			return q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: keys.Key(strconv.Itoa(i))})
		})
	}
	require.NoError(t, asking.Wait())
	ctx, leave := context.WithCancel(t.Context())
	var ran atomic.Int64
	gate, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- q.Run(ctx, t.Context(), workers(func(context.Context, engine.Request) engine.Outcome {
			<-gate
			ran.Add(1)
			return engine.Outcome{}
		}))
	}()
	s, err := b.client.Stream(t.Context(), "RQ_shop_c")
	require.NoError(t, err)
	made := func() (first *jetstream.ConsumerInfo) {
		consumers := s.ListConsumers(t.Context())
		for i := range consumers.Info() {
			if strings.HasPrefix(i.Name, "p0-h-") {
				first = i
			}
		}
		return first
	}
	var before *jetstream.ConsumerInfo
	eventually(t, "the window is full", func() bool {
		before = made()
		return before != nil && before.NumAckPending >= 400
	})
	<-time.After(25 * time.Second)
	close(gate)
	eventually(t, "all have run", func() bool { return ran.Load() >= n })
	require.Equal(t, before.Created, made().Created, "it is the same consumer")
	require.EqualValues(t, n, ran.Load())
	leave()
	require.NoError(t, <-done)
}

func TestAPendingKeyIsOneMessage(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	for range 50 {
		require.NoError(t, q.Enqueue(t.Context(), engine.Request{Controller: "c", Key: b.bucket("orders").Key("k")}))
	}
	s, err := b.client.Stream(t.Context(), "RQ_shop_c")
	require.NoError(t, err)
	i, err := s.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, i.State.Msgs)
}

func TestAnotherNumberOfPartitionsIsRefused(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	_, err := bus.Queue(t.Context(), engine.QueueConfig{Controller: "c", Workers: 1})
	require.NoError(t, err)
	bus.Close(t.Context())
	bus, err = nats.NewBus(t.Context(), b.conn, nats.BusConfig{Engine: "shop", Partitions: 4})
	require.NoError(t, err)
	defer bus.Close(t.Context())
	_, err = bus.Queue(t.Context(), engine.QueueConfig{Controller: "c", Workers: 1})
	require.ErrorContains(t, err, "was made for 2 partitions, and the configuration says 4")
}

// A key that asks for itself is found although every request of it is a message.
func TestKeyThatCausesItselfIsSlowed(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(context.WithoutCancel(t.Context()))
	var ran, slowed atomic.Int32
	var mu sync.Mutex
	var first time.Time
	var promised, waited time.Duration
	c := engine.NewController("c").For(b.bucket("orders")).WithHandler(
		func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			ran.Add(1)
			return engine.Result{}, rt.Enqueue(ctx, req.Key, 0)
		})
	_, stop := run(t, engine.Config{Name: "shop", Bus: bus, Controllers: []engine.Controller{c}, Hooks: engine.Hooks{
		KeySlowed: func(_ string, _ engine.Key, wait time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			if slowed.Add(1) == 1 {
				first = time.Now()
			}
			if slowed.Load() <= 5 {
				waited = time.Since(first) - promised
				promised += wait
			}
		},
	}})
	defer stop()
	_, err := b.kv("orders").PutString(t.Context(), "a", "1")
	require.NoError(t, err)
	eventually(t, "it is slowed", func() bool { return slowed.Load() >= 5 })
	require.LessOrEqual(t, ran.Load(), 20+slowed.Load(), "ten rounds are free")
	mu.Lock()
	defer mu.Unlock()
	require.GreaterOrEqual(t, waited, time.Duration(0), "each round has waited as long as it was told")
}

func nop(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
	return engine.Result{}, nil
}

func TestEventsCanBeSubscribed(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	sub := bus.Subscriber("audit")
	messages, err := sub.Subscribe(t.Context(), engine.EventTopic("orders"))
	require.NoError(t, err)
	orders := b.bucket("orders")
	e, stop := run(t, engine.Config{Name: "shop", Bus: bus, Controllers: []engine.Controller{engine.NewController("c").For(orders).WithHandler(nop)}})
	eventually(t, "the first list", func() bool { return e.Sources()[0].Synced })
	_, err = b.kv("orders").PutString(t.Context(), "a", "1")
	require.NoError(t, err)
	nacked := false
	for {
		var m *message.Message
		select {
		case m = <-messages:
		case <-time.After(10 * time.Second):
			t.Fatal("no event")
		}
		e, by, err := engine.DecodeEvent(m)
		require.NoError(t, err)
		require.Equal(t, "shop", by)
		if !nacked {
			nacked = true
			m.Nack()
			continue
		}
		m.Ack()
		if e.Key == orders.Key("a") {
			break
		}
	}
	require.True(t, nacked, "the first came again after its nack")
	s, err := b.client.Stream(t.Context(), "EV_shop")
	require.NoError(t, err)
	_, err = s.GetLastMsgForSubject(t.Context(), "ev.shop.orders.=.nats=2Fkv.orders.a")
	require.NoError(t, err, "any client can filter by key")
	require.NoError(t, sub.Close())
	stop()
}

func TestEventsCanBeOff(t *testing.T) {
	b := newBed(t)
	bus, err := nats.NewBus(t.Context(), b.conn, nats.BusConfig{Engine: "shop", Events: "off"})
	require.NoError(t, err)
	defer bus.Close(t.Context())
	require.Nil(t, bus.Publisher())
	_, err = bus.Subscriber("").Subscribe(t.Context(), "x")
	require.ErrorContains(t, err, "events are off")
}

func TestDataDirectoryBelongsToOneEngine(t *testing.T) {
	b := newBed(t)
	_, err := nats.StartServer(nats.ServerConfig{DataDir: b.dir})
	require.ErrorIs(t, err, nats.ErrDataDirInUse)
	require.ErrorContains(t, err, fmt.Sprintf("held by process %d", os.Getpid()))
}

func TestConfigsSayWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	notPEM := filepath.Join(dir, "ca.pem")
	require.NoError(t, os.WriteFile(notPEM, []byte("x"), 0o600))
	for want, cfg := range map[string]nats.ConnectionConfig{
		"url: it is required":            {},
		"is not an address":              {URL: "nonsense"},
		"only one of them":               {URL: "nats://x:1", CredsFile: "a", TokenFile: "b"},
		"certFile and keyFile":           {URL: "nats://x:1", TLS: nats.TLS{CertFile: "a"}},
		"credsFile: stat":                {URL: "nats://x:1", CredsFile: filepath.Join(dir, "none")},
		"tokenFile: stat":                {URL: "nats://x:1", TokenFile: filepath.Join(dir, "none")},
		"tls.caFile: open":               {URL: "nats://x:1", TLS: nats.TLS{CAFile: filepath.Join(dir, "none")}},
		"holds no certificate":           {URL: "nats://x:1", TLS: nats.TLS{CAFile: notPEM}},
		"no server answers there; check": {URL: "nats://127.0.0.1:1"},
	} {
		_, err := nats.Connect(t.Context(), cfg)
		require.ErrorContains(t, err, want)
	}
	for want, cfg := range map[string]nats.ServerConfig{
		"sync: \"maybe\"": {Sync: "maybe"}, "syncInterval: it goes with": {SyncInterval: time.Second}, "listen: \"x\"": {Listen: "x"},
	} {
		_, err := nats.StartServer(cfg)
		require.ErrorContains(t, err, want)
	}
	require.ErrorContains(t, nats.BusConfig{Replicas: 9, Partitions: 99, Events: "maybe"}.Validate(), "events: ")
	require.ErrorContains(t, nats.BucketConfig{}.Validate(), "bucket: it is required")
	require.ErrorContains(t, nats.BucketConfig{Bucket: "a b"}.Validate(), "letters, digits")
}

func TestPasswordsAreNotShown(t *testing.T) {
	_, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: "nats://me:secret@127.0.0.1:1"})
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

// foreignServer is a user's server that wants a token.
func foreignServer(t *testing.T, opts natsserver.Options) *natsserver.Server {
	t.Helper()
	opts.JetStream, opts.StoreDir, opts.Port, opts.Host, opts.NoSigs = true, t.TempDir(), natsserver.RANDOM_PORT, "127.0.0.1", true
	s, err := natsserver.NewServer(&opts)
	require.NoError(t, err)
	s.Start()
	require.True(t, s.ReadyForConnections(10*time.Second))
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	return s
}

func TestTokenIsUsedAndAWrongOneIsExplained(t *testing.T) {
	s := foreignServer(t, natsserver.Options{Authorization: "open sesame"})
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("wrong\n"), 0o600))
	cfg := nats.ConnectionConfig{URL: s.ClientURL(), TokenFile: token, Scope: "main"}
	_, err := nats.Connect(t.Context(), cfg)
	require.ErrorContains(t, err, "the server refuses the credentials")
	require.NoError(t, os.WriteFile(token, []byte("open sesame\n"), 0o600))
	conn, err := nats.Connect(t.Context(), cfg)
	require.NoError(t, err)
	require.True(t, conn.Connected())
	require.Equal(t, "main", conn.Scope())
	bucket, err := nats.NewBucket(t.Context(), conn, nats.BucketConfig{Bucket: "b", Create: true})
	require.NoError(t, err)
	require.Equal(t, "nats/kv@main:b/k", bucket.Key("k").String())
	conn.Close()
}

func TestServerWithoutJetStreamIsExplained(t *testing.T) {
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true})
	require.NoError(t, err)
	s.Start()
	defer func() { s.Shutdown(); s.WaitForShutdown() }()
	require.True(t, s.ReadyForConnections(10*time.Second))
	_, err = nats.Connect(t.Context(), nats.ConnectionConfig{URL: s.ClientURL()})
	require.ErrorContains(t, err, "JetStream does not answer")
}

func TestMissingBucketIsExplained(t *testing.T) {
	b := newBed(t)
	_, err := nats.NewBucket(t.Context(), b.conn, nats.BucketConfig{Bucket: "none"})
	require.ErrorContains(t, err, `bucket "none" does not exist on NATS at the embedded server: create it, or set create: true`)
}

func TestOddKeysAndLargeValues(t *testing.T) {
	b := newBed(t)
	bus := b.bus("shop")
	defer bus.Close(t.Context())
	in, out := b.bucket("in"), b.bucket("out")
	seen := &runs{}
	failed := make(chan error, 100)
	c := engine.NewController("c").For(in).Owns(out).WithConcurrency(4).WithHandler(
		func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			seen.add(req)
			o, err := rt.Get(ctx, req.Key)
			if err != nil {
				return engine.Result{}, err
			}
			err = rt.Apply(ctx, engine.Object{Key: out.Key(req.Key.Name), Value: o.Value})
			if errors.Is(err, engine.ErrInvalid) {
				failed <- err
				return engine.Result{}, engine.Terminal(err)
			}
			return engine.Result{}, err
		})
	_, stop := run(t, engine.Config{Name: "shop", Bus: bus, Controllers: []engine.Controller{c}})
	defer stop()
	valid := []string{"a.b/c=d_e-f", "=", strings.Repeat("k", 1024), "A/", "_.-"}
	for _, k := range valid {
		_, err := b.kv("in").PutString(t.Context(), k, "v")
		require.NoError(t, err)
	}
	for _, k := range valid {
		eventually(t, k, func() bool { return value(b.kv("out"), k) == "v" })
	}
	big := strings.Repeat("x", 900<<10)
	_, err := b.kv("in").PutString(t.Context(), "big", big)
	require.NoError(t, err)
	eventually(t, "900 KiB", func() bool { return value(b.kv("out"), "big") == big })

	// A foreign client may put what no bucket should hold.
	for _, k := range []string{"käse", "a\xffb", "what?!"} {
		m := natsgo.NewMsg("$KV.in." + k)
		m.Data = []byte("v")
		_, err := b.client.PublishMsg(t.Context(), m)
		require.NoError(t, err)
		eventually(t, k, func() bool { return len(seen.of(k)) == 1 })
		require.ErrorContains(t, <-failed, "cannot be a key of a NATS bucket")
	}
}

func TestValueOverTheLimitIsInvalid(t *testing.T) {
	b := newBed(t)
	bucket := b.bucket("b")
	_, err := bucket.Apply(t.Context(), engine.Object{Key: bucket.Key("k"), Value: make([]byte, 2<<20)}, engine.Write{})
	require.ErrorIs(t, err, engine.ErrInvalid)
	require.ErrorContains(t, err, "too large for the server")
	_, err = bucket.Apply(t.Context(), engine.Object{Key: bucket.Key("k"), Value: 7}, engine.Write{})
	require.ErrorIs(t, err, engine.ErrInvalid)
}

func TestSinkChecksPreconditions(t *testing.T) {
	b := newBed(t)
	bucket := b.bucket("b")
	o := engine.Object{Key: bucket.Key("k"), Value: []byte("1")}
	first, err := bucket.Apply(t.Context(), o, engine.Write{Absent: true, Traceparent: "00-1", Intent: "i"})
	require.NoError(t, err)
	_, err = bucket.Apply(t.Context(), o, engine.Write{Absent: true})
	require.ErrorIs(t, err, engine.ErrConflict)
	second, err := bucket.Apply(t.Context(), o, engine.Write{Revision: first})
	require.NoError(t, err)
	_, err = bucket.Apply(t.Context(), o, engine.Write{Revision: first})
	require.ErrorIs(t, err, engine.ErrConflict)
	require.ErrorIs(t, bucket.Delete(t.Context(), o.Key, engine.Write{Revision: first}), engine.ErrConflict)
	require.NoError(t, bucket.Delete(t.Context(), o.Key, engine.Write{Revision: second}))
	require.ErrorIs(t, bucket.Delete(t.Context(), o.Key, engine.Write{}), engine.ErrNotFound)
	_, err = bucket.Apply(t.Context(), o, engine.Write{Absent: true})
	require.NoError(t, err, "a marker of a deletion is nothing")
}

// workers lets all workers call one function.
func workers(p engine.Process) func() engine.Process { return func() engine.Process { return p } }

func TestBusKeepsThePromises(t *testing.T) { keepsThePromises(t, newBed) }

// A server that syncs always gets what waits in groups.
func TestBusThatCommitsInGroupsKeepsThePromises(t *testing.T) {
	keepsThePromises(t, func(t *testing.T) *bed {
		t.Helper()
		return newBedThat(t, "always")
	})
}

func keepsThePromises(t *testing.T, newBed func(t *testing.T) *bed) {
	t.Helper()
	enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
		b := newBed(t)
		bus := b.bus("suite")
		t.Cleanup(func() { bus.Close(context.WithoutCancel(t.Context())) })
		return enginetest.BusFixture{Bus: bus, Reopen: func(t *testing.T) engine.Bus {
			bus.Close(t.Context())
			b.stop()
			b.start()
			bus = b.bus("suite")
			return bus
		}, Migrate: func(t *testing.T, controller string) engine.Bus {
			t.Helper()
			bus.Close(t.Context())
			var err error
			bus, err = nats.NewBus(t.Context(), b.conn, nats.BusConfig{Engine: "suite", Partitions: 5})
			require.NoError(t, err)
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
