package nats

import (
	"context"
	"errors"
	"fmt"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
)

// The server's codes that mean something here.
const (
	codeWrongLastSequence         jetstream.ErrorCode = 10071
	codeWrongLastSequenceInFlight jetstream.ErrorCode = 10164
	codeMessageTooLarge           jetstream.ErrorCode = 10054
)

// understood joins what an error of the client means to the engine with the error itself.
func understood(err error) error {
	var api *jetstream.APIError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &api) && (api.ErrorCode == codeWrongLastSequence || api.ErrorCode == codeWrongLastSequenceInFlight):
		return fmt.Errorf("%w: %w", engine.ErrConflict, err)
	case errors.As(err, &api) && api.ErrorCode == codeMessageTooLarge, errors.Is(err, natsgo.ErrMaxPayload):
		return fmt.Errorf("%w: too large for the server: %w", engine.ErrInvalid, err)
	case errors.Is(err, jetstream.ErrMsgNotFound), errors.Is(err, jetstream.ErrKeyNotFound):
		return fmt.Errorf("%w: %w", engine.ErrNotFound, err)
	default:
		return err
	}
}

// connectError says what to do about a connection that cannot be made.
func connectError(url string, err error) error {
	var hint string
	switch {
	case errors.Is(err, natsgo.ErrAuthorization), errors.Is(err, natsgo.ErrAuthExpired):
		hint = "the server refuses the credentials; check credsFile, tokenFile or the user's permissions"
	case errors.Is(err, natsgo.ErrNoServers), errors.Is(err, context.DeadlineExceeded), errors.Is(err, natsgo.ErrTimeout):
		hint = "no server answers there; check the address and that it is running"
	case errors.Is(err, natsgo.ErrSecureConnRequired), errors.Is(err, natsgo.ErrSecureConnWanted):
		hint = "one side wants TLS and the other does not; check tls and the scheme (tls://)"
	default:
		hint = "check url, tls and the credentials"
	}
	return fmt.Errorf("connect to NATS at %s: %w: %s", url, err, hint)
}

// transient says that a request may be answered later: the server, or the cluster, is busy with itself.
func transient(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, errNoAnswer) || errors.Is(err, natsgo.ErrNoResponders) || errors.As(err, &api) && api.Code == 503
}

// streamError says what to do about a stream that cannot be set up.
func streamError(name string, err error) error {
	if transient(err) {
		return fmt.Errorf("set up stream %s: %w: the server, or a majority of its cluster, is not ready", name, err)
	}
	return fmt.Errorf("set up stream %s: %w: the right to manage streams is needed", name, err)
}
