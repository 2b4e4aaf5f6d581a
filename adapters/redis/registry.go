package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/internal/owner"
)

// registry is an owner.Registry: members with the time until which they live, and a claim for each partition, written only over
// the one that was seen. It is read anew when somebody says that it changed, and now and then, for the dead say nothing.
type registry struct {
	bus *Bus

	mu      sync.Mutex
	highest map[owner.Partition]uint64 // the epochs that were seen
	err     error                      // why this replica could last not be announced
}

var _ owner.Registry = (*registry)(nil)

// lookEvery is how often the members are looked at, as a part of their time to live.
const lookEvery = 10

func (g *registry) members() []string { return []string{g.bus.key("members"), g.bus.key("member")} }

func (g *registry) channel() string { return g.bus.key("news") }

// newsMembers says that members or claims have changed.
const newsMembers = "members"

// Announce implements owner.Registry.
func (g *registry) Announce(ctx context.Context, m owner.Member, ttl time.Duration) error {
	data, err := json.Marshal(m)
	if err == nil {
		err = understood(announceScript.Run(ctx, g.bus.conn.client, g.members(), m.ID, data, ttl.Milliseconds(), g.channel()).Err())
	}
	g.mu.Lock()
	g.err = err
	g.mu.Unlock()
	if err != nil {
		return fmt.Errorf("announce this replica: %w", err)
	}
	return nil
}

func (g *registry) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

// Withdraw implements owner.Registry.
func (g *registry) Withdraw(ctx context.Context, id string) error {
	if err := withdrawScript.Run(ctx, g.bus.conn.client, g.members(), id, g.channel()).Err(); err != nil {
		return fmt.Errorf("withdraw this replica: %w", understood(err))
	}
	return nil
}

// Claim implements owner.Registry. It goes behind what the last owner has still to say.
func (g *registry) Claim(ctx context.Context, p owner.Partition, id string, seen uint64) (uint64, error) {
	g.mu.Lock()
	floor := g.highest[p]
	g.mu.Unlock()
	answer, err := g.bus.pipeline.do(ctx, claimScript, []string{g.bus.partition(p).owner}, seen, id, floor, g.channel())
	if err != nil {
		return 0, fmt.Errorf("claim partition %d of controller %s: %w", p.Number, p.Group, err)
	}
	epoch, _ := strconv.ParseUint(fmt.Sprint(answer), 10, 64)
	if epoch == 0 {
		return 0, owner.ErrOvertaken
	}
	g.see(p, epoch)
	return epoch, nil
}

// see remembers an epoch. It returns false if a higher one was seen before.
func (g *registry) see(p owner.Partition, epoch uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if epoch < g.highest[p] {
		return false
	}
	g.highest[p] = epoch
	return true
}

// Watch implements owner.Registry.
func (g *registry) Watch(ctx context.Context, changed func(owner.View)) error {
	look := make(chan struct{}, 1)
	defer g.bus.news.listen(func(channel, text string) {
		if channel == "" || text == newsMembers {
			wake(look)
		}
	})()
	ticker := time.NewTicker(g.bus.conn.ttl() / lookEvery)
	defer ticker.Stop()
	var last owner.View
	for {
		view, err := g.read(ctx)
		if err != nil {
			return fmt.Errorf("look at the other replicas: %w", understood(err))
		}
		if !reflect.DeepEqual(view, last) {
			last = view
			changed(view)
		}
		select {
		case <-look:
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (g *registry) read(ctx context.Context) (owner.View, error) {
	view := owner.View{Members: make(map[string]owner.Member), Claims: make(map[owner.Partition]owner.Claim)}
	living, err := livingScript.Run(ctx, g.bus.conn.client, g.members()).StringSlice()
	if err != nil {
		return view, err
	}
	groups := make(map[string]bool)
	for _, text := range living {
		var m owner.Member
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			return view, fmt.Errorf("member %q: %w", text, err)
		}
		view.Members[m.ID] = m
		for _, group := range m.Groups {
			groups[group] = true
		}
	}
	return view, g.readClaims(ctx, groups, view.Claims)
}

func (g *registry) readClaims(ctx context.Context, groups map[string]bool, into map[owner.Partition]owner.Claim) error {
	pipe := g.bus.conn.client.Pipeline()
	asked := make(map[owner.Partition]*goredis.SliceCmd)
	for group := range groups {
		for n := range g.bus.cfg.Partitions {
			p := owner.Partition{Group: group, Number: n}
			asked[p] = pipe.HMGet(ctx, g.bus.partition(p).owner, "holder", "epoch")
		}
	}
	if len(asked) == 0 {
		return nil
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return err
	}
	for p, cmd := range asked {
		found := cmd.Val()
		holder, _ := found[0].(string)
		text, _ := found[1].(string)
		var epoch uint64
		if text != "" {
			var err error
			if epoch, err = strconv.ParseUint(text, 10, 64); err != nil {
				return fmt.Errorf("%s: epoch %q: %w", g.bus.partition(p).owner, text, err)
			}
		}
		if !g.see(p, epoch) {
			if err := g.recover(ctx, p, epoch); err != nil {
				return err
			}
			continue
		}
		if epoch > 0 {
			into[p] = owner.Claim{Holder: holder, Epoch: epoch}
		}
	}
	return nil
}

// recover makes a claim anew that Redis has lost, as after a failover: nobody's, and of a higher epoch than any before, so that
// whoever held it knows.
func (g *registry) recover(ctx context.Context, p owner.Partition, epoch uint64) error {
	_, err := g.Claim(ctx, p, "", epoch)
	if errors.Is(err, owner.ErrOvertaken) {
		return nil // it was lost by a moment, not by Redis: this replica has just claimed it; or another was quicker
	}
	if err == nil {
		g.bus.conn.log.Error("Redis has lost what it had accepted, as a failover may: what waited there comes back with the next list or resync",
			"controller", p.Group, "partition", p.Number)
	}
	return err
}
