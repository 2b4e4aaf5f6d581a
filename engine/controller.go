package engine

import (
	"context"
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
	// Each runs every key in each replica, which follows the sources itself and keeps its requests in memory. Such a
	// controller should not write.
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
	initializer func(ctx context.Context) error
	onStart     func(ctx context.Context)
	onStop      func(ctx context.Context)
	background  []func(ctx context.Context) error
	backoff     Backoff
	limit       *RateLimit
	debounce    Debounce
	suspended   bool
	tracksReads bool
	heartbeat   time.Duration
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

// WithRateLimit bounds how often reconciles start. Several controllers may be given the same limit and share it.
func (c Controller) WithRateLimit(l *RateLimit) Controller {
	if l == nil {
		return c.problem("WithRateLimit: the limit is nil")
	}
	if err := l.validate(); err != nil {
		return c.problem("WithRateLimit: %w", err)
	}
	c.limit = l
	return c
}

// WithDebounce waits until a key has been quiet before it is reconciled. It delays no retry, no requeue and no manual
// request.
func (c Controller) WithDebounce(d Debounce) Controller {
	if err := d.validate(); err != nil {
		return c.problem("WithDebounce: %w", err)
	}
	c.debounce = d
	return c
}

// WithInitializer calls f before the first reconcile, and again before the first one after a lost lease. While it fails
// nothing is reconciled, and it is called again after the waits of a crash-looping source.
func (c Controller) WithInitializer(f func(ctx context.Context) error) Controller {
	if f == nil {
		return c.problem("WithInitializer: the function is nil")
	}
	c.initializer = f
	return c
}

// OnStart calls f after the initializer and before the first reconcile.
func (c Controller) OnStart(f func(ctx context.Context)) Controller {
	if f == nil {
		return c.problem("OnStart: the function is nil")
	}
	c.onStart = f
	return c
}

// OnStop calls f once after the last reconcile and the last background work, when the controller stops or loses its lease.
// Its sources can still be read. At shutdown its context lasts until the drain timeout.
func (c Controller) OnStop(f func(ctx context.Context)) Controller {
	if f == nil {
		return c.problem("OnStop: the function is nil")
	}
	c.onStop = f
	return c
}

// WithBackground runs f beside the reconciles for as long as the controller works, and waits for it at the end. If it
// fails it is run again after the waits of a crash-looping source; nil ends it for good. It may run an Engine of its own.
func (c Controller) WithBackground(f func(ctx context.Context) error) Controller {
	if f == nil {
		return c.problem("WithBackground: the function is nil")
	}
	c.background = append(slices.Clip(c.background), f)
	return c
}

// Suspended holds back every key of the controller. What is asked for meanwhile waits.
func (c Controller) Suspended() Controller {
	c.suspended = true
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

// WithHeartbeat cancels a reconcile, with ErrNoHeartbeat as the cause, that does not call Runtime.Heartbeat for this long:
// for runs that may take hours and must not hang for hours. Default 0: nobody waits for heartbeats. The timeout holds all
// the same; WithTimeout(-1) turns that off.
func (c Controller) WithHeartbeat(d time.Duration) Controller {
	if d < 0 {
		return c.problem("WithHeartbeat: %s is negative; 0 is off", d)
	}
	c.heartbeat = d
	return c
}

// TracksReads reconciles a key again when something changes that its last run read through its Runtime, with no mapper
// written. Sources that are only read are then watched too. 512 objects of a run are remembered; a run that lists a source
// depends on all of it.
func (c Controller) TracksReads() Controller {
	c.tracksReads = true
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
