// Package link is a link to a server that tests can cut, or make deaf.
package link

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

// Link passes TCP connections on to a server. Its methods are safe for concurrent use.
type Link struct {
	listener net.Listener
	to       string
	group    sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	deaf  bool
	conns map[net.Conn]struct{}
}

// New returns a link to a server's address. Close ends it.
func New(ctx context.Context, to string) (*Link, error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &Link{listener: listener, to: to, conns: make(map[net.Conn]struct{})}
	l.group.Go(func() { l.run(ctx) })
	return l, nil
}

// Address is where clients find the link.
func (l *Link) Address() string { return l.listener.Addr().String() }

func (l *Link) run(ctx context.Context) {
	for {
		near, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		var d net.Dialer
		far, err := d.DialContext(ctx, "tcp", l.to)
		l.mu.Lock()
		switch {
		case err != nil:
			_ = near.Close()
		case l.cut:
			_, _ = near.Close(), far.Close()
		default:
			l.conns[near], l.conns[far] = struct{}{}, struct{}{}
			l.group.Go(func() { l.pump(near, hearing{far, l}) })
			l.group.Go(func() { l.pump(far, near) })
		}
		l.mu.Unlock()
	}
}

func (l *Link) pump(to, from net.Conn) {
	_, _ = io.Copy(to, from) // it ends when either side does
	_, _ = to.Close(), from.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, to)
}

// hearing reads what the server says, unless the link is deaf.
type hearing struct {
	net.Conn

	l *Link
}

func (h hearing) Read(p []byte) (int, error) {
	for {
		n, err := h.Conn.Read(p)
		h.l.mu.Lock()
		deaf := h.l.deaf
		h.l.mu.Unlock()
		if !deaf || err != nil {
			return n, err
		}
	}
}

// Sever closes all connections and lets none through, or lets them through again.
func (l *Link) Sever(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut = cut; cut {
		for c := range l.conns {
			_ = c.Close()
		}
	}
}

// Deafen loses what the server says from now on.
func (l *Link) Deafen() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = true
}

// Close ends the link.
func (l *Link) Close() {
	_ = l.listener.Close()
	l.Sever(true)
	l.group.Wait()
}
