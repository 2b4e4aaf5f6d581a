package engine

import (
	"slices"
	"sync"
	"time"
)

// Run is one reconcile that has ended.
type Run struct {
	Key     Key           `json:"key"`
	Causes  []Cause       `json:"causes"`
	Attempt int           `json:"attempt"`
	Started time.Time     `json:"started"`
	Waited  time.Duration `json:"waited"`
	Took    time.Duration `json:"took"`
	// Outcome is done, requeue, defer, backoff, error, parked or interrupted.
	Outcome string `json:"outcome"`
	Error   string `json:"error,omitempty"`
	// Next is when the run asked to be repeated; zero if it did not.
	Next    time.Time `json:"next,omitzero"`
	TraceID string    `json:"traceId,omitempty"`
}

// historySize is how many runs of a controller are remembered, shared by its workers: enough for the last ten runs of
// the keys that anybody asks about, and bounded whatever happens.
const historySize = 1 << 12

// history is a ring of the last runs of one worker.
type history struct {
	mu   sync.Mutex
	size int
	runs []pastRun
	next int // where the oldest is, once the ring is full
}

// pastRun is a Run as it is kept: half as large, and nothing is computed for what nobody may ask.
type pastRun struct {
	key                   Key
	causes                Causes
	started, waited, took int64
	wait                  time.Duration // until the next run, negative: none
	err                   error
	traceparent           string
	attempt               int32
	outcome               string
}

func (h *history) add(r *pastRun) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.runs) < h.size {
		h.runs = append(h.runs, *r)
		return
	}
	h.runs[h.next] = *r
	if h.next++; h.next == h.size {
		h.next = 0
	}
}

// of returns the runs of a key.
func (h *history) of(key Key) (runs []Run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.runs {
		if h.runs[i].key == key {
			runs = append(runs, h.runs[i].run())
		}
	}
	return runs
}

func (p *pastRun) run() Run {
	r := Run{
		Key: p.key, Causes: p.causes.of(&p.key).All(), Attempt: int(p.attempt), Started: time.Unix(0, p.started), Waited: time.Duration(p.waited),
		Took: time.Duration(p.took), Outcome: p.outcome, TraceID: traceID(p.traceparent),
	}
	if p.err != nil {
		r.Error = p.err.Error()
	}
	if p.wait >= 0 {
		r.Next = r.Started.Add(r.Took + p.wait)
	}
	return r
}

const interrupted = "interrupted"

func outcomeName(res *Result, err error, cut bool) string {
	switch {
	case cut:
		return interrupted
	case IsTerminal(err):
		return "parked"
	case err != nil:
		return "error"
	case res.RequeueAfter > 0 || res.now:
		return "requeue"
	case res.Defer > 0:
		return "defer"
	case res.Backoff:
		return "backoff"
	default:
		return "done"
	}
}

// wait is how long it is until the next run that an outcome asks for, negative if it asks for none.
func (o *Outcome) wait() time.Duration {
	r := &o.Result
	switch {
	case o.Interrupted, IsTerminal(o.Err):
		return -1
	case r.retry > 0:
		return r.retry
	case r.RequeueAfter > 0 || r.now:
		return r.RequeueAfter
	case r.Defer > 0:
		return r.Defer
	default:
		return -1
	}
}

// explainedRuns is how many runs an Explanation shows.
const explainedRuns = 10

// runsOf returns the last runs of a key, the newest first.
func (c *runner) runsOf(key Key) []Run {
	c.workersMu.Lock()
	workers := slices.Clone(c.workers)
	c.workersMu.Unlock()
	var runs []Run
	for _, w := range workers {
		runs = append(runs, w.history.of(key)...)
	}
	slices.SortFunc(runs, func(a, b Run) int { return b.Started.Compare(a.Started) })
	return runs[:min(len(runs), explainedRuns)]
}
