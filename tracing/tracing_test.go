package tracing_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
	"github.com/windlass-dev/windlass/tracing"
)

// spans runs an engine in virtual time and returns the spans of what f did, by name.
func spans(t *testing.T, parent bool, handler engine.Handler, f func(things, owned *memory.Map[int])) map[string][]tracetest.SpanStub {
	t.Helper()
	exporter := tracetest.NewInMemoryExporter()
	synctest.Test(t, func(t *testing.T) {
		provider := trace.NewTracerProvider(trace.WithSyncer(exporter))
		things, owned := memory.New[int]("things"), memory.New[int]("owned")
		cfg := engine.Config{Controllers: []engine.Controller{
			engine.NewController("c").For(things).Owns(owned).WithHandler(handler).WithBackoff(engine.Backoff{Initial: time.Second}),
		}}
		tracing.New(tracing.Config{TracerProvider: provider, System: "in_memory", Parent: parent}).Install(&cfg)
		e, err := engine.New(cfg)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		synctest.Wait()
		f(things, owned)
		time.Sleep(time.Minute)
		cancel()
		require.NoError(t, <-done)
	})
	byName := map[string][]tracetest.SpanStub{}
	for _, s := range exporter.GetSpans() {
		byName[s.Name] = append(byName[s.Name], s)
	}
	return byName
}

func TestRetryIsLinkedToTheRunThatFailed(t *testing.T) {
	got := spans(t, false, func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
		if req.Attempt == 0 {
			return engine.Result{}, errors.New("broken")
		}
		return engine.Result{}, nil
	}, func(things, _ *memory.Map[int]) { things.Set("a", 1) })
	event, runs := got["publish events.things"][0], got["reconcile c"]
	require.Len(t, runs, 2, "a span an attempt")
	require.Equal(t, oteltrace.SpanKindProducer, event.SpanKind)
	require.Equal(t, codes.Error, runs[0].Status.Code)
	require.Equal(t, codes.Unset, runs[1].Status.Code)
	require.NotEqual(t, runs[0].SpanContext.TraceID(), runs[1].SpanContext.TraceID(), "each is a root")
	linked := map[oteltrace.SpanID]bool{}
	for _, l := range runs[1].Links {
		linked[l.SpanContext.SpanID()] = true
	}
	require.True(t, linked[event.SpanContext.SpanID()], "to the change")
	require.True(t, linked[runs[0].SpanContext.SpanID()], "and to the run that failed")
}

func TestOneCauseCanBeTheParent(t *testing.T) {
	got := spans(t, true, func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
		return engine.Result{}, nil
	},
		func(things, _ *memory.Map[int]) { things.Set("a", 1) })
	require.Equal(t, got["publish events.things"][0].SpanContext.SpanID(), got["reconcile c"][0].Parent.SpanID())
}

func TestWhatAReconcileWritesContinuesItsTrace(t *testing.T) {
	got := spans(t, false, func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		if req.Trigger() == engine.Dependency {
			return engine.Result{}, nil
		}
		return engine.Result{}, rt.Apply(ctx, engine.Object{Key: memory.New[int]("owned").Key("o"), Value: 1})
	}, func(things, _ *memory.Map[int]) { things.Set("a", 1) })
	run, write := got["reconcile c"][0], got["apply memory"][0]
	require.Equal(t, run.SpanContext.SpanID(), write.Parent.SpanID())
	require.Equal(t, run.SpanContext.SpanID(), got["publish events.owned"][0].Parent.SpanID())
}
