// Command postgres keeps a shipment for every order, with its requests carried by PostgreSQL, through Watermill's SQL Pub/Sub:
// what was asked for and not done when the process ends is delivered to the next one. It is a module of its own, so that the
// engine does not depend on a database driver.
//
//	DATABASE_URL=postgres://user@127.0.0.1:5432/shop go run . [order=quantity …]
package main

import (
	"context"
	stdsql "database/sql"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/bus"
	"github.com/windlass-dev/windlass/sources/memory"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Getenv("DATABASE_URL"), os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, url string, orders []string) error {
	db, err := stdsql.Open("pgx", url)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer func() { _ = db.Close() }()
	requests, err := onPostgres(db)
	if err != nil {
		return err
	}
	things := memory.New[string]("orders")
	ship := engine.NewController("shipping").For(things).WithHandler(
		func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			quantity, err := engine.Get[string](ctx, rt, req.Key)
			if err != nil {
				return engine.Result{}, err
			}
			fmt.Println("shipped", req.Key.Name, quantity)
			return engine.Result{}, nil
		})
	eng, err := engine.New(engine.Config{Name: "shop", Bus: requests, Controllers: []engine.Controller{ship}})
	if err != nil {
		return err
	}
	for _, order := range orders {
		name, quantity, _ := strings.Cut(order, "=")
		things.Set(name, quantity)
	}
	return eng.Run(ctx)
}

// onPostgres returns a bus that acks a request in PostgreSQL once its reconcile has ended well.
func onPostgres(db *stdsql.DB) (engine.Bus, error) {
	quiet := watermill.NopLogger{}
	publisher, err := sql.NewPublisher(db, sql.PublisherConfig{SchemaAdapter: sql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}, quiet)
	if err != nil {
		return nil, fmt.Errorf("publish to PostgreSQL: %w", err)
	}
	// Each group reads a topic at its own offset.
	subscriber := func(group string) message.Subscriber {
		s, err := sql.NewSubscriber(db, sql.SubscriberConfig{
			ConsumerGroup: group, SchemaAdapter: sql.DefaultPostgreSQLSchema{}, OffsetsAdapter: sql.DefaultPostgreSQLOffsetsAdapter{},
			PollInterval: 50 * time.Millisecond, InitializeSchema: true,
		}, quiet)
		if err != nil {
			panic(err) // of the config above
		}
		return s
	}
	return bus.FromPubSub(bus.Config{Publisher: publisher, Subscriber: subscriber, Ack: bus.AfterRun})
}
