package consul

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/windlass-dev/windlass/engine"
)

// What a transaction takes: 64 operations, which is the limit of older versions, and 512 KiB of text.
const (
	mostOperations = 64
	mostText       = 500 << 10
)

// textSize is about how long operations of keys are as text.
func textSize(ops api.TxnOps) (n int) {
	for _, op := range ops {
		n += 150 + len(op.KV.Key) + base64.StdEncoding.EncodedLen(len(op.KV.Value))
	}
	return n
}

// transact carries out operations all together or not at all. What a check refused is ErrConflict.
func (c *Connection) transact(ctx context.Context, ops api.TxnOps) (*api.TxnResponse, error) {
	opts, err := c.query(ctx)
	if err != nil {
		return nil, err
	}
	opts.AllowStale, opts.RequireConsistent = false, false
	ok, done, _, err := c.client.Txn().Txn(ops, opts)
	switch {
	case err != nil:
		return nil, understood(err)
	case ok:
		return done, nil
	}
	what := make([]string, 0, len(done.Errors))
	for _, e := range done.Errors {
		what = append(what, e.What)
	}
	switch text := strings.Join(what, "; "); {
	case strings.Contains(strings.ToLower(text), "permission denied"):
		return nil, fmt.Errorf("%w: %s", errRight, text)
	case strings.Contains(text, "index is stale"), strings.Contains(text, "doesn't exist"):
		return nil, fmt.Errorf("%w: %s", engine.ErrConflict, text)
	default:
		return nil, fmt.Errorf("refused: %s", text)
	}
}

func setTrace(key, traceparent string) *api.TxnOp {
	return &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVSet, Key: key, Value: []byte(traceparent)}}
}

func deleteTrace(key string) *api.TxnOp {
	return &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVDelete, Key: key}}
}

// traceOf reads the trace context that a write has left in a key.
func (c *Connection) traceOf(ctx context.Context, key string) string {
	opts, err := c.query(ctx)
	if err != nil {
		return ""
	}
	p, _, err := c.client.KV().Get(key, opts)
	if err != nil || p == nil {
		return "" // a trace is worth no second try
	}
	return string(p.Value)
}
