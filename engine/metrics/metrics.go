// Package metrics counts what an engine does, for Prometheus: under the names of controller-runtime and client-go, so
// that dashboards made for them work, and under windlass_ what they have no word for. Nothing is labelled by object.
package metrics

import (
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/windlass-dev/windlass/engine"
)

// Metrics collects from one engine.
type Metrics struct {
	registry prometheus.Registerer

	reconciles, errs, terminal, panics, timeouts *prometheus.CounterVec
	time                                         *prometheus.HistogramVec
	adds, retries                                *prometheus.CounterVec
	queued, worked                               *prometheus.HistogramVec
	events, triggers, parked, repaired           *prometheus.CounterVec
	mappingFailed, dropped, sourceFailed         *prometheus.CounterVec
	malformed                                    prometheus.Counter

	controllers sync.Map // name to *controller
}

// controller has the children of one controller, looked up once.
type controller struct {
	success, failure, requeue, requeueAfter prometheus.Counter
	errs, terminal, panics, timeouts        prometheus.Counter
	time, queued, worked                    prometheus.Observer
	adds, retries, parked                   prometheus.Counter
	triggers                                [engine.Manual + 1]prometheus.Counter

	mu      sync.Mutex
	running map[engine.Key]time.Time
}

var seconds = []float64{
	.005, .01, .025, .05, .1, .15, .2, .25, .3, .35, .4, .45, .5, .6, .7, .8, .9, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4,
	4.5, 5, 6, 7, 8, 9, 10, 15, 20, 25, 30, 40, 50, 60,
}

// New registers the metrics.
func New(registry prometheus.Registerer) *Metrics {
	m := &Metrics{registry: registry}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, native float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets, NativeHistogramBucketFactor: native}, labels)
		registry.MustRegister(h)
		return h
	}
	queueBuckets := prometheus.ExponentialBuckets(1e-6, 4, 14)
	m.reconciles = counter("controller_runtime_reconcile_total", "Reconciles, by result.", "controller", "result")
	m.errs = counter("controller_runtime_reconcile_errors_total", "Reconciles that failed.", "controller")
	m.terminal = counter("controller_runtime_terminal_reconcile_errors_total", "Reconciles that failed for good.", "controller")
	m.panics = counter("controller_runtime_reconcile_panics_total", "Reconciles that panicked.", "controller")
	m.timeouts = counter("controller_runtime_reconcile_timeouts_total", "Reconciles that exceeded their deadline.", "controller")
	m.time = histogram("controller_runtime_reconcile_time_seconds", "How long reconciles take.", seconds, 1.1, "controller")
	m.adds = counter("workqueue_adds_total", "Requests added to the queue, merged ones included.", "name", "controller")
	m.retries = counter("workqueue_retries_total", "Failed requests that are tried again.", "name", "controller")
	m.queued = histogram("workqueue_queue_duration_seconds", "How long requests are ready before they run.", queueBuckets, 0, "name", "controller")
	m.worked = histogram("workqueue_work_duration_seconds", "How long a request is worked on.", queueBuckets, 0, "name", "controller")
	m.events = counter("windlass_events_total", "Events of sources.", "source", "operation")
	m.triggers = counter("windlass_reconcile_triggers_total", "Reconciles, by what triggered them.", "controller", "trigger")
	m.parked = counter("windlass_dead_letter_total", "Keys that were parked.", "controller")
	m.repaired = counter("windlass_relist_repaired_total", "Changes that a list found and no event had told.", "source")
	m.mappingFailed = counter("windlass_mapping_failures_total", "Events whose mapper failed.", "controller")
	m.dropped = counter("windlass_dropped_requests_total", "Mapped keys that were not the controller's.", "controller")
	m.sourceFailed = counter("windlass_source_failures_total", "Times that a source ended and was run again.", "source")
	m.malformed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "windlass_malformed_messages_total", Help: "Messages that were set aside because they cannot be read.",
	})
	registry.MustRegister(m.malformed)
	return m
}

