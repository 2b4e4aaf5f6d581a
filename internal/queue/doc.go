// Package queue is a keyed, coalescing, prioritised and delayed work queue. It is the one queue of the engine: the
// memory bus is this type and little else, and the owner runtime of a durable bus drives the same type and adds only
// what must be written down.
//
// # One key
//
// A key is in one place at a time:
//
//	          Add                   Next                 Finish, Release
//	(absent) ─────▶ ready ────────────────────▶ running ─────────────────▶ (absent)
//	                  ▲                            │
//	      due, or Add │                            ├─ Requeue, Defer, Retry ─▶ delayed
//	                  └──────── delayed ◀──────────┤
//	                  ▲                            └─ Park ─▶ parked
//	                  └──────── parked  ◀───────────────────────┘ (an Add that revives it)
//
// What is added while a key waits joins the request that waits; what is added while it runs waits for the run's end
// and then causes exactly one more run. No key ever runs twice at once.
//
// # Delays
//
// A key has one delayed entry. Its due time is soft: any run supersedes it, and of two due times the earlier holds.
// Its notBefore is hard: only a manual Add passes it. A request from outside for a later time is kept beside them: it
// outlives the runs that start before its time and never touches a request that waits.
//
// A failing run raises the attempt by one, unless an Add started it while a retry was still to come: then the attempt
// and the earlier due time are kept, so that events neither burn nor reset the budget of retries. Success resets all.
//
// # Restart
//
// Restore puts back what an earlier process wrote down. Until the first Next, a list that finds such a key unchanged does
// not disturb it: a delayed key keeps its time, a parked one stays parked. What has changed is ready at once.
//
// # Classes
//
// Ready keys stand in three first-in-first-out lists, served 16:4:1 while all have work: no class waits for another to
// empty. A join moves a key up, never down.
//
// # Who owns what
//
// One mutex guards everything and is never held while the caller's code runs, Config's two functions excepted: they
// must not call back. One timer serves all delays. The queue starts no goroutine.
package queue
