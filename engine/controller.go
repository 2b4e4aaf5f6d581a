package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"
)

// Placement is where a controller runs when several replicas share the work.
type Placement string

// The placements. With one replica they are the same.
const (
	// Sharded spreads the keys over the replicas. It is the default.
	Sharded Placement = "sharded"
	// Singleton runs all keys in one replica.
	Singleton Placement = "singleton"
	// Each runs every key in each replica. Such a controller should not write.
	Each Placement = "each"
)

// Controller describes what is reconciled, why, and by what. It is a value: every method returns a changed copy, so
// that two controllers may grow from one. Mistakes are kept and reported, all at once, by New.
type Controller struct {
	name        string
	primary     Source
	owns        []Source
	watches     []watch
	reads       []Source
	sinks       []Sink
	handler     Handler
	middleware  []Middleware
	backoff     Backoff
	concurrency int
	timeout     time.Duration
	resync      time.Duration
	placement   Placement
	dryRun      bool
	logger      *slog.Logger
	problems    []error
}

type watch struct {
	source Source
	mapper Mapper
}

// NewController starts the description of a controller. The name is part of stream names and metrics: lower-case
// letters, digits and dashes, 63 at most.
func NewController(name string) Controller {
	return Controller{name: name, timeout: 30 * time.Second, concurrency: 1, placement: Sharded}
}

// For names the primary source: a change of one of its objects reconciles that object's key.
func (c Controller) For(s Source) Controller {
	switch {
	case isNil(s):
		return c.problem("For: the source is nil")
	case c.primary != nil:
		return c.problem("For: there is a primary source already, %q", c.primary.Name())
	}
	c.primary = s
	return c
}

// Owns names a source whose objects the controller makes: a change of one reconciles the key that owns it, the former
// owner and the new one. It must be a Sink too.
func (c Controller) Owns(s Source) Controller {
	if isNil(s) {
		return c.problem("Owns: the source is nil")
	}
	sink, ok := s.(Sink)
	if !ok {
		return c.problem("Owns: %q cannot be written; Watches is for what is only observed", s.Name())
	}
	c.owns = append(slices.Clip(c.owns), s)
	return c.WritesTo(sink)
}

// Watches names a source whose events mapper turns into keys of this controller. One source may be watched twice.
func (c Controller) Watches(s Source, mapper Mapper) Controller {
	if isNil(s) {
		return c.problem("Watches: the source is nil")
	}
	if mapper == nil {
		return c.problem("Watches: the mapper of %q is nil", s.Name())
	}
	c.watches = append(slices.Clip(c.watches), watch{s, mapper})
	return c
}

// Reads names a source that is synced before the first reconcile and whose objects can be read. Its changes trigger
// nothing.
func (c Controller) Reads(s Source) Controller {
	if isNil(s) {
		return c.problem("Reads: the source is nil")
	}
	c.reads = append(slices.Clip(c.reads), s)
	return c
}

// WritesTo names a sink that the handler writes and the engine does not watch.
func (c Controller) WritesTo(s Sink) Controller {
	if isNil(s) {
		return c.problem("WritesTo: the sink is nil")
	}
	c.sinks = append(slices.Clip(c.sinks), s)
	return c
}

// WithHandler names the handler.
func (c Controller) WithHandler(h Handler) Controller {
	if h == nil {
		return c.problem("WithHandler: the handler is nil")
	}
	c.handler = h
	return c
}

// WithReconciler names the handler as an interface.
func (c Controller) WithReconciler(r Reconciler) Controller {
	if isNil(r) {
		return c.problem("WithReconciler: the reconciler is nil")
	}
	return c.WithHandler(r.Reconcile)
}

// WithMiddleware puts middleware around the handler, the outermost first, inside the engine's own.
func (c Controller) WithMiddleware(m ...Middleware) Controller {
	c.middleware = append(slices.Clip(c.middleware), m...)
	return c
}

// WithBackoff sets how long failed requests wait. Zero fields have their defaults.
func (c Controller) WithBackoff(b Backoff) Controller {
	if err := b.withDefaults().validate(); err != nil {
		return c.problem("WithBackoff: %w", err)
	}
	c.backoff = b
	return c
}

