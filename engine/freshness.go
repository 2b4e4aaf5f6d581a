package engine

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// RevisionComparer is a Reader that may lag behind the events of its source, and whose revisions can be compared. Runtime
// reads such a source again until it has caught up with what caused the run.
type RevisionComparer interface {
	// CompareRevisions is negative if a is older than b, 0 if they are the same and positive if a is newer.
	CompareRevisions(a, b string) (int, error)
}

// The waits for a read that is older than the event that caused the run are those of Grafana's freshness floor.
const (
	staleRetries = 4
	staleWait    = 250 * time.Millisecond
	floorLasts   = 15 * time.Minute
)

// ErrStale says that a read is older than the event that caused the run. It is retried with backoff.
var ErrStale = errors.New("the source has not caught up with the event that caused this run")

// floor returns the newest that the causes of the run know of key, nil if that is nothing or too long ago.
func (s *runState) floor(key Key) (newest *cause) {
	for x := range s.req.Causes.each {
		if x.of(key, s.req.Key) && x.revision != "" && x.trigger != Manual && x.trigger != Requeued && x.trigger != Retried {
			newest = x
		}
	}
	if newest != nil && s.start.Sub(time.Unix(0, newest.time)) > floorLasts {
		return nil
	}
	return newest
}

// read gets an object that is at least as new as what caused the run.
func (s *runState) read(ctx context.Context, r Reader, key Key) (Object, error) {
	o, err := r.Get(ctx, key)
	compare, ok := r.(RevisionComparer)
	if !ok {
		return o, err
	}
	floor := s.floor(key)
	if floor == nil {
		return o, err
	}
	for range staleRetries {
		if stale, failed := floor.above(compare, o, err); !stale || failed != nil {
			return o, errors.Join(err, failed)
		}
		pause(ctx, staleWait)
		if ctx.Err() != nil {
			return Object{}, context.Cause(ctx)
		}
		o, err = r.Get(ctx, key)
	}
	if stale, failed := floor.above(compare, o, err); !stale || failed != nil {
		return o, errors.Join(err, failed)
	}
	return Object{}, fmt.Errorf("%w: revision %q was told, %s was read", ErrStale, floor.revision, revisionRead(o, err))
}

func revisionRead(o Object, err error) string {
	if err != nil {
		return "nothing"
	}
	return fmt.Sprintf("%q", o.Revision)
}

// above says that what was read is older than the cause. Nothing is older than a put; another incarnation is neither.
func (c *cause) above(compare RevisionComparer, o Object, err error) (bool, error) {
	gone := c.operation == Delete || c.operation == Purge
	switch {
	case IsNotFound(err):
		return !gone, nil
	case err == nil && o.Incarnation == c.incarnation:
		n, failed := compare.CompareRevisions(o.Revision, c.revision)
		return n < 0, failed
	default:
		return false, nil
	}
}
