// Package ownedqueue is what the queues and replicas of all shared buses have in common, above the broker of each.
package ownedqueue

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/internal/owner"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Config describes the queue of one controller.
type Config struct {
	engine.QueueConfig

	Partitions  int
	PartitionOf func(key engine.Key) int
	Replica     *owner.Replica
	// Store is the engine's.
	Store kv.Store
	// ExtendEvery is how often the broker is told of the messages in hand.
	ExtendEvery time.Duration
	// Publish stores a request.
	Publish func(ctx context.Context, req engine.Request) error
	Log     *slog.Logger
}

// Queue is an engine.Queue on an owner, and the part of the owner's broker that is the same everywhere.
type Queue struct {
	*owner.Owner[engine.Key, engine.Causes]

	cfg      Config
	suspects owner.Suspects[engine.Key]
}

// New returns a queue over a broker, of which it is usually a part.
func New(broker owner.Broker[engine.Key, engine.Causes], cfg Config) *Queue {
	failures := &Seldom{}
	return &Queue{
		cfg:      cfg,
		suspects: owner.Suspects[engine.Key]{Store: cfg.Store, Prefix: engine.CrashesPrefix + cfg.Controller + "/", Parse: engine.ParseKey},
		Owner: owner.New(broker, owner.Config[engine.Key, engine.Causes]{
			Queue: cfg.Rules(), Partitions: cfg.Partitions, Partition: cfg.PartitionOf, Workers: cfg.Workers, ExtendEvery: cfg.ExtendEvery,
			Trusted: cfg.Replica.Trusted,
			Failed: func(err error) {
				if failures.May() {
					cfg.Log.Warn("the bus does not answer; trying again", "controller", cfg.Controller, "err", err)
				}
			},
		}),
	}
}

// Open begins to share the keys, unless this replica only adds to the queue for now.
func (q *Queue) Open(ctx context.Context) error {
	q.cfg.Replica.Leave(ctx, q.cfg.Controller) // a queue that was opened before and never run
	if !q.cfg.Standby {
		q.cfg.Replica.Join(ctx, q.cfg.Controller, q.cfg.Partitions, q.Owner)
	}
	return ctx.Err()
}

// Enqueue implements engine.Queue. Requests of class list for keys of this replica stay in the process: the next list makes
// them again.
func (q *Queue) Enqueue(ctx context.Context, req engine.Request) error {
	if req.Priority == engine.PriorityList && req.Due.IsZero() && !req.Manual && q.Add(req.Key, req.Causes, req.Options()) {
		return nil
	}
	return q.cfg.Publish(ctx, req)
}

// Hand implements owner.Broker.
func (q *Queue) Hand(ctx context.Context, key engine.Key, causes engine.Causes) error {
	return q.cfg.Publish(ctx, engine.Request{Controller: q.cfg.Controller, Key: key, Causes: causes, Priority: engine.PriorityList})
}

// Run implements engine.Queue.
func (q *Queue) Run(intake, work context.Context, newProcess func() engine.Process) error {
	if q.cfg.Standby {
		q.cfg.Replica.Join(intake, q.cfg.Controller, q.cfg.Partitions, q.Owner)
	}
	var leaving sync.WaitGroup
	leaving.Go(func() {
		<-intake.Done()
		q.cfg.Replica.Leave(work, q.cfg.Controller)
	})
	q.Owner.Run(intake, work, func() owner.Process[engine.Key, engine.Causes] {
		process := newProcess()
		return func(ctx context.Context, run *owner.Run[engine.Key, engine.Causes]) queue.Outcome[engine.Causes] {
			req := engine.RequestOf(q.cfg.Controller, &run.Run)
			req.Fence, req.Crashes = run.Fence, run.Crashes
			return engine.AfterRun(&req, process(ctx, req))
		}
	})
	leaving.Wait()
	return nil
}

// Crashes implements owner.Broker.
func (q *Queue) Crashes(ctx context.Context, t owner.Term) (map[engine.Key]int, error) {
	return q.suspects.Crashes(ctx, func(k engine.Key) bool { return q.cfg.PartitionOf(k) == t.Partition })
}

// Died implements owner.Broker.
func (q *Queue) Died(ctx context.Context, t owner.Term) (int, error) {
	return q.suspects.Died(ctx, t.Partition)
}

// Suspect implements owner.Broker.
func (q *Queue) Suspect(ctx context.Context, key engine.Key, crashes int) error {
	return q.suspects.Suspect(ctx, key, crashes)
}

// ReplicaID is a name that no other process has, ever; unique makes it so, and the rest is for people.
func ReplicaID(unique string) string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s-%d-%s", host, os.Getpid(), unique)
}

// Join becomes a replica of an engine. Of cfg, ID, Registry, TTL and Alone must be set; system is what is told of when it does
// not answer.
func Join(ctx context.Context, cfg owner.ReplicaConfig, system string, log *slog.Logger) (*owner.Replica, error) {
	failures := &Seldom{}
	cfg.Lost = engine.ErrLeaseLost
	cfg.Failed = func(err error) {
		if failures.May() {
			log.Warn("the replicas cannot be reached; trying again", "err", err)
		}
	}
	cfg.Fenced = func(fenced bool) {
		if fenced {
			log.Error("no reconcile runs: " + system + " did not answer for so long that another replica may take over")
		} else {
			log.Info(system + " answers; reconciles run")
		}
	}
	return owner.NewReplica(ctx, cfg)
}

// Replicas are the members and who works on what, as a replica knows it.
func Replicas(r *owner.Replica, partitions int) (members []engine.Member, of []engine.Partition) {
	view, owned := r.View(), make(map[string]int)
	for p, c := range view.Claims {
		if p.Number >= partitions {
			continue // from before a migration
		}
		owned[c.Holder]++
		of = append(of, engine.Partition{Controller: p.Group, Number: p.Number, Owner: c.Holder, Epoch: c.Epoch})
	}
	for id, m := range view.Members {
		members = append(members, engine.Member{ID: id, Self: id == r.ID(), Controllers: m.Groups, Partitions: owned[id]})
	}
	return members, of
}

// Seldom lets through what would otherwise be said many times a second. Its zero value is ready for use.
type Seldom struct {
	mu   sync.Mutex
	next time.Time
}

// May says whether it is time to say it again.
func (s *Seldom) May() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Before(s.next) {
		return false
	}
	s.next = now.Add(5 * time.Second)
	return true
}
