package testbed

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"time"
)

// The versions of NATS that tests ask for: the oldest that will do, and one that will not.
var (
	NATSOldest  = server{folder: "nats-2.11", program: "github.com/nats-io/nats-server/v2", version: "v2.11.10"}
	NATSTooOld  = server{folder: "nats-2.10", program: "github.com/nats-io/nats-server/v2", version: "v2.10.29"}
	natsTimeout = 5 * time.Second
)

// StartNATS starts a NATS server with JetStream, keeps everything in dir, and returns its address.
func StartNATS(ctx context.Context, s server, dir string, log io.Writer) (address string, stop func(), err error) {
	path, err := s.binary(ctx, log)
	if err != nil {
		return "", nil, err
	}
	addresses, err := FreeAddresses(ctx, 1)
	if err != nil {
		return "", nil, err
	}
	_, port, err := net.SplitHostPort(addresses[0])
	if err != nil {
		return "", nil, err
	}
	p, err := start(filepath.Join(dir, "nats.log"), path, "-js", "-sd", filepath.Join(dir, "data"), "-a", "127.0.0.1", "-p", port)
	if err != nil {
		return "", nil, err
	}
	stop = func() { p.kill() }
	dialer := net.Dialer{Timeout: natsTimeout}
	err = await(ctx, "nats-server", filepath.Join(dir, "nats.log"), p, func() bool {
		c, err := dialer.DialContext(ctx, "tcp", addresses[0])
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	if err != nil {
		stop()
		return "", nil, err
	}
	return addresses[0], stop, nil
}
