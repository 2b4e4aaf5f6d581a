package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Sharer is told which partitions of a group are this replica's. An Owner is one.
type Sharer interface {
	Acquire(ctx context.Context, t Term) error
	Surrender(ctx context.Context, partition int, cause error)
	Revoke(partition int, cause error)
}

// ReplicaConfig describes a replica.
type ReplicaConfig struct {
	// ID is this process's and no other's, ever.
	ID       string
	Registry Registry
	// TTL is how long the others believe that a silent replica lives.
	TTL time.Duration
	// Alone goes on when the registry cannot be reached: there is no other replica that could take over, and none may be.
	Alone bool
	// Lost is the cause with which the runs of a lost partition end.
	Lost error
	// Failed is told what goes wrong with the registry; the replica tries again.
	Failed func(err error)
	// Fenced is told when this replica has stopped its work because it could not renew its membership in time, and when it
	// has taken it up again.
	Fenced func(fenced bool)
}

// Replica shares the partitions of its groups with the other replicas. Each computes the same distribution from the same
// members, claims what is its own as soon as the present holder gives it up or is dead, and gives up what is not. There
// is no leader. It trusts its membership by its own clock, for three quarters of the TTL from before its last renewal: when
// the others may begin to take over, its runs are cancelled already.
type Replica struct {
	cfg    ReplicaConfig
	wake   chan struct{}
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	groups  map[string]*group
	view    View
	seen    bool      // there is a view
	until   time.Time // the membership is trusted until then
	fenced  bool
	changed bool // the groups have, since the last announcement
	leaving bool
}

type group struct {
	name    string
	sharer  Sharer
	slots   []slot
	leaving bool
	ctx     context.Context // ends what it waits for when it leaves
	settled chan struct{}   // closed once it has all that is its own
	left    chan struct{}   // closed once it has nothing any more
}

// slot is a partition as this replica holds it.
type slot struct {
	owned bool
	busy  bool // it is being acquired or given up
	epoch uint64
}

// ErrAlone says that a replica that suffers no other has met one.
var ErrAlone = errors.New("there is another replica")

// NewReplica becomes a member and starts to share. It returns when the registry knows it, and with ErrAlone if there are
// others although one of them is to be alone.
func NewReplica(ctx context.Context, cfg ReplicaConfig) (*Replica, error) {
	r := &Replica{cfg: cfg, wake: make(chan struct{}, 1), groups: make(map[string]*group)}
	if err := r.announce(ctx); err != nil {
		return nil, err
	}
	ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	r.done.Go(func() { r.watch(ctx) })
	r.done.Go(func() { r.renew(ctx) })
	r.done.Go(func() { r.run(ctx) })
	if err := r.suffered(ctx); err != nil {
		r.Close(ctx)
		return nil, err
	}
	return r, nil
}

// suffered waits, if this replica or another is to be alone, for those who may be dead.
func (r *Replica) suffered(ctx context.Context) error {
	for last := time.Now().Add(r.cfg.TTL + time.Second); ; {
		r.mu.Lock()
		_, seen := r.view.Members[r.cfg.ID]
		var others []string
		for id, m := range r.view.Members {
			if id != r.cfg.ID && (r.cfg.Alone || m.Alone) {
				others = append(others, id)
			}
		}
		r.mu.Unlock()
		late := time.Now().After(last)
		switch {
		case seen && len(others) == 0, late && !r.cfg.Alone && len(others) == 0:
			return nil
		case late && seen:
			slices.Sort(others)
			return fmt.Errorf("%w: %s", ErrAlone, strings.Join(others, ", "))
		case late:
			return errors.New("it is not known whether there is another replica")
		}
		if !sleep(ctx, r.cfg.TTL/200) {
			return ctx.Err()
		}
	}
}

