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
	adds, retries                                *prometheus.CounterVec
	events, triggers, parked, repaired           *prometheus.CounterVec
	mappingFailed, dropped, sourceFailed         *prometheus.CounterVec
	stuck, slowed                                *prometheus.CounterVec
	malformed                                    prometheus.Counter

	controllers sync.Map // name to *controller
	sources     sync.Map // name to *source
}

// source has the children of one source, looked up once.
type source struct {
	operations [engine.ListEnded + 1]prometheus.Counter
	repaired   prometheus.Counter
}

// controller has the children of one controller, looked up once.
type controller struct {
	success, failure, requeue, requeueAfter prometheus.Counter
	errs, terminal, panics, timeouts        prometheus.Counter
	time, queued, worked                    *histogram
	adds, retries, parked                   prometheus.Counter
	triggers                                [engine.Manual + 1]prometheus.Counter
}

// The bounds of the buckets are those of controller-runtime and, for the queue, of a wider range than client-go's.
var (
	reconcileBounds = []time.Duration{
		5e6, 10e6, 25e6, 50e6, 100e6, 150e6, 200e6, 250e6, 300e6, 350e6, 400e6, 450e6, 500e6, 600e6, 700e6, 800e6, 900e6, 1e9,
		125e7, 15e8, 175e7, 2e9, 25e8, 3e9, 35e8, 4e9, 45e8, 5e9, 6e9, 7e9, 8e9, 9e9, 10e9, 15e9, 20e9, 25e9, 30e9, 40e9, 50e9, 60e9,
	}
	queueBounds = []time.Duration{
		1e3, 4e3, 16e3, 64e3, 256e3, 1024e3, 4096e3, 16384e3, 65536e3, 262144e3, 1048576e3, 4194304e3, 16777216e3, 67108864e3,
	}
)

// New registers the metrics.
func New(registry prometheus.Registerer) *Metrics {
	m := &Metrics{registry: registry}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		registry.MustRegister(c)
		return c
	}
	m.reconciles = counter("controller_runtime_reconcile_total", "Reconciles, by result.", "controller", "result")
	m.errs = counter("controller_runtime_reconcile_errors_total", "Reconciles that failed.", "controller")
	m.terminal = counter("controller_runtime_terminal_reconcile_errors_total", "Reconciles that failed for good.", "controller")
	m.panics = counter("controller_runtime_reconcile_panics_total", "Reconciles that panicked.", "controller")
	m.timeouts = counter("controller_runtime_reconcile_timeouts_total", "Reconciles that exceeded their deadline.", "controller")
	m.adds = counter("workqueue_adds_total", "Requests added to the queue, merged ones included.", "name", "controller")
	m.retries = counter("workqueue_retries_total", "Failed requests that are tried again.", "name", "controller")
	m.events = counter("windlass_events_total", "Events of sources.", "source", "operation")
	m.triggers = counter("windlass_reconcile_triggers_total", "Reconciles, by what triggered them.", "controller", "trigger")
	m.parked = counter("windlass_dead_letter_total", "Keys that were parked.", "controller")
	m.repaired = counter("windlass_relist_repaired_total", "Changes that a list found and no event had told.", "source")
	m.mappingFailed = counter("windlass_mapping_failures_total", "Events whose mapper failed.", "controller")
	m.dropped = counter("windlass_dropped_requests_total", "Mapped keys that were not the controller's.", "controller")
	m.sourceFailed = counter("windlass_source_failures_total", "Times that a source ended and was run again.", "source")
	m.stuck = counter("windlass_stuck_reconciles_total", "Reconciles that went on although their time was over.", "controller")
	m.slowed = counter("windlass_slowed_requests_total", "Requests held back because their key causes itself.", "controller")
	m.malformed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "windlass_malformed_messages_total", Help: "Messages that were set aside because they cannot be read.",
	})
	registry.MustRegister(m.malformed, &histograms{m})
	return m
}

// Hooks returns the hooks that count.
func (m *Metrics) Hooks() engine.Hooks {
	return engine.Hooks{
		EventReceived: func(e engine.Event) {
			s := m.ofSource(e.Source)
			s.operations[min(e.Operation, engine.ListEnded)].Inc()
			if e.Repaired {
				s.repaired.Inc()
			}
		},
		RequestAdded:     func(name string, _ engine.Trigger) { m.of(name).adds.Inc() },
		RequestDropped:   func(name string, _ engine.Key) { m.dropped.WithLabelValues(name).Inc() },
		MappingFailed:    func(name string, _ engine.Event, _ error) { m.mappingFailed.WithLabelValues(name).Inc() },
		MessageMalformed: func(string, error) { m.malformed.Inc() },
		SourceFailed:     func(source string, _ error, _ time.Duration) { m.sourceFailed.WithLabelValues(source).Inc() },
		RunEnded:         m.runEnded,
		RunStuck:         func(name string, _ engine.Key, _ time.Duration) { m.stuck.WithLabelValues(name).Inc() },
		KeySlowed:        func(name string, _ engine.Key, _ time.Duration) { m.slowed.WithLabelValues(name).Inc() },
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
		timeouts: m.timeouts.WithLabelValues(name), time: newHistogram(reconcileTime, reconcileBounds, name),
		queued: newHistogram(queueDuration, queueBounds, name, name), worked: newHistogram(workDuration, queueBounds, name, name),
		adds: m.adds.WithLabelValues(name, name), retries: m.retries.WithLabelValues(name, name),
		parked: m.parked.WithLabelValues(name),
	}
	for t := range c.triggers {
		c.triggers[t] = m.triggers.WithLabelValues(name, engine.Trigger(t).String())
	}
	kept, _ := m.controllers.LoadOrStore(name, c) // both have the same children
	return kept.(*controller)
}

// ofSource returns the children of a source.
func (m *Metrics) ofSource(name string) *source {
	if s, ok := m.sources.Load(name); ok {
		return s.(*source)
	}
	s := &source{repaired: m.repaired.WithLabelValues(name)}
	for o := range s.operations {
		s.operations[o] = m.events.WithLabelValues(name, engine.Operation(o).String())
	}
	kept, _ := m.sources.LoadOrStore(name, s) // both have the same children
	return kept.(*source)
}

func (m *Metrics) runEnded(req engine.Request, o engine.Outcome, took time.Duration) {
	c := m.of(req.Controller)
	c.queued.observe(req.Waited)
	if t := req.Trigger(); int(t) < len(c.triggers) {
		c.triggers[t].Inc()
	}
	c.worked.observe(took)
	c.time.observe(took)
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
	m.registry.MustRegister(&collector{e})
}
