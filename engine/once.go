package engine

import (
	"context"
	"errors"
	"fmt"
)

// ReconcileOnce reconciles one key through the controller's whole chain, with no bus, source or queue running: for tests
// and for trying out. It reads and writes the real sources and sinks. What the queue would do with the outcome is told
// and not done.
func (c Controller) ReconcileOnce(ctx context.Context, key Key, causes ...Cause) (Outcome, error) {
	r, err := c.alone(ctx)
	if err != nil {
		return Outcome{}, err
	}
	return r.process(ctx, &worker{history: history{size: 1}}, Request{Controller: c.name, Key: key, Causes: CausesOf(causes...)}), nil
}

// MapOnce returns the keys that an event would reconcile, and reconciles nothing.
func (c Controller) MapOnce(ctx context.Context, e Event) ([]Key, error) {
	r, err := c.alone(ctx)
	if err != nil {
		return nil, err
	}
	var keys []Key
	var errs error
	found := false
	for _, router := range r.routers {
		if router.source.Name() != e.Source {
			continue
		}
		found = true
		for _, x := range router.routesTo(r) {
			switch x.role {
			case primary:
				keys = append(keys, e.Key)
			case owned:
				owners, _, err := r.ownersOf(ctx, &e)
				errs = errors.Join(errs, err)
				keys = append(keys, owners...)
			case watched:
				mapped, err := protected(ctx, x.mapper, e)
				keys, errs = append(keys, mapped...), errors.Join(errs, err)
			case tracked: // nothing was read yet
			}
		}
	}
	if !found {
		return nil, fmt.Errorf("%w: controller %s references no source %q", ErrInvalid, c.name, e.Source)
	}
	return keys, errs
}

// alone returns the controller in an engine of its own that does not run.
func (c Controller) alone(ctx context.Context) (*runner, error) {
	e, err := New(Config{Controllers: []Controller{c}})
	if err != nil {
		return nil, err
	}
	if err := e.ownership.load(ctx); err != nil {
		return nil, err
	}
	return e.runners[0], nil
}
