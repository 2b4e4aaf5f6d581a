// Package nats connects Windlass to NATS: key-value buckets as sources and sinks, JetStream as the bus, and a server
// embedded in the process for those who have none.
//
// # Streams
//
//	RQ_<engine>_<controller>  requests: WorkQueue, one message per subject, so a pending key is there once
//	RQS_<engine>              one state record per key: delay, attempts, parked
//	RQC_<engine>              the claim on the engine's name
//	EV_<engine>               events: a log of 24 hours
//	DEAD_<engine>             messages that cannot be read
//	KV_windlass_<engine>      a bucket: who owns which object
//
// Subjects of requests are rq.<engine>.<controller>.<partition>.<class>.<scope>.<kind>.<namespace>.<name>, class being h
// (live), d (dependency), l (list) or t (for a later time, with a last token that is never the same). The partition is a hash of
// the last four. Tokens are written [A-Za-z0-9_-] as they are and any other byte as =XX.
//
// Those of events are ev.<engine>.<source>.<scope>.<kind>.<namespace>.<name>.
//
// A requeue-after and a retry are messages: the state record of their key, with the due time, the attempt and the
// causes. The engine reads the records when it starts and releases each when it is due.
//
// # Lists are not stored
//
// Requests of class list are kept in the process alone: a crash loses nothing, because the list is made again at the
// next start.
package nats
