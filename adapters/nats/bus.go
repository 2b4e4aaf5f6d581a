package nats

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
	"github.com/windlass-dev/windlass/internal/ownedqueue"
	"github.com/windlass-dev/windlass/internal/owner"
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
	// Outage is what happens when NATS cannot be reached for so long that another replica may take over: "stop", the default, or
	// "continue": what is in hand is worked on all the same. That goes with one replica only; a second one is refused.
	Outage string `yaml:"outage"`
	// SoleServer says that the server is this process's own, so that replicas that are found there are dead.
	SoleServer bool `yaml:"-"`
	// GroupCommit says that the server syncs its disk for every write, so that what waits had better be written together.
	GroupCommit bool `yaml:"-"`
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
	if c.Outage != "" && c.Outage != "stop" && c.Outage != "continue" {
		errs = append(errs, fmt.Errorf("outage: %q is neither stop nor continue", c.Outage))
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
	cfg     BusConfig
	conn    *Connection
	own     *Connection // for members, claims and leases
	replica *owner.Replica
	leases  *Leases
	store   *Store
	states  jetstream.Stream
	records *committer // to states
	events  *committer
	dead    string
}

var _ engine.Bus = (*Bus)(nil)

// memberTTL is how long the others believe that a silent replica lives: on a cluster longer than it takes to replace a
// server that led.
const (
	memberTTL        = 4 * time.Second
	memberTTLCluster = 12 * time.Second
)

// NewBus sets up the streams of an engine and becomes one of its replicas. Close ends that.
func NewBus(ctx context.Context, conn *Connection, cfg BusConfig) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("NATS bus: %w", err)
	}
	b := &Bus{cfg: cfg.withDefaults(), conn: conn, dead: "dead." + token(cfg.Engine)}
	b.records, b.events = b.committer(), b.committer()
	if err := b.open(ctx); err != nil {
		return nil, fmt.Errorf("NATS bus: %w", err)
	}
	return b, nil
}

// join becomes a replica.
func (b *Bus) join(ctx context.Context) error {
	if _, err := b.coordination(ctx); err != nil {
		return err
	}
	// Renewals must not wait behind what is published.
	own, err := b.conn.another(ctx)
	if err != nil {
		return err
	}
	stream, err := own.js.Stream(ctx, coordinationStream(b.cfg.Engine))
	if err != nil {
		return streamError(coordinationStream(b.cfg.Engine), err)
	}
	b.own, b.leases = own, newLeases(own, stream, b.cfg.Engine)
	r := &registry{conn: own, stream: stream, prefix: "rqc." + token(b.cfg.Engine) + "."}
	if b.cfg.SoleServer {
		if err := r.bury(ctx); err != nil {
			return err
		}
	}
	ttl := memberTTL
	if b.cfg.Replicas > 1 {
		ttl = memberTTLCluster
	}
	b.replica, err = ownedqueue.Join(ctx, owner.ReplicaConfig{
		ID: ownedqueue.ReplicaID(nuid.Next()), Registry: r, TTL: ttl, Alone: b.cfg.Outage == "continue",
	}, "NATS", b.conn.log)
	if err != nil {
		own.Close()
	}
	return err
}

// committer returns one for another stream.
func (b *Bus) committer() *committer { return &committer{conn: b.conn, groups: b.cfg.GroupCommit} }

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
			Retention: jetstream.LimitsPolicy, MaxAge: 24 * time.Hour, MaxBytes: 1 << 30, Discard: jetstream.DiscardOld, AllowAtomicPublish: true,
		}); err != nil {
			return err
		}
	}
	if b.cfg.Replicas > 1 { // who owns what is as safe as what waits
		if _, err = b.conn.js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: storeBucket(b.cfg.Engine), Replicas: b.cfg.Replicas}); err != nil {
			return streamError("KV_"+storeBucket(b.cfg.Engine), err)
		}
	}
	if b.store, err = OpenStore(ctx, b.conn, storeBucket(b.cfg.Engine)); err != nil {
		return err
	}
	return b.join(ctx)
}

