package consul

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
)

// query is one of several blocking queries that are watched together.
type query struct {
	// ask waits behind the index of the options. What is to be done with the answer is in keep, which is told whether the index has moved;
	// it runs in the goroutine of await.
	ask   func(ctx context.Context, opts *api.QueryOptions) (keep func(moved bool), m *api.QueryMeta, err error)
	index uint64
}

// queries are watched together, by one goroutine.
type queries struct {
	conn  *Connection
	all   []*query
	round uint64
}

// await returns once one of the queries has answered and none is left that never has. Anew says that all of them begin anew. It returns how
// often it has been called, which does for an index.
func (q *queries) await(ctx context.Context, anew bool) (uint64, error) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	type result struct {
		query *query
		index uint64
		keep  func(moved bool)
		err   error
	}
	results := make(chan result, len(q.all))
	missing := 0
	for _, x := range q.all {
		if anew {
			x.index = 0
		}
		if x.index == 0 {
			missing++
		}
		after := x.index
		group.Go(func() {
			asked := time.Now()
			opts, err := q.conn.query(ctx)
			if err != nil {
				results <- result{err: err}
				return
			}
			opts.WaitIndex, opts.WaitTime = after, someWait()
			keep, m, err := x.ask(ctx, opts)
			if err != nil {
				results <- result{err: err}
				return
			}
			results <- result{query: x, index: next(m.LastIndex, after, asked), keep: keep}
		})
	}
	for answered := false; !answered || missing > 0; answered = true {
		r := <-results
		if r.err != nil {
			return 0, r.err
		}
		if r.query.index == 0 {
			missing--
		}
		r.keep(r.index != r.query.index)
		r.query.index = r.index
	}
	q.round++
	return q.round, nil
}

// snapshot is await, after which all of the queries are asked again: what one transaction has changed is seen together.
func (q *queries) snapshot(ctx context.Context, anew bool) (uint64, error) {
	index, err := q.await(ctx, anew)
	if err != nil || anew {
		return index, err
	}
	return q.await(ctx, true)
}
