package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/adapters/redis"
	"github.com/windlass-dev/windlass/engine"
)

const (
	engineName = "soak"
	controller = "copy"
	// journal is the stream in which engines note what they do.
	journal = "JOURNAL"
	// requeueAfter is what one run in five asks for.
	requeueAfter = 2 * time.Second
)

// note is one line of the journal.
type note struct {
	Key     string    `json:"k"`
	Process int       `json:"p"`
	Fence   uint64    `json:"f"`
	Version int       `json:"v"`
	At      time.Time `json:"at"`
	// End says that the run has done its work; else it begins.
	End bool `json:"end,omitempty"`
	// Due is when the key wants to run again.
	Due time.Time `json:"due,omitzero"`
	// Requeued says that the run is here because its time had come.
	Requeued bool `json:"rq,omitempty"`
	// Overlap says that another run of the key was under way in the same process.
	Overlap bool `json:"overlap,omitempty"`
}

// serve is a NATS server, with a route one of a cluster.
func serve(ctx context.Context, dir, address, route, routes string) error {
	opts := &natsserver.Options{JetStream: true, StoreDir: dir, NoSigs: true, ServerName: "soak-" + address}
	var err error
	if opts.Host, opts.Port, err = hostPort(address); err != nil {
		return err
	}
	if route != "" {
		opts.Cluster.Name = "soak"
		if opts.Cluster.Host, opts.Cluster.Port, err = hostPort(route); err != nil {
			return err
		}
		opts.Routes = natsserver.RoutesFromStr(routes)
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return err
	}
	s.Start()
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

func hostPort(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	return host, port, err
}

// worker is a replica: it copies orders to results.
type worker struct {
	js      jetstream.JetStream
	results *nats.Bucket

	mu      sync.Mutex
	running map[string]bool
}

func work(ctx context.Context, kind, url, address string, log *slog.Logger) error {
	conn, err := nats.Connect(ctx, nats.ConnectionConfig{URL: url, Scope: "main", Logger: log})
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &worker{running: make(map[string]bool)}
	if w.js, err = jetstream.New(conn.Conn()); err != nil {
		return err
	}
	orders, err := nats.NewBucket(ctx, conn, nats.BucketConfig{Bucket: "orders"})
	if err != nil {
		return err
	}
	if w.results, err = nats.NewBucket(ctx, conn, nats.BucketConfig{Bucket: "results"}); err != nil {
		return err
	}
	bus, end, err := openBus(ctx, kind, address, conn, log)
	if err != nil {
		return err
	}
	defer end()
	e, err := engine.New(engine.Config{Name: engineName, Bus: bus, Logger: log, Controllers: []engine.Controller{
		engine.NewController(controller).For(orders).Owns(w.results).WithConcurrency(16).WithHandler(w.handle).
			WithBackoff(engine.Backoff{Initial: 100 * time.Millisecond, Max: 5 * time.Second}),
	}})
	if err != nil {
		return err
	}
	return e.Run(ctx)
}

// openBus returns the bus and what closes it.
func openBus(ctx context.Context, kind, address string, conn *nats.Connection, log *slog.Logger) (engine.Bus, func(), error) {
	if kind != "redis" {
		cfg := nats.BusConfig{Engine: engineName}
		if kind == "nats3" {
			cfg.Replicas = 3
		}
		bus, err := nats.NewBus(ctx, conn, cfg)
		return bus, func() { bus.Close(context.WithoutCancel(ctx)) }, err
	}
	redis.LogTo(log)
	far, err := redis.Connect(ctx, redis.ConnectionConfig{Address: address, Scope: "redis", Logger: log})
	if err != nil {
		return nil, nil, err
	}
	bus, err := redis.NewBus(ctx, far, redis.BusConfig{Engine: engineName})
	return bus, func() { bus.Close(context.WithoutCancel(ctx)); far.Close() }, err
}

func (w *worker) handle(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
	key := req.Key.Name
	w.mu.Lock()
	n := note{Key: key, At: time.Now(), Process: os.Getpid(), Fence: req.Fence, Overlap: w.running[key], Requeued: req.Trigger() == engine.Requeued}
	w.running[key] = true
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.running, key)
	}()
	o, err := rt.Get(ctx, req.Key)
	if err != nil {
		return engine.Result{}, err
	}
	if n.Version, err = strconv.Atoi(string(o.Value.([]byte))); err != nil {
		return engine.Result{}, engine.Terminal(err)
	}
	if err := w.note(ctx, n); err != nil {
		return engine.Result{}, err
	}
	select {
	case <-time.After(time.Millisecond + rand.N(49*time.Millisecond)): //nolint:gosec // no secret.
	case <-ctx.Done():
		return engine.Result{}, ctx.Err()
	}
	if rand.IntN(20) == 0 { //nolint:gosec // no secret.
		return engine.Result{}, errors.New("one in twenty fails")
	}
	if err := rt.Apply(ctx, engine.Object{Key: w.results.Key(key), Value: o.Value}); err != nil {
		return engine.Result{}, err
	}
	n.End, n.At = true, time.Now()
	var result engine.Result
	if rand.IntN(5) == 0 { //nolint:gosec // no secret.
		result.RequeueAfter, n.Due = requeueAfter, time.Now().Add(requeueAfter)
	}
	return result, w.note(ctx, n)
}

// note writes a line of the journal.
func (w *worker) note(ctx context.Context, n note) error {
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // an answer that was lost is not waited for
	defer cancel()
	if _, err = w.js.Publish(ctx, "journal."+n.Key, data); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}
