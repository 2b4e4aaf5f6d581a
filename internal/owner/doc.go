// Package owner runs the queue of one controller over a durable broker: the broker keeps, the queue decides.
//
// The broker holds the dirty set, one message per key and lane, and one state record per key: its delay, its attempts,
// whether it is parked. The owner of a partition fetches messages into the very queue that the memory bus is, and acks
// one only after its key's run has ended and what follows from it is stored.
//
// # Order of writes
//
//	run ends → state record stored (or removed) → messages acked → key unlocked
//
// so that a crash at any point repeats a run and never loses one:
//
//	crash                              what is there             what happens
//	before the run ends                messages, old record      both are taken up again: the run is repeated
//	after the record, before the ack   messages, new record      one extra run, with the new attempt
//	after the ack                      new record                nothing is repeated
//
// A request for a later time becomes part of the record, and its message is acked then; if its key runs at that moment,
// the record is written when the run ends.
//
// # Who owns what
//
// A message is in hand from its fetch to its ack. While it is, a second delivery of it is ignored, and the broker is
// told now and then that it is still wanted. The record of a key is written only while the queue holds the key locked, so
// records of one key are written one at a time and in the order of what they say.
//
// # One replica
//
// The owner takes all partitions. Membership, claims and epochs decide later which ones, and end the context of the
// runs of a partition that is lost; nothing else here knows of replicas.
package owner
