package nats_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/link"
)

// newLink returns a link to a server that can be cut.
func newLink(t *testing.T, url string) *link.Link {
	t.Helper()
	l, err := link.New(context.WithoutCancel(t.Context()), strings.TrimPrefix(url, "nats://"))
	require.NoError(t, err)
	t.Cleanup(l.Close)
	return l
}

// A message that the server has sent and nobody received must not wait until the server gives up waiting for its ack: not
// after an interruption of the link that is too short for another replica to take over.
func TestDeliveryThatNobodyReceivedIsRepeatedAfterAShortCut(t *testing.T) {
	b := newBed(t)
	w := newLink(t, b.server.URL())
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: "nats://" + w.Address(), Logger: logger()})
	require.NoError(t, err)
	defer conn.Close()
	bus, err := nats.NewBus(t.Context(), conn, nats.BusConfig{Engine: "shop", Partitions: 1})
	require.NoError(t, err)
	defer bus.Close(context.WithoutCancel(t.Context()))
	q, err := bus.Queue(t.Context(), engine.QueueConfig{Engine: "shop", Controller: "c", Workers: 1})
	require.NoError(t, err)
	key := b.bucket("orders").Key("k")
	ctx, cancel := context.WithCancel(t.Context())
	ran, done := make(chan engine.Key, 10), make(chan error, 1)
	go func() {
		done <- q.Run(ctx, t.Context(), workers(func(_ context.Context, req engine.Request) engine.Outcome {
			ran <- req.Key
			return engine.Outcome{}
		}))
	}()
	stream, err := b.client.Stream(t.Context(), "RQ_shop_c")
	require.NoError(t, err)
	var consumer jetstream.Consumer
	eventually(t, "it fetches", func() bool {
		names := stream.ConsumerNames(t.Context())
		for name := range names.Name() {
			if strings.HasPrefix(name, "p0-h-") {
				consumer, err = stream.Consumer(t.Context(), name)
				return err == nil && consumer.CachedInfo().NumWaiting > 0
			}
		}
		return false
	})
	w.Sever(true)
	// The first fetch to be answered is now that of somebody who never acks.
	eventually(t, "the cut has been noticed", func() bool { return !conn.Connected() })
	m, err := engine.EncodeRequest(engine.Request{Controller: "c", Key: key})
	require.NoError(t, err)
	subject := fmt.Sprintf("rq.shop.c.0.h.=.%s.orders.k", "nats=2Fkv")
	eventually(t, "the server knows of the cut", func() bool {
		i, err := consumer.Info(t.Context())
		return err == nil && i.NumWaiting == 0
	})
	before := natsgo.NewMsg(subject) // as requests were written before
	for name, value := range m.Metadata {
		before.Header.Set(name, value)
	}
	before.Header.Set("Watermill-Uuid", m.UUID)
	before.Data = m.Payload
	_, err = b.client.PublishMsg(t.Context(), before)
	require.NoError(t, err)
	stolen, err := consumer.Next(jetstream.FetchMaxWait(5 * time.Second))
	require.NoError(t, err)
	require.Equal(t, subject, stolen.Subject())
	w.Sever(false)
	select {
	case got := <-ran:
		require.Equal(t, key, got)
	case <-time.After(60 * time.Second):
		t.Error("it is held back")
	}
	cancel()
	require.NoError(t, <-done)
}

// An answer that is lost with its connection never comes: whoever waited for it would hold up the end of a term for as
// long as the caller gives it.
func TestAnswerThatIsLostWithItsConnectionIsNotWaitedFor(t *testing.T) {
	b := newBed(t)
	w := newLink(t, b.server.URL())
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: "nats://" + w.Address(), Logger: logger()})
	require.NoError(t, err)
	defer conn.Close()
	store, err := nats.OpenStore(t.Context(), conn, "lost")
	require.NoError(t, err)
	near, err := nats.OpenStore(t.Context(), b.conn, "lost")
	require.NoError(t, err)

	w.Deafen()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	answered := make(chan error, 1)
	go func() {
		_, err := store.Put(ctx, "k", []byte("v"), "")
		answered <- err
	}()
	eventually(t, "the server has what was written", func() bool {
		_, err := near.Get(t.Context(), "k")
		return err == nil
	})
	w.Sever(true)
	var lost error
	eventually(t, "it is known that no answer comes", func() bool {
		select {
		case lost = <-answered:
			return true
		default:
			return false
		}
	})
	require.ErrorContains(t, lost, "NATS did not answer")
	require.NotErrorIs(t, lost, context.Canceled, "the caller did not give up")
}
