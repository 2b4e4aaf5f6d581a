package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/windlass-dev/windlass/adapters/consul"
	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/adapters/redis"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/app"
	"github.com/windlass-dev/windlass/engine/sync"
)

// components are the systems that this program knows. Adding one is adding a line here.
func components() app.Components {
	return app.Components{
		Connections: map[string]app.Factory[app.Closer]{
			"consul": app.New(consulConnection), "kubernetes": app.New(kubernetesConnection), "nats": app.New(natsConnection), "redis": app.New(redisConnection),
		},
		Buses:      map[string]app.Factory[engine.Bus]{"nats": app.New(natsBus), "redis": app.New(redisBus), "memory": app.New(memoryBus)},
		Sources:    map[string]app.Factory[engine.Source]{"consul": app.New(consulSource), "kubernetes": app.New(kubernetesSource), "nats": app.New(natsSource)},
		Sinks:      map[string]app.Factory[engine.Sink]{"consul": app.New(consulSink), "kubernetes": app.New(kubernetesSink), "nats": app.New(natsSink)},
		Handlers:   map[string]app.Factory[engine.Handler]{"sync": app.New(syncHandler)},
		DefaultBus: "nats",
	}
}

func memoryBus(context.Context, *app.Env, string, struct{}) (engine.Bus, error) {
	return engine.NewMemoryBus(), nil
}

func natsConnection(ctx context.Context, env *app.Env, name string, cfg nats.ConnectionConfig) (app.Closer, error) {
	cfg.Scope, cfg.Logger = name, env.Logger
	return nats.Connect(ctx, cfg)
}

// natsBusConfig is the bus on a named connection, or on a server of its own.
type natsBusConfig struct {
	Connection        string `yaml:"connection"`
	nats.ServerConfig `yaml:",inline"`
	nats.BusConfig    `yaml:",inline"`
}

// ConnectionName is the connection that must exist.
func (c natsBusConfig) ConnectionName() string { return c.Connection }

// Validate returns everything that is wrong.
func (c natsBusConfig) Validate() error {
	errs := []error{c.ServerConfig.Validate(), c.BusConfig.Validate()}
	if c.Connection != "" && c.ServerConfig != (nats.ServerConfig{}) {
		errs = append(errs, errors.New("connection: dataDir, listen, sync and syncInterval are for the embedded server, which a connection replaces"))
	}
	if c.Connection == "" && c.Replicas > 1 {
		errs = append(errs, errors.New("replicas: the embedded server is one; name a connection to a cluster"))
	}
	return errors.Join(errs...)
}

func natsBus(ctx context.Context, env *app.Env, _ string, cfg natsBusConfig) (engine.Bus, error) {
	cfg.Engine = env.Engine
	conn, err := natsBusConnection(ctx, env, cfg)
	if err != nil {
		return nil, err
	}
	env.Share(conn)
	cfg.SoleServer = cfg.Connection == "" && cfg.Listen == ""
	cfg.GroupCommit = cfg.Connection == "" && cfg.Sync != "interval"
	bus, err := nats.NewBus(ctx, conn, cfg.BusConfig)
	if err != nil {
		return nil, err
	}
	env.OnClose(bus.Close)
	return bus, nil
}

func natsBusConnection(ctx context.Context, env *app.Env, cfg natsBusConfig) (*nats.Connection, error) {
	if cfg.Connection != "" {
		return app.Connection[*nats.Connection](env, cfg.Connection)
	}
	cfg.Logger = env.Logger
	server, err := nats.StartServer(cfg.ServerConfig)
	if err != nil {
		return nil, err
	}
	env.OnClose(func(context.Context) { server.Shutdown() })
	if url := server.URL(); url != "" {
		env.Logger.InfoContext(ctx, "embedded NATS listens", "url", url)
	}
	conn, err := server.Connect(ctx, "")
	if err != nil {
		return nil, err
	}
	env.OnClose(func(context.Context) { conn.Close() })
	return conn, nil
}

