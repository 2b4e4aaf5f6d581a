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
// # Terms
//
// A controller's keys are divided into partitions, and a partition is one owner's at a time, for a term with an epoch that
// grows from owner to owner. A term begins with what the broker keeps of the partition (Acquire). It ends in good order
// (Surrender: nothing new begins, what runs ends and is stored, acks have had their effect, what only this owner knew is handed to the broker) or at
// once (Revoke: runs are cancelled, and what comes of them reaches nobody). A key whose run ignores its context stays
// locked in this process until it returns, also for a later term. What the queue knows of a partition changes only under the
// owner's lock, so that the end of a term is one moment.
//
// # Replicas
//
// A Replica is a member as long as it renews its membership in the Registry. Each computes from the same members the same
// distribution of every controller's partitions (rendezvous hashing, no member with more than its share), claims what is
// its own once the present holder has given it up or is dead, and gives up what is not. There is no leader, and nothing
// to agree on but single claims, each written only over the one that was seen.
//
//	joins               the others surrender what is now the new one's; each partition waits for its own running keys only
//	leaves              the same the other way; its claims are free before it is gone
//	dies                its membership runs out; the others claim what it held
//	is cut off          by its own clock it stops trusting its membership after three quarters of the TTL, counted from before
//	                    its last renewal: no run starts, what runs is cancelled, all terms are revoked; then the others take over
//	is stopped, goes on the same, the moment it goes on: what it may still send is refused, for a claim, a consumer or a
//	                    record is not what it was
//	the broker is away  all are cut off; when it is back, each claims again what it held
package owner
