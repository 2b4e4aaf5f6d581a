package app

import (
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/engine"
)

// APIVersion and Kind head every config file.
const (
	APIVersion = "windlass.dev/v1alpha1"
	Kind       = "Engine"
)

// Config is a config file.
type Config struct {
	APIVersion  string               `yaml:"apiVersion"`
	Kind        string               `yaml:"kind"`
	Metadata    Metadata             `yaml:"metadata"`
	Connections map[string]Component `yaml:"connections"`
	Bus         *Component           `yaml:"bus"`
	Sources     []Component          `yaml:"sources"`
	Sinks       []Component          `yaml:"sinks"`
	Controllers []ControllerConfig   `yaml:"controllers"`
	Log         LogConfig            `yaml:"log"`
	Shutdown    ShutdownConfig       `yaml:"shutdown"`
	Tracing     TracingConfig        `yaml:"tracing"`
	Server      ServerConfig         `yaml:"server"`
}

// Metadata names the engine.
type Metadata struct {
	Name string `yaml:"name"`
}

// ControllerConfig describes one controller.
type ControllerConfig struct {
	Name        string        `yaml:"name"`
	For         string        `yaml:"for"`
	Owns        []string      `yaml:"owns"`
	Watches     []WatchConfig `yaml:"watches"`
	Reads       []string      `yaml:"reads"`
	Handler     Component     `yaml:"handler"`
	Concurrency int           `yaml:"concurrency"`
	Timeout     time.Duration `yaml:"timeout"`
	Resync      time.Duration `yaml:"resync"`
	Backoff     BackoffConfig `yaml:"backoff"`
	Placement   string        `yaml:"placement"`
	DryRun      bool          `yaml:"dryRun"`

	origin
}

// origin is where a part of the config stands.
type origin struct {
	file string
	path string
	node *yaml.Node
}

func (o *origin) decodeOrigin(d *decoder, n *yaml.Node, path string) { *o = origin{d.file, path, n} }

// fail reports a problem with a field of the part.
func (o *origin) fail(d *decoder, field, format string, args ...any) {
	d.file = o.file
	n, _ := find(o.node, field)
	d.fail(n, at(o.path, field), format, args...)
}

// WatchConfig is a source that concerns a controller, and how its events become keys.
type WatchConfig struct {
	Source string    `yaml:"source"`
	Map    MapConfig `yaml:"map"`
}

// MapConfig is a mapper: the word owner or sameName, or an expression for the names of keys.
type MapConfig struct {
	Word string
	Expr string `yaml:"expr"`
}

func (m *MapConfig) decodeSection(d *decoder, n *yaml.Node, path string) {
	if n.Kind == yaml.ScalarNode {
		if m.Word = n.Value; m.Word != "owner" && m.Word != "sameName" {
			d.fail(n, path, "unknown mapper %q%s", m.Word, suggest(m.Word, []string{"owner", "sameName", "expr"}))
		}
		return
	}
	d.fields(n, path, func(key, value *yaml.Node) {
		if key.Value != "expr" || value.Kind != yaml.ScalarNode {
			d.fail(key, path, "unknown mapper %q%s", key.Value, suggest(key.Value, []string{"owner", "sameName", "expr"}))
			return
		}
		m.Expr = value.Value
	})
}

// BackoffConfig is engine.Backoff.
type BackoffConfig struct {
	Initial     time.Duration `yaml:"initial"`
	Max         time.Duration `yaml:"max"`
	Multiplier  float64       `yaml:"multiplier"`
	Jitter      float64       `yaml:"jitter"`
	MaxAttempts int           `yaml:"maxAttempts"`
}

func (b BackoffConfig) engine() engine.Backoff { return engine.Backoff(b) }

// LogConfig says what is logged and how.
type LogConfig struct {
	// Level is debug, info, warn or error.
	Level string `yaml:"level"`
	// Format is json, text, or auto: text on a terminal.
	Format string `yaml:"format"`
}

// ShutdownConfig says how the engine ends.
type ShutdownConfig struct {
	DrainTimeout time.Duration `yaml:"drainTimeout"`
}

// TracingConfig says where spans go. The OTEL_* variables win.
type TracingConfig struct {
	OTLP OTLPConfig `yaml:"otlp"`
	// SampleRatio is the share of traces that are kept. Default 1.
	SampleRatio *float64 `yaml:"sampleRatio"`
	// Causality is link, the default, or parent: a reconcile with one cause then continues its trace.
	Causality string `yaml:"causality"`
}

// OTLPConfig is an OpenTelemetry collector.
type OTLPConfig struct {
	Endpoint string `yaml:"endpoint"`
	// Protocol is grpc or http/protobuf.
	Protocol string `yaml:"protocol"`
}

// ServerConfig are the addresses that the engine listens on. "off" is none.
type ServerConfig struct {
	Health  string `yaml:"health"`
	Metrics string `yaml:"metrics"`
}