func redisConnection(ctx context.Context, env *app.Env, name string, cfg redis.ConnectionConfig) (app.Closer, error) {
	cfg.Scope, cfg.Logger = name, env.Logger
	redis.LogTo(env.Logger)
	return redis.Connect(ctx, cfg)
}

// redisBusConfig is the bus on a named connection.
type redisBusConfig struct {
	Connection      string `yaml:"connection"`
	redis.BusConfig `yaml:",inline"`
}

// ConnectionName is the connection that must exist.
func (c redisBusConfig) ConnectionName() string { return c.Connection }

func redisBus(ctx context.Context, env *app.Env, _ string, cfg redisBusConfig) (engine.Bus, error) {
	conn, err := app.Connection[*redis.Connection](env, cfg.Connection)
	if err != nil {
		return nil, err
	}
	cfg.Engine = env.Engine
	bus, err := redis.NewBus(ctx, conn, cfg.BusConfig)
	if err != nil {
		return nil, err
	}
	env.OnClose(bus.Close)
	return bus, nil
}

// natsBucketConfig is a bucket on a connection.
type natsBucketConfig struct {
	Connection        string `yaml:"connection"`
	nats.BucketConfig `yaml:",inline"`
}

// ConnectionName is the connection that must exist.
func (c natsBucketConfig) ConnectionName() string { return c.Connection }

func natsSource(ctx context.Context, env *app.Env, name string, cfg natsBucketConfig) (engine.Source, error) {
	return natsBucket(ctx, env, name, cfg)
}

func natsSink(ctx context.Context, env *app.Env, name string, cfg natsBucketConfig) (engine.Sink, error) {
	return natsBucket(ctx, env, name, cfg)
}

func natsBucket(ctx context.Context, env *app.Env, name string, cfg natsBucketConfig) (*nats.Bucket, error) {
	conn, err := app.Connection[*nats.Connection](env, cfg.Connection)
	if err != nil {
		return nil, err
	}
	cfg.Name = name
	return nats.NewBucket(ctx, conn, cfg.BucketConfig)
}

func kubernetesConnection(ctx context.Context, env *app.Env, name string, cfg k8s.ConnectionConfig) (app.Closer, error) {
	cfg.Scope, cfg.Logger, cfg.UserAgent = name, env.Logger, "windlass/"+version
	k8s.LogTo(env.Logger)
	return k8s.Connect(ctx, cfg)
}

// kubernetesConfig is a kind of objects on a connection.
type kubernetesConfig struct {
	Connection         string `yaml:"connection"`
	k8s.ResourceConfig `yaml:",inline"`
}

// ConnectionName is the connection that must exist.
func (c kubernetesConfig) ConnectionName() string { return c.Connection }

func kubernetesSource(_ context.Context, env *app.Env, name string, cfg kubernetesConfig) (engine.Source, error) {
	return kubernetesResource(env, name, cfg)
}

func kubernetesSink(_ context.Context, env *app.Env, name string, cfg kubernetesConfig) (engine.Sink, error) {
	return kubernetesResource(env, name, cfg)
}

func kubernetesResource(env *app.Env, name string, cfg kubernetesConfig) (*k8s.Resource, error) {
	conn, err := app.Connection[*k8s.Connection](env, cfg.Connection)
	if err != nil {
		return nil, err
	}
	cfg.Name, cfg.FieldManager = name, cmp.Or(cfg.FieldManager, "windlass-"+env.Engine)
	return k8s.Open(conn, cfg.ResourceConfig)
}

func consulConnection(ctx context.Context, env *app.Env, name string, cfg consul.ConnectionConfig) (app.Closer, error) {
	cfg.Scope, cfg.Logger = name, env.Logger
	return consul.Connect(ctx, cfg)
}

// consulSinkConfig is keys, the instances of a node, or config entries.
type consulSinkConfig struct {
	Connection      string `yaml:"connection"`
	consul.KVConfig `yaml:",inline"`

	Instances     *consul.InstancesConfig `yaml:"instances"`
	ConfigEntries *consul.EntriesConfig   `yaml:"configEntries"`
}

