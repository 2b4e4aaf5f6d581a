package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Config describes an engine. Only Controllers is required.
type Config struct {
	// Name prefixes what the engine keeps on its bus, so that several can share one. Default "windlass".
	Name        string
	Controllers []Controller
	// Bus carries events and requests. Default: a MemoryBus.
	Bus Bus
	// Middleware is put around the engine's own, the outermost first.
	Middleware []Middleware
	// Emit is put around the Emit that sources call, the outermost first. The event has its Source by then.
	Emit  []func(Emit) Emit
	Hooks Hooks
	// Logger is where the engine reports. Default: nowhere.
	Logger *slog.Logger
	// DrainTimeout is how long running reconciles may take at shutdown before they are cancelled. Default 30 s.
	DrainTimeout time.Duration
}

// Engine runs controllers. Create it with New.
type Engine struct {
	name      string
	bus       Bus
	publisher message.Publisher
	hooks     Hooks
	log       *slog.Logger
	drain     time.Duration
	ownership *ownership
	routers   []*router
	runners   []*runner
	wrapEmit  []func(Emit) Emit
	started   atomic.Bool
	ready     chan struct{} // closed once the queues are open
}

// runner is a controller at work.
type runner struct {
	Controller
	engine  *Engine
	log     *slog.Logger
	chain   Handler
	queue   Queue
	sources []Source // that it references
	mapping *runner  // of failed mappings; nil where no mapper can fail
	waitFor []*router

	workersMu sync.Mutex
	workers   []*worker
}

// New checks the configuration and reports everything that is wrong with it at once.
func New(cfg Config) (*Engine, error) {
	if cfg.Name == "" {
		cfg.Name = "windlass"
	}
	if cfg.Bus == nil {
		cfg.Bus = NewMemoryBus()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		name: cfg.Name, bus: cfg.Bus, publisher: cfg.Bus.Publisher(), hooks: cfg.Hooks, log: cfg.Logger, drain: cfg.DrainTimeout,
		wrapEmit: cfg.Emit, ownership: &ownership{store: cfg.Bus.Store()}, ready: make(chan struct{}),
	}
	for _, c := range cfg.Controllers {
		e.addRunner(c, cfg.Middleware)
	}
	return e, nil
}

func (cfg Config) validate() error {
	var problems []error
	if !validName.MatchString(cfg.Name) {
		problems = append(problems, fmt.Errorf("engine %q: the name must be lower-case letters, digits and dashes, 63 at most", cfg.Name))
	}
	if len(cfg.Controllers) == 0 {
		problems = append(problems, errors.New("the engine has no controllers"))
	}
	controllers, sources := make(map[string]bool), make(map[string]Source)
	for _, c := range cfg.Controllers {
		if controllers[c.name] {
			problems = append(problems, fmt.Errorf("controller %q: there are two of this name", c.name))
		}
		controllers[c.name] = true
		problems = append(problems, c.validate())
		for _, s := range c.sources() {
			if s == nil {
				continue
			}
			if !reflect.TypeOf(s).Comparable() {
				problems = append(problems, fmt.Errorf("controller %q: source %q: a %T cannot be compared with ==; use a pointer", c.name, s.Name(), s))
				continue
			}
			if other, ok := sources[s.Name()]; ok && other != s {
				problems = append(problems, fmt.Errorf("controller %q: source %q: another source has this name", c.name, s.Name()))
			}
			sources[s.Name()] = s
		}
	}
	return errors.Join(problems...)
}

func (e *Engine) addRunner(c Controller, outer []Middleware) {
	log := e.log
	if c.logger != nil {
		log = c.logger
	}
	r := &runner{Controller: c, engine: e, log: log.With("controller", c.name), sources: c.sources()}
	if len(c.watches) > 0 {
		r.mapping = mappingOf(r)
		r.mapping.build(outer)
	}
	r.build(outer)
	e.runners = append(e.runners, r)
	e.routerOf(c.primary, r).add(route{to: r, role: primary})
	for _, s := range c.owns {
		e.routerOf(s, r).add(route{to: r, role: owned})
	}
	for _, w := range c.watches {
		e.routerOf(w.source, r).add(route{to: r, role: watched, mapper: w.mapper})
	}
	for _, s := range c.reads {
		e.routerOf(s, r)
	}
}

func (c *runner) build(outer []Middleware) {
	own := []Middleware{logged, c.backoff.withDefaults().middleware, deadline(c.timeout), recovered}
	c.chain = chain(chain(c.handler, c.middleware...), append(append([]Middleware(nil), outer...), own...)...)
}

// routerOf returns the router of a source and makes r wait for its first list.
func (e *Engine) routerOf(s Source, r *runner) *router {
	var found *router
	for _, x := range e.routers {
		if x.source == s {
			found = x
		}
	}
	if found == nil {
		found = &router{engine: e, source: s, topic: EventTopic(s.Name()), synced: make(chan struct{})}
		e.routers = append(e.routers, found)
	}
	r.waitFor = append(r.waitFor, found)
	return found
}

