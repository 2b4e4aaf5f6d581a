package engine

import (
	"errors"
	"fmt"

	"github.com/windlass-dev/windlass/engine/kv"
)

// The errors that decide something. Readers, sinks and the Runtime return them, wrapped; test with errors.Is.
var (
	// ErrNotFound says that there is no such object.
	ErrNotFound = kv.ErrNotFound
	// ErrConflict says that the object is not as the writer thought.
	ErrConflict = kv.ErrConflict
	// ErrInvalid says that the system will never take this object or key. The sync handler parks on it.
	ErrInvalid = errors.New("invalid")
	// ErrResourceExists says that there is an object of the wanted name that belongs to somebody else. It is retried
	// with backoff, since it may go away.
	ErrResourceExists = errors.New("resource exists and is not managed by this controller")
	// ErrDeadline is the cause with which a reconcile that took too long is cancelled.
	ErrDeadline = errors.New("reconcile deadline exceeded")
	// ErrNoHeartbeat is the cause with which a reconcile that was silent for too long is cancelled.
	ErrNoHeartbeat = errors.New("no heartbeat")
	// ErrLeaseLost is the cause with which the reconciles of a singleton are cancelled when its lease is lost.
	ErrLeaseLost = errors.New("lease lost")
	// ErrEndsProcess says that a key is parked because processes that ran it ended.
	ErrEndsProcess = errors.New("the key ends its process")
	// ErrShutdown is the cause with which reconciles are cancelled that outlast the drain timeout.
	ErrShutdown = errors.New("engine shut down")
	// ErrRunEnded says that a Runtime was used after its run.
	ErrRunEnded = errors.New("the run that this Runtime belongs to has ended")
	// ErrMalformed says that a message is not what the codec writes.
	ErrMalformed = errors.New("malformed message")
)

// PanicError is a panic of a handler or mapper, recovered.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("panic [recovered]: %v\n%s", e.Value, e.Stack)
}

// IsNotFound says whether err means that there is no such object.
func IsNotFound(err error) bool { return errors.Is(err, ErrNotFound) }
