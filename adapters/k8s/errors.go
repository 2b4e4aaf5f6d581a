package k8s

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/windlass-dev/windlass/engine"
)

// explained joins an error of client-go with what it means to the engine and what to do about it, in one line.
func explained(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return unreachable(err)
	}
	s := status.Status()
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w: %w", engine.ErrNotFound, err)
	case apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%w: %w", engine.ErrConflict, err)
	case apierrors.IsConflict(err):
		return fmt.Errorf("%w: %w%s", engine.ErrConflict, err, fieldManagers(s))
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not know these credentials: renew the token or certificate: %w", err)
	case strings.Contains(s.Message, "denied the request"), strings.Contains(s.Message, "denied request"): // a webhook or a policy, by any code
		return fmt.Errorf("the cluster's admission refuses it: %w", err)
	case apierrors.IsForbidden(err):
		return forbidden(s, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err),
		strings.Contains(s.Message, "failed to create typed patch object"): // what is not of the schema is an internal error to apply
		return fmt.Errorf("%w: %w%s", engine.ErrInvalid, err, causes(s))
	case apierrors.IsRequestEntityTooLargeError(err):
		return fmt.Errorf("%w: larger than the API server takes (about 1.5 MiB): keep less in one object: %w", engine.ErrInvalid, err)
	}
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		return engine.RetryAfter(err, time.Duration(seconds)*time.Second)
	}
	return err
}

// forbidden tells apart what the server calls forbidden: a missing right, a quota, a policy.
func forbidden(s metav1.Status, err error) error {
	switch {
	case strings.Contains(s.Message, "exceeded quota"):
		return fmt.Errorf("a quota is used up: raise it, or remove something: %w", err)
	case strings.Contains(s.Message, "cannot "):
		return fmt.Errorf("a right is missing: grant it with a Role or ClusterRole ('engine rbac' prints one): %w", err)
	default:
		return fmt.Errorf("the cluster's admission refuses it: %w", err)
	}
}

// causes lists what the server found wrong where, if its message does not.
func causes(s metav1.Status) string {
	if s.Details == nil {
		return ""
	}
	var b strings.Builder
	for _, c := range s.Details.Causes {
		if !strings.Contains(s.Message, c.Message) {
			fmt.Fprintf(&b, "; %s: %s", c.Field, c.Message)
		}
	}
	return b.String()
}

// fieldManagers says what to do where somebody else applies the same fields.
func fieldManagers(s metav1.Status) string {
	if s.Details == nil {
		return ""
	}
	for _, c := range s.Details.Causes {
		if c.Type == metav1.CauseTypeFieldManagerConflict {
			return ": leave the field to its manager, or take it with conflicts: force"
		}
	}
	return ""
}

// unreachable says what stands between here and the server.
func unreachable(err error) error {
	var (
		unknown  x509.UnknownAuthorityError
		host     x509.HostnameError
		invalid  x509.CertificateInvalidError
		verify   *tls.CertificateVerificationError
		op       *net.OpError
		resolved *net.DNSError
	)
	var hint string
	switch {
	case errors.As(err, &unknown):
		hint = "its certificate is not signed by the kubeconfig's certificate-authority"
	case errors.As(err, &host):
		hint = "its certificate is for another name: correct the server's address, or set tls-server-name"
	case errors.As(err, &invalid), errors.As(err, &verify):
		hint = "its certificate is not valid"
	case errors.As(err, &resolved):
		hint = "its name is not known: check the server's address"
	case errors.As(err, &op), errors.Is(err, context.DeadlineExceeded):
		hint = "no API server answers there: check the address and that it is running"
	default:
		return err
	}
	return fmt.Errorf("%w: %s", err, hint)
}
