package main

import (
	"context"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/metrics"
)

// countKubernetes has client-go count its requests, and what they wait for qps and burst, under the names that other controllers use.
// Client-go has one such place for the process.
func countKubernetes(registry prometheus.Registerer) {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "rest_client_requests_total", Help: "Number of HTTP requests, partitioned by status code, method, and host.",
	}, []string{"code", "method", "host"})
	limited := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "rest_client_rate_limiter_duration_seconds", Help: "Client side rate limiter latency in seconds. Broken down by verb, and host.",
		Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0},
	}, []string{"verb", "host"})
	registry.MustRegister(requests, limited)
	metrics.Register(metrics.RegisterOpts{RequestResult: counted{requests}, RateLimiterLatency: timed{limited}})
}

type counted struct{ *prometheus.CounterVec }

func (c counted) Increment(_ context.Context, code, method, host string) {
	c.WithLabelValues(code, method, host).Inc()
}

type timed struct{ *prometheus.HistogramVec }

func (t timed) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	t.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}
