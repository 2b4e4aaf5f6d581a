// Package otlp sets up the OpenTelemetry SDK for a program: the exporter, the sampler and the resource. The OTEL_*
// variables of the specification win over what it is given.
package otlp

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
)

// Config says where spans go.
type Config struct {
	// Endpoint is host:port or a URL of a collector. Empty, and no OTEL_EXPORTER_OTLP_ENDPOINT: nowhere.
	Endpoint string
	// Protocol is grpc, the default, or http/protobuf.
	Protocol string
	// SampleRatio is the share of new traces that are kept; a trace that comes from elsewhere is kept if it was there.
	SampleRatio float64
	// Stdout prints spans there too. Nil is off.
	Stdout io.Writer
	// Service and Version name the program.
	Service, Version string
}

// New returns a provider, or nil if there is nowhere for spans to go. Shut it down to send what is left.
func New(ctx context.Context, cfg Config) (*trace.TracerProvider, error) {
	var opts []trace.TracerProviderOption
	exporter, err := cfg.exporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	if exporter != nil {
		opts = append(opts, trace.WithBatcher(exporter))
	}
	if cfg.Stdout != nil {
		e, err := stdouttrace.New(stdouttrace.WithWriter(cfg.Stdout), stdouttrace.WithPrettyPrint())
		if err != nil {
			return nil, fmt.Errorf("tracing: %w", err)
		}
		opts = append(opts, trace.WithSyncer(e))
	}
	if len(opts) == 0 {
		return nil, nil
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", cfg.Service), attribute.String("service.version", cfg.Version)),
		resource.WithHost(), resource.WithProcessPID(), resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("tracing: resource: %w", err)
	}
	opts = append(opts, trace.WithResource(res))
	if os.Getenv("OTEL_TRACES_SAMPLER") == "" {
		opts = append(opts, trace.WithSampler(trace.ParentBased(trace.TraceIDRatioBased(cfg.SampleRatio))))
	}
	return trace.NewTracerProvider(opts...), nil
}

func (cfg Config) exporter(ctx context.Context) (trace.SpanExporter, error) {
	fromEnv := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
	if os.Getenv("OTEL_TRACES_EXPORTER") == "none" || fromEnv == "" && cfg.Endpoint == "" {
		return nil, nil
	}
	protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), cfg.Protocol, "grpc")
	endpoint := cfg.Endpoint
	if !strings.Contains(endpoint, "://") {
		endpoint = "http://" + endpoint
	}
	if _, err := url.Parse(endpoint); err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	switch protocol {
	case "grpc":
		var opts []otlptracegrpc.Option
		if fromEnv == "" {
			opts = append(opts, otlptracegrpc.WithEndpointURL(endpoint))
		}
		return otlptracegrpc.New(ctx, opts...)
	case "http/protobuf":
		var opts []otlptracehttp.Option
		if fromEnv == "" {
			opts = append(opts, otlptracehttp.WithEndpointURL(endpoint))
		}
		return otlptracehttp.New(ctx, opts...)
	default:
		return nil, fmt.Errorf("protocol %q is neither grpc nor http/protobuf", protocol)
	}
}

// Discard returns a provider that records one trace in 1/ratio and throws it away: to measure what tracing costs.
func Discard(ratio float64) *trace.TracerProvider {
	return trace.NewTracerProvider(trace.WithBatcher(nowhere{}), trace.WithSampler(trace.ParentBased(trace.TraceIDRatioBased(ratio))))
}

// nowhere is an exporter that keeps nothing.
type nowhere struct{}

// ExportSpans implements trace.SpanExporter.
func (nowhere) ExportSpans(context.Context, []trace.ReadOnlySpan) error { return nil }

// Shutdown implements trace.SpanExporter.
func (nowhere) Shutdown(context.Context) error { return nil }
