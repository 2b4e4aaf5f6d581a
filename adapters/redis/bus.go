package redis

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	goredis "github.com/redis/go-redis/v9"

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
	// Partitions is into how many parts the keys of a controller are divided. It is kept in Redis and cannot be changed for a
	// controller that exists. Default 8.
	Partitions int `yaml:"partitions"`
	// Events is "on", the default, or "off": then events are not published.
	Events string `yaml:"events"`
	// Outage is what happens when Redis cannot be reached for so long that another replica may take over: "stop", the default, or
	// "continue": what is in hand is worked on all the same. That goes with one replica only; a second one is refused.
	Outage string `yaml:"outage"`
}

// Validate returns everything that is wrong with the configuration.
func (c BusConfig) Validate() error {
	var errs []error
	if c.Partitions < 0 || c.Partitions > maxPartitions {
		errs = append(errs, fmt.Errorf("partitions: %d is not between 1 and %d", c.Partitions, maxPartitions))
	}
	if c.Events != "" && c.Events != "on" && c.Events != "off" {
		errs = append(errs, fmt.Errorf("events: %q is neither on nor off", c.Events))
	}
	if c.Outage != "" && c.Outage != "stop" && c.Outage != "continue" {
		errs = append(errs, fmt.Errorf("outage: %q is neither stop nor continue", c.Outage))
	}
	return errors.Join(errs...)
}

const maxPartitions = 64

func (c BusConfig) withDefaults() BusConfig {
	if c.Partitions == 0 {
		c.Partitions = 8
	}
	if c.Events == "" {
		c.Events = "on"
	}
	return c
}

// Bus is an engine.Bus on Redis. What it promises, and what not, is in the package's documentation.
type Bus struct {
	ctx      context.Context //nolint:containedctx // the maker's, for what outlives its callers.
	cfg      BusConfig
	conn     *Connection
	pipeline *pipeline
	registry *registry
	replica  *owner.Replica
	leases   *Leases
	store    *Store
	news     *news
	id       string

	mu    sync.Mutex
	asked map[string]chan []byte // by question
}

var _ engine.Bus = (*Bus)(nil)

// memberTTL is how long the others believe that a silent replica lives, and where a server can be replaced longer, for
// that takes a while.
const (
	memberTTL         = 4 * time.Second
	memberTTLFailover = 12 * time.Second
)

func (c *Connection) ttl() time.Duration {
	if c.single {
		return memberTTL
	}
	return memberTTLFailover
}

// NewBus becomes one of the replicas of an engine. Close ends that.
func NewBus(ctx context.Context, conn *Connection, cfg BusConfig) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("bus on Redis: %w", err)
	}
	cfg = cfg.withDefaults()
	pipeline, err := newPipeline(ctx, conn.client)
	if err != nil {
		return nil, fmt.Errorf("bus on Redis: %w", err)
	}
	id := ownedqueue.ReplicaID(watermill.NewShortUUID())
	b := &Bus{
		id: id, asked: make(map[string]chan []byte),
		ctx: context.WithoutCancel(ctx), cfg: cfg, conn: conn, pipeline: pipeline, leases: newLeases(conn, cfg.Engine),
		store: NewStore(conn, cfg.Engine), news: newNews(ctx, conn, engineKey(cfg.Engine, "news"), engineKey(cfg.Engine, "ask:"+id)),
	}
	b.registry = &registry{bus: b, highest: make(map[owner.Partition]uint64)}
	b.replica, err = ownedqueue.Join(ctx, owner.ReplicaConfig{
		ID: id, Registry: b.registry, TTL: conn.ttl(), Alone: cfg.Outage == "continue",
	}, "Redis", conn.log)
	if err != nil {
		b.news.close()
		return nil, fmt.Errorf("bus on Redis: %w", err)
	}
	return b, nil
}

// Store implements engine.Bus.
func (b *Bus) Store() kv.Store { return b.store }

// Leases returns the store of the leases of this engine's replicas. The engine finds it and runs each source in one
// replica.
func (b *Bus) Leases() lease.Store { return b.leases }

// Status says why the bus does not work at present, nil if it does.
func (b *Bus) Status() error {
	if err := b.registry.failure(); err != nil {
		return fmt.Errorf("the Redis at %s cannot be reached; changes wait where they come from: %w", b.conn.address, err)
	}
	if !b.replica.Trusted() {
		return errors.New("the Redis did not answer for so long that another replica may have taken over; no reconcile starts until it does")
	}
	return nil
}

// Replicas returns the replicas of the engine and who works on what, as this one knows it.
func (b *Bus) Replicas() ([]engine.Member, []engine.Partition) {
	return ownedqueue.Replicas(b.replica, b.cfg.Partitions)
}

// Trusted says whether this replica may work: its membership was renewed in time.
func (b *Bus) Trusted() bool { return b.replica.Trusted() }

// Close hands over what is this replica's and ends its membership. The connection stays open: it belongs to whoever
// opened it.
func (b *Bus) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	b.replica.Close(ctx)
	b.news.close()
}

// escaped writes a name so that it can stand in a key: without colons and braces.
func escaped(name string) string { return url.QueryEscape(name) }

// engineKey is a key of the engine as a whole.
func engineKey(engineName, what string) string {
	return "windlass:{" + escaped(engineName) + "}:" + what
}

func (b *Bus) key(what string) string { return engineKey(b.cfg.Engine, what) }

// partKey is a key of something that a Cluster may keep elsewhere.
func (b *Bus) partKey(part, what string) string {
	return "windlass:{" + escaped(b.cfg.Engine) + ":" + part + "}:" + what
}

// deadKept is how many messages that cannot be read are kept.
const deadKept = 10_000

// setAside keeps a message that cannot be read among the dead letters, with the reason.
func (b *Bus) setAside(ctx context.Context, from, text string, reason error) error {
	err := b.conn.client.XAdd(ctx, &goredis.XAddArgs{
		Stream: b.key("dead"), MaxLen: deadKept, Approx: true, Values: []any{"from", from, "message", text, "error", reason.Error()},
	}).Err()
	if err != nil {
		return fmt.Errorf("set a malformed message aside: %w", understood(err))
	}
	return nil
}
