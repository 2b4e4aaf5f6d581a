package engine

import (
	"context"
	"time"
)

// Hooks are called as things happen; metrics and the demo are built on them. A nil field is off. They are called on
// the path of a change, from many goroutines at once: they must be quick and must not block.
type Hooks struct {
	// EventReceived is called for every event that a source emits, list brackets excluded.
	EventReceived func(e Event)
	// RequestAdded is called when a request was accepted by a controller's queue.
	RequestAdded func(controller string, t Trigger)
	// RequestDropped is called for a key that a mapper named and the controller does not reconcile.
	RequestDropped func(controller string, key Key)
	// MappingFailed is called when a mapper failed; the event is mapped again later.
	MappingFailed func(controller string, e Event, err error)
	// RunStarted is called before the handler's chain.
	RunStarted func(req Request)
	// RunEnded is called after it, once for each RunStarted.
	RunEnded func(req Request, o Outcome, took time.Duration)
	// RunStuck is called when a run has passed its limit and ignores that its context has ended.
	RunStuck func(controller string, key Key, age time.Duration)
	// KeySlowed is called for each request that is held back because its key causes itself.
	KeySlowed func(controller string, key Key, wait time.Duration)
	// Access is called before a handler's read or write ("get", "list", "apply", "delete") and returns the context for
	// it and what is called with its error at the end. Only one Access can be set.
	Access func(ctx context.Context, verb string, key Key) (context.Context, func(error))
	// MessageMalformed is called for each message that was set aside because it cannot be read.
	MessageMalformed func(topic string, err error)
	// SourceFailed is called when a source ended and is to be run again after wait.
	SourceFailed func(source string, err error, wait time.Duration)
}

// JoinHooks returns hooks that call each of the given ones in turn.
func JoinHooks(all ...Hooks) Hooks {
	var h Hooks
	for _, x := range all {
		h.EventReceived = join1(h.EventReceived, x.EventReceived)
		h.RequestAdded = join2(h.RequestAdded, x.RequestAdded)
		h.RequestDropped = join2(h.RequestDropped, x.RequestDropped)
		h.MappingFailed = join3(h.MappingFailed, x.MappingFailed)
		h.RunStarted = join1(h.RunStarted, x.RunStarted)
		h.RunEnded = join3(h.RunEnded, x.RunEnded)
		h.RunStuck = join3(h.RunStuck, x.RunStuck)
		h.KeySlowed = join3(h.KeySlowed, x.KeySlowed)
		h.Access = either(h.Access, x.Access, h.Access == nil)
		h.MessageMalformed = join2(h.MessageMalformed, x.MessageMalformed)
		h.SourceFailed = join3(h.SourceFailed, x.SourceFailed)
	}
	return h
}

func join1[A any](f, g func(A)) func(A) {
	if f == nil || g == nil {
		return either(f, g, f == nil)
	}
	return func(a A) { f(a); g(a) }
}

func join2[A, B any](f, g func(A, B)) func(A, B) {
	if f == nil || g == nil {
		return either(f, g, f == nil)
	}
	return func(a A, b B) { f(a, b); g(a, b) }
}

func join3[A, B, C any](f, g func(A, B, C)) func(A, B, C) {
	if f == nil || g == nil {
		return either(f, g, f == nil)
	}
	return func(a A, b B, c C) { f(a, b, c); g(a, b, c) }
}

func either[F any](f, g F, second bool) F {
	if second {
		return g
	}
	return f
}
