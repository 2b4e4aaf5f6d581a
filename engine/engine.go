package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine/kv"
	"github.com/windlass-dev/windlass/engine/lease"
)

// Config describes an engine. Only Controllers is required.
type Config struct {
	// Name prefixes what the engine keeps on its bus, so that several can share one. Default "windlass".
	Name        string
	Controllers []Controller
	// Bus carries events and requests. Default: a MemoryBus.
	Bus Bus
	// Leases decide which replica runs the singletons, and on a shared bus the sources. Default: the bus's, if it is shared;
	// else nil: this process is the only one.
	Leases lease.Store
	// Replica names this process to Leases. Default: a random name.
	Replica string
	// Middleware is put around the engine's own, the outermost first.
	Middleware []Middleware
	// Emit is put around the Emit that sources call, the outermost first. The event has its Source by then.
	Emit  []func(Emit) Emit
	Hooks Hooks
	// Logger is where the engine reports. Default: nowhere.
	Logger *slog.Logger
	// SyncTimeout is how long a controller waits for the first lists of its sources before Run fails with ErrNotSynced.
	// Default 0: without end, with a warning now and then.
	SyncTimeout time.Duration
	// DrainTimeout is how long running reconciles may take at shutdown before they are cancelled. Default 30 s.
	DrainTimeout time.Duration
}

// Engine runs controllers. Create it with New; its methods are safe for concurrent use.
type Engine struct {
	cfg       Config
	publisher message.Publisher
	ownership *ownership
	pauses    *pauses
	lineage   lineage
	shared    bool // other replicas may be on the bus
	local     Bus  // carries the requests of controllers that run in each replica
	started   atomic.Bool
	ready     chan struct{} // closed once the queues are open

	changing sync.Mutex // one change of the controllers at a time

	mu      sync.RWMutex
	routers []*router
	runners []*runner
	session *session // while Run is at work
}

// session is what a call of Run has for those that are added while it is at work.
type session struct {
	intake, work context.Context //nolint:containedctx // Run's, for the time of Run.
	stop         context.CancelCauseFunc
	group        sync.WaitGroup
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
	if cfg.Replica == "" {
		cfg.Replica = rand.Text()
	}
	bus, shared := cfg.Bus.(interface{ Leases() lease.Store })
	if shared && cfg.Leases == nil {
		cfg.Leases = bus.Leases()
	}
	e := &Engine{
		shared: shared, local: cfg.Bus, cfg: cfg, publisher: cfg.Bus.Publisher(), ownership: &ownership{store: cfg.Bus.Store(), shared: shared},
		pauses: &pauses{store: cfg.Bus.Store()}, ready: make(chan struct{}),
	}
	if shared {
		e.local = NewMemoryBus()
	}
	var problems []error
	if !validName.MatchString(cfg.Name) {
		problems = append(problems, fmt.Errorf("engine %q: the name must be lower-case letters, digits and dashes, 63 at most", cfg.Name))
	}
	if len(cfg.Controllers) == 0 {
		problems = append(problems, errors.New("the engine has no controllers"))
	}
	for _, c := range cfg.Controllers {
		if err := e.admit(c); err != nil {
			problems = append(problems, err)
			continue
		}
		e.attach(newRunner(e, c))
	}
	return e, errors.Join(problems...)
}

// admit says what is wrong with a controller, by itself and beside those that are there.
func (e *Engine) admit(c Controller) error {
	problems := []error{c.validate()}
	for _, r := range e.runners {
		if r.name == c.name {
			problems = append(problems, fmt.Errorf("controller %q: there are two of this name", c.name))
		}
	}
	sources := c.sources()
	for i, s := range sources {
		if s == nil {
			continue
		}
		if !reflect.TypeOf(s).Comparable() {
			problems = append(problems, fmt.Errorf("controller %q: source %q: a %T cannot be compared with ==; use a pointer", c.name, s.Name(), s))
			continue
		}
		for _, r := range e.routers {
			if r.source.Name() == s.Name() && r.source != s {
				problems = append(problems, fmt.Errorf("controller %q: source %q: another source has this name", c.name, s.Name()))
			}
		}
		for _, other := range sources[:i] {
			if other != nil && reflect.TypeOf(other).Comparable() && other.Name() == s.Name() && other != s {
				problems = append(problems, fmt.Errorf("controller %q: source %q: another source has this name", c.name, s.Name()))
			}
		}
	}
	return errors.Join(problems...)
}

