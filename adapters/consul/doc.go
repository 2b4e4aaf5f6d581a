// Package consul connects the engine to Consul.
//
// A [Connection] is to one datacenter; its scope is part of every key. [KV] is the keys under a prefix, [Instances] the service instances of one
// node, [Entries] the config entries of one kind: each a source, a reader and a sink. [Services] with the health of their instances and [Nodes]
// can be watched and read.
//
// # The source
//
// One blocking query, or one for each of its parts, watches a thing, however many keys it has, by Consul's own rules: an index that goes backwards (a snapshot was
// restored) or is zero begins anew, waits are jittered, queries are bounded in number, failures back off. Each answer is the whole
// state, and is compared with what was told: so a move of the index without a change tells nothing, a deletion is told apart from a
// put, and nothing is missed however many changes lie between two answers. What is told is noted only when it was accepted; an event that was not is
// emitted again, in the state of the next answer.
//
// # The sink
//
// Writes are transactions: the check of the index, the write, and where it is configured the trace context beside it, in one step. KV has no
// place for an owner, so the engine keeps the record; instances and config entries have it in their Meta. Config entries are not part of
// Consul's transactions: they are written by check-and-set, and carry no trace.
package consul
