// Package memory names the typed map of sources/memory from the writer's side: what it sinks can be watched and read.
package memory

import "github.com/windlass-dev/windlass/sources/memory"

// Sink is a map that controllers write.
type Sink[T any] = memory.Map[T]

// New returns an empty sink.
func New[T any](name string) *Sink[T] { return memory.New[T](name) }
