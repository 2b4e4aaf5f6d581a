package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/windlass-dev/windlass/internal/queue"
)

// Explanation says how a key stands: why it ran, why it does not run, when it will.
type Explanation struct {
	Controller string `json:"controller"`
	Key        Key    `json:"key"`
	// State is idle, ready, running, requeued, backoff, parked, paused or debounced.
	State string `json:"state"`
	// Reason says in a sentence why the key is in this state.
	Reason string `json:"reason"`
	// Attempt counts the failures so far, and Error is the last of them.
	Attempt int    `json:"attempt,omitempty"`
	Error   string `json:"error,omitempty"`
	// Next is when it will run, as far as that is known; zero if nothing is to come or it is only waiting for its turn.
	Next time.Time `json:"next,omitzero"`
	// Waiting are the causes of the run that is to come.
	Waiting []Cause `json:"waiting,omitempty"`
	// Suspension is what holds it back.
	Suspension *Suspension `json:"suspension,omitempty"`
	// Runs are the last ten, the newest first. They are forgotten when the process ends, and before that if the controller
	// has run thousands of times since.
	Runs []Run `json:"runs,omitempty"`
}

// Explain says how a key of a controller stands.
func (e *Engine) Explain(controller string, key Key) (Explanation, error) {
	c, err := e.runner(controller)
	if err != nil {
		return Explanation{}, err
	}
	x := Explanation{Controller: controller, Key: key, State: "idle", Runs: c.runsOf(key)}
	if s, ok := e.pauses.of(c, key); ok {
		x.Suspension = &s
	}
	q := c.queue.Load()
	if q == nil {
		x.Reason = "the controller is not at work in this process"
		if c.lease != nil && !c.lease.Held() {
			x.Reason = "the controller is a singleton, and this process does not hold its lease" + because(c.lease.Err())
		}
		return x, nil
	}
	if it, ok := q.Item(key); ok {
		x.describe(it)
	} else {
		x.Reason = "nothing asks for a run"
		if len(x.Runs) == 0 {
			x.Reason += "; no run is remembered"
		}
	}
	for _, r := range c.routers {
		select {
		case <-r.synced:
		default:
			x.Reason += fmt.Sprintf("; the controller has not started: source %s has not ended its first list%s", r.source.Name(), because(r.lastFailure()))
		}
	}
	return x, nil
}

func (x *Explanation) describe(it Item) {
	x.State, x.Attempt, x.Error = it.Phase.String(), it.Attempt, it.Err
	x.Waiting = it.Waiting.of(&x.Key).All()
	if len(x.Waiting) == 0 {
		x.Waiting = it.Value.of(&x.Key).All()
	}
	if it.Wake != 0 {
		x.Next = moment(it.Wake)
	}
	switch it.Phase {
	case queue.Ready:
		x.Reason = "it waits for a worker since " + moment(it.Since).Format(time.RFC3339Nano)
	case queue.Running:
		if x.Reason = "it is being reconciled"; it.Again {
			x.Reason += ", and will be once more: something changed meanwhile"
		}
	case queue.Requeued:
		x.Reason = "its last run asked for another one later"
		if it.Later != 0 {
			x.Reason = "it was asked for a later time"
		}
	case queue.Backoff:
		x.Reason = fmt.Sprintf("it failed %d times and is tried again after a while", it.Attempt)
	case queue.Parked:
		x.Reason = "it failed for good; a change of it, or an operator, brings it back"
	case queue.Paused:
		x.Reason = "it is suspended"
		if x.Suspension != nil && x.Suspension.Reason != "" {
			x.Reason += ": " + x.Suspension.Reason
		}
	case queue.Debounced:
		x.Reason = "it waits until it has been quiet for a while"
	}
}

// String prints the explanation for people.
func (x Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s of controller %s is %s: %s\n", x.Key, x.Controller, x.State, x.Reason)
	if !x.Next.IsZero() {
		fmt.Fprintf(&b, "  next run   %s\n", x.Next.Format(time.RFC3339Nano))
	}
	if x.Error != "" {
		fmt.Fprintf(&b, "  last error %s\n", x.Error)
	}
	for _, c := range x.Waiting {
		fmt.Fprintf(&b, "  because    %s\n", c)
	}
	for _, r := range x.Runs {
		fmt.Fprintf(&b, "  ran        %s, waited %s, took %s: %s", r.Started.Format(time.RFC3339Nano), r.Waited, r.Took, r.Outcome)
		if r.Error != "" {
			fmt.Fprintf(&b, " (%s)", r.Error)
		}
		b.WriteByte('\n')
		for _, c := range r.Causes {
			fmt.Fprintf(&b, "    because  %s\n", c)
		}
	}
	return b.String()
}

