package engine_test

import (
	"io"
	"log"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/windlass-dev/windlass/engine"
)

// TestEventsPassWatermillsOwnSuite runs the suite that Watermill has for Pub/Subs on the events half of the memory bus.
func TestEventsPassWatermillsOwnSuite(t *testing.T) {
	log.SetOutput(io.Discard) // the suite tells every step
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	bus := engine.NewMemoryBus()
	of := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		s := bus.Subscriber(group)
		t.Cleanup(func() { _ = s.Close() }) // the suite leaves some open
		return bus.Publisher(), s
	}
	tests.TestPubSub(t, tests.Features{
		ConsumerGroups: true, ExactlyOnceDelivery: true, GuaranteedOrder: true, Persistent: true,
	}, func(t *testing.T) (message.Publisher, message.Subscriber) { return of(t, "suite") }, of)
}
