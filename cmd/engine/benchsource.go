package main

import (
	"context"
	"strconv"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

var benchKind, benchOther = engine.KindOf("bench"), engine.KindOf("bench/other")

// benchSource hands its emit to the workload.
type benchSource struct {
	running      chan engine.Emit
	otherRunning chan engine.Emit
	emit         engine.Emit
	spread       time.Duration // of delayed requests
}

func newBenchSource(spread time.Duration) *benchSource {
	return &benchSource{running: make(chan engine.Emit, 1), otherRunning: make(chan engine.Emit, 1), spread: spread}
}

func (s *benchSource) Name() string { return "bench" }

// delayOf is when a request of workload delay falls due: within the spread, long after the last was made.
func (s *benchSource) delayOf(key engine.Key) time.Duration {
	i, _ := strconv.Atoi(key.Name)
	return 2*time.Second + time.Duration(i%10_000)*s.spread/10_000
}

// Run implements engine.Source.
func (s *benchSource) Run(ctx context.Context, emit engine.Emit) error {
	return runBench(ctx, emit, s.running)
}

func runBench(ctx context.Context, emit engine.Emit, running chan<- engine.Emit) error {
	for _, op := range []engine.Operation{engine.ListStarted, engine.ListEnded} {
		if err := emit(ctx, engine.Event{Operation: op}); err != nil {
			return err
		}
	}
	running <- emit
	<-ctx.Done()
	return nil
}

// otherSource is a second source, whose events concern keys of the first.
type otherSource struct{ *benchSource }

func (s *benchSource) other() engine.Source { return otherSource{s} }

func (s otherSource) Name() string { return "other" }

// Run implements engine.Source.
func (s otherSource) Run(ctx context.Context, emit engine.Emit) error {
	return runBench(ctx, emit, s.otherRunning)
}

func (s *benchSource) emitOther(ctx context.Context, e engine.Event) error {
	emit := <-s.otherRunning
	s.otherRunning <- emit
	return emit(ctx, e)
}