// Join begins to share the partitions of a group. It returns when this replica has what is its own at present, and at
// the latest when somebody who died before would have been noticed; or when ctx ends.
func (r *Replica) Join(ctx context.Context, name string, partitions int, s Sharer) {
	g := &group{
		name: name, sharer: s, slots: make([]slot, partitions), ctx: context.WithoutCancel(ctx),
		settled: make(chan struct{}), left: make(chan struct{}),
	}
	r.mu.Lock()
	r.groups[name] = g
	r.changed = true
	r.mu.Unlock()
	r.poke()
	timer := time.NewTimer(r.cfg.TTL + time.Second)
	defer timer.Stop()
	select {
	case <-g.settled:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Leave gives up the partitions of a group, each as soon as its runs have ended, and returns when nothing is left of it.
// When ctx ends first, runs are cancelled.
func (r *Replica) Leave(ctx context.Context, name string) {
	r.mu.Lock()
	g := r.groups[name]
	if g == nil {
		r.mu.Unlock()
		return
	}
	g.leaving, g.ctx, r.changed = true, ctx, true
	r.mu.Unlock()
	r.poke()
	<-g.left
}

// Close leaves all groups and ends the membership. What cannot be told to the registry before ctx ends runs out there by
// itself.
func (r *Replica) Close(ctx context.Context) {
	r.mu.Lock()
	r.leaving = true
	names := slices.Collect(maps.Keys(r.groups))
	r.mu.Unlock()
	for _, name := range names {
		r.Leave(ctx, name)
	}
	r.cancel()
	r.done.Wait()
	if err := r.cfg.Registry.Withdraw(ctx, r.cfg.ID); err != nil {
		r.cfg.Failed(err)
	}
}

// ID is the replica's own.
func (r *Replica) ID() string { return r.cfg.ID }

// View returns what members and claims are known of.
func (r *Replica) View() View {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.view
}

// Trusted says whether this replica may work: its membership was renewed in time.
func (r *Replica) Trusted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.trusted()
}

func (r *Replica) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Replica) trusted() bool { return r.cfg.Alone || time.Now().Before(r.until) }

// announce tells the others that this replica lives. What is trusted is counted from before the call.
func (r *Replica) announce(ctx context.Context) error {
	r.mu.Lock()
	m := Member{ID: r.cfg.ID, Alone: r.cfg.Alone}
	for name, g := range r.groups {
		if !g.leaving {
			m.Groups = append(m.Groups, name)
		}
	}
	r.changed = false
	r.mu.Unlock()
	slices.Sort(m.Groups)
	before := time.Now()
	ctx, cancel := context.WithTimeout(ctx, r.cfg.TTL/3)
	defer cancel()
	err := r.cfg.Registry.Announce(ctx, m, r.cfg.TTL)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.changed = true
		return err
	}
	r.until = before.Add(r.cfg.TTL * 3 / 4)
	return nil
}

// renew announces this replica three times in its TTL, more often while that fails.
func (r *Replica) renew(ctx context.Context) {
	for {
		wait := r.cfg.TTL / 3
		if r.fails(ctx, r.announce(ctx)) {
			wait = r.cfg.TTL / 20
		}
		r.poke()
		if !sleep(ctx, wait) {
			return
		}
	}
}

func (r *Replica) fails(ctx context.Context, err error) bool {
	if err != nil && ctx.Err() == nil {
		r.cfg.Failed(err)
	}
	return err != nil
}

