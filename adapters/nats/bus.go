package nats

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
)

// BusConfig describes the bus of one engine.
type BusConfig struct {
	// Engine is the engine's name; several engines can share a server.
	Engine string `yaml:"-"`
	// Replicas is how many servers keep each stream. Default 1.
	Replicas int `yaml:"replicas"`
	// Partitions is into how many parts the keys of a controller are divided. It is kept in the stream and cannot be
	// changed for a stream that exists. Default 8.
	Partitions int `yaml:"partitions"`
	// Events is "on", the default, or "off": then events are not published, and a change costs one durable write less.
	Events string `yaml:"events"`
	// SoleServer says that the server is this process's own, so that a claim on the name that is found there is a dead
	// process's.
	SoleServer bool `yaml:"-"`
}

// Validate returns everything that is wrong with the configuration.
func (c BusConfig) Validate() error {
	var errs []error
	if c.Replicas < 0 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("replicas: %d is not between 1 and 5", c.Replicas))
	}
	if c.Partitions < 0 || c.Partitions > 64 {
		errs = append(errs, fmt.Errorf("partitions: %d is not between 1 and 64", c.Partitions))
	}
	if c.Events != "" && c.Events != "on" && c.Events != "off" {
		errs = append(errs, fmt.Errorf("events: %q is neither on nor off", c.Events))
	}
	return errors.Join(errs...)
}

func (c BusConfig) withDefaults() BusConfig {
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.Partitions == 0 {
		c.Partitions = 8
	}
	if c.Events == "" {
		c.Events = "on"
	}
	return c
}

// Bus is an engine.Bus on JetStream: requests, their delays and attempts, and the engine's own records survive any
// restart of the engine, and of the server as far as its disks do.
type Bus struct {
	cfg    BusConfig
	conn   *Connection
	claim  *claim
	store  *Store
	states jetstream.Stream
	dead   string
}

var _ engine.Bus = (*Bus)(nil)

// NewBus claims the engine's name and sets up its streams. Another engine of that name is refused with ErrNameClaimed.
// Close gives the name up.
func NewBus(ctx context.Context, conn *Connection, cfg BusConfig) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("NATS bus: %w", err)
	}
	b := &Bus{cfg: cfg.withDefaults(), conn: conn, dead: "dead." + token(cfg.Engine)}
	var err error
	if b.claim, err = takeClaim(ctx, conn, cfg.Engine, cfg.SoleServer); err != nil {
		return nil, fmt.Errorf("NATS bus: %w", err)
	}
	if err = b.open(ctx); err != nil {
		b.Close(ctx)
		return nil, fmt.Errorf("NATS bus: %w", err)
	}
	return b, nil
}

func (b *Bus) open(ctx context.Context) (err error) {
	if b.states, err = b.stream(ctx, jetstream.StreamConfig{
		Name: stateStream(b.cfg.Engine), Subjects: []string{"rqs." + token(b.cfg.Engine) + ".>"},
		Retention: jetstream.LimitsPolicy, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardOld, AllowAtomicPublish: true,
	}); err != nil {
		return err
	}
	if _, err = b.stream(ctx, jetstream.StreamConfig{
		Name: deadStream(b.cfg.Engine), Subjects: []string{b.dead + ".>"}, Retention: jetstream.LimitsPolicy,
		MaxBytes: 256 << 20, Discard: jetstream.DiscardOld,
	}); err != nil {
		return err
	}
	if b.cfg.Events == "on" {
		if _, err = b.stream(ctx, jetstream.StreamConfig{
			Name: eventStream(b.cfg.Engine), Subjects: []string{"ev." + token(b.cfg.Engine) + ".>"},
			Retention: jetstream.LimitsPolicy, MaxAge: 24 * time.Hour, MaxBytes: 1 << 30, Discard: jetstream.DiscardOld,
		}); err != nil {
			return err
		}
	}
	b.store, err = OpenStore(ctx, b.conn, storeBucket(b.cfg.Engine))
	return err
}

// stream creates a stream or brings it to these settings.
func (b *Bus) stream(ctx context.Context, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	cfg.Storage, cfg.Replicas, cfg.AllowDirect = jetstream.FileStorage, b.cfg.Replicas, true
	s, err := b.conn.js.CreateOrUpdateStream(ctx, cfg)
	if err != nil {
		return nil, streamError(cfg.Name, err)
	}
	return s, nil
}

// Store implements engine.Bus.
func (b *Bus) Store() kv.Store { return b.store }

// Close gives the engine's name up. The connection stays open: it belongs to whoever opened it.
func (b *Bus) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	b.claim.release(ctx)
}

// Publisher implements engine.Bus.
func (b *Bus) Publisher() message.Publisher {
	if b.cfg.Events == "off" {
		return nil
	}
	return &publisher{bus: b}
}

// publisher publishes Watermill messages to the stream of events. Topic and metadata become subject and headers.
type publisher struct{ bus *Bus }

// Publish implements message.Publisher. It returns once the server has stored the messages.
func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		out := natsMessage(p.bus.eventSubject(topic, m), m)
		if _, err := p.bus.conn.js.PublishMsg(m.Context(), out); err != nil {
			return fmt.Errorf("publish to %s: %w", topic, understood(err))
		}
	}
	return nil
}

// Close implements message.Publisher.
func (p *publisher) Close() error { return nil }

// eventSubjects are the subjects of a topic: ev.<engine>.<source>.<scope>.<kind>.<namespace>.<name> of the key, or "=" for
// a message without one, so that any NATS client can filter.
func (b *Bus) eventSubjects(topic string) string {
	return "ev." + token(b.cfg.Engine) + "." + token(strings.TrimPrefix(topic, engine.EventTopic("")))
}

func (b *Bus) eventSubject(topic string, m *message.Message) string {
	key, err := engine.ParseKey(m.Metadata.Get(engine.MetadataKey))
	if err != nil {
		return b.eventSubjects(topic) + "." + token("")
	}
	return b.eventSubjects(topic) + "." + keyTokens(key)
}

// headerUUID carries Watermill's message id.
const headerUUID = "Watermill-Uuid"

// natsMessage puts a Watermill message into one of NATS.
func natsMessage(subject string, m *message.Message) *natsgo.Msg {
	out := natsgo.NewMsg(subject)
	for k, v := range m.Metadata {
		out.Header[k] = []string{v}
	}
	out.Header[headerUUID] = []string{m.UUID}
	out.Data = m.Payload
	return out
}

// watermillMessage is the reverse of natsMessage.
func watermillMessage(h natsgo.Header, data []byte) *message.Message {
	m := message.NewMessage(h.Get(headerUUID), data)
	for k, v := range h {
		if len(v) > 0 && k != headerUUID {
			m.Metadata[k] = v[0]
		}
	}
	return m
}

// setAside keeps a message that cannot be read among the dead letters, with the reason.
func (b *Bus) setAside(ctx context.Context, subject string, h natsgo.Header, data []byte, reason error) error {
	m := natsgo.NewMsg(b.dead + "." + subject)
	maps.Copy(m.Header, h)
	for _, k := range []string{"Nats-Expected-Last-Subject-Sequence", "Nats-Msg-Id", "Nats-TTL"} {
		m.Header.Del(k)
	}
	m.Header.Set("Windlass-Error", strconv.Quote(reason.Error()))
	m.Data = data
	if _, err := b.conn.js.PublishMsg(ctx, m); err != nil {
		return fmt.Errorf("set a malformed message aside: %w", understood(err))
	}
	return nil
}
