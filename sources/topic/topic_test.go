package topic_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
	"github.com/windlass-dev/windlass/sources/topic"
)

func TestAnotherEnginesEventsAreReconciledHere(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		theirs := h.Config.Bus
		things, here := memory.New[int]("things"), &enginetest.Recorder{}
		var malformed []string
		src, err := topic.New(topic.Config{
			Name: "things", Subscriber: theirs.Subscriber("here"), Malformed: func(topic string, _ error) { malformed = append(malformed, topic) },
		})
		require.NoError(h.T, err)
		h.Start(engine.NewController("there").For(things).WithHandler((&enginetest.Recorder{}).Handle))

		ours := engine.NewMemoryBus()
		echo := ours.Subscriber("echo")
		again, err := echo.Subscribe(h.T.Context(), "events.things")
		require.NoError(h.T, err)
		e, err := engine.New(engine.Config{Bus: ours, Controllers: []engine.Controller{engine.NewController("here").For(src).WithHandler(here.Handle)}})
		require.NoError(h.T, err)
		ctx, cancel := context.WithCancel(h.T.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		h.Settle()

		things.Set("a", 1)
		h.Settle()
		require.Equal(h.T, things.Key("a"), here.Last().Key)
		require.Equal(h.T, engine.Created, here.Last().Trigger())
		things.Set("a", 2)
		h.Settle()
		require.Equal(h.T, "2", here.Last().Causes.Newest().Revision)
		require.NoError(h.T, theirs.Publisher().Publish("events.things", message.NewMessage("1", []byte("nonsense"))))
		things.Remove("a")
		h.Settle()
		require.Equal(h.T, engine.Deleted, here.Last().Trigger(), "a malformed message blocks nothing")
		require.Equal(h.T, []string{"events.things"}, malformed)
		select {
		case m := <-again:
			h.T.Errorf("published again: %v", m.Metadata)
		default:
		}
		cancel()
		require.NoError(h.T, <-done)
		require.NoError(h.T, echo.Close())
	})
}

func TestEventThatIsNotAcceptedIsToldAgainAndNotOvertaken(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		bus := engine.NewMemoryBus()
		src, err := topic.New(topic.Config{Name: "things", Subscriber: bus.Subscriber("")})
		require.NoError(h.T, err)
		ctx, cancel := context.WithCancel(h.T.Context())
		var told []string
		done := make(chan error, 1)
		go func() {
			done <- src.Run(ctx, func(_ context.Context, e engine.Event) error {
				told = append(told, e.Key.Name)
				if len(told) < 5 && e.Key.Name == "a" {
					return errors.New("not yet")
				}
				return nil
			})
		}()
		h.Settle()
		for _, name := range []string{"a", "b"} {
			m, err := engine.EncodeEvent(engine.Event{Source: "x", Key: engine.Key{Kind: engine.KindOf("k"), Name: name}, Time: time.Now()}, "")
			require.NoError(h.T, err)
			require.NoError(h.T, bus.Publisher().Publish("events.things", m))
		}
		h.Advance(time.Second)
		require.Equal(h.T, []string{"", "", "a", "a", "a", "b"}, told)
		cancel()
		require.NoError(h.T, <-done)
	})
}

func TestMistakesAreTold(t *testing.T) {
	_, err := topic.New(topic.Config{})
	require.ErrorContains(t, err, "Name and Subscriber are required")
}
