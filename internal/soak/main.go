// Command soak lets replicas of an engine work while they, their server and their links are killed, stopped and cut, and
// checks from outside that nothing is lost, nothing runs twice at once and nothing stale is written. It prints one line of
// JSON, and ends with 1 if anything of that happened. See docs/guarantees.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	var c conductor
	role := flag.String("role", "", "server or engine: what the processes are that soak starts")
	dir := flag.String("dir", "", "where the server keeps its data")
	url := flag.String("url", "", "the server's address")
	route := flag.String("route", "", "the server's address for the others of its cluster")
	routes := flag.String("routes", "", "the addresses of all of the cluster")
	redis := flag.String("redis", "", "the address of Redis, for an engine")
	flag.StringVar(&c.bus, "bus", "nats", "nats, nats3 (a cluster of three) or redis")
	flag.StringVar(&c.former, "former", "", "soak of another version, for the first of the engines")
	flag.DurationVar(&c.length, "for", time.Minute, "how long to disturb")
	flag.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano()), "what happens when")
	flag.IntVar(&c.keys, "keys", 2000, "how many keys")
	flag.IntVar(&c.rate, "rate", 500, "changes a second")
	flag.IntVar(&c.replicas, "replicas", 3, "how many engines")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	var err error
	switch *role {
	case "server":
		err = serve(ctx, *dir, *url, *route, *routes)
	case "engine":
		err = work(ctx, c.bus, *url, *redis, log)
	default:
		c.log = log
		err = c.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing left to do.
	}
}
