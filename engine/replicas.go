package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Member is a replica of the engine as all see it.
type Member struct {
	ID string `json:"id"`
	// Self says that it is this process.
	Self bool `json:"self,omitempty"`
	// Controllers are those whose keys it shares, and Partitions how many it has of them.
	Controllers []string `json:"controllers"`
	Partitions  int      `json:"partitions"`
}

// Partition is a part of a controller's keys.
type Partition struct {
	Controller string `json:"controller"`
	Number     int    `json:"number"`
	// Owner is the member that works on it; empty while nobody does.
	Owner string `json:"owner,omitempty"`
	// Epoch is the fence of its runs.
	Epoch uint64 `json:"epoch"`
}

// sharedBus is what a bus can do whose replicas know of each other.
type sharedBus interface {
	// Replicas returns the members and who works on what.
	Replicas() ([]Member, []Partition)
	// PartitionOf is the number of a key's partition, the same for all controllers.
	PartitionOf(key Key) int
	// Ask passes a question to a member and waits for its answer.
	Ask(ctx context.Context, member string, question []byte) ([]byte, error)
	// Answer answers what others ask, until ctx ends. Several questions are answered at once.
	Answer(ctx context.Context, answer func(ctx context.Context, question []byte) []byte) error
}

// Replicas returns the replicas of the engine and who works on what. Both are empty on a bus that is not shared.
func (e *Engine) Replicas() (members []Member, partitions []Partition) {
	b, ok := e.cfg.Bus.(sharedBus)
	if !ok {
		return nil, nil
	}
	members, partitions = b.Replicas()
	slices.SortFunc(members, func(a, b Member) int { return strings.Compare(a.ID, b.ID) })
	slices.SortFunc(partitions, func(a, b Partition) int {
		return cmp.Or(strings.Compare(a.Controller, b.Controller), cmp.Compare(a.Number, b.Number))
	})
	return members, partitions
}

// question is what one replica asks another.
type question struct {
	Do         string `json:"do"` // explain, items or reconcile
	Controller string `json:"controller"`
	Key        Key    `json:"key"`
	Limit      int    `json:"limit,omitempty"`
	Token      string `json:"token,omitempty"`
}

type answer struct {
	Explanation Explanation   `json:"explanation,omitzero"`
	Items       []Explanation `json:"items,omitempty"`
	Total       int           `json:"total,omitempty"`
	Run         Run           `json:"run,omitzero"`
	Error       string        `json:"error,omitempty"`
}

// answerWithin is how long another replica may take to tell what it knows.
const answerWithin = 2 * time.Second

// ownerOf returns the other member that works on a key; empty if it is this one, nobody, or nobody else can be.
func (e *Engine) ownerOf(c *runner, key Key) (sharedBus, string) {
	b, ok := e.cfg.Bus.(sharedBus)
	if !ok || c.placement == Each {
		return nil, ""
	}
	members, partitions := b.Replicas()
	at := b.PartitionOf(key)
	for _, p := range partitions {
		if p.Controller != c.name || p.Number != at {
			continue
		}
		for _, m := range members {
			if m.ID == p.Owner && !m.Self {
				return b, m.ID
			}
		}
	}
	return nil, ""
}

func ask(ctx context.Context, b sharedBus, member string, q question) (answer, error) {
	var a answer
	data, err := json.Marshal(q)
	if err != nil {
		return a, fmt.Errorf("ask %s: %w", member, err)
	}
	data, err = b.Ask(ctx, member, data)
	if err != nil {
		return a, fmt.Errorf("ask %s: %w", member, err)
	}
	if err := json.Unmarshal(data, &a); err != nil {
		return a, fmt.Errorf("the answer of %s: %w", member, err)
	}
	if a.Error != "" {
		return a, fmt.Errorf("%s answers: %s", member, a.Error)
	}
	return a, nil
}

// answer is the other side of ask.
func (e *Engine) answer(ctx context.Context, data []byte) []byte {
	var q question
	var a answer
	err := json.Unmarshal(data, &q)
	if err == nil {
		switch q.Do {
		case "explain":
			a.Explanation, err = e.Explain(q.Controller, q.Key)
		case "items":
			a.Items, a.Total, err = e.explainItems(q.Controller, q.Limit)
		case "reconcile":
			a.Run, err = e.reconcile(ctx, q.Controller, q.Key, q.Token)
		default:
			err = fmt.Errorf("this version does not know how to %q", q.Do)
		}
	}
	if err != nil {
		a = answer{Error: err.Error()}
	}
	out, err := json.Marshal(a)
	if err != nil {
		out, _ = json.Marshal(answer{Error: err.Error()}) // of text alone
	}
	return out
}

// ExplainAnywhere is Explain by whichever replica works on the key.
func (e *Engine) ExplainAnywhere(ctx context.Context, controller string, key Key) (Explanation, error) {
	c, err := e.runner(controller)
	if err != nil {
		return Explanation{}, err
	}
	b, owner := e.ownerOf(c, key)
	if owner == "" {
		return e.Explain(controller, key)
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	a, err := ask(ctx, b, owner, question{Do: "explain", Controller: controller, Key: key})
	return a.Explanation, err
}

// explainItems explains the keys that are not idle in this process, limit of them at most, and counts all.
func (e *Engine) explainItems(controller string, limit int) ([]Explanation, int, error) {
	items, err := e.Items(controller)
	if err != nil {
		return nil, 0, err
	}
	out := make([]Explanation, 0, min(len(items), limit))
	for _, it := range items[:cap(out)] {
		x := Explanation{Controller: controller, Key: it.Key}
		x.describe(it)
		out = append(out, x)
	}
	return out, len(items), nil
}

// ItemsAnywhere explains the keys of a controller that are not idle, in all replicas, in the order of their keys: up to limit
// of each replica's. Total is how many there are. With an error it returns what the replicas said that did answer.
func (e *Engine) ItemsAnywhere(ctx context.Context, controller string, limit int) (items []Explanation, total int, err error) {
	items, total, err = e.explainItems(controller, limit)
	b, ok := e.cfg.Bus.(sharedBus)
	if err != nil || !ok {
		return items, total, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	var group sync.WaitGroup
	var mu sync.Mutex
	members, _ := b.Replicas()
	for _, m := range members {
		if m.Self || !slices.Contains(m.Controllers, controller) {
			continue
		}
		group.Go(func() {
			a, failed := ask(ctx, b, m.ID, question{Do: "items", Controller: controller, Limit: limit})
			mu.Lock()
			defer mu.Unlock()
			items, total, err = append(items, a.Items...), total+a.Total, errors.Join(err, failed)
		})
	}
	group.Wait()
	slices.SortFunc(items, func(a, b Explanation) int { return strings.Compare(a.Key.String(), b.Key.String()) })
	return items, total, err
}
