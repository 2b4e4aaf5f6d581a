package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/admin"
	"github.com/windlass-dev/windlass/engine/expr"
	"github.com/windlass-dev/windlass/internal/nearest"
)

// Plan is a configuration that was found to be in order, ready to run.
type Plan struct {
	Config      Config
	connections map[string]planned[Closer]
	bus         planned[engine.Bus]
	sources     []named[engine.Source]
	sinks       []named[engine.Sink]
	handlers    []planned[engine.Handler] // of Config.Controllers, one each
	mappers     [][]*expr.Program         // of their watches, one each; nil where none is an expression
}

type named[T any] struct {
	name string
	planned[T]
}

// Load reads config files, directories of them included, and checks them as one. The error is a Problems with all that
// is wrong. Nothing is connected to.
func Load(paths []string, components Components) (*Plan, error) {
	d := &decoder{}
	files := d.expand(paths)
	var cfg Config
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			d.problems = append(d.problems, Problem{File: f, Message: fileError(err)})
			continue
		}
		d.merge(&cfg, f, data)
	}
	return check(d, cfg, components)
}

// Parse is Load of one document.
func Parse(name string, data []byte, components Components) (*Plan, error) {
	d := &decoder{}
	var cfg Config
	d.merge(&cfg, name, data)
	return check(d, cfg, components)
}

// expand replaces directories by the YAML files in them.
func (d *decoder) expand(paths []string) []string {
	var files []string
	for _, p := range paths {
		info, err := os.Stat(p)
		switch {
		case err != nil:
			d.problems = append(d.problems, Problem{File: p, Message: fileError(err)})
		case !info.IsDir():
			files = append(files, p)
		default:
			before := len(files)
			for _, pattern := range []string{"*.yaml", "*.yml"} {
				found, _ := filepath.Glob(filepath.Join(p, pattern)) // the pattern is well formed
				files = append(files, found...)
			}
			slices.Sort(files[before:])
			if len(files) == before {
				d.problems = append(d.problems, Problem{File: p, Message: "the directory holds no .yaml file"})
			}
		}
	}
	return files
}

func fileError(err error) string {
	if errors.Is(err, os.ErrNotExist) {
		return "there is no such file"
	}
	if path, ok := errors.AsType[*os.PathError](err); ok {
		return path.Err.Error()
	}
	return err.Error()
}

// merge adds one file to the configuration: lists and connections grow, everything else may be said once.
func (d *decoder) merge(into *Config, file string, data []byte) {
	d.file = file
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	for first := true; ; first = false {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			if first {
				d.problems = append(d.problems, Problem{File: file, Message: "the file is empty"})
			}
			return
		}
		if err != nil {
			d.problems = append(d.problems, Problem{File: file, Message: strings.TrimPrefix(err.Error(), "yaml: ")})
			return
		}
		d.mergeDocument(into, doc.Content[0])
	}
}

func (d *decoder) mergeDocument(into *Config, n *yaml.Node) {
	var cfg Config
	d.decode(n, reflect.ValueOf(&cfg).Elem(), "")
	head, _ := find(n, "apiVersion")
	if cfg.APIVersion != APIVersion {
		d.fail(head, "apiVersion", "want %s, got %q", APIVersion, cfg.APIVersion)
	}
	if head, _ = find(n, "kind"); cfg.Kind != Kind {
		d.fail(head, "kind", "want %s, got %q", Kind, cfg.Kind)
	}
	into.Sources = append(into.Sources, cfg.Sources...)
	into.Sinks = append(into.Sinks, cfg.Sinks...)
	into.Controllers = append(into.Controllers, cfg.Controllers...)
	for name, c := range cfg.Connections {
		if into.Connections == nil {
			into.Connections = make(map[string]Component)
		}
		if _, twice := into.Connections[name]; twice {
			d.fail(c.line, c.path, "there is a connection %q in another file", name)
		}
		into.Connections[name] = c
	}
	whole, part := reflect.ValueOf(into).Elem(), reflect.ValueOf(&cfg).Elem()
	for i := range whole.NumField() {
		name := whole.Type().Field(i).Tag.Get("yaml")
		f := whole.Field(i)
		if k := f.Kind(); k == reflect.Slice || k == reflect.Map || part.Field(i).IsZero() {
			continue
		}
		if !f.IsZero() && name != "apiVersion" && name != "kind" {
			at, _ := find(n, name)
			d.fail(at, name, "this is said in another file already")
			continue
		}
		f.Set(part.Field(i))
	}
}

