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
// # What holds a key back
//
// Debounce holds a request that waits until none has been added for a while; a delay that is due, and a manual request,
// do not wait for it, and take it along. A pause holds everything but deletions. Config.Limit gates the whole queue: a
// permission that is not good yet is kept, and is the next key's. None of them occupies a worker.
//
// # Restart
//
// Restore puts back what an earlier process wrote down. Until the first Next, a list that finds such a key unchanged does
// not disturb it: a delayed key keeps its time, a parked one stays parked. What has changed is ready at once.
//
// # Classes
//
// Ready keys stand in three first-in-first-out lists, served 16:4:1 while all have work: no class waits for another to
// empty. A join moves a key up, never down. Manual requests stand in a fourth, served before them.
//
// # Who owns what
//
// One mutex guards everything but the inbox, and is never held while the caller's code runs, Config's functions excepted:
// they must not call back. The inbox, where Put leaves requests, has a lock of its own; whoever locks the queue takes in
// what is there before anything else, so that nobody sees the queue without it. One timer serves all delays, and a
// second one looks after workers that are believed to come back (crew). The queue starts no goroutine.
package queue
