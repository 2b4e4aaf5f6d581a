package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/internal/queue"
)

// Suspension holds back a controller or one of its keys. What is asked for meanwhile waits, and is reconciled when the
// suspension ends. Running reconciles are not touched. Suspensions are kept in the bus's store and outlive a restart.
type Suspension struct {
	// Until is when it ends by itself; zero is never.
	Until time.Time `json:"until,omitzero"`
	// Reason is shown to whoever asks why nothing happens.
	Reason string `json:"reason,omitempty"`
	// Deletions are held back too. By default a key whose object is gone is reconciled all the same.
	Deletions bool `json:"deletions,omitempty"`
	// Since is when it began. The engine fills it in.
	Since time.Time `json:"since"`
}

func (s Suspension) pause() *queue.Pause {
	return &queue.Pause{Until: nanos(s.Until), Deletions: s.Deletions}
}

// pauses are the suspensions in force: the store's content, written through.
type pauses struct {
	store kv.Store

	mu    sync.Mutex
	known map[string]map[Key]Suspension // by controller; the zero key is the whole controller
}

const pausePrefix = "pause/"

func pauseName(controller string, key Key) string {
	name := pausePrefix + controller
	if !key.IsZero() {
		name += "/" + key.String()
	}
	return name
}

func (p *pauses) load(ctx context.Context) error {
	entries, err := p.store.List(ctx, pausePrefix)
	if err != nil {
		return fmt.Errorf("load the suspensions: %w", err)
	}
	for _, e := range entries {
		controller, key, s, err := readSuspension(e)
		if err != nil {
			return err
		}
		p.keep(controller, key, s)
	}
	return nil
}

func readSuspension(e kv.Entry) (controller string, key Key, s Suspension, err error) {
	controller, text, ofKey := strings.Cut(strings.TrimPrefix(e.Key, pausePrefix), "/")
	if ofKey {
		key, err = ParseKey(text)
	}
	if err == nil && !e.Deleted {
		err = json.Unmarshal(e.Value, &s)
	}
	if err != nil {
		err = fmt.Errorf("suspension %q cannot be read: %w", e.Key, err)
	}
	return controller, key, s, err
}

// learnSuspension takes in what a replica has written, this one or another.
func (e *Engine) learnSuspension(entry kv.Entry) error {
	controller, key, s, err := readSuspension(entry)
	if err != nil {
		return err
	}
	c, _ := e.runner(controller)
	held := c == nil || key.IsZero() && c.suspended // it is not one of this replica's, or suspended in any case
	switch {
	case entry.Deleted:
		e.pauses.forget(controller, key)
		if !held {
			c.pause(key, nil)
		}
	default:
		if !held {
			c.pause(key, s.pause())
		}
		e.pauses.keep(controller, key, s)
	}
	return nil
}

func (p *pauses) forget(controller string, key Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known[controller], key)
}

func (p *pauses) keep(controller string, key Key, s Suspension) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known == nil {
		p.known = make(map[string]map[Key]Suspension)
	}
	if p.known[controller] == nil {
		p.known[controller] = make(map[Key]Suspension)
	}
	p.known[controller][key] = s
}

// of returns the suspension that holds a key back, if one does.
func (p *pauses) of(c *runner, key Key) (Suspension, bool) {
	if c.suspended {
		return Suspension{Reason: "suspended in its configuration"}, true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range []Key{key, {}} {
		if s, ok := p.known[c.name][k]; ok && (s.Until.IsZero() || time.Now().Before(s.Until)) {
			return s, true
		}
	}
	return Suspension{}, false
}

// apply tells a queue that has just been opened.
func (p *pauses) apply(c *runner, q Queue) {
	if c.suspended {
		q.Pause(nil, &queue.Pause{})
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, s := range p.known[c.name] {
		if key.IsZero() && !c.suspended {
			q.Pause(nil, s.pause())
		} else if !key.IsZero() {
			q.Pause(&key, s.pause())
		}
	}
}

// Suspend holds back a controller, or with a key that one. A second call replaces the first.
func (e *Engine) Suspend(ctx context.Context, controller string, key Key, s Suspension) error {
	c, err := e.runner(controller)
	if err != nil {
		return err
	}
	s.Since = time.Now()
	value, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("suspend %s: %w", controller, err)
	}
	if err := e.overwrite(ctx, pauseName(controller, key), value); err != nil {
		return fmt.Errorf("suspend %s: %w", controller, err)
	}
	e.pauses.keep(controller, key, s)
	c.pause(key, s.pause())
	return nil
}

// overwrite puts an entry in the place of what is there.
func (e *Engine) overwrite(ctx context.Context, name string, value []byte) error {
	for {
		there, err := e.pauses.store.Get(ctx, name)
		if err != nil && !IsNotFound(err) {
			return err
		}
		if _, err = e.pauses.store.Put(ctx, name, value, there.Revision); !errors.Is(err, ErrConflict) {
			return err
		}
	}
}

// Resume ends a suspension, of a controller or of a key. It is no error if there is none. A key is held back still if
// its controller is.
func (e *Engine) Resume(ctx context.Context, controller string, key Key) error {
	c, err := e.runner(controller)
	if err != nil {
		return err
	}
	if key.IsZero() && c.suspended {
		return fmt.Errorf("controller %s is suspended in its configuration: change that", controller)
	}
	if err := e.pauses.store.Delete(ctx, pauseName(controller, key), ""); err != nil {
		return fmt.Errorf("resume %s: %w", controller, err)
	}
	e.pauses.forget(controller, key)
	c.pause(key, nil)
	return nil
}

func (c *runner) pause(key Key, p *queue.Pause) {
	q := c.queue.Load()
	switch {
	case q == nil:
	case key.IsZero():
		q.Pause(nil, p)
	default:
		q.Pause(&key, p)
	}
}

// Suspensions returns what holds back a controller (the zero key) and its keys.
func (e *Engine) Suspensions(controller string) map[Key]Suspension {
	e.pauses.mu.Lock()
	defer e.pauses.mu.Unlock()
	out := make(map[Key]Suspension)
	for k, s := range e.pauses.known[controller] {
		if s.Until.IsZero() || time.Now().Before(s.Until) {
			out[k] = s
		}
	}
	return out
}
