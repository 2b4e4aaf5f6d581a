package bus_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/bus"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// channels is a GoChannel: unordered, redelivering at once after a nack, and a message a time.
func channels(t *testing.T) *gochannel.GoChannel {
	t.Helper()
	c := gochannel.NewGoChannel(gochannel.Config{Persistent: false}, watermill.NopLogger{})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func on(t *testing.T, c *gochannel.GoChannel, mode bus.Ack) *bus.PubSub {
	t.Helper()
	b, err := bus.FromPubSub(bus.Config{Publisher: c, Subscriber: func(string) message.Subscriber { return c }, Ack: mode})
	require.NoError(t, err)
	return b
}

func TestEachModeKeepsItsPromisesOnGoChannel(t *testing.T) {
	for _, mode := range []bus.Ack{bus.OnAccept, bus.AfterRun} {
		t.Run(string(mode), func(t *testing.T) {
			enginetest.TestBus(t, func(t *testing.T) enginetest.BusFixture {
				return enginetest.BusFixture{Bus: on(t, channels(t), mode)}
			})
		})
	}
}

func TestMistakesAreToldAtOnce(t *testing.T) {
	_, err := bus.FromPubSub(bus.Config{Ack: "sometimes"})
	require.ErrorContains(t, err, "Publisher and Subscriber are required")
	require.ErrorContains(t, err, `Ack "sometimes" is none of onAccept, afterRun`)
}

func TestMalformedRequestIsAckedAndTold(t *testing.T) {
	c := channels(t)
	told := make(chan string, 1)
	q, err := on(t, c, bus.AfterRun).Queue(t.Context(), engine.QueueConfig{
		Engine: "e", Controller: "c", Workers: 1, Malformed: func(topic string, err error) { told <- topic + ": " + err.Error() },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- q.Run(ctx, t.Context(), func() engine.Process { return nil }) }()
	m := message.NewMessage("1", []byte("nonsense"))
	require.NoError(t, c.Publish("requests.e.c", m))
	require.Contains(t, <-told, "requests.e.c: malformed message")
	cancel()
	require.NoError(t, <-done)
}

// TestMessageIsAckedAfterTheRunThatIsDoneWithIt counts what a Pub/Sub still has when the process is cut off.
func TestMessageIsAckedAfterTheRunThatIsDoneWithIt(t *testing.T) {
	for _, c := range []struct {
		mode bus.Ack
		left int64
	}{{bus.OnAccept, 0}, {bus.AfterRun, 1}} {
		t.Run(string(c.mode), func(t *testing.T) {
			p := &counted{GoChannel: channels(t)}
			b, err := bus.FromPubSub(bus.Config{Publisher: p, Subscriber: func(string) message.Subscriber { return p }, Ack: c.mode})
			require.NoError(t, err)
			things := memory.New[int]("things")
			failing := &atomic.Bool{}
			failing.Store(true)
			e, err := engine.New(engine.Config{Bus: b, Controllers: []engine.Controller{
				engine.NewController("c").For(things).WithHandler(func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
					if failing.Load() {
						return engine.Result{}, errors.New("not yet")
					}
					return engine.Result{}, nil
				}).WithBackoff(engine.Backoff{Initial: 1500 * time.Millisecond, Max: 1500 * time.Millisecond}),
			}})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- e.Run(ctx) }()
			require.Eventually(t, func() bool { return e.Sources()[0].Synced }, 5*time.Second, time.Millisecond)
			things.Set("a", 1)
			settled := func() bool {
				items, err := e.Items("c")
				return err == nil && len(items) == 1 && items[0].Attempt > 1
			}
			require.Eventually(t, settled, 10*time.Second, time.Millisecond)
			// A moment's look may see the message and its successor.
			require.Eventually(t, func() bool { return p.unacked() == c.left }, 5*time.Second, time.Millisecond, "while the key is delayed one message keeps its place")
			failing.Store(false)
			require.Eventually(t, func() bool { return p.unacked() == 0 }, 10*time.Second, time.Millisecond)
			cancel()
			require.NoError(t, <-done)
		})
	}
}

// counted knows how many requests were published and not acked.
type counted struct {
	*gochannel.GoChannel

	published, acked atomic.Int64
}

func (c *counted) unacked() int64 { return c.published.Load() - c.acked.Load() }

func (c *counted) Publish(topic string, messages ...*message.Message) error {
	if topic == "requests.windlass.c" {
		c.published.Add(int64(len(messages)))
	}
	return c.GoChannel.Publish(topic, messages...)
}

func (c *counted) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := c.GoChannel.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for m := range in {
			go func() {
				select {
				case <-m.Acked():
					c.acked.Add(1)
				case <-m.Nacked():
				}
			}()
			select {
			case out <- m:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}