// WithConcurrency sets how many keys are reconciled at once. Default 1.
func (c Controller) WithConcurrency(n int) Controller {
	if n < 1 {
		return c.problem("WithConcurrency: %d is less than 1", n)
	}
	c.concurrency = n
	return c
}

// WithTimeout sets after how long a reconcile is cancelled. Default 30 s; -1 is never.
func (c Controller) WithTimeout(d time.Duration) Controller {
	if d == 0 {
		return c.problem("WithTimeout: 0 would cancel every reconcile at once; -1 is never")
	}
	c.timeout = d
	return c
}

// WithResync reconciles every key of the primary source again at this interval. Default 0: never. The source must be
// a Reader.
func (c Controller) WithResync(d time.Duration) Controller {
	if d < 0 {
		return c.problem("WithResync: %s is negative; 0 is never", d)
	}
	c.resync = d
	return c
}

// WithPlacement sets where the controller runs when replicas share the work. Default Sharded.
func (c Controller) WithPlacement(p Placement) Controller {
	if p != Sharded && p != Singleton && p != Each {
		return c.problem("WithPlacement: %q is none of sharded, singleton, each", string(p))
	}
	c.placement = p
	return c
}

// WithDryRun reports what the controller would write, and writes nothing.
func (c Controller) WithDryRun() Controller {
	c.dryRun = true
	return c
}

// WithLogger sets the logger. Default: the engine's.
func (c Controller) WithLogger(l *slog.Logger) Controller {
	if l == nil {
		return c.problem("WithLogger: the logger is nil")
	}
	c.logger = l
	return c
}

// Name returns the controller's name.
func (c Controller) Name() string { return c.name }

// String describes the controller with its effective settings.
func (c Controller) String() string {
	primary := ""
	if c.primary != nil {
		primary = c.primary.Name()
	}
	names := func(of []Source) string {
		out := make([]string, 0, len(of))
		for _, s := range of {
			out = append(out, s.Name())
		}
		sort.Strings(out)
		return "[" + strings.Join(slices.Compact(out), " ") + "]"
	}
	watched := make([]Source, 0, len(c.watches))
	for _, w := range c.watches {
		watched = append(watched, w.source)
	}
	return fmt.Sprintf("<Controller name=%q, for=%q, owns=%s, watches=%s, reads=%s, concurrency=%d, timeout=%s, backoff=<%s>, placement=%q>",
		c.name, primary, names(c.owns), names(watched), names(c.reads), c.concurrency, c.timeout, c.backoff.withDefaults(), string(c.placement))
}

func (c Controller) problem(format string, args ...any) Controller {
	c.problems = append(slices.Clip(c.problems), fmt.Errorf(format, args...))
	return c
}

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// validate returns everything that is wrong, each with the controller's name.
func (c Controller) validate() error {
	problems := slices.Clip(c.problems)
	add := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if !validName.MatchString(c.name) {
		add("the name must be lower-case letters, digits and dashes, 63 at most")
	}
	if c.primary == nil {
		add("it has no primary source: call For")
	}
	if c.handler == nil {
		add("it has no handler: call WithHandler or WithReconciler")
	}
	if _, ok := c.primary.(Reader); c.resync > 0 && c.primary != nil && !ok {
		add("WithResync: source %q cannot be listed", c.primary.Name())
	}
	for i, err := range problems {
		problems[i] = fmt.Errorf("controller %q: %w", c.name, err)
	}
	return errors.Join(problems...)
}

// sources returns every source that the controller references.
func (c Controller) sources() []Source {
	all := append([]Source{c.primary}, c.owns...)
	for _, w := range c.watches {
		all = append(all, w.source)
	}
	return append(all, c.reads...)
}

func (c Controller) sinkOf(key Key) Sink {
	for _, s := range c.sinks {
		if s.Covers(key) {
			return s
		}
	}
	return nil
}

func (c Controller) sinkNamed(name string) Sink {
	for _, s := range c.sinks {
		if s.Name() == name {
			return s
		}
	}
	return nil
}
