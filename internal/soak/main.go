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
	port := flag.Int("port", 0, "the server's port")
	url := flag.String("url", "", "the server's address, for an engine")
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
		err = serve(ctx, *dir, *port)
	case "engine":
		err = work(ctx, *url, log)
	default:
		c.log = log
		err = c.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing left to do.
	}
}
