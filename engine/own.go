package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
)

// StatusWriter is a source whose objects have a status that is written apart from what is wanted of them.
type StatusWriter interface {
	// ApplyStatus makes the status of an object as given and returns the object's new revision. It writes nothing if nothing differs.
	ApplyStatus(ctx context.Context, key Key, status any, w Write) (revision string, err error)
}

// MergePatcher is a source whose objects can be changed in part.
type MergePatcher interface {
	// MergePatch applies a JSON merge patch (RFC 7386) and returns the object's new revision.
	MergePatch(ctx context.Context, key Key, patch []byte, w Write) (revision string, err error)
}

// Recorder is a source that keeps notes for people about its objects.
type Recorder interface {
	// Record keeps a note, soon and if it can. It does not block.
	Record(key Key, n Note)
}

// Note is something that people who look at an object should know.
type Note struct {
	// Warning says that something is wrong.
	Warning bool
	// Reason is one word in CamelCase, and Message a sentence.
	Reason, Message string
}

// Status writes the status of the object of this run's key. The primary source must be a StatusWriter.
func (rt Runtime) Status(ctx context.Context, status any) error {
	return rt.own(ctx, "status", status, func(ctx context.Context, s *runState, w Write) (string, error) {
		to, ok := s.c.primary.(StatusWriter)
		if !ok {
			return "", fmt.Errorf("%w: the objects of source %s have no status", ErrInvalid, s.c.primary.Name())
		}
		return to.ApplyStatus(ctx, s.req.Key, status, w)
	})
}

// MergePatch changes the object of this run's key: its finalizers or annotations, say. The primary source must be a
// MergePatcher. Prefer Status and Apply where they do.
func (rt Runtime) MergePatch(ctx context.Context, patch any) error {
	return rt.own(ctx, "patch", patch, func(ctx context.Context, s *runState, w Write) (string, error) {
		to, ok := s.c.primary.(MergePatcher)
		if !ok {
			return "", fmt.Errorf("%w: the objects of source %s cannot be patched", ErrInvalid, s.c.primary.Name())
		}
		text, err := json.Marshal(patch)
		if err != nil {
			return "", fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		return to.MergePatch(ctx, s.req.Key, text, w)
	})
}

// own carries out a write to the object of the run's key.
func (rt Runtime) own(ctx context.Context, verb string, value any, write func(ctx context.Context, s *runState, w Write) (string, error)) error {
	s, err := rt.use()
	if err != nil {
		return err
	}
	defer s.done()
	key := s.req.Key
	if s.c.dryRun {
		s.log().InfoContext(ctx, "dry run", "would", verb, "target", key.String(), "value", value)
		return nil
	}
	a := application{s: s}
	if err := a.fenced(); err != nil {
		return fmt.Errorf("%s %s: %w", verb, key, err)
	}
	ctx, end := s.access(ctx, verb, key)
	by := s.descendLocked()
	s.c.engine.lineage.note(key, "", by)
	revision, err := write(ctx, s, a.conditions())
	s.c.engine.lineage.note(key, cmp.Or(revision, "none"), by)
	end(err)
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, key, err)
	}
	return nil
}

// Note tells people who look at the object of this run's key something: by its source, if that is a Recorder, and in the log.
func (rt Runtime) Note(ctx context.Context, n Note) {
	s, err := rt.use()
	if err != nil {
		return
	}
	defer s.done()
	level := slog.LevelInfo
	if n.Warning {
		level = slog.LevelWarn
	}
	s.log().Log(ctx, level, n.Message, "reason", n.Reason)
	s.record(n)
}

func (s *runState) record(n Note) {
	if r, ok := s.c.primary.(Recorder); ok && !s.c.dryRun {
		r.Record(s.req.Key, n)
	}
}