// attach puts a controller behind the routers of its sources, new ones where there are none, and returns those.
func (e *Engine) attach(c *runner) (made []*router) {
	e.mu.Lock()
	defer e.mu.Unlock()
	routerOf := func(s Source) *router {
		i := slices.IndexFunc(e.routers, func(r *router) bool { return r.source == s })
		if i < 0 {
			i = len(e.routers)
			e.routers = append(e.routers, newRouter(e, s))
			made = append(made, e.routers[i])
		}
		if !slices.Contains(c.routers, e.routers[i]) {
			c.routers = append(c.routers, e.routers[i])
		}
		return e.routers[i]
	}
	routerOf(c.primary).add(&route{to: c, role: primary})
	for _, s := range c.owns {
		routerOf(s).add(&route{to: c, role: owned})
	}
	for _, w := range c.watches {
		routerOf(w.source).add(&route{to: c, role: watched, mapper: w.mapper})
	}
	for _, s := range c.reads {
		routerOf(s)
	}
	if c.tracked != nil {
		for _, s := range c.sources {
			if r := routerOf(s); len(r.routesTo(c)) == 0 || (*r.routes.Load())[len(*r.routes.Load())-1].role != tracked {
				r.add(&route{to: c, role: tracked})
			}
		}
	}
	e.runners = append(e.runners, c)
	return made
}

// detach is the reverse of attach. It returns the routers that nobody needs any more.
func (e *Engine) detach(c *runner) (unused []*router) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.runners = slices.DeleteFunc(e.runners, func(r *runner) bool { return r == c })
	e.routers = slices.DeleteFunc(e.routers, func(r *router) bool {
		r.remove(c)
		if slices.ContainsFunc(e.runners, func(x *runner) bool { return slices.Contains(x.routers, r) }) {
			return false
		}
		unused = append(unused, r)
		return true
	})
	return unused
}

// The errors of Run and of changes while it is at work.
var (
	// ErrAlreadyRan says that Run was called twice.
	ErrAlreadyRan = errors.New("engine: Run can be called only once")
	// ErrNotRunning says that Run is not at work, or that its end has begun.
	ErrNotRunning = errors.New("engine: not running")
	// ErrNotSynced says that a source did not end its first list in time.
	ErrNotSynced = errors.New("source not synced")
)

// Run runs the sources and controllers until ctx ends, or until something fails that the engine cannot go on without.
// At the end it takes nothing new, waits for the running reconciles, cancels them with ErrShutdown after the drain
// timeout, and returns once all its goroutines have ended: nil if ctx ended it.
func (e *Engine) Run(ctx context.Context) error {
	if !e.started.CompareAndSwap(false, true) {
		return ErrAlreadyRan
	}
	s := &session{}
	var stop, cancel context.CancelCauseFunc
	s.intake, stop = context.WithCancelCause(ctx)
	defer stop(nil)
	s.work, cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	s.stop = stop
	defer context.AfterFunc(s.intake, func() {
		timer := time.AfterFunc(e.cfg.DrainTimeout, func() { cancel(ErrShutdown) })
		context.AfterFunc(s.work, func() { timer.Stop() })
	})()
	fail := func(err error) error {
		stop(nil)
		s.group.Wait()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // what was cut short is no failure.
		}
		return err
	}
	if err := e.load(s); err != nil {
		return fail(err)
	}
	e.changing.Lock()
	// The queues are open before any source runs, so that an emitted event has somewhere to go.
	for _, c := range e.runners {
		if c.lease == nil || e.shared {
			if err := c.open(s.intake); err != nil {
				e.changing.Unlock()
				return fail(err)
			}
		}
	}
	for _, r := range e.routers {
		r.start(s)
	}
	for _, c := range e.runners {
		c.start(s)
	}
	e.mu.Lock()
	e.session = s
	e.mu.Unlock()
	e.changing.Unlock()
	close(e.ready)

	<-s.intake.Done()
	e.changing.Lock()
	e.mu.Lock()
	e.session = nil
	e.mu.Unlock()
	e.changing.Unlock()
	s.group.Wait()
	if ctx.Err() == nil {
		return context.Cause(s.intake)
	}
	return nil
}

// load reads what earlier processes left in the store, and follows what other replicas write there.
func (e *Engine) load(s *session) error {
	w, ok := e.cfg.Bus.Store().(kv.Watcher)
	if !e.shared || !ok {
		return errors.Join(e.ownership.load(s.intake), e.pauses.load(s.intake))
	}
	follow := func() (<-chan kv.Entry, error) {
		changes, err := w.Watch(s.intake, "")
		if err != nil {
			return nil, fmt.Errorf("follow the engine's store: %w", err)
		}
		return changes, errors.Join(e.ownership.load(s.intake), e.pauses.load(s.intake))
	}
	changes, err := follow()
	if err != nil {
		return err
	}
	if b, ok := e.cfg.Bus.(sharedBus); ok {
		s.group.Go(func() {
			if err := b.Answer(s.intake, e.answer); err != nil {
				e.cfg.Logger.WarnContext(s.intake, "other replicas cannot ask this one", "err", err)
			}
		})
	}
	s.group.Go(func() {
		for s.intake.Err() == nil {
			for entry := range changes {
				e.learn(s.intake, entry)
			}
			for changes, err = follow(); err != nil && s.intake.Err() == nil; changes, err = follow() {
				e.cfg.Logger.WarnContext(s.intake, "what other replicas write is not seen; trying again", "err", err)
				pause(s.intake, time.Second)
			}
		}
	})
	return nil
}