// Hooks returns the hooks that count.
func (m *Metrics) Hooks() engine.Hooks {
	return engine.Hooks{
		EventReceived: func(e engine.Event) {
			m.events.WithLabelValues(e.Source, e.Operation.String()).Inc()
			if e.Repaired {
				m.repaired.WithLabelValues(e.Source).Inc()
			}
		},
		RequestAdded:     func(name string, _ engine.Cause) { m.of(name).adds.Inc() },
		RequestDropped:   func(name string, _ engine.Key) { m.dropped.WithLabelValues(name).Inc() },
		MappingFailed:    func(name string, _ engine.Event, _ error) { m.mappingFailed.WithLabelValues(name).Inc() },
		MessageMalformed: func(string, error) { m.malformed.Inc() },
		SourceFailed:     func(source string, _ error, _ time.Duration) { m.sourceFailed.WithLabelValues(source).Inc() },
		RunStarted:       m.runStarted,
		RunEnded:         m.runEnded,
	}
}

// of returns the children of a controller, made at 0 when it is first heard of.
func (m *Metrics) of(name string) *controller {
	if c, ok := m.controllers.Load(name); ok {
		return c.(*controller)
	}
	c := &controller{
		success: m.reconciles.WithLabelValues(name, "success"), failure: m.reconciles.WithLabelValues(name, "error"),
		requeue: m.reconciles.WithLabelValues(name, "requeue"), requeueAfter: m.reconciles.WithLabelValues(name, "requeue_after"),
		errs: m.errs.WithLabelValues(name), terminal: m.terminal.WithLabelValues(name), panics: m.panics.WithLabelValues(name),
		timeouts: m.timeouts.WithLabelValues(name), time: m.time.WithLabelValues(name),
		queued: m.queued.WithLabelValues(name, name), worked: m.worked.WithLabelValues(name, name),
		adds: m.adds.WithLabelValues(name, name), retries: m.retries.WithLabelValues(name, name),
		parked: m.parked.WithLabelValues(name), running: make(map[engine.Key]time.Time),
	}
	for t := range c.triggers {
		c.triggers[t] = m.triggers.WithLabelValues(name, engine.Trigger(t).String())
	}
	kept, _ := m.controllers.LoadOrStore(name, c) // both have the same children
	return kept.(*controller)
}

func (m *Metrics) runStarted(req engine.Request) {
	c := m.of(req.Controller)
	c.queued.Observe(req.Waited.Seconds())
	if t := req.Trigger(); int(t) < len(c.triggers) {
		c.triggers[t].Inc()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[req.Key] = time.Now()
}

func (m *Metrics) runEnded(req engine.Request, o engine.Outcome, took time.Duration) {
	c := m.of(req.Controller)
	c.mu.Lock()
	delete(c.running, req.Key)
	c.mu.Unlock()
	c.worked.Observe(took.Seconds())
	c.time.Observe(took.Seconds())
	switch {
	case o.Interrupted:
	case o.Err != nil:
		c.failure.Inc()
		c.errs.Inc()
		if engine.IsTerminal(o.Err) {
			c.terminal.Inc()
			c.parked.Inc()
		} else {
			c.retries.Inc()
		}
		if _, ok := errors.AsType[*engine.PanicError](o.Err); ok {
			c.panics.Inc()
		}
		if o.TimedOut {
			c.timeouts.Inc()
		}
	case o.Result.RequeueAfter > 0 || o.Result.Defer > 0:
		c.requeueAfter.Inc()
	case o.Result.Backoff:
		c.requeue.Inc()
		c.retries.Inc()
	default:
		c.success.Inc()
	}
}

// Observe adds what can only be read from the engine: depths and states. It also makes the series of its controllers,
// so that they are there before anything happens.
func (m *Metrics) Observe(e *engine.Engine) {
	for _, name := range e.Controllers() {
		m.of(name)
	}
	m.registry.MustRegister(&collector{m, e})
}