func (c *runner) readerOf(key Key) Reader {
	for _, s := range c.sources {
		if r, ok := s.(Reader); ok && r.Covers(key) {
			return r
		}
	}
	return nil
}

func (r *router) add(x route) { r.routes = append(r.routes, x) }

// ErrAlreadyRan says that Run was called twice.
var ErrAlreadyRan = errors.New("engine: Run can be called only once")

// Run runs the sources and controllers until ctx ends, or until something fails that the engine cannot go on without.
// At the end it takes nothing new, waits for the running reconciles, cancels them with ErrShutdown after the drain
// timeout, and returns once all its goroutines have ended: nil if ctx ended it.
func (e *Engine) Run(ctx context.Context) error {
	if !e.started.CompareAndSwap(false, true) {
		return ErrAlreadyRan
	}
	intake, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(intake, func() {
		timer := time.AfterFunc(e.drain, func() { cancel(ErrShutdown) })
		context.AfterFunc(work, func() { timer.Stop() })
	})()
	if err := e.open(intake); err != nil {
		return err
	}
	close(e.ready)

	var group sync.WaitGroup
	for _, r := range e.routers {
		group.Go(func() { r.supervise(intake) })
	}
	for _, c := range e.runners {
		group.Go(func() {
			if err := c.run(intake, work); err != nil {
				stop(fmt.Errorf("controller %s: %w", c.name, err))
			}
		})
	}
	group.Wait()
	if ctx.Err() == nil {
		return context.Cause(intake)
	}
	return nil
}

// open opens the queues before any source runs, so that an emitted event has somewhere to go.
func (e *Engine) open(ctx context.Context) error {
	if err := e.ownership.load(ctx); err != nil {
		return err
	}
	for _, c := range e.runners {
		for _, r := range []*runner{c, c.mapping} {
			if r == nil {
				continue
			}
			q, err := e.bus.Queue(ctx, QueueConfig{
				Engine: e.name, Controller: r.name, Workers: r.concurrency, Malformed: e.malformed,
			})
			if err != nil {
				return fmt.Errorf("open the queue of controller %s: %w", r.name, err)
			}
			r.queue = q
		}
	}
	return nil
}

func (e *Engine) malformed(topic string, err error) {
	e.log.Error("malformed message set aside", "topic", topic, "err", err)
	if e.hooks.MessageMalformed != nil {
		e.hooks.MessageMalformed(topic, err)
	}
}

// tellRival reports to a controller that another one claims what it owns. The claimant has its error.
func (e *Engine) tellRival(ctx context.Context, holder, claimant owner, target Key) {
	for _, c := range e.runners {
		if c.name == holder.Controller && holder.Controller != claimant.Controller {
			c.log.WarnContext(ctx, "another controller claims an object of this one", "key", holder.Key.String(),
				"target", target.String(), "claimant", claimant.String())
		}
	}
}

// run works on the controller's requests once every source that it references has ended its first list.
func (c *runner) run(intake, work context.Context) error {
	for _, r := range c.waitFor {
		select {
		case <-r.synced:
		case <-intake.Done():
			return nil
		}
	}
	c.log.InfoContext(intake, "controller started", "for", c.primary.Name(), "concurrency", c.concurrency)
	var group sync.WaitGroup
	var mappingErr error
	if c.mapping != nil {
		group.Go(func() { mappingErr = c.mapping.queue.Run(intake, work, c.mapping.newProcess) })
	}
	if c.resync > 0 {
		group.Go(func() { c.resyncEvery(intake, c.resync) })
	}
	err := c.queue.Run(intake, work, c.newProcess)
	group.Wait()
	return errors.Join(err, mappingErr)
}

// worker is where a worker of a controller shows what it does.
type worker struct {
	state *runState
	since atomic.Int64 // when its run began, 0: it has none
}

// newProcess returns what one worker calls for each of its requests.
func (c *runner) newProcess() Process {
	w := &worker{}
	c.workersMu.Lock()
	c.workers = append(c.workers, w)
	c.workersMu.Unlock()
	return func(ctx context.Context, req Request) Outcome { return c.process(ctx, w, req) }
}

// process runs the chain for one request.
func (c *runner) process(ctx context.Context, w *worker, req Request) Outcome {
	if w.state == nil {
		w.state = &runState{c: c}
	}
	s := w.state
	rt := s.begin(req)
	w.since.Store(s.start.UnixNano())
	hooks := &c.engine.hooks
	if hooks.RunStarted != nil {
		hooks.RunStarted(s.req)
	}
	res, err := c.chain(ctx, rt, s.req)
	o := Outcome{
		Result: res, Err: err, Interrupted: err != nil && ctx.Err() != nil, TimedOut: err != nil && s.timedOut, Traceparent: s.traceparent,
	}
	s.mu.Lock()
	o.Revision, o.Incarnation = s.revision, s.incarnation
	s.mu.Unlock()
	o.ended = time.Now()
	w.since.Store(0)
	if hooks.RunEnded != nil {
		hooks.RunEnded(s.req, o, o.ended.Sub(s.start))
	}
	if !s.end() {
		w.state = nil
	}
	return o
}

