package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
)

// demoMinimum is how long the story takes: the requeue must fall due after the restart.
const demoMinimum = 12 * time.Second

func demoCommand() *cobra.Command {
	length, output := 20*time.Second, "text"
	cmd := &cobra.Command{
		Use: "demo", Short: "Show what the engine does, by itself", Args: noArgs,
		Long: `demo starts an embedded NATS server and an engine that makes a shipment of every order, and
prints a line for each thing that happens. It needs nothing and leaves nothing behind.
It exits 1 if anything that the engine promises did not happen.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if length < demoMinimum {
				return usageError{fmt.Errorf("--for %s: the story takes %s at least", length, demoMinimum)}
			}
			story := cmd.OutOrStdout()
			switch output {
			case "text":
			case "json":
				story = cmd.ErrOrStderr()
			default:
				return usageError{fmt.Errorf("--output %q is none of text, json", output)}
			}
			d := &demo{log: newDemoLog(story), length: length}
			if err := d.run(cmd.Context()); errors.Is(err, context.Canceled) {
				d.log.note("interrupted")
				return errProblem
			} else if err != nil {
				return err
			}
			ok := d.log.verdict()
			if output == "json" {
				if err := json.NewEncoder(cmd.OutOrStdout()).Encode(d.log.counts()); err != nil {
					return err
				}
			}
			if !ok {
				return errProblem
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&length, "for", length, "how long it runs")
	cmd.Flags().StringVarP(&output, "output", "o", output, "text, or json: a last line with the counts")
	return cmd
}

// demo is the story and what it runs on.
type demo struct {
	log    *demoLog
	length time.Duration
	dir    string
	orders jetstream.KeyValue
	life   *demoLife
}

// demoLife is one life of the engine, with its server.
type demoLife struct {
	server *nats.Server
	conn   *nats.Connection
	client *natsgo.Conn
	bus    *nats.Bus
	stop   context.CancelFunc
	ended  chan error
}

func (d *demo) run(ctx context.Context) (err error) {
	if d.dir, err = os.MkdirTemp("", "windlass-demo-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(d.dir)) }()
	end := time.Now().Add(d.length)
	if err := d.start(ctx); err != nil {
		return err
	}
	defer func() {
		if d.life != nil {
			err = errors.Join(err, d.end(ctx))
		}
	}()
	for _, scene := range []func(context.Context) error{d.changes, d.burst, d.failures, d.restart} {
		if err := scene(ctx); err != nil {
			return err
		}
	}
	return d.everyday(ctx, end)
}

// start begins a life on the data directory.
func (d *demo) start(ctx context.Context) error {
	server, err := nats.StartServer(nats.ServerConfig{DataDir: d.dir, Listen: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	l := &demoLife{server: server, ended: make(chan error, 1)}
	d.life = l
	if l.conn, err = server.Connect(ctx, ""); err != nil {
		return err
	}
	if l.bus, err = nats.NewBus(ctx, l.conn, nats.BusConfig{Engine: "demo", Partitions: 2, SoleServer: true}); err != nil {
		return err
	}
	e, err := d.engine(ctx)
	if err != nil {
		return err
	}
	// The orders come from a client that knows nothing of the engine.
	if l.client, err = natsgo.Connect(server.URL()); err != nil {
		return err
	}
	js, err := jetstream.New(l.client)
	if err != nil {
		return err
	}
	if d.orders, err = js.KeyValue(ctx, "orders"); err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = stop
	go func() { l.ended <- e.Run(running) }()
	for !listed(e) {
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

func listed(e *engine.Engine) bool {
	for _, s := range e.Sources() {
		if !s.Synced {
			return false
		}
	}
	return true
}

func (d *demo) engine(ctx context.Context) (*engine.Engine, error) {
	orders, err := nats.NewBucket(ctx, d.life.conn, nats.BucketConfig{Bucket: "orders", Create: true})
	if err != nil {
		return nil, err
	}
	shipments, err := nats.NewBucket(ctx, d.life.conn, nats.BucketConfig{Bucket: "shipments", Create: true})
	if err != nil {
		return nil, err
	}
	c := engine.NewController("shipping").For(orders).Owns(shipments).WithConcurrency(4).
		WithBackoff(engine.Backoff{Initial: 500 * time.Millisecond, Max: 5 * time.Second, MaxAttempts: 4}).
		WithHandler(d.ship(shipments))
	return engine.New(engine.Config{
		Name: "demo", Controllers: []engine.Controller{c}, Bus: d.life.bus, Hooks: d.log.hooks(), Logger: slog.New(slog.DiscardHandler),
	})
}

// end ends a life: the engine, its bus and the server.
func (d *demo) end(ctx context.Context) error {
	l := d.life
	d.life = nil
	var err error
	if l.stop != nil {
		l.stop()
		err = <-l.ended
		l.client.Close()
	}
	if l.bus != nil {
		l.bus.Close(ctx)
	}
	if l.conn != nil {
		l.conn.Close()
	}
	l.server.Shutdown()
	return err
}

// order is what the orders bucket holds.
type order struct {
	Quantity int     `json:"quantity"`
	Price    float64 `json:"price"`
	// Slow, Flaky, Hold and Poison are what makes the story: an order that takes its time, that fails a few times,
	// that is to be looked at again later, that never succeeds.
	Slow   time.Duration `json:"slow,omitempty"`
	Flaky  int           `json:"flaky,omitempty"`
	Hold   time.Duration `json:"hold,omitempty"`
	Poison bool          `json:"poison,omitempty"`
}

// ship makes a shipment of an order.
func (d *demo) ship(shipments *nats.Bucket) engine.Handler {
	return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
		target := shipments.Key(req.Key.Name)
		o, err := engine.Get[order](ctx, rt, req.Key)
		if engine.IsNotFound(err) {
			return engine.Result{}, rt.Delete(ctx, target)
		}
		if err != nil {
			return engine.Result{}, err
		}
		switch {
		case o.Poison:
			return engine.Result{}, errors.New("no such article")
		case req.Attempt < o.Flaky && req.Trigger() != engine.Resynced:
			return engine.Result{}, errors.New("the carrier does not answer")
		}
		select {
		case <-time.After(o.Slow):
		case <-ctx.Done():
			return engine.Result{}, context.Cause(ctx)
		}
		total := fmt.Sprintf(`{"quantity":%d,"total":%.2f}`, o.Quantity, float64(o.Quantity)*o.Price)
		if err := rt.Apply(ctx, engine.Object{Key: target, Value: []byte(total)}); err != nil {
			return engine.Result{}, err
		}
		d.log.shipped(req, total)
		if o.Hold > 0 && req.Trigger() != engine.Requeued {
			return engine.Result{RequeueAfter: o.Hold}, nil
		}
		return engine.Result{}, nil
	}
}

func (d *demo) put(ctx context.Context, name string, o order) error {
	value, err := json.Marshal(o)
	if err != nil {
		return err
	}
	_, err = d.orders.Put(ctx, name, value)
	return err
}

func (d *demo) changes(ctx context.Context) error {
	d.log.title("Every change of an order is reconciled")
	for i := range 4 {
		if err := d.put(ctx, fmt.Sprintf("order-%d", i+1), order{Quantity: i + 1, Price: 2.5}); err != nil {
			return err
		}
	}
	if err := pause(ctx, 300*time.Millisecond); err != nil {
		return err
	}
	if err := d.orders.Delete(ctx, "order-4"); err != nil {
		return err
	}
	return pause(ctx, 500*time.Millisecond)
}

func (d *demo) burst(ctx context.Context) error {
	const n = 200
	d.log.title(fmt.Sprintf("%d changes of one key become a few runs, and the last one wins", n))
	for i := range n {
		if err := d.put(ctx, "hot", order{Quantity: i + 1, Price: 1, Slow: 150 * time.Millisecond}); err != nil {
			return err
		}
	}
	return pause(ctx, time.Second)
}

func (d *demo) failures(ctx context.Context) error {
	d.log.title("What fails is tried again after growing waits; what never succeeds is parked, and is in nobody's way")
	for name, o := range map[string]order{
		"flaky": {Quantity: 1, Price: 9, Flaky: 2}, "poison": {Quantity: 1, Poison: true},
	} {
		if err := d.put(ctx, name, o); err != nil {
			return err
		}
	}
	for i := range 4 {
		if err := pause(ctx, 900*time.Millisecond); err != nil {
			return err
		}
		if err := d.put(ctx, fmt.Sprintf("meanwhile-%d", i+1), order{Quantity: 1, Price: 1}); err != nil {
			return err
		}
	}
	return pause(ctx, 500*time.Millisecond)
}

func (d *demo) restart(ctx context.Context) error {
	const hold = 4 * time.Second
	d.log.title("A requeue-after survives a restart and fires at its time")
	if err := d.put(ctx, "layaway", order{Quantity: 2, Price: 7, Hold: hold}); err != nil {
		return err
	}
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	d.log.note("the engine and its NATS server stop")
	if err := d.end(ctx); err != nil {
		return err
	}
	if err := pause(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	d.log.note("and start again on the same directory")
	d.log.restarted()
	if err := d.start(ctx); err != nil {
		return err
	}
	if err := pause(ctx, 300*time.Millisecond); err != nil {
		return err
	}
	d.log.checked()
	return pause(ctx, hold-time.Second)
}

// everyday goes on until the time is over.
func (d *demo) everyday(ctx context.Context, end time.Time) error {
	if time.Until(end) > time.Second {
		d.log.title("And so on")
	}
	for i := 1; time.Until(end) > 500*time.Millisecond; i++ {
		if err := d.put(ctx, fmt.Sprintf("order-%d", i%8+1), order{Quantity: i, Price: 1.5}); err != nil {
			return err
		}
		if err := pause(ctx, min(700*time.Millisecond, time.Until(end))); err != nil {
			return err
		}
	}
	return pause(ctx, 300*time.Millisecond)
}

// pause waits, or returns the error of an ended ctx.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