func (e *Engine) learn(ctx context.Context, entry kv.Entry) {
	var err error
	switch {
	case strings.HasPrefix(entry.Key, ownershipPrefix):
		err = e.ownership.learn(entry)
	case strings.HasPrefix(entry.Key, pausePrefix):
		err = e.learnSuspension(entry)
	}
	if err != nil {
		e.cfg.Logger.ErrorContext(ctx, "an entry of the engine's store is passed over", "err", err)
	}
}

func (e *Engine) running() (*session, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.session == nil {
		return nil, ErrNotRunning
	}
	return e.session, nil
}

// Add starts a controller while Run is at work. What its sources hold is reconciled as at a start. It returns once the
// controller takes requests.
func (e *Engine) Add(ctx context.Context, c Controller) error {
	e.changing.Lock()
	defer e.changing.Unlock()
	s, err := e.running()
	if err != nil {
		return err
	}
	e.mu.RLock()
	err = e.admit(c)
	e.mu.RUnlock()
	if err != nil {
		return err
	}
	r := newRunner(e, c)
	r.late = true
	if r.lease == nil || e.shared {
		if err := r.open(ctx); err != nil {
			return err
		}
	}
	for _, made := range e.attach(r) {
		made.start(s)
	}
	r.start(s)
	return nil
}

// Remove stops a controller while Run is at work: it takes nothing new and its running reconciles end. Sources that
// nothing else references are stopped. It returns once all that has ended, or when ctx does; then it goes on in the
// background. What a durable bus keeps for the controller stays there until it comes back.
func (e *Engine) Remove(ctx context.Context, controller string) error {
	e.changing.Lock()
	defer e.changing.Unlock()
	if _, err := e.running(); err != nil {
		return err
	}
	c, err := e.runner(controller)
	if err != nil {
		return err
	}
	unused := e.detach(c)
	c.halt()
	for _, r := range unused {
		r.halt()
	}
	for _, done := range append([]<-chan struct{}{c.done}, ended(unused)...) {
		select {
		case <-done:
		case <-ctx.Done():
			return fmt.Errorf("remove controller %s: %w", controller, context.Cause(ctx))
		}
	}
	return nil
}

func ended(routers []*router) []<-chan struct{} {
	out := make([]<-chan struct{}, len(routers))
	for i, r := range routers {
		out[i] = r.done
	}
	return out
}

// Replace puts a changed controller in the place of the one of its name, or adds it if there is none. Requests that
// wait, delays and parked keys stay. If the new one is invalid, the old one goes on.
func (e *Engine) Replace(ctx context.Context, c Controller) error {
	if err := c.validate(); err != nil {
		return err
	}
	if _, err := e.runner(c.name); err == nil {
		if err := e.Remove(ctx, c.name); err != nil {
			return err
		}
	}
	return e.Add(ctx, c)
}

func (e *Engine) malformed(topic string, err error) {
	e.cfg.Logger.Error("malformed message set aside", "topic", topic, "err", err)
	if e.cfg.Hooks.MessageMalformed != nil {
		e.cfg.Hooks.MessageMalformed(topic, err)
	}
}

// tellRival reports to a controller that another one claims what it owns. The claimant has its error.
func (e *Engine) tellRival(ctx context.Context, holder, claimant owner, target Key) {
	if c, err := e.runner(holder.Controller); err == nil && holder.Controller != claimant.Controller {
		c.log.WarnContext(ctx, "another controller claims an object of this one", "key", holder.Key.String(),
			"target", target.String(), "claimant", claimant.String())
	}
}

// Enqueue asks for a run of a key from outside, after a while or, with zero, now. A request for now passes hard delays
// and brings back a parked key; one for later outlives the runs that start before its time. It fails before Run has
// opened the queues.
func (e *Engine) Enqueue(ctx context.Context, controller string, key Key, after time.Duration) error {
	c, err := e.runner(controller)
	if err != nil {
		return err
	}
	return c.enqueue(ctx, key, after, cause{trigger: Manual, time: time.Now().UnixNano()})
}

// runner returns the controller of a name.
func (e *Engine) runner(controller string) (*runner, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	for _, c := range e.runners {
		if c.name == controller {
			return c, nil
		}
	}
	return nil, fmt.Errorf("engine: there is no controller %q: %w", controller, ErrNotFound)
}

// each calls f for every controller, and for the one that maps its failed events again if it can have such.
func (e *Engine) each(f func(*runner)) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	for _, c := range e.runners {
		f(c)
		if c.mapping != nil {
			f(c.mapping)
		}
	}
}

// Controllers returns the names of the controllers, in the order in which they were added, each followed by the one
// that maps its failed events again, if it can have such.
func (e *Engine) Controllers() (names []string) {
	e.each(func(c *runner) { names = append(names, c.name) })
	return names
}

// Workers is how many keys a controller reconciles at once; 1 for what is none.
func (e *Engine) Workers(controller string) int {
	if c, err := e.runner(controller); err == nil {
		return c.concurrency
	}
	return 1
}