// ConnectionName is the connection that must exist.
func (c consulSinkConfig) ConnectionName() string { return c.Connection }

// Validate returns everything that is wrong.
func (c consulSinkConfig) Validate() error { return c.validate(0) }

func (c consulSinkConfig) validate(others int) error {
	errs := []error{c.KVConfig.Validate()}
	if c.KVConfig != (consul.KVConfig{}) {
		others++
	}
	if c.Instances != nil {
		others++
		errs = append(errs, prefixed("instances", c.Instances.Validate()))
	}
	if c.ConfigEntries != nil {
		others++
		errs = append(errs, prefixed("configEntries", c.ConfigEntries.Validate()))
	}
	if others > 1 {
		errs = append(errs, errors.New("keys, services, nodes, instances and configEntries exclude each other: make one of each"))
	}
	return errors.Join(errs...)
}

func prefixed(field string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s.%w", field, err)
}

func consulSink(_ context.Context, env *app.Env, name string, cfg consulSinkConfig) (engine.Sink, error) {
	conn, err := app.Connection[*consul.Connection](env, cfg.Connection)
	switch {
	case err != nil:
		return nil, err
	case cfg.Instances != nil:
		cfg.Instances.Name = name
		return consul.NewInstances(conn, *cfg.Instances)
	case cfg.ConfigEntries != nil:
		cfg.ConfigEntries.Name = name
		return consul.NewEntries(conn, *cfg.ConfigEntries)
	default:
		cfg.Name = name
		return consul.NewKV(conn, cfg.KVConfig)
	}
}

// consulSourceConfig is what can be written, services or nodes.
type consulSourceConfig struct {
	consulSinkConfig `yaml:",inline"`

	Services *consul.ServicesConfig `yaml:"services"`
	Nodes    *consul.NodesConfig    `yaml:"nodes"`
}

// Validate returns everything that is wrong.
func (c consulSourceConfig) Validate() error {
	others := 0
	if c.Services != nil {
		others++
	}
	if c.Nodes != nil {
		others++
	}
	return c.validate(others)
}

func consulSource(ctx context.Context, env *app.Env, name string, cfg consulSourceConfig) (engine.Source, error) {
	if cfg.Services == nil && cfg.Nodes == nil {
		sink, err := consulSink(ctx, env, name, cfg.consulSinkConfig)
		if err != nil {
			return nil, err
		}
		return sink.(engine.Source), nil
	}
	conn, err := app.Connection[*consul.Connection](env, cfg.Connection)
	switch {
	case err != nil:
		return nil, err
	case cfg.Nodes != nil:
		cfg.Nodes.Name = name
		return consul.NewNodes(conn, *cfg.Nodes)
	default:
		cfg.Services.Name = name
		return consul.NewServices(conn, *cfg.Services)
	}
}

// syncConfig is the sync handler. It owns what it writes.
type syncConfig struct {
	sync.Config `yaml:",inline"`
}

// Owns are the sinks that become the controller's own.
func (c syncConfig) Owns() []string { return c.Sinks() }

// Reads are the sources that the controller must reference.
func (c syncConfig) Reads() (names []string) {
	for _, l := range c.With {
		names = append(names, l.Source)
	}
	return names
}

// Validate returns everything that is wrong.
func (c syncConfig) Validate() error {
	_, err := sync.Compile(c.Config)
	return err
}

func syncHandler(_ context.Context, env *app.Env, _ string, cfg syncConfig) (engine.Handler, error) {
	s, err := sync.Compile(cfg.Config)
	if err != nil {
		return nil, err
	}
	targets := make(map[string]sync.Target)
	for _, name := range cfg.Sinks() {
		if targets[name], err = app.Sink[sync.Target](env, name); err != nil {
			return nil, err
		}
	}
	from := make(map[string]sync.Named, len(cfg.With))
	for name, l := range cfg.With {
		if from[l.Source], err = app.Source[sync.Named](env, l.Source); err != nil {
			return nil, fmt.Errorf("with.%s: %w", name, err)
		}
	}
	return s.Handler(targets, from), nil
}
