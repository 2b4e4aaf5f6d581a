package engine_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

func newLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func TestWatchedSourceIsMapped(t *testing.T) {
	bubble(t, func(b *bundle) {
		parts := memory.New[string]("parts")
		b.start(b.controller().Watches(parts, func(_ context.Context, e engine.Event) ([]engine.Key, error) {
			return []engine.Key{b.things.Key("of-" + e.Key.Name)}, nil
		}))
		parts.Set("p", "x")
		synctest.Wait()
		req := b.rec.Last()
		require.Equal(t, b.things.Key("of-p"), req.Key)
		require.Equal(t, engine.Dependency, req.Trigger())
		require.Equal(t, engine.PriorityDependency, req.Priority)
		require.Equal(t, parts.Key("p"), req.Causes.Newest().Key)
	})
}

func TestOwnerBeforeAndAfterAreBothMapped(t *testing.T) {
	a, b := &engine.Meta{Owner: engine.Key{Kind: engine.KindOf("k"), Name: "a"}}, &engine.Meta{Owner: engine.Key{Kind: engine.KindOf("k"), Name: "b"}}
	for _, c := range []struct {
		old, new *engine.Meta
		want     []engine.Key
	}{
		{a, b, []engine.Key{b.Owner, a.Owner}},
		{a, a, []engine.Key{a.Owner}},
		{nil, a, []engine.Key{a.Owner}},
		{a, nil, []engine.Key{a.Owner}},
		{nil, &engine.Meta{}, nil},
		{nil, nil, nil},
	} {
		got, err := engine.MapOwner(t.Context(), engine.Event{Old: c.old, New: c.new})
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
}

func TestFailingMapperIsCalledAgainAndBlocksNobody(t *testing.T) {
	bubble(t, func(b *bundle) {
		parts := memory.New[string]("parts")
		calls := 0
		var failed []string
		b.Config.Hooks.MappingFailed = func(c string, e engine.Event, _ error) { failed = append(failed, c+" "+e.Key.Name) }
		b.start(b.controller().WithBackoff(engine.Backoff{Initial: time.Second}).
			Watches(parts, func(_ context.Context, e engine.Event) ([]engine.Key, error) {
				if e.Key.Name == "bad" {
					switch calls++; calls {
					case 1:
						return []engine.Key{b.things.Key("never")}, errBroken
					case 2:
						panic("oh")
					}
				}
				return []engine.Key{b.things.Key(e.Key.Name)}, nil
			}))
		parts.Set("bad", "x")
		parts.Set("good", "x")
		synctest.Wait()
		require.Len(t, b.rec.Times("good"), 1)
		require.Empty(t, b.rec.Times("bad"))
		b.Advance(time.Minute)
		require.Equal(t, []time.Duration{2 * time.Second}, b.rec.Times("bad"), "after 1 s it panicked, and waited the first wait of its own")
		require.Equal(t, 3, calls)
		require.Empty(t, b.rec.Times("never"), "what came with an error is not used")
		require.Equal(t, []string{"test bad"}, failed)
		require.Contains(t, b.Engine.Stats(), "test.mapping")
	})
}

func TestMappedKeyOfAnotherKindIsDroppedAndTold(t *testing.T) {
	bubble(t, func(b *bundle) {
		var log bytes.Buffer
		b.Config.Logger = newLogger(&log)
		dropped := 0
		b.Config.Hooks.RequestDropped = func(string, engine.Key) { dropped++ }
		parts := memory.New[string]("parts")
		b.start(b.controller().Watches(parts, func(context.Context, engine.Event) ([]engine.Key, error) {
			return []engine.Key{parts.Key("x"), b.things.Key("kept")}, nil
		}))
		parts.Set("p", "x")
		synctest.Wait()
		require.Equal(t, 1, b.rec.Count())
		require.Equal(t, 1, dropped)
		require.Contains(t, log.String(), "mapped key dropped")
	})
}

func TestMapSameName(t *testing.T) {
	like := memory.New[int]("things").Key("")
	keys, err := engine.MapSameName(like)(t.Context(), engine.Event{Key: memory.New[int]("parts").Key("p")})
	require.NoError(t, err)
	require.Equal(t, []engine.Key{memory.New[int]("things").Key("p")}, keys)
}

func TestEventsArePublishedForEveryoneElse(t *testing.T) {
	bubble(t, func(b *bundle) {
		bus := engine.NewMemoryBus()
		b.Config.Bus = bus
		b.Config.Name = "shop"
		sub := bus.Subscriber("audit")
		messages, err := sub.Subscribe(b.t.Context(), engine.EventTopic("things"))
		require.NoError(t, err)
		var events []engine.Event
		b.things.Set("a", 1)
		b.start()
		b.things.Set("a", 2)
		b.things.Remove("a")
		for range 2 {
			m := <-messages
			e, routedBy, err := engine.DecodeEvent(m)
			require.NoError(t, err)
			require.Equal(t, "shop", routedBy)
			events = append(events, e)
			m.Ack()
		}
		require.Equal(t, engine.Put, events[0].Operation, "what is only listed is not published")
		require.Equal(t, engine.Delete, events[1].Operation)
		require.Equal(t, b.things.Key("a"), events[1].Key)
		require.Equal(t, "things", events[1].Source)
		require.NoError(t, sub.Close())
	})
}

func publish(t *testing.T, bus *engine.MemoryBus, texts ...string) {
	t.Helper()
	for _, x := range texts {
		require.NoError(t, bus.Publisher().Publish("t", message.NewMessage(x, []byte(x))))
	}
}

func TestGroupSharesAndTheEmptyGroupGetsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := engine.NewMemoryBus()
		var mu sync.Mutex
		got := map[string][]string{}
		subs := []message.Subscriber{bus.Subscriber("g"), bus.Subscriber("g"), bus.Subscriber(""), bus.Subscriber("")}
		for i, s := range subs {
			messages, err := s.Subscribe(t.Context(), "t")
			require.NoError(t, err)
			name := []string{"g", "g", "x", "y"}[i]
			go func() {
				for m := range messages {
					mu.Lock()
					got[name] = append(got[name], m.UUID)
					mu.Unlock()
					m.Ack()
				}
			}()
		}
		publish(t, bus, "1")
		synctest.Wait()
		publish(t, bus, "2")
		synctest.Wait()
		for _, s := range subs {
			require.NoError(t, s.Close())
		}
		require.Equal(t, map[string][]string{"g": {"1", "2"}, "x": {"1", "2"}, "y": {"1", "2"}}, got)
	})
}

func TestMessageComesAgainAfterANackAndOrderIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := engine.NewMemoryBus()
		sub := bus.Subscriber("g")
		messages, err := sub.Subscribe(t.Context(), "t")
		require.NoError(t, err)
		publish(t, bus, "1", "2", "3")
		(<-messages).Nack()
		var got []string
		for range 3 {
			m := <-messages
			got = append(got, m.UUID)
			require.NoError(t, m.Context().Err())
			m.Ack()
		}
		require.Equal(t, []string{"1", "2", "3"}, got)
		require.NoError(t, sub.Close())
		_, err = sub.Subscribe(t.Context(), "t")
		require.Error(t, err)
	})
}

func TestUnackedMessageGoesToAnotherMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := engine.NewMemoryBus()
		one, two := bus.Subscriber("g"), bus.Subscriber("g")
		first, err := one.Subscribe(t.Context(), "t")
		require.NoError(t, err)
		publish(t, bus, "1")
		<-first
		second, err := two.Subscribe(t.Context(), "t")
		require.NoError(t, err)
		require.NoError(t, one.Close())
		m := <-second
		require.Equal(t, "1", m.UUID)
		m.Ack()
		require.NoError(t, two.Close())
	})
}
