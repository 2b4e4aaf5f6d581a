package engine

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// census finds out what a list lacks: keys that own something and recorded objects that are gone. A deletion that
// happened while nobody watched is carried out or put right because of it.
type census struct {
	mu      sync.Mutex
	owners  map[*runner]map[Key]struct{} // keys that own something by the records, without those that were listed
	listed  map[Key]struct{}             // kept only where objects name their owners themselves
	targets map[Key]owner                // recorded objects of the source, without those that were listed
	rival   map[string]*runner           // the controllers that own objects of the source
}

// censusOf begins a census of the list of a source for some of its routes.
func censusOf(routes []*route, source Source) *census {
	c := &census{owners: make(map[*runner]map[Key]struct{}), rival: make(map[string]*runner)}
	var own *ownership
	for _, r := range routes {
		own = r.to.engine.ownership
		switch r.role {
		case primary:
			c.owners[r.to] = own.owners(r.to.name)
			if len(r.to.marked()) > 0 && c.listed == nil {
				c.listed = make(map[Key]struct{})
			}
		case owned:
			c.rival[r.to.name] = r.to
		case watched, tracked:
		}
	}
	if reader, ok := source.(Reader); ok && len(c.rival) > 0 {
		c.targets = own.covered(reader)
	}
	return c
}

func (c *census) seen(key Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, keys := range c.owners {
		delete(keys, key)
	}
	delete(c.targets, key)
	if c.listed != nil {
		c.listed[key] = struct{}{}
	}
}

// marked returns the sinks that a controller owns, whose objects name their owners and can be listed.
func (c *runner) marked() (readers []Reader) {
	for _, s := range c.owns {
		if r, ok := s.(Reader); ok && keepsOwner(s.(Sink)) {
			readers = append(readers, r)
		}
	}
	return readers
}

// orphans adds the owners that marks name and the list lacks.
func (c *census) orphans(ctx context.Context, to *runner, owners map[Key]struct{}) error {
	for _, r := range to.marked() {
		objects, err := r.List(ctx)
		if err != nil {
			return fmt.Errorf("controller %s: list what it owns: %w", to.name, err)
		}
		for _, o := range objects {
			if _, listed := c.listed[o.Owner]; !listed && !o.Owner.IsZero() && to.primary.(Reader).Covers(o.Owner) {
				owners[o.Owner] = struct{}{}
			}
		}
	}
	return nil
}

// missing asks for the owners that the list lacks, and for those of recorded objects that it lacks.
func (c *census) missing(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ask := func(to *runner, key, deleted Key, t Trigger) error {
		cause := Cause{Trigger: t, Operation: Delete, Time: time.Now()}
		if t == Dependency {
			cause.Key = deleted
		}
		return to.add(ctx, Request{Controller: to.name, Key: key, Priority: PriorityList, Deletion: t == Deleted, Causes: CausesOf(cause)})
	}
	for to, keys := range c.owners {
		if _, ok := to.primary.(Reader); ok && c.listed != nil {
			if err := c.orphans(ctx, to, keys); err != nil {
				return err
			}
		}
		for k := range keys {
			if err := ask(to, k, k, Deleted); err != nil {
				return err
			}
		}
	}
	for target, o := range c.targets {
		if to := c.rival[o.Controller]; to != nil {
			if err := ask(to, o.Key, target, Dependency); err != nil {
				return err
			}
		}
	}
	return nil
}