// stream creates a stream or brings it to these settings.
func (b *Bus) stream(ctx context.Context, cfg jetstream.StreamConfig) (jetstream.Stream, error) {
	cfg.Storage, cfg.Replicas, cfg.AllowDirect = jetstream.FileStorage, b.cfg.Replicas, true
	for last := time.Now().Add(patience); ; {
		s, err := ask(ctx, b.conn, func(ctx context.Context) (jetstream.Stream, error) { return b.conn.js.CreateOrUpdateStream(ctx, cfg) })
		switch {
		case err == nil:
			return readAtLeader(s), nil
		case !transient(err) || ctx.Err() != nil || time.Now().After(last):
			return nil, streamError(cfg.Name, err)
		}
		b.conn.log.Warn("NATS is not ready; trying again", "stream", cfg.Name, "err", err)
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// patience is how long a cluster is given to agree on its leaders before a start fails.
const patience = 30 * time.Second

// Store implements engine.Bus.
func (b *Bus) Store() kv.Store { return b.store }

// Leases returns the store of the leases of this engine's replicas. The engine finds it and runs each source in one
// replica.
func (b *Bus) Leases() lease.Store { return b.leases }

// Status says why the bus does not work at present, nil if it does.
func (b *Bus) Status() error {
	switch {
	case !b.conn.Connected():
		return fmt.Errorf("NATS at %s cannot be reached; changes wait there", b.conn.url)
	case !b.replica.Trusted():
		return errors.New("NATS did not answer for so long that another replica may have taken over; no reconcile starts until it does")
	default:
		return nil
	}
}

// Replicas returns the replicas of the engine and who works on what, as this one knows it.
func (b *Bus) Replicas() ([]engine.Member, []engine.Partition) {
	return ownedqueue.Replicas(b.replica, b.cfg.Partitions)
}

// PartitionOf is the number of a key's partition.
func (b *Bus) PartitionOf(key engine.Key) int { return partition(keyTokens(key), b.cfg.Partitions) }

func (b *Bus) askSubject(member string) string {
	return "ask." + token(b.cfg.Engine) + "." + token(member)
}

// Ask passes a question to another replica and waits for its answer.
func (b *Bus) Ask(ctx context.Context, member string, question []byte) ([]byte, error) {
	m, err := b.conn.nc.RequestWithContext(ctx, b.askSubject(member), question)
	if err != nil {
		return nil, err
	}
	return m.Data, nil
}

// Answer answers what other replicas ask, until ctx ends.
func (b *Bus) Answer(ctx context.Context, answer func(ctx context.Context, question []byte) []byte) error {
	var answers sync.WaitGroup
	sub, err := b.conn.nc.Subscribe(b.askSubject(b.replica.ID()), func(m *natsgo.Msg) {
		answers.Go(func() { _ = m.Respond(answer(ctx, m.Data)) }) // who asked gives up by itself
	})
	if err != nil {
		return fmt.Errorf("answer other replicas: %w", err)
	}
	<-ctx.Done()
	err = sub.Unsubscribe()
	answers.Wait()
	return err
}

// Trusted says whether this replica may work: its membership was renewed in time.
func (b *Bus) Trusted() bool { return b.replica.Trusted() }

// Close hands over what is this replica's and ends its membership. The connection stays open: it belongs to whoever
// opened it.
func (b *Bus) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	b.replica.Close(ctx)
	b.own.Close()
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
		if _, err := p.bus.events.publish(m.Context(), out, nil); err != nil {
			return fmt.Errorf("publish to %s: %w", topic, err)
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

// withoutConditions leaves out what a message's headers told the server about its first publication.
func withoutConditions(h natsgo.Header) natsgo.Header {
	rest := make(natsgo.Header, len(h))
	for k, v := range h {
		if !strings.HasPrefix(k, "Nats-") {
			rest[k] = v
		}
	}
	return rest
}

// setAside keeps a message that cannot be read among the dead letters, with the reason.
func (b *Bus) setAside(ctx context.Context, subject string, h natsgo.Header, data []byte, reason error) error {
	m := natsgo.NewMsg(b.dead + "." + subject)
	m.Header = withoutConditions(h)
	m.Header.Set("Windlass-Error", strconv.Quote(reason.Error()))
	m.Data = data
	if _, err := b.conn.publish(ctx, m); err != nil {
		return fmt.Errorf("set a malformed message aside: %w", err)
	}
	return nil
}
