package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/internal/testbed"
)

// broker is where the engines keep their queue.
type broker interface {
	// addresses are those of its servers.
	addresses() []string
	// ttl is how long a membership lasts there.
	ttl() time.Duration
	// disturb stops a server and starts it again, after a while at the earliest.
	disturb(ctx context.Context, rng *rand.Rand, after time.Duration)
	// claims are the holders of the partitions, by number.
	claims(ctx context.Context) (map[int]string, error)
	// kill ends it.
	kill()
}

func must(err error) {
	if err != nil {
		panic(err) // nothing can be started any more
	}
}

func end(cmd *exec.Cmd, s syscall.Signal) {
	_ = cmd.Process.Signal(s)
	_ = cmd.Wait() // however it ends
}

func process(ctx context.Context, path string, args ...string) (*exec.Cmd, error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), path, args...) //nolint:gosec // ourselves, or redis-server.
	log, err := os.OpenFile(logFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, cmd.Start()
}

// natsBroker is a NATS server, or a cluster of three.
type natsBroker struct {
	dir     string
	clients []string // their addresses for clients
	routes  []string // and for each other
	servers []*exec.Cmd
	js      jetstream.JetStream
}

func newNATSBroker(ctx context.Context, dir string, n int) (*natsBroker, error) {
	all, err := testbed.FreeAddresses(ctx, 2*n)
	if err != nil {
		return nil, err
	}
	b := &natsBroker{dir: dir, clients: all[:n], routes: all[n:], servers: make([]*exec.Cmd, n)}
	for i := range n {
		if err := b.start(ctx, i); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *natsBroker) start(ctx context.Context, i int) (err error) {
	args := []string{"-role", "server", "-dir", filepath.Join(b.dir, fmt.Sprint("nats", i)), "-url", b.clients[i]}
	if len(b.servers) > 1 {
		args = append(args, "-route", b.routes[i], "-routes", natsURL(b.routes))
	}
	b.servers[i], err = process(ctx, os.Args[0], args...)
	return err
}

// await waits until there is a leader.
func (b *natsBroker) await(ctx context.Context) error {
	for deadline := time.Now().Add(time.Minute); ; nap(ctx, 100*time.Millisecond) {
		try, cancel := context.WithTimeout(ctx, time.Second)
		_, err := b.js.AccountInfo(try)
		cancel()
		if err == nil {
			_, err = b.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "READY", Replicas: len(b.servers)})
		}
		if err == nil || time.Now().After(deadline) || ctx.Err() != nil {
			return err
		}
	}
}

func (b *natsBroker) addresses() []string { return b.clients }

func (b *natsBroker) ttl() time.Duration {
	if len(b.servers) > 1 {
		return 12 * time.Second
	}
	return 4 * time.Second
}

// disturb kills one server of a cluster. One that is alone is asked to end: with its default, sync at intervals, it would lose
// what it has acked a moment before.
func (b *natsBroker) disturb(ctx context.Context, rng *rand.Rand, after time.Duration) {
	i, how := rng.IntN(len(b.servers)), syscall.SIGTERM
	if len(b.servers) > 1 {
		how = syscall.SIGKILL
	}
	end(b.servers[i], how)
	nap(ctx, after)
	must(b.start(ctx, i))
}

func (b *natsBroker) claims(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := b.js.Stream(ctx, "RQC_"+engineName)
	if err != nil {
		return nil, err
	}
	holders := make(map[int]string)
	for p := range 8 {
		m, err := s.GetLastMsgForSubject(ctx, fmt.Sprintf("rqc.%s.c.%s.%d", engineName, controller, p))
		if err != nil {
			return nil, err
		}
		holders[p] = string(m.Data)
	}
	return holders, nil
}

func (b *natsBroker) kill() {
	for _, s := range b.servers {
		if s != nil {
			end(s, syscall.SIGKILL)
		}
	}
}

// redisBroker is a Redis server that syncs its disk always, so that it may be killed.
type redisBroker struct {
	dir     string
	address []string
	server  *exec.Cmd
	client  *goredis.Client
}

func newRedisBroker(ctx context.Context, dir string) (*redisBroker, error) {
	address, err := testbed.FreeAddresses(ctx, 1)
	if err != nil {
		return nil, err
	}
	b := &redisBroker{dir: dir, address: address, client: goredis.NewClient(&goredis.Options{Addr: address[0]})}
	if err := b.start(ctx); err != nil {
		return nil, err
	}
	for b.client.Ping(ctx).Err() != nil && ctx.Err() == nil {
		nap(ctx, 50*time.Millisecond)
	}
	return b, ctx.Err()
}

func (b *redisBroker) start(ctx context.Context) (err error) {
	_, port, _ := strings.Cut(b.address[0], ":")
	b.server, err = process(ctx, "redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", b.dir,
		"--save", "", "--appendonly", "yes", "--appendfsync", "always")
	return err
}

func (b *redisBroker) addresses() []string { return b.address }

func (b *redisBroker) ttl() time.Duration { return 4 * time.Second }

func (b *redisBroker) disturb(ctx context.Context, _ *rand.Rand, after time.Duration) {
	end(b.server, syscall.SIGKILL)
	nap(ctx, after)
	must(b.start(ctx))
}

func (b *redisBroker) claims(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	holders := make(map[int]string)
	for p := range 8 {
		holder, err := b.client.HGet(ctx, fmt.Sprintf("windlass:{%s:%s:%d}:owner", engineName, controller, p), "holder").Result()
		if err != nil {
			return nil, err
		}
		holders[p] = holder
	}
	return holders, nil
}

func (b *redisBroker) kill() {
	_ = b.client.Close()
	end(b.server, syscall.SIGKILL)
}
