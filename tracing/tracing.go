// Package tracing makes spans of what the engine does, on the OpenTelemetry API. Set-up of an SDK is in tracing/otlp.
//
// A reconcile attempt is a span "reconcile <controller>" of kind CONSUMER and a new root, with a link to every cause that
// was kept: many changes may lead to one reconcile, and a link is what OpenTelemetry's messaging conventions say for
// that. An event that a source emits is a PRODUCER span "publish events.<source>", and continues the trace of whoever
// made the change if the system carries one; events of a list have no span. Reads and writes are child spans. The context
// of the reconcile travels onto what it writes and with what it asks for later.
package tracing

import (
	"context"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/windlass-dev/windlass/engine"
)

// Config describes the spans.
type Config struct {
	TracerProvider trace.TracerProvider
	// System is the messaging.system of the bus: nats, redis, in_memory.
	System string
	// Parent makes a reconcile with exactly one cause continue that cause's trace, where the default is a link.
	Parent bool
}

// Tracing makes spans. Put its parts into the engine's Config.
type Tracing struct {
	cfg    Config
	tracer trace.Tracer
	names  sync.Map // of spans, by controller
	idle   atomic.Bool
	// What every span starts with.
	child, root, producer []trace.SpanStartOption
}

// New returns a Tracing on a provider.
func New(cfg Config) *Tracing {
	consumer := trace.WithSpanKind(trace.SpanKindConsumer)
	return &Tracing{
		cfg: cfg, tracer: cfg.TracerProvider.Tracer("github.com/windlass-dev/windlass/tracing"),
		child: []trace.SpanStartOption{consumer}, root: []trace.SpanStartOption{consumer, trace.WithNewRoot()},
		producer: []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindProducer)},
	}
}

// Install puts the spans into an engine's configuration.
func (t *Tracing) Install(cfg *engine.Config) {
	cfg.Middleware = append([]engine.Middleware{t.Middleware}, cfg.Middleware...)
	cfg.Emit = append([]func(engine.Emit) engine.Emit{t.Emit}, cfg.Emit...)
	cfg.Hooks = engine.JoinHooks(cfg.Hooks, engine.Hooks{Access: t.Access})
}

// Middleware makes the span of a reconcile attempt. What describes it is added only if it is recorded: a sampler decides
// by the trace's id and its parent.
func (t *Tracing) Middleware(next engine.Handler) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		if t.skips() {
			return next(ctx, rt, req)
		}
		ctx, span := t.start(ctx, &req)
		if sc := span.SpanContext(); t.valid(sc) {
			rt.SetTraceparent(format(sc))
		}
		if !span.IsRecording() {
			return next(ctx, rt, req)
		}
		defer span.End()
		t.describe(span, &req)
		res, err := next(ctx, rt, req)
		finish(span, res, err)
		return res, err
	}
}

// probeEvery is how many spans are begun in vain, of all, while the provider makes none: the API without an SDK. One that
// is installed later is noticed then.
const probeEvery = 64

func (t *Tracing) skips() bool {
	return t.idle.Load() && rand.Uint32()%probeEvery != 0 //nolint:gosec // no secret.
}

func (t *Tracing) valid(sc trace.SpanContext) bool {
	valid := sc.IsValid()
	if t.idle.Load() == valid {
		t.idle.Store(!valid)
	}
	return valid
}

func (t *Tracing) start(ctx context.Context, req *engine.Request) (context.Context, trace.Span) {
	name, ok := t.names.Load(req.Controller)
	if !ok {
		name, _ = t.names.LoadOrStore(req.Controller, "reconcile "+req.Controller)
	}
	if t.cfg.Parent && req.Causes.Count() == 1 {
		if parent := parse(req.Causes.Newest().Traceparent); parent.IsValid() {
			return t.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, parent), name.(string), t.child...)
		}
	}
	return t.tracer.Start(ctx, name.(string), t.root...)
}

