// Package redis is the bus on Redis 6.2 or later, or Valkey: sorted sets and scripts for requests, streams for events, and
// the engine's own records. A server alone, behind Sentinel, or a Cluster.
//
// # Keys
//
// <engine>, <controller> and <source> are written as in a URL's query. What stands in braces decides where a Cluster keeps a
// key: everything that one script touches has the same.
//
//	windlass:{<engine>}:members, :member       who lives until when; what each works on
//	windlass:{<engine>}:lease:<name>           who runs a source
//	windlass:{<engine>}:store, :store:last     who owns which object; the last revision
//	windlass:{<engine>}:queues                 the controllers that have a queue
//	windlass:{<engine>}:dead                   a stream: messages that cannot be read, the newest 10,000
//	windlass:{<engine>:<controller>}:queue     the number of partitions
//	windlass:{<engine>:<controller>:<p>}:owner   who works on a partition, its epoch, its last sequence
//	…:h, :d, :l                                what waits, by class (live, dependency, list), in its order
//	…:requests                                 the requests that wait
//	…:states                                   one state record per key: delay, attempts, parked
//	windlass:{<engine>:events:<source>}        a stream: events, the newest 100,000
//
// # How a request is kept
//
// A request is a member of its class's sorted set, under the text of its key: what comes while it waits takes its place, with
// a new sequence. Its owner reads what is beyond the last sequence that it was given, and removes a request after its run, if it is
// still the one that was run. Nothing is taken out to be worked on, so nothing has to be put back when its owner dies.
// A requeue-after and a retry are state records, stored before the request is removed.
//
// # Replicas
//
// Replicas of an engine share the partitions as on every bus (see internal/owner). A claim is written over the one that was seen, and
// its epoch is checked by every script of an owner, in the server, so that a former one changes nothing. Time is the server's.
//
// # What Redis does not promise
//
// What is written is on disk when appendfsync says so: a second later by default. A failover may lose what the new master had
// not yet received, claims included. Then epochs and sequences would go backwards; they are made of the time, so that they do
// not, and a claim that was lost is recognised and made anew. The requests that were lost come back with the next list or resync.
package redis