func (r *Replica) watch(ctx context.Context) {
	for ctx.Err() == nil {
		err := r.cfg.Registry.Watch(ctx, func(v View) {
			r.mu.Lock()
			// What this replica wrote itself may not have come back yet.
			claims := maps.Clone(v.Claims)
			for p, known := range r.view.Claims {
				if known.Epoch > claims[p].Epoch {
					claims[p] = known
				}
			}
			r.view, r.seen = View{Members: v.Members, Claims: claims}, true
			r.mu.Unlock()
			r.poke()
		})
		r.fails(ctx, err)
		sleep(ctx, r.cfg.TTL/20)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// run settles whenever something has changed, and when the trust in the membership ends.
func (r *Replica) run(ctx context.Context) {
	for {
		r.mu.Lock()
		changed := r.changed
		left := max(time.Until(r.until), 0)
		fenced := !r.trusted()
		r.mu.Unlock()
		if changed && !fenced {
			r.fails(ctx, r.announce(ctx))
		}
		r.settle()
		timer := time.NewTimer(left + 1)
		if fenced {
			timer.Stop()
		}
		select {
		case <-r.wake:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// settle compares what this replica holds with what it should, and begins to change it.
func (r *Replica) settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	trusted := r.trusted()
	if r.fenced == trusted && r.cfg.Fenced != nil {
		r.fenced = !trusted
		r.cfg.Fenced(!trusted)
	}
	for _, g := range r.groups {
		if !trusted {
			for p := range g.slots {
				g.sharer.Revoke(p, r.cfg.Lost)
				g.slots[p].owned = false
			}
		}
		if missing, held := r.settleGroup(g, trusted && r.seen); g.leaving {
			if !held {
				delete(r.groups, g.name)
				close(g.left)
			}
		} else if trusted && r.seen && !missing {
			select {
			case <-g.settled:
			default:
				close(g.settled)
			}
		}
	}
}

// settleGroup says whether something that is this replica's is missing, and whether it holds anything at all.
func (r *Replica) settleGroup(g *group, may bool) (missing, held bool) {
	var holders []string
	if may {
		holders = distribute(g.name, len(g.slots), r.candidates(g))
	}
	for p := range g.slots {
		s, claim := &g.slots[p], r.view.Claims[Partition{g.name, p}]
		mine := may && holders[p] == r.cfg.ID
		_, alive := r.view.Members[claim.Holder]
		missing = missing || mine && !s.owned
		held = held || s.owned || s.busy
		switch {
		case s.busy:
		case s.owned && claim.Epoch > s.epoch:
			g.sharer.Revoke(p, r.cfg.Lost)
			s.owned = false
			r.poke()
		case s.owned && !mine, !s.owned && !mine && may && claim.Holder == r.cfg.ID:
			s.busy, held = true, true
			ctx, seen := g.ctx, claim.Epoch
			if s.owned {
				seen = s.epoch
			}
			r.done.Go(func() { r.giveUp(ctx, g, p, seen) })
		case !s.owned && mine && (claim.Holder == "" || claim.Holder == r.cfg.ID || !alive):
			s.busy, held = true, true
			ctx, orphaned := g.ctx, claim.Holder != "" && claim.Holder != r.cfg.ID
			r.done.Go(func() { r.acquire(ctx, g, p, claim.Epoch, orphaned) })
		}
	}
	return missing, held
}

// candidates are the members that work on a group.
func (r *Replica) candidates(g *group) []string {
	var ids []string
	for id, m := range r.view.Members {
		if id != r.cfg.ID && slices.Contains(m.Groups, g.name) {
			ids = append(ids, id)
		}
	}
	if !g.leaving {
		ids = append(ids, r.cfg.ID)
	}
	return ids
}

func (r *Replica) acquire(ctx context.Context, g *group, p int, seen uint64, orphaned bool) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.TTL)
	defer cancel()
	at := Partition{g.name, p}
	epoch, err := r.cfg.Registry.Claim(ctx, at, r.cfg.ID, seen)
	if err == nil {
		r.note(at, Claim{r.cfg.ID, epoch})
		err = g.sharer.Acquire(ctx, Term{Partition: p, Epoch: epoch, Orphaned: orphaned})
	}
	r.did(ctx, g, p, err, func(s *slot) { s.owned, s.epoch = true, epoch })
}

func (r *Replica) giveUp(ctx context.Context, g *group, p int, seen uint64) {
	at := Partition{g.name, p}
	g.sharer.Surrender(ctx, p, r.cfg.Lost)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.TTL/2)
	defer cancel()
	epoch, err := r.cfg.Registry.Claim(last, at, "", seen)
	if err == nil {
		r.note(at, Claim{"", epoch})
	}
	r.mu.Lock()
	g.slots[p].owned = false
	r.mu.Unlock()
	r.did(ctx, g, p, err, func(*slot) {})
}

// note remembers a claim that this replica wrote itself.
func (r *Replica) note(p Partition, c Claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	claims := maps.Clone(r.view.Claims)
	if claims[p].Epoch < c.Epoch {
		claims[p] = c
	}
	r.view.Claims = claims
}

// did ends what giveUp or acquire began. After an error it is tried again, unless the view shows by then that there is no
// need to.
func (r *Replica) did(ctx context.Context, g *group, p int, err error, changed func(*slot)) {
	switch ctx := context.WithoutCancel(ctx); {
	case err == nil:
	case errors.Is(err, ErrOvertaken):
		sleep(ctx, r.cfg.TTL/100) // the view will show it soon
	default:
		r.cfg.Failed(err)
		sleep(ctx, r.cfg.TTL/20)
	}
	r.mu.Lock()
	s := &g.slots[p]
	s.busy = false
	if err == nil {
		changed(s)
	}
	r.mu.Unlock()
	r.poke()
}