// String prints the cause for people.
func (c Cause) String() string {
	s := c.Trigger.String()
	if c.Trigger == Dependency && !c.Key.IsZero() {
		s += " " + c.Key.String() + " (" + c.Operation.String() + ")"
	}
	if c.Revision != "" {
		s += " at revision " + c.Revision
	}
	if c.Token != "" {
		s += " with token " + c.Token
	}
	return s + ", " + c.Time.Format(time.RFC3339Nano)
}

// Items returns the keys of a controller that are not idle, in the order of their keys.
func (e *Engine) Items(controller string) ([]Item, error) {
	c, err := e.runner(controller)
	if err != nil {
		return nil, err
	}
	q := c.queue.Load()
	if q == nil {
		return nil, nil
	}
	items := q.Items()
	for i := range items {
		x := &items[i]
		x.Value, x.LaterValue, x.Waiting = x.Value.of(&x.Key), x.LaterValue.of(&x.Key), x.Waiting.of(&x.Key)
	}
	slices.SortFunc(items, func(a, b Item) int { return strings.Compare(a.Key.String(), b.Key.String()) })
	return items, nil
}

// Dead returns the parked keys of a controller: its dead letters, each with its error, its attempts and its causes.
func (e *Engine) Dead(controller string) ([]Item, error) {
	items, err := e.Items(controller)
	return slices.DeleteFunc(items, func(i Item) bool { return i.Phase != queue.Parked }), err
}

// parked returns the queue of a controller if it keeps key parked.
func (e *Engine) parked(controller string, key Key) (Queue, error) {
	c, err := e.runner(controller)
	if err != nil {
		return nil, err
	}
	if q := c.queue.Load(); q != nil {
		if it, ok := q.Item(key); ok && it.Phase == queue.Parked {
			return q, nil
		}
	}
	return nil, fmt.Errorf("controller %s: %s is not parked: %w", controller, key, ErrNotFound)
}

// Redrive brings back a parked key. It returns ErrNotFound if the key is not parked.
func (e *Engine) Redrive(ctx context.Context, controller string, key Key) error {
	if _, err := e.parked(controller, key); err != nil {
		return err
	}
	return e.Enqueue(ctx, controller, key, 0)
}

// Drop forgets a parked key: the failure is settled otherwise. It returns ErrNotFound if the key is not parked. The next
// change of the key reconciles it as any other.
func (e *Engine) Drop(ctx context.Context, controller string, key Key) error {
	q, err := e.parked(controller, key)
	if err != nil {
		return err
	}
	return q.Drop(ctx, key)
}

// Reconcile asks for a run of a key now, with a token that the run's causes and history show, and waits for the end of a
// run that began after the call. It passes hard delays and brings back a parked key, but waits while the key is suspended.
// Whichever replica works on the key is asked.
func (e *Engine) Reconcile(ctx context.Context, controller string, key Key, token string) (Run, error) {
	c, err := e.runner(controller)
	if err != nil {
		return Run{}, err
	}
	if b, owner := e.ownerOf(c, key); owner != "" {
		a, err := ask(ctx, b, owner, question{Do: "reconcile", Controller: controller, Key: key, Token: token})
		return a.Run, err
	}
	return e.reconcile(ctx, controller, key, token)
}

// reconcile asks for a run in this process.
func (e *Engine) reconcile(ctx context.Context, controller string, key Key, token string) (Run, error) {
	c, err := e.runner(controller)
	if err != nil {
		return Run{}, err
	}
	if token == "" {
		return Run{}, fmt.Errorf("reconcile %s: the token is empty", key)
	}
	answer := make(chan Run, 1)
	if _, twice := c.waiters.LoadOrStore(token, answer); twice {
		return Run{}, fmt.Errorf("reconcile %s: somebody waits for the token %q already", key, token)
	}
	c.waiting.Add(1)
	defer func() {
		c.waiters.Delete(token)
		c.waiting.Add(-1)
	}()
	if err := c.enqueue(ctx, key, 0, cause{trigger: Manual, revision: token, time: time.Now().UnixNano()}); err != nil {
		return Run{}, err
	}
	select {
	case r := <-answer:
		return r, nil
	case <-c.done:
		return Run{}, fmt.Errorf("reconcile %s: %w", key, ErrNotRunning)
	case <-ctx.Done():
		return Run{}, fmt.Errorf("reconcile %s: not handled yet: %w", key, context.Cause(ctx))
	}
}

// echo tells those who wait for the tokens of a run. Interrupted runs have handled nothing.
func (c *runner) echo(p *pastRun) {
	if c.waiting.Load() == 0 || p.outcome == interrupted {
		return
	}
	for x := range p.causes.each {
		if x.trigger != Manual {
			continue
		}
		if w, ok := c.waiters.Load(x.revision); ok {
			select {
			case w.(chan Run) <- p.run():
			default:
			}
		}
	}
}
