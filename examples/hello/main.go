// Command hello keeps a shipment for every order, in memory.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/sources/memory"
)

func main() {
	orders, shipments := memory.New[int]("orders"), memory.New[string]("shipments")
	ship := engine.NewController("shipping").For(orders).Owns(shipments).WithHandler(
		func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			shipment := shipments.Object("for-"+req.Key.Name, "")
			quantity, err := engine.Get[int](ctx, rt, req.Key)
			if engine.IsNotFound(err) {
				return engine.Result{}, rt.Delete(ctx, shipment.Key)
			}
			if err != nil {
				return engine.Result{}, err
			}
			shipment.Value = strconv.Itoa(quantity) + " boxes"
			fmt.Println(req.Key.Name, req.Trigger(), "→", shipment.Value)
			return engine.Result{}, rt.Apply(ctx, shipment)
		})

	eng, err := engine.New(engine.Config{Controllers: []engine.Controller{ship}})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	orders.Set("apples", 3)
	if err := eng.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
