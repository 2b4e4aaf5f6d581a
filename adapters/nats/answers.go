package nats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// answers brings what a server says about messages that it was to store to those who wait for it. It does what the client's PublishMsg does
// without two contexts and an inbox for each message, and without reading the answer by reflection: a fifth more live changes a second.
type answers struct {
	inbox string // what the subjects of answers begin with

	mu      sync.Mutex
	last    uint64
	waiting map[string]chan *natsgo.Msg // by the end of the subject
}

func newAnswers(nc *natsgo.Conn) (*answers, error) {
	a := &answers{inbox: nc.NewInbox() + ".", waiting: make(map[string]chan *natsgo.Msg)}
	if _, err := nc.Subscribe(a.inbox+"*", a.take); err != nil {
		return nil, fmt.Errorf("listen for answers: %w", err)
	}
	return a, nil
}

func (a *answers) take(m *natsgo.Msg) {
	end := strings.TrimPrefix(m.Subject, a.inbox)
	a.mu.Lock()
	answered := a.waiting[end]
	delete(a.waiting, end)
	a.mu.Unlock()
	if answered != nil { // else nobody waits any more
		answered <- m
	}
}

// expect returns where an answer is to go, and where it comes.
func (a *answers) expect() (end string, answered chan *natsgo.Msg) {
	answered = make(chan *natsgo.Msg, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last++
	end = strconv.FormatUint(a.last, 36)
	a.waiting[end] = answered
	return end, answered
}

func (a *answers) forget(end string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, end)
}

// store publishes a message to a stream and returns its sequence. It ends with ctx, with the connection and when the server takes too long; the
// message may be stored yet.
func (c *Connection) store(ctx context.Context, m *natsgo.Msg) (uint64, error) {
	c.mu.Lock()
	session := c.session
	c.mu.Unlock()
	end, answered := c.answers.expect()
	m.Reply = c.answers.inbox + end
	if err := c.nc.PublishMsg(m); err != nil {
		c.answers.forget(end)
		return 0, err
	}
	timer := time.NewTimer(requestTimeout)
	defer timer.Stop()
	select {
	case answer := <-answered:
		return stored(answer)
	case <-ctx.Done():
		c.answers.forget(end)
		return 0, ctx.Err()
	case <-session.Done():
	case <-timer.C:
	}
	c.answers.forget(end)
	return 0, errNoAnswer
}

// stored reads an answer.
func stored(answer *natsgo.Msg) (uint64, error) {
	if len(answer.Data) == 0 && answer.Header.Get("Status") == "503" {
		return 0, natsgo.ErrNoResponders
	}
	if _, rest, ok := bytes.Cut(answer.Data, []byte(`"seq":`)); ok && !bytes.Contains(answer.Data, []byte(`"error"`)) {
		digits := len(rest) - len(bytes.TrimLeft(rest, "0123456789"))
		if seq, err := strconv.ParseUint(string(rest[:digits]), 10, 64); err == nil {
			return seq, nil
		}
	}
	var ack struct {
		jetstream.PubAck
		Error *jetstream.APIError `json:"error"`
	}
	switch err := json.Unmarshal(answer.Data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("%w: %w", jetstream.ErrInvalidJSAck, err)
	case ack.Error != nil:
		return 0, fmt.Errorf("nats: %w", ack.Error)
	case ack.Stream == "":
		return 0, jetstream.ErrInvalidJSAck
	}
	return ack.Sequence, nil
}

// publish stores a message and returns its sequence.
func (c *Connection) publish(ctx context.Context, m *natsgo.Msg, opts ...jetstream.PublishOpt) (uint64, error) {
	if len(opts) == 0 {
		seq, err := c.store(ctx, m)
		if !errors.Is(err, natsgo.ErrNoResponders) {
			return seq, understood(err)
		}
		m.Reply = "" // the stream has no leader just now: the client waits a little and tries again
	}
	ack, err := ask(ctx, c, func(ctx context.Context) (*jetstream.PubAck, error) { return c.js.PublishMsg(ctx, m, opts...) })
	if err != nil {
		return 0, understood(err)
	}
	return ack.Sequence, nil
}
