// Package enginetest is for tests of controllers and of what the engine is extended with.
//
// # Controllers
//
// [Run] runs an engine in virtual time: a test waits a hundred days in a few milliseconds, and nothing in it is timed by
// chance. A [Recorder] is a handler that remembers its runs. A [FaultBus] is a durable bus in memory that loses,
// repeats, reorders and delays as a seed says, and that can crash the engine at any moment; the same seed does the same
// again, but for the order of what happens at one instant. Controller.ReconcileOnce and Controller.MapOnce of package
// engine need no engine at all.
//
// # Extensions
//
// [TestBus], [TestSource], [TestSink], [TestStore] and [TestLease] check what the engine relies on. Each case says why it
// must hold.
package enginetest
