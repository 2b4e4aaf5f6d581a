package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/windlass-dev/windlass/engine"
)

// demoLog prints what happens, counts it, and knows at the end whether all of it did.
type demoLog struct {
	w     io.Writer
	color bool
	start time.Time

	mu       sync.Mutex
	total    demoCounts
	runs     []demoRun
	added    int
	resynced int
	fresh    int // runs that news of the key or of what it owns caused
	last     map[string]string
	restart  time.Time
}

// demoCounts is the last line of -o json.
type demoCounts struct {
	Events     int `json:"events"`
	Reconciles int `json:"reconciles"`
	Merged     int `json:"merged"`
	Retries    int `json:"retries"`
	Delayed    int `json:"delayed"`
	Dead       int `json:"dead"`
}

// demoRun is a run that ended.
type demoRun struct {
	name    string
	trigger engine.Trigger
	attempt int
	ended   time.Time
	outcome engine.Outcome
}

func newDemoLog(w io.Writer) *demoLog {
	f, ok := w.(*os.File)
	color := ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == ""
	return &demoLog{w: w, color: color, start: time.Now(), last: make(map[string]string)}
}

const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
)

func (l *demoLog) paint(style, s string) string {
	if !l.color {
		return s
	}
	return "\x1b[" + style + "m" + s + "\x1b[0m"
}

func (l *demoLog) title(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.w, "\n%s\n", l.paint(bold, s))
}

func (l *demoLog) note(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lineLocked("", cyan, s, "")
}

// lineLocked prints when, which key, what and the rest.
func (l *demoLog) lineLocked(name, style, what, rest string) {
	at := time.Since(l.start).Seconds()
	fmt.Fprintf(l.w, "%s  %-12s %s  %s\n", l.paint(dim, fmt.Sprintf("%7.3fs", at)), name, l.paint(style, fmt.Sprintf("%-10s", what)), rest)
}

func (l *demoLog) restarted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.restart = time.Now()
}

// shipped is called by the handler when it has written a shipment.
func (l *demoLog) shipped(req engine.Request, total string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[req.Key.Name] = total
}

// checked tells of the orders that the list at the start found unchanged.
func (l *demoLog) checked() {
	l.mu.Lock()
	n := l.resynced
	l.mu.Unlock()
	l.note(fmt.Sprintf("%d orders were listed and checked again; what is delayed or parked stays so", n))
}

func (l *demoLog) hooks() engine.Hooks {
	return engine.Hooks{
		EventReceived: func(e engine.Event) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if e.Operation != engine.Resync {
				l.total.Events++
			}
		},
		RequestAdded: func(string, engine.Trigger) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.added++
		},
		RunEnded: l.ended,
	}
}

func (l *demoLog) ended(req engine.Request, o engine.Outcome, _ time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total.Reconciles++
	r := demoRun{req.Key.Name, req.Trigger(), req.Attempt, time.Now(), o}
	l.runs = append(l.runs, r)
	why := r.trigger.String()
	switch r.trigger {
	case engine.Retried:
		l.total.Retries++
		why = fmt.Sprintf("retry, attempt %d", r.attempt)
	case engine.Requeued:
		l.total.Delayed++
	default:
		l.fresh++
		if n := req.Causes.Count(); n > 1 {
			why = fmt.Sprintf("%d causes, %s last", n, why)
		}
	}
	because := l.paint(dim, "because: "+why)
	switch {
	case o.Interrupted:
		l.lineLocked(r.name, yellow, "interrupted", because)
	case engine.IsTerminal(o.Err):
		l.total.Dead++
		l.lineLocked(r.name, red, "parked", o.Err.Error()+"  "+because)
	case o.Err != nil:
		l.lineLocked(r.name, yellow, "failed", fmt.Sprintf("%s; again in %s  %s", o.Err, o.Result.Retry(), because))
	case o.Result.RequeueAfter > 0:
		l.lineLocked(r.name, green, "reconciled", fmt.Sprintf("again in %s  %s", o.Result.RequeueAfter, because))
	case r.trigger == engine.Resynced:
		l.resynced++ // one line for all of them: checked
	default:
		l.lineLocked(r.name, green, "reconciled", because)
	}
}

func (l *demoLog) counts() demoCounts {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.total
	c.Merged = max(l.added-l.fresh, 0)
	return c
}

// of returns the runs of a key.
func (l *demoLog) of(name string) []demoRun {
	var out []demoRun
	for _, r := range l.runs {
		if r.name == name {
			out = append(out, r)
		}
	}
	return out
}

// verdict prints what was promised and whether it happened.
func (l *demoLog) verdict() bool {
	counts := l.counts()
	l.mu.Lock()
	defer l.mu.Unlock()
	ok := true
	fmt.Fprintf(l.w, "\n%s\n", l.paint(bold, "What was promised"))
	for _, p := range []struct {
		what string
		kept bool
	}{
		{"changes are reconciled", l.last["order-3"] != "" && len(l.of("order-1")) > 0},
		{"many changes of one key are merged, and the last one wins", len(l.of("hot")) < 100 && strings.Contains(l.last["hot"], `"quantity":200,`)},
		{"a failing order is tried again after growing waits, and succeeds", l.flakyRecovered()},
		{"a requeue-after fires at its time, after a restart", l.requeueFired()},
		{"a poison order is parked while others go on", l.poisonParked()},
	} {
		mark := l.paint(green, "kept  ")
		if !p.kept {
			mark, ok = l.paint(red, "BROKEN"), false
		}
		fmt.Fprintf(l.w, "  %s  %s\n", mark, p.what)
	}
	fmt.Fprintf(l.w, "\n%d events, %d reconciles, %d requests merged, %d retries, %d delayed, %d dead\n",
		counts.Events, counts.Reconciles, counts.Merged, counts.Retries, counts.Delayed, counts.Dead)
	return ok
}

func (l *demoLog) flakyRecovered() bool {
	runs := l.of("flaky")
	if len(runs) < 3 || runs[0].outcome.Err == nil || runs[1].outcome.Err == nil || runs[2].outcome.Err != nil {
		return false
	}
	return runs[2].attempt == 2 && runs[2].ended.Sub(runs[1].ended) > runs[1].ended.Sub(runs[0].ended)
}

func (l *demoLog) requeueFired() bool {
	var asked time.Time
	for _, r := range l.of("layaway") {
		if r.outcome.Result.RequeueAfter > 0 && asked.IsZero() {
			asked = r.ended
		}
		if r.trigger == engine.Requeued && !asked.IsZero() {
			late := r.ended.Sub(asked) - 4*time.Second
			return r.ended.After(l.restart) && !l.restart.IsZero() && late > -100*time.Millisecond && late < 2*time.Second
		}
	}
	return false
}

func (l *demoLog) poisonParked() bool {
	var parked time.Time
	for _, r := range l.of("poison") {
		if engine.IsTerminal(r.outcome.Err) {
			parked = r.ended
		}
	}
	return !parked.IsZero() && l.last["meanwhile-4"] != ""
}
