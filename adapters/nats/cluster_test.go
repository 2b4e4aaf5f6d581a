package nats_test

import (
	"context"
	"fmt"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/testbed"
)

// cluster starts three servers.
func cluster(t *testing.T) (address string) {
	t.Helper()
	routes, err := testbed.FreeAddresses(t.Context(), 3)
	require.NoError(t, err)
	var all []*url.URL
	for _, r := range routes {
		all = append(all, &url.URL{Scheme: "nats", Host: r})
	}
	for i, r := range all {
		var port int
		_, err := fmt.Sscanf(r.Port(), "%d", &port)
		require.NoError(t, err)
		s, err := natsserver.NewServer(&natsserver.Options{
			ServerName: fmt.Sprint("s", i), Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, Routes: all,
			Cluster: natsserver.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: port},
		})
		require.NoError(t, err)
		s.Start()
		t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
		require.True(t, s.ReadyForConnections(20*time.Second))
		address = s.ClientURL()
	}
	nc, err := natsgo.Connect(address)
	require.NoError(t, err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	require.NoError(t, err)
	eventually(t, "they agree on a leader", func() bool { _, err := js.AccountInfo(t.Context()); return err == nil })
	return address
}

// Any server of a stream answers direct reads, also one that has just come back and knows only what was: a run would see the former value of its
// key, and nobody would look again.
func TestReplicatedBucketIsReadAtItsLeader(t *testing.T) {
	address := cluster(t)
	nc, err := natsgo.Connect(address)
	require.NoError(t, err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	require.NoError(t, err)
	for replicas, direct := range map[int]bool{1: true, 3: false} {
		bucket := fmt.Sprint("orders", replicas)
		eventually(t, "a cluster", func() bool {
			_, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: bucket, Replicas: replicas})
			return err == nil
		})
		var directly, atLeader atomic.Int64
		_, err := nc.Subscribe("$JS.API.DIRECT.GET.KV_"+bucket+".>", func(*natsgo.Msg) { directly.Add(1) })
		require.NoError(t, err)
		_, err = nc.Subscribe("$JS.API.STREAM.MSG.GET.KV_"+bucket, func(*natsgo.Msg) { atLeader.Add(1) })
		require.NoError(t, err)
		require.NoError(t, nc.Flush())
		conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: address})
		require.NoError(t, err)
		defer conn.Close()
		b, err := nats.NewBucket(t.Context(), conn, nats.BucketConfig{Bucket: bucket})
		require.NoError(t, err)
		kv, err := js.KeyValue(t.Context(), bucket)
		require.NoError(t, err)
		_, err = kv.PutString(t.Context(), "k", "v")
		require.NoError(t, err)
		o, err := b.Get(t.Context(), b.Key("k"))
		require.NoError(t, err)
		require.Equal(t, "v", string(o.Value.([]byte)))
		if direct {
			eventually(t, "read directly", func() bool { return directly.Load() == 1 && atLeader.Load() == 0 })
		} else {
			eventually(t, "read at the leader", func() bool { return directly.Load() == 0 && atLeader.Load() == 1 })
		}
	}
}

func TestEverythingOfTheBusIsReplicated(t *testing.T) {
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: cluster(t)})
	require.NoError(t, err)
	defer conn.Close()
	_, err = nats.OpenStore(t.Context(), conn, "windlass_shop") // as it was made before
	require.NoError(t, err)
	bus, err := nats.NewBus(t.Context(), conn, nats.BusConfig{Engine: "shop", Replicas: 3})
	require.NoError(t, err)
	defer bus.Close(context.WithoutCancel(t.Context()))
	_, err = bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	js, err := jetstream.New(conn.Conn())
	require.NoError(t, err)
	streams := js.ListStreams(t.Context())
	n := 0
	for s := range streams.Info() {
		require.Equal(t, 3, s.Config.Replicas, s.Config.Name)
		n++
	}
	require.NoError(t, streams.Err())
	require.Equal(t, 6, n, "requests, states, coordination, events, dead letters, the store")
}
