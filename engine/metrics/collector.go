package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/windlass-dev/windlass/engine"
)

// collector reads an engine when it is scraped.
type collector struct{ engine *engine.Engine }

var (
	depth      = desc("workqueue_depth", "Requests that are ready.", "name", "controller", "priority")
	unfinished = desc("workqueue_unfinished_work_seconds", "How long the running reconciles have run, added up.", "name", "controller")
	longest    = desc("workqueue_longest_running_processor_seconds", "How long the longest of them has run.", "name", "controller")
	active     = desc("controller_runtime_active_workers", "Reconciles that run.", "controller")
	workers    = desc("controller_runtime_max_concurrent_reconciles", "Reconciles that may run at once.", "controller")
	items      = desc("windlass_items", "Keys that are not idle, by state.", "controller", "state")
	stuckNow   = desc("windlass_stuck_reconciles", "Reconciles that go on although their time is over.", "controller")
	synced     = desc("windlass_source_synced", "Whether the source has ended its first list and runs.", "source")
	busUp      = desc("windlass_bus_up", "Whether the bus answers and this replica may work. Absent where the bus is in memory.")
	members    = desc("windlass_members", "Replicas of the engine, this one included. Absent where the bus is not shared.")
	owned      = desc("windlass_owned_partitions", "Partitions of the controller that this replica works on.", "controller")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{depth, unfinished, longest, active, workers, items, stuckNow, synced, busUp, members, owned} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	stats := c.engine.Stats()
	for _, name := range c.engine.Controllers() {
		s := stats[name]
		for p, n := range s.Ready {
			gauge(depth, float64(n), name, name, engine.Priority(p).String())
		}
		gauge(unfinished, s.Busy.Seconds(), name, name)
		gauge(longest, s.Longest.Seconds(), name, name)
		gauge(active, float64(s.Running), name)
		gauge(workers, float64(c.engine.Workers(name)), name)
		gauge(stuckNow, float64(s.Stuck), name)
		gauge(items, float64(s.Ready[0]+s.Ready[1]+s.Ready[2]), name, "ready")
		gauge(items, float64(s.Running), name, "running")
		gauge(items, float64(s.Delayed), name, "delayed")
		gauge(items, float64(s.Parked), name, "parked")
	}
	c.shared(gauge)
	for _, s := range c.engine.Sources() {
		up := 0.0
		if s.Synced && s.Err == nil {
			up = 1
		}
		gauge(synced, up, s.Name)
	}
}

// shared tells of a bus that is shared.
func (c *collector) shared(gauge func(d *prometheus.Desc, v float64, labels ...string)) {
	if known, err := c.engine.BusStatus(); known && err == nil {
		gauge(busUp, 1)
	} else if known {
		gauge(busUp, 0)
	}
	all, partitions := c.engine.Replicas()
	if all == nil {
		return
	}
	gauge(members, float64(len(all)))
	mine := make(map[string]int)
	for _, m := range all {
		if !m.Self {
			continue
		}
		for _, name := range m.Controllers {
			mine[name] = 0
		}
		for _, p := range partitions {
			if p.Owner == m.ID {
				mine[p.Controller]++
			}
		}
	}
	for name, n := range mine {
		gauge(owned, float64(n), name)
	}
}

// histograms collects what is counted by hand.
type histograms struct{ *Metrics }

var (
	reconcileTime = desc("controller_runtime_reconcile_time_seconds", "How long reconciles take.", "controller")
	queueDuration = desc("workqueue_queue_duration_seconds", "How long requests are ready before they run.", "name", "controller")
	workDuration  = desc("workqueue_work_duration_seconds", "How long a request is worked on.", "name", "controller")
)

// Describe implements prometheus.Collector.
func (h *histograms) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{reconcileTime, queueDuration, workDuration} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (h *histograms) Collect(ch chan<- prometheus.Metric) {
	h.controllers.Range(func(_, c any) bool {
		for _, x := range []*histogram{c.(*controller).time, c.(*controller).queued, c.(*controller).worked} {
			x.collect(ch)
		}
		return true
	})
}
