// Package nats connects Windlass to NATS: key-value buckets as sources and sinks, JetStream as the bus, and a server
// embedded in the process for those who have none.
//
// # Streams
//
//	RQ_<engine>_<controller>  requests: WorkQueue, one message per subject, so a pending key is there once
//	RQS_<engine>              one state record per key: delay, attempts, parked
//	RQC_<engine>              members, which partition is whose, leases
//	EV_<engine>               events: a log of 24 hours
//	DEAD_<engine>             messages that cannot be read
//	KV_windlass_<engine>      a bucket: who owns which object
//
// Subjects of requests are rq.<engine>.<controller>.<partition>.<class>.<scope>.<kind>.<namespace>.<name>, class being h
// (live), d (dependency) or l (list); those for a later time are live and have a last token that is never the same. The
// partition is a hash of the last four. Tokens are written [A-Za-z0-9_-] as they are and any other byte as =XX.
//
// Those of events are ev.<engine>.<source>.<scope>.<kind>.<namespace>.<name>.
//
// A requeue-after and a retry are messages: the state record of their key, with the due time, the attempt and the
// causes. The engine reads the records when it starts and releases each when it is due.
//
// # Replicas
//
// Engines of one name share the work: each partition of each controller is one replica's (see internal/owner), each source is
// run by one that holds its lease. A membership lasts four seconds, on a cluster of servers twelve. The epoch of a partition is
// the sequence of its claim. It fences: it is part of the names of the consumers, of which those of former owners are
// removed before the records are loaded, each state record is written only over the one that is known, and handlers and
// sinks are given it. Nothing is buffered while there is no connection, so that nothing old arrives late.
//
// # Lists are not stored
//
// Requests of class list are kept in the process that made the list, for the keys that are its own: a crash loses nothing,
// because whoever runs the source next lists it again. Those for other replicas' keys are messages, as all others.
package nats
