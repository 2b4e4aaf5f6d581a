// Package k8s connects the engine to Kubernetes clusters, by client-go alone.
//
// A [Connection] is to one cluster; its scope is part of every key, so that several clusters can be at work at once. A
// [Resource] is one kind of objects there: a source, a reader and a sink.
//
// # The source
//
// Client-go's reflector lists and watches; the resource's index is its store, and knows for each object which revision was told:
//
//   - Each object is entered into the index before its event is emitted, so whoever is told of a change can read it there.
//   - The first list of a run is emitted whole, as a resync between ListStarted and ListEnded. A later list (the watch was lost,
//     the history compacted, the server restarted) is compared with what was told; what differs is emitted as repaired.
//   - What is gone stays in the index until its deletion was told. So whatever ends a run, the next one finishes the telling.
//   - An event with a revision that was told is dropped.
//
// A kind that the server does not know is waited for: Status says so, and the run goes on when the kind appears. When it is
// removed, what was there is told as deleted, and the waiting begins again.
//
// # What is kept, and what is read
//
// By default metadata alone is watched and kept, and objects are read from the server. With cache: full the objects are kept
// and read from memory; with cache: fields only the declared fields are. Values are client-go's types for kinds that it knows, and
// *unstructured.Unstructured for others; managed fields are left out. Readers get copies. What the engine itself writes is
// entered with the answer, so that the next run of the key sees it.
//
// # The sink
//
// Objects are written by server-side apply. An object that must not exist is applied with a revision that no object has: the
// server makes it if it is absent and refuses it otherwise, in one step, and its fields belong to the field manager's Apply. An
// object that was read is applied at the revision that was read.
//
// Who owns an object is written on it: an annotation with the owner's whole key and a label with a hash of it, to select by, and
// where Kubernetes allows it an owner reference besides, so that its garbage collector knows. An annotation holds a hash of
// what was last applied: an object that contains all of what is wanted, when that is what was last applied, is not written.
package k8s
