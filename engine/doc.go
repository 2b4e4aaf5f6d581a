// Package engine is the core of Windlass: an event-driven controller engine over a message bus.
//
// Use it to keep things in step that live in more than one system, with work that must survive a restart. For a
// controller that lives in one Kubernetes cluster and loses nothing by forgetting its requeues, controller-runtime is
// the smaller tool.
//
// # The way of a change
//
// A [Source] watches one thing and emits an [Event] for each change. The router of that source maps the event to the
// keys of every [Controller] that depends on it, and adds a [Request] for each to that controller's [Queue]. A worker
// takes the request and calls the controller's [Handler] through the middleware, in this order, the outermost first:
//
//	Config.Middleware (trace, metrics) · log · backoff · deadline · heartbeat · recover ·
//	the controller's own · handler
//
// and the queue carries out what came of it:
//
//	Result{}               done; attempts start afresh
//	Result{RequeueAfter}   again after a while; not a failure
//	Result{Defer}          again after a while; attempts are kept
//	Result{Backoff}        again with backoff; an attempt more, never parked
//	an error               again with backoff; an attempt more, parked after the last
//	Terminal(err)          parked at once
//	RetryAfter(err, d)     a failure, tried again no earlier than d
//
// On a durable bus the next request is stored before the present one is acknowledged: a crash between the two repeats
// work and never loses it.
//
// # What is promised
//
//  1. A pending key is reconciled once, however many events arrived; their causes are joined.
//  2. A key is never reconciled twice at once.
//  3. A change during a reconcile causes exactly one more after it (at least one if a process crashed).
//  4. Every accepted event leads to a reconcile that starts after it.
//  5. A key has one delayed entry: of two soft due times the earlier holds, and any run supersedes it.
//  6. Live changes, dependencies and lists share the workers 16:4:1: no class waits for another to empty.
//  7. Attempt, delay, causes and parked state survive a restart on a durable bus.
//  8. At shutdown intake stops and running reconciles finish; an interrupted one is not a failure.
//  9. A poison key blocks only itself. It is parked, and news of it brings it back.
//  10. A malformed message is counted, logged, kept apart and never retried.
//
// # Who may write what
//
// A handler writes through its [Runtime]. One applier carries out every write: it compares first and writes only what
// differs, it marks or records what is owned, puts right what somebody else changed, and refuses to touch what it does
// not own ([ErrResourceExists]).
//
// # Lives
//
// A controller lives while its lease is held, or always if it needs none: it initializes, waits for its sources, works, and
// stops. A life has ended when its last reconcile has, and the next one begins after that. Controllers are added, replaced
// and removed while the engine runs ([Engine.Add]); each life begins by asking for everything that its sources hold.
//
// # Why, and what to do about it
//
// [Engine.Explain] says how a key stands and shows its last runs with their causes. [Engine.Suspend], [Engine.Reconcile],
// [Engine.Redrive] and [Engine.Drop] are what operators do about it.
//
// # Ownership of goroutines
//
// [Engine.Run] blocks. When it returns, every goroutine that it started has ended.
package engine