// resyncEvery asks for every key of the primary source at an interval.
func (c *runner) resyncEvery(ctx context.Context, interval time.Duration) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		objects, err := c.primary.(Reader).List(ctx)
		if err != nil {
			c.log.WarnContext(ctx, "resync skipped: the source cannot be listed", "source", c.primary.Name(), "err", err)
			continue
		}
		for _, o := range objects {
			cause := Cause{Trigger: Resynced, Operation: Resync, Revision: o.Revision, Incarnation: o.Incarnation, Time: time.Now()}
			if err := c.add(ctx, Request{Controller: c.name, Key: o.Key, Priority: PriorityList, Causes: CausesOf(cause)}); err != nil {
				c.log.WarnContext(ctx, "resync cut short", "err", err)
				break
			}
		}
	}
}

func (c *runner) enqueue(ctx context.Context, key Key, after time.Duration, cause Cause) error {
	if r, ok := c.primary.(Reader); ok && !r.Covers(key) {
		return fmt.Errorf("%w: %s is not a key of source %s, which controller %s is for", ErrInvalid, key, c.primary.Name(), c.name)
	}
	req := Request{Controller: c.name, Key: key, Priority: PriorityLive, Causes: CausesOf(cause), Manual: cause.Trigger == Manual && after <= 0}
	if after > 0 {
		req.Due = time.Now().Add(after)
	}
	return c.add(ctx, req)
}

// Enqueue asks for a run of a key from outside, after a while or, with zero, now. A request for now passes hard delays
// and brings back a parked key; one for later outlives the runs that start before its time. It fails before Run has
// opened the queues.
func (e *Engine) Enqueue(ctx context.Context, controller string, key Key, after time.Duration) error {
	c, err := e.runner(controller)
	if err != nil {
		return err
	}
	return c.enqueue(ctx, key, after, Cause{Trigger: Manual, Key: key, Time: time.Now()})
}

// Items returns the keys of a controller that are not idle, in the order of their keys.
func (e *Engine) Items(controller string) ([]Item, error) {
	c, err := e.runner(controller)
	if err != nil {
		return nil, err
	}
	items := c.queue.Items()
	for i := range items {
		x := &items[i]
		x.Value, x.LaterValue, x.Waiting = x.Value.of(&x.Key), x.LaterValue.of(&x.Key), x.Waiting.of(&x.Key)
	}
	sort.Slice(items, func(i, j int) bool { return items[i].Key.String() < items[j].Key.String() })
	return items, nil
}

// Stats counts the keys of one controller.
type Stats struct {
	queue.Stats
	// Busy is how long the running reconciles have run, added up; Longest is that of the one that has run longest.
	Busy, Longest time.Duration
}

// Stats counts the keys of each controller; before Run has opened the queues there are none.
func (e *Engine) Stats() map[string]Stats {
	stats := make(map[string]Stats, len(e.runners))
	select {
	case <-e.ready:
	default:
		return stats
	}
	for _, c := range e.runners {
		stats[c.name] = c.stats()
		if c.mapping != nil {
			stats[c.mapping.name] = c.mapping.stats()
		}
	}
	return stats
}

func (c *runner) stats() Stats {
	s := Stats{Stats: c.queue.Stats()}
	c.workersMu.Lock()
	defer c.workersMu.Unlock()
	for _, w := range c.workers {
		if since := w.since.Load(); since != 0 {
			age := max(time.Since(time.Unix(0, since)), 0)
			s.Busy += age
			s.Longest = max(s.Longest, age)
		}
	}
	return s
}

func (e *Engine) runner(controller string) (*runner, error) {
	select {
	case <-e.ready:
	default:
		return nil, errors.New("engine: not running yet")
	}
	for _, c := range e.runners {
		if c.name == controller {
			return c, nil
		}
	}
	return nil, fmt.Errorf("engine: there is no controller %q", controller)
}

// Controllers returns the names of the controllers, in the order of the configuration, each followed by the one that
// maps its failed events again, if it can have such.
func (e *Engine) Controllers() []string {
	var names []string
	for _, c := range e.runners {
		names = append(names, c.name)
		if c.mapping != nil {
			names = append(names, c.mapping.name)
		}
	}
	return names
}

// Workers is how many keys a controller reconciles at once; 1 for what is none.
func (e *Engine) Workers(controller string) int {
	for _, c := range e.runners {
		if c.name == controller {
			return c.concurrency
		}
	}
	return 1
}
