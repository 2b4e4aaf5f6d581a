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

// plain hides everything but Watermill's own interface.
type plain struct{ message.Subscriber }

func TestEventThatIsNotAcceptedIsToldAgainAndNotOvertaken(t *testing.T) {
	for _, c := range []struct {
		name string
		as   func(message.Subscriber) message.Subscriber
	}{
		{"several at a time", func(s message.Subscriber) message.Subscriber { return s }},
		{"one at a time", func(s message.Subscriber) message.Subscriber { return plain{s} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			enginetest.Run(t, func(h *enginetest.Harness) {
				bus := engine.NewMemoryBus()
				src, err := topic.New(topic.Config{Name: "things", Subscriber: c.as(bus.Subscriber("readers"))})
				require.NoError(h.T, err)
				// run tells what the source emits until the harness has settled, refused or not.
				run := func(refused func(told []string, name string) bool, meanwhile func()) (told []string) {
					ctx, cancel := context.WithCancel(h.T.Context())
					done := make(chan error, 1)
					go func() {
						done <- src.Run(ctx, func(_ context.Context, e engine.Event) error {
							told = append(told, e.Key.Name)
							if refused(told, e.Key.Name) {
								return errors.New("not yet")
							}
							return nil
						})
					}()
					h.Settle()
					meanwhile()
					h.Advance(250 * time.Millisecond)
					cancel()
					require.NoError(h.T, <-done)
					return told
				}
				told := run(func(told []string, name string) bool { return name == "a" && len(told) < 5 || name == "c" }, func() {
					for _, name := range []string{"a", "b", "c", "d"} {
						m, err := engine.EncodeEvent(engine.Event{Source: "x", Key: engine.Key{Kind: engine.KindOf("k"), Name: name}, Time: time.Now()}, "")
						require.NoError(h.T, err)
						require.NoError(h.T, bus.Publisher().Publish("events.things", m))
					}
				})
				require.Equal(h.T, []string{"", "", "a", "a", "a", "b", "c"}, told, "list, then the events")
				told = run(func([]string, string) bool { return false }, func() {})
				require.Equal(h.T, []string{"", "", "c", "d"}, told, "what was not accepted when the source ended, and what came behind it")
			})
		})
	}
}

func TestMistakesAreTold(t *testing.T) {
	_, err := topic.New(topic.Config{})
	require.ErrorContains(t, err, "Name and Subscriber are required")
}