// check plans every component and looks at what refers to what.
func check(d *decoder, cfg Config, components Components) (*Plan, error) {
	cfg.defaults()
	p := &Plan{Config: cfg, connections: make(map[string]planned[Closer])}
	for name, c := range cfg.Connections {
		if x, ok := plan(d, "connection", c, components.Connections); ok {
			p.connections[name] = x
		}
	}
	bus := Component{Type: components.DefaultBus, path: "bus"}
	if cfg.Bus != nil {
		bus = *cfg.Bus
	}
	if x, ok := plan(d, "bus", bus, components.Buses); ok {
		p.bus = x
		p.needConnection(d, bus, x.connection)
	}
	names := make(map[string]bool)
	unique := func(what string, c Component) {
		d.file = c.file
		if c.Name == "" {
			d.fail(c.line, c.path, "the %s has no name", what)
		}
		if names[c.Name] {
			d.fail(c.line, c.path, "there are two sources or sinks named %q", c.Name)
		}
		names[c.Name] = true
	}
	for _, c := range cfg.Sources {
		unique("source", c)
		if x, ok := plan(d, "source", c, components.Sources); ok {
			p.sources = append(p.sources, named[engine.Source]{c.Name, x})
			p.needConnection(d, c, x.connection)
		}
	}
	for _, c := range cfg.Sinks {
		unique("sink", c)
		if x, ok := plan(d, "sink", c, components.Sinks); ok {
			p.sinks = append(p.sinks, named[engine.Sink]{c.Name, x})
			p.needConnection(d, c, x.connection)
		}
	}
	p.checkControllers(d, components)
	p.checkRest(d)
	if len(d.problems) > 0 {
		slices.SortStableFunc(d.problems, func(a, b Problem) int {
			if c := strings.Compare(a.File, b.File); c != 0 {
				return c
			}
			return a.Line - b.Line
		})
		return nil, d.problems
	}
	return p, nil
}

func (p *Plan) needConnection(d *decoder, c Component, connection string) {
	if connection == "" {
		return
	}
	names := make([]string, 0, len(p.Config.Connections))
	for name := range p.Config.Connections {
		names = append(names, name)
	}
	if !slices.Contains(names, connection) {
		d.file = c.file
		n, _ := find(c.node, "connection")
		d.fail(n, at(c.path, "connection"), "there is no connection %q%s", connection, nearest.Hint(connection, names))
	}
}

func (cfg *Config) defaults() {
	if cfg.Metadata.Name == "" {
		cfg.Metadata.Name = "windlass"
	}
	setDefault(&cfg.Log.Level, "info")
	setDefault(&cfg.Log.Format, "auto")
	setDefault(&cfg.Server.Health, ":8081")
	setDefault(&cfg.Server.Metrics, ":8080")
	setDefault(&cfg.Server.Admin.Address, "127.0.0.1:8090")
	setDefault(&cfg.Tracing.OTLP.Protocol, "grpc")
	setDefault(&cfg.Tracing.Causality, "link")
	if cfg.Shutdown.DrainTimeout == 0 {
		cfg.Shutdown.DrainTimeout = 30 * time.Second
	}
	for i := range cfg.Controllers {
		c := &cfg.Controllers[i]
		setDefault(&c.Placement, string(engine.Sharded))
		if c.Concurrency == 0 {
			c.Concurrency = 1
		}
		if c.Timeout == 0 {
			c.Timeout = 30 * time.Second
		}
	}
}

