package app

import (
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/nearest"
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
	Name        string         `yaml:"name"`
	For         string         `yaml:"for"`
	Owns        []string       `yaml:"owns"`
	Watches     []WatchConfig  `yaml:"watches"`
	Reads       []string       `yaml:"reads"`
	Handler     Component      `yaml:"handler"`
	Concurrency int            `yaml:"concurrency"`
	Timeout     time.Duration  `yaml:"timeout"`
	Resync      time.Duration  `yaml:"resync"`
	RateLimit   *RateConfig    `yaml:"rateLimit"`
	Debounce    DebounceConfig `yaml:"debounce"`
	Backoff     BackoffConfig  `yaml:"backoff"`
	Placement   string         `yaml:"placement"`
	Suspend     bool           `yaml:"suspend"`
	DryRun      bool           `yaml:"dryRun"`

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

// MapConfig is a mapper: a word, or one key with what it needs.
type MapConfig struct {
	// Type is owner, sameName, label, annotation, field or expr.
	Type string
	// Arg is the name of the label, annotation or field, or the expression for the names of keys.
	Arg string
}

// mapperWords are the mappers that need nothing, mapperKeys those that need a word.
var (
	mapperWords = []string{"owner", "sameName"}
	mapperKeys  = []string{"label", "annotation", "field", "expr"}
)

func (m *MapConfig) decodeSection(d *decoder, n *yaml.Node, path string) {
	unknown := func(n *yaml.Node, word string) {
		d.fail(n, path, "unknown mapper %q%s", word, nearest.Hint(word, append(slices.Clone(mapperWords), mapperKeys...)))
	}
	if n.Kind == yaml.ScalarNode {
		switch m.Type = n.Value; {
		case slices.Contains(mapperKeys, m.Type):
			d.fail(n, path, "the mapper %q needs a value: {%s: …}", m.Type, m.Type)
		case !slices.Contains(mapperWords, m.Type):
			unknown(n, m.Type)
		}
		return
	}
	d.fields(n, path, func(key, value *yaml.Node) {
		switch {
		case !slices.Contains(mapperKeys, key.Value):
			unknown(key, key.Value)
		case value.Kind != yaml.ScalarNode || value.Value == "":
			d.fail(value, at(path, key.Value), "want text, got %s", shape(value))
		case m.Type != "":
			d.fail(key, path, "%q and %q are two mappers; choose one", m.Type, key.Value)
		default:
			m.Type, m.Arg = key.Value, value.Value
		}
	})
}

// RateConfig bounds how often reconciles start.
type RateConfig struct {
	PerSecond float64 `yaml:"perSecond"`
	Burst     int     `yaml:"burst"`
}

// DebounceConfig is engine.Debounce.
type DebounceConfig struct {
	After time.Duration `yaml:"after"`
	Max   time.Duration `yaml:"max"`
}

// BackoffConfig is engine.Backoff.
type BackoffConfig struct {
	Linear      bool          `yaml:"linear"`
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
	Health  string      `yaml:"health"`
	Metrics string      `yaml:"metrics"`
	Admin   AdminConfig `yaml:"admin"`

	origin
}

// AdminConfig is the API for operators.
type AdminConfig struct {
	Address string `yaml:"address"`
	// TokenFile holds what requests must carry as a bearer token. Without it, the address must be this machine's own.
	TokenFile string `yaml:"tokenFile"`
}
