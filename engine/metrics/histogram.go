package metrics

import (
	"sort"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// histogram counts durations. There are three observations on the path of every reconcile: one costs two additions,
// where the client library's costs about ten times as much for what nobody needs here (exemplars, native buckets, sums
// of floats).
type histogram struct {
	desc   *prometheus.Desc
	labels []string
	bounds []time.Duration
	counts []atomic.Uint64 // one more than bounds
	sum    atomic.Int64
}

func newHistogram(d *prometheus.Desc, bounds []time.Duration, labels ...string) *histogram {
	return &histogram{desc: d, labels: labels, bounds: bounds, counts: make([]atomic.Uint64, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	i := 0
	if len(h.bounds) > 0 && d > h.bounds[0] { // most are short
		i = sort.Search(len(h.bounds), func(i int) bool { return d <= h.bounds[i] })
	}
	h.counts[i].Add(1)
	h.sum.Add(int64(d))
}

// collect reads the counts one after the other: an observation that comes in between is in the next scrape.
func (h *histogram) collect(ch chan<- prometheus.Metric) {
	buckets, n := make(map[float64]uint64, len(h.bounds)), uint64(0)
	for i, b := range h.bounds {
		n += h.counts[i].Load()
		buckets[b.Seconds()] = n
	}
	n += h.counts[len(h.bounds)].Load()
	ch <- prometheus.MustNewConstHistogram(h.desc, n, time.Duration(h.sum.Load()).Seconds(), buckets, h.labels...)
}
