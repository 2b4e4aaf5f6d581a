package main

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

// proxy is the link of one replica to the server. It can be cut.
type proxy struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]struct{}
}

func newProxy(ctx context.Context, to string) (*proxy, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, to: to, conns: make(map[net.Conn]struct{})}
	go p.run(ctx)
	return p, nil
}

func (p *proxy) run(ctx context.Context) {
	for {
		near, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		var d net.Dialer
		far, err := d.DialContext(ctx, "tcp", p.to)
		p.mu.Lock()
		if err != nil || p.cut {
			p.mu.Unlock()
			_ = near.Close()
			if err == nil {
				_ = far.Close()
			}
			continue
		}
		p.conns[near], p.conns[far] = struct{}{}, struct{}{}
		p.mu.Unlock()
		go p.pump(near, far)
		go p.pump(far, near)
	}
}

func (p *proxy) pump(to, from net.Conn) {
	_, _ = io.Copy(to, from) // it ends when either side does
	_ = to.Close()
	_ = from.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, to)
	delete(p.conns, from)
}

// sever closes all connections, and lets none through until mend.
func (p *proxy) sever() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
}