func (t *Tracing) describe(span trace.Span, req *engine.Request) {
	span.SetAttributes(
		attribute.String("messaging.operation.name", "reconcile"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.system", t.cfg.System),
		attribute.String("messaging.destination.name", "requests."+req.Controller),
		attribute.Int("messaging.batch.message_count", max(req.Causes.Count(), 1)),
		attribute.String("windlass.controller", req.Controller),
		attribute.String("windlass.key", req.Key.String()),
		attribute.Int("windlass.attempt", req.Attempt),
		attribute.String("windlass.trigger", req.Trigger().String()),
		attribute.Float64("windlass.waited_seconds", req.Waited.Seconds()),
	)
	for _, c := range req.Causes.All() {
		if sc := parse(c.Traceparent); sc.IsValid() {
			span.AddLink(trace.Link{SpanContext: sc, Attributes: []attribute.KeyValue{
				attribute.String("windlass.trigger", c.Trigger.String()),
				attribute.String("windlass.key", c.Key.String()),
			}})
		}
	}
}

func finish(span trace.Span, res engine.Result, err error) {
	result := "success"
	switch {
	case engine.IsTerminal(err):
		result = "terminal"
	case err != nil:
		result = "error"
	case res.RequeueAfter > 0:
		result = "requeue_after"
	case res.Defer > 0:
		result = "defer"
	case res.Backoff:
		result = "backoff"
	}
	span.SetAttributes(attribute.String("windlass.result", result))
	if wait := max(res.RequeueAfter, res.Defer, res.Retry()); wait > 0 {
		span.SetAttributes(attribute.Float64("windlass.next_run_seconds", wait.Seconds()))
	}
	failed(span, err)
}

func failed(span trace.Span, err error) {
	if err == nil {
		return
	}
	span.SetAttributes(attribute.String("error.type", errorType(err)))
	span.RecordError(err)
	span.SetStatus(codes.Error, err.Error())
}

func errorType(err error) string {
	var p *engine.PanicError
	switch {
	case errors.As(err, &p):
		return "panic"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, engine.ErrDeadline):
		return "timeout"
	case errors.Is(err, engine.ErrConflict):
		return "conflict"
	case errors.Is(err, engine.ErrResourceExists):
		return "resource_exists"
	default:
		return "_OTHER"
	}
}

// Emit makes the span of an event.
func (t *Tracing) Emit(next engine.Emit) engine.Emit {
	return func(ctx context.Context, e engine.Event) error {
		if e.Operation == engine.Resync || e.Operation == engine.ListStarted || e.Operation == engine.ListEnded {
			return next(ctx, e)
		}
		if t.skips() {
			return next(ctx, e)
		}
		// A span of its own, whatever span the source runs in.
		parent := ctx
		if e.Traceparent != "" || trace.SpanContextFromContext(ctx).IsValid() {
			parent = trace.ContextWithRemoteSpanContext(ctx, parse(e.Traceparent))
		}
		name, ok := t.names.Load(e.Source + "/events")
		if !ok {
			name, _ = t.names.LoadOrStore(e.Source+"/events", "publish "+engine.EventTopic(e.Source))
		}
		_, span := t.tracer.Start(parent, name.(string), t.producer...)
		if sc := span.SpanContext(); t.valid(sc) {
			e.Traceparent = format(sc)
		}
		if !span.IsRecording() {
			return next(ctx, e)
		}
		defer span.End()
		span.SetAttributes(
			attribute.String("messaging.operation.name", "publish"),
			attribute.String("messaging.operation.type", "create"),
			attribute.String("messaging.system", t.cfg.System),
			attribute.String("messaging.destination.name", engine.EventTopic(e.Source)),
			attribute.String("windlass.key", e.Key.String()),
			attribute.String("windlass.operation", e.Operation.String()),
			attribute.String("windlass.revision", e.Revision),
			attribute.Bool("windlass.repaired", e.Repaired),
		)
		err := next(ctx, e)
		failed(span, err)
		return err
	}
}

// Access makes the span of a read or write; it is an engine.Hooks.Access.
func (t *Tracing) Access(ctx context.Context, verb string, key engine.Key) (context.Context, func(error)) {
	kind := key.Kind.String()
	if kind == "" {
		kind = key.Namespace
	}
	ctx, span := t.tracer.Start(ctx, verb+" "+kind, trace.WithSpanKind(trace.SpanKindClient))
	if !span.IsRecording() {
		return ctx, func(error) {}
	}
	span.SetAttributes(attribute.String("windlass.key", key.String()))
	return ctx, func(err error) {
		if !engine.IsNotFound(err) {
			failed(span, err)
		}
		span.End()
	}
}

// format writes a span context as a W3C traceparent.
func format(sc trace.SpanContext) string {
	id, span := sc.TraceID(), sc.SpanID()
	b := make([]byte, 0, 55)
	b = append(b, "00-"...)
	b = hex.AppendEncode(b, id[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, span[:])
	b = append(b, '-')
	b = hex.AppendEncode(b, []byte{byte(sc.TraceFlags())})
	return string(b)
}

// parse is the reverse of format; what is no traceparent gives an invalid span context.
func parse(traceparent string) trace.SpanContext {
	if traceparent == "" {
		return trace.SpanContext{}
	}
	carrier := propagation.MapCarrier{"traceparent": traceparent}
	//nolint:forbidigo // the context carries the result, no lifetime.
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}
