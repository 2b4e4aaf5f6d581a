package redis

import (
	"context"
	"slices"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// requestTimeout is how long the server may take to answer.
const requestTimeout = 5 * time.Second

// maxPipeline is how many commands go together at most.
const maxPipeline = 1000

// pipeline sends commands in the order in which they were asked for. What is asked for while others are on their way goes
// together, so that the way costs little when there is much to do and nothing waits when there is not.
type pipeline struct {
	client goredis.UniversalClient

	mu      sync.Mutex
	waiting []*call
	busy    bool
}

// call is a script with its arguments, or without one a command.
type call struct {
	script *goredis.Script
	keys   []string
	// args are asked for when the call is sent.
	args func() []any
	// then is told the answer. It must not block.
	then func(answer any, err error)
}

// newPipeline gives the server the scripts beforehand: one that it does not know is sent again, behind others that it does.
func newPipeline(ctx context.Context, client goredis.UniversalClient) (*pipeline, error) {
	for _, s := range []*goredis.Script{enqueueScript, ackScript, saveScript, claimScript} {
		if err := s.Load(ctx, client).Err(); err != nil {
			return nil, understood(err)
		}
	}
	return &pipeline{client: client}, nil
}

// do sends a script and returns its answer. When ctx ends first it may have been heard.
func (p *pipeline) do(ctx context.Context, script *goredis.Script, keys []string, args ...any) (any, error) {
	type result struct {
		answer any
		err    error
	}
	done := make(chan result, 1)
	p.send(ctx, &call{
		script: script, keys: keys, args: func() []any { return args },
		then: func(answer any, err error) { done <- result{answer, err} },
	})
	select {
	case r := <-done:
		return r.answer, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipeline) send(ctx context.Context, c *call) {
	p.mu.Lock()
	p.waiting = append(p.waiting, c)
	lead := !p.busy
	p.busy = true
	p.mu.Unlock()
	if lead {
		go p.run(context.WithoutCancel(ctx))
	}
}

// run sends until nothing waits.
func (p *pipeline) run(ctx context.Context) {
	for {
		calls := p.next()
		if len(calls) == 0 {
			return
		}
		p.exec(ctx, calls)
	}
}

func (p *pipeline) next() []*call {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(p.waiting), maxPipeline)
	calls := slices.Clone(p.waiting[:n])
	p.waiting = slices.Delete(p.waiting, 0, n)
	p.busy = n > 0
	return calls
}

func (p *pipeline) exec(ctx context.Context, calls []*call) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	commands, args := make([]*goredis.Cmd, len(calls)), make([][]any, len(calls))
	pipe := p.client.Pipeline()
	for i, c := range calls {
		args[i] = c.args()
		if c.script == nil {
			commands[i] = pipe.Do(ctx, args[i]...)
		} else {
			commands[i] = c.script.EvalSha(ctx, pipe, c.keys, args[i]...)
		}
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i, c := range calls {
		if goredis.HasErrorPrefix(commands[i].Err(), "NOSCRIPT") {
			commands[i] = c.script.Eval(ctx, p.client, c.keys, args[i]...)
		}
		answer, err := commands[i].Result()
		c.then(answer, understood(err))
	}
}
