package nats_test

import (
	"context"
	"io"
	"log"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
)

// TestEventsPassWatermillsOwnSuite runs the suite that Watermill has for Pub/Subs on the events half of the bus.
func TestEventsPassWatermillsOwnSuite(t *testing.T) {
	log.SetOutput(io.Discard) // the suite tells every step
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	b := newBed(t)
	bus := b.bus("suite")
	t.Cleanup(func() { bus.Close(context.Background()) })
	of := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		s := bus.Subscriber(group)
		t.Cleanup(func() { _ = s.Close() }) // the suite leaves some open
		return bus.Publisher(), s
	}
	tests.TestPubSub(t, tests.Features{
		ConsumerGroups: true, GuaranteedOrder: true, Persistent: true,
	}, func(t *testing.T) (message.Publisher, message.Subscriber) { return of(t, "suite") }, of)
}