func setDefault(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

func (p *Plan) checkControllers(d *decoder, components Components) {
	var sources, sinks []string
	for _, c := range p.Config.Sources {
		sources = append(sources, c.Name)
	}
	for _, c := range p.Config.Sinks {
		sinks = append(sinks, c.Name)
	}
	watchable := append(slices.Clip(sources), sinks...)
	names := make(map[string]bool)
	for i := range p.Config.Controllers {
		c := &p.Config.Controllers[i]
		refer := func(field, what, name string, among []string) {
			if !slices.Contains(among, name) {
				c.fail(d, field, "there is no %s %q%s", what, name, nearest.Hint(name, slices.Clone(among)))
			}
		}
		if names[c.Name] {
			c.fail(d, "name", "there are two controllers named %q", c.Name)
		}
		names[c.Name] = true
		if c.For == "" {
			c.fail(d, "for", "the name of a source is required")
		} else {
			refer("for", "source", c.For, watchable)
		}
		for j, name := range c.Owns {
			refer(fmt.Sprintf("owns.%d", j), "sink", name, sinks)
		}
		for j, name := range c.Reads {
			refer(fmt.Sprintf("reads.%d", j), "source", name, watchable)
		}
		p.mappers = append(p.mappers, c.checkWatches(d, func(field, name string) { refer(field, "source", name, watchable) }))
		h := planned[engine.Handler]{}
		if c.Handler.line == nil {
			c.fail(d, "handler", "a handler is required")
		} else if x, ok := plan(d, "handler", c.Handler, components.Handlers); ok {
			h = x
			for _, name := range x.owns {
				refer("handler", "sink", name, sinks)
			}
			c.checkReads(d, x, watchable)
		}
		p.handlers = append(p.handlers, h)
		c.checkSettings(d)
	}
	if len(p.Config.Controllers) == 0 && len(d.problems) == 0 {
		d.problems = append(d.problems, Problem{File: d.file, Message: "there are no controllers"})
	}
}

// checkReads says which of the sources that the handler reads the controller does not reference.
func (c *ControllerConfig) checkReads(d *decoder, h planned[engine.Handler], watchable []string) {
	referenced := slices.Concat([]string{c.For}, c.Owns, h.owns, c.Reads)
	for _, w := range c.Watches {
		referenced = append(referenced, w.Source)
	}
	for _, name := range h.reads {
		switch {
		case slices.Contains(referenced, name):
		case slices.Contains(watchable, name):
			c.fail(d, "handler", "it reads source %q, which the controller does not reference; add it to reads, or to watches", name)
		default:
			c.fail(d, "handler", "there is no source %q%s", name, nearest.Hint(name, slices.Clone(watchable)))
		}
	}
}

// checkWatches compiles the mappers that are expressions.
func (c *ControllerConfig) checkWatches(d *decoder, refer func(field, name string)) []*expr.Program {
	programs := make([]*expr.Program, len(c.Watches))
	for j, w := range c.Watches {
		field := fmt.Sprintf("watches.%d", j)
		refer(field+".source", w.Source)
		if w.Map.Type == "" {
			c.fail(d, field, "map: how an event becomes keys is required: one of %s", strings.Join(append(slices.Clone(mapperWords), mapperKeys...), ", "))
		}
		if w.Map.Type != "expr" {
			continue
		}
		compiler, err := expr.NewCompiler("event")
		if err == nil {
			programs[j], err = compiler.Compile(w.Map.Arg)
		}
		if err != nil {
			c.fail(d, field+".map.expr", "%s", err)
		}
	}
	return programs
}

// checkSettings lets the engine itself look at the settings.
func (c *ControllerConfig) checkSettings(d *decoder) {
	probe := c.settings(engine.NewController(c.Name)).For(anySource{}).WithHandler(
		func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
			return engine.Result{}, nil
		})
	_, err := engine.New(engine.Config{Controllers: []engine.Controller{probe}})
	if err == nil {
		return
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		field, message := "name", strings.TrimPrefix(line, fmt.Sprintf("controller %q: ", c.Name))
		for prefix, f := range map[string]string{
			"WithBackoff: ": "backoff", "WithConcurrency: ": "concurrency", "WithTimeout: ": "timeout",
			"WithResync: ": "resync", "WithPlacement: ": "placement", "WithRateLimit: ": "rateLimit", "WithDebounce: ": "debounce",
		} {
			if rest, ok := strings.CutPrefix(message, prefix); ok {
				field, message = f, rest
			}
		}
		c.fail(d, field, "%s", message)
	}
}

func (c *ControllerConfig) settings(x engine.Controller) engine.Controller {
	x = x.WithConcurrency(c.Concurrency).WithTimeout(c.Timeout).WithBackoff(c.Backoff.engine()).
		WithPlacement(engine.Placement(c.Placement)).WithResync(c.Resync).WithDebounce(engine.Debounce(c.Debounce))
	if r := c.RateLimit; r != nil {
		x = x.WithRateLimit(engine.NewRateLimit(r.PerSecond, r.Burst))
	}
	if c.Suspend {
		x = x.Suspended()
	}
	if c.DryRun {
		x = x.WithDryRun()
	}
	return x
}

// anySource stands for the primary source while settings are checked.
type anySource struct{ engine.Reader }

func (anySource) Name() string                           { return "primary" }
func (anySource) Run(context.Context, engine.Emit) error { return nil }

func (p *Plan) checkRest(d *decoder) {
	if a := p.Config.Server.Admin; a.Address != "off" && a.TokenFile == "" && !admin.Loopback(a.Address) {
		p.Config.Server.fail(d, "admin", "address: %s can be reached from other machines: set tokenFile too", a.Address)
	}
	cfg := p.Config
	oneOf := func(path, value string, known ...string) {
		if !slices.Contains(known, value) {
			d.problems = append(d.problems, Problem{File: d.file, Path: path, Message: fmt.Sprintf("%q is none of %s", value, strings.Join(known, ", "))})
		}
	}
	oneOf("log.level", cfg.Log.Level, "debug", "info", "warn", "error")
	oneOf("log.format", cfg.Log.Format, "auto", "json", "text")
	oneOf("tracing.otlp.protocol", cfg.Tracing.OTLP.Protocol, "grpc", "http/protobuf")
	oneOf("tracing.causality", cfg.Tracing.Causality, "link", "parent")
	if r := cfg.Tracing.SampleRatio; r != nil && (*r < 0 || *r > 1) {
		d.problems = append(d.problems, Problem{File: d.file, Path: "tracing.sampleRatio", Message: "it is not between 0 and 1"})
	}
	if cfg.Shutdown.DrainTimeout < 0 {
		d.problems = append(d.problems, Problem{File: d.file, Path: "shutdown.drainTimeout", Message: "it is negative"})
	}
}
