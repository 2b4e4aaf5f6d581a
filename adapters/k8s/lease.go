package k8s

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/windlass-dev/windlass/engine/lease"
)

// EpochAnnotation is on Lease objects. Kubernetes' own count of transitions begins anew when a Lease is deleted; this does not.
const EpochAnnotation = "windlass.dev/epoch"

// NameAnnotation says which lease a Lease object is: its own name is made from a hash, because Kubernetes allows few characters.
const NameAnnotation = "windlass.dev/lease"

// Leases are Lease objects (coordination.k8s.io) in one namespace as a lease.Store.
//
// No clock is compared with another: as in client-go's leader election, a replica takes a lease over when it has itself watched the
// object stay the same for its time to live. So clocks may be wrong as far as they like, if they run equally fast; and a
// replica that has just started waits a whole time to live before it takes over from one that died. The times in the object are
// for people.
type Leases struct {
	client clientv1.LeaseInterface

	mu   sync.Mutex
	seen map[string]sighting
}

// sighting is when a version of a Lease was first seen, by the own clock.
type sighting struct {
	revision string
	at       time.Time
}

var _ lease.Store = (*Leases)(nil)

// NewLeases returns the leases in a namespace. The account needs get, create and update of leases.coordination.k8s.io there.
func NewLeases(conn *Connection, namespace string) (*Leases, error) {
	client, err := clientv1.NewForConfigAndClient(conn.config, conn.http)
	if err != nil {
		return nil, fmt.Errorf("leases: %w", err)
	}
	return &Leases{client: client.Leases(namespace), seen: make(map[string]sighting)}, nil
}

// objectName is the name of the object for a lease: what can be read of its name, and a hash of all of it.
func objectName(name string) string {
	readable := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9':
			return r
		default:
			return '-'
		}
	}, strings.ToLower(name))
	sum := sha256.Sum256([]byte(name))
	return "windlass-" + readable[:min(len(readable), 40)] + "-" + hex.EncodeToString(sum[:6])
}

// Acquire implements lease.Store. The shortest time to live is a second, which is what Kubernetes counts in.
func (l *Leases) Acquire(ctx context.Context, name, holder string, ttl time.Duration) (held bool, epoch uint64, err error) {
	have, err := l.client.Get(ctx, objectName(name), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return l.create(ctx, name, holder, ttl)
	}
	if err != nil {
		return false, 0, fmt.Errorf("lease %s: %w", name, explained(err))
	}
	epoch = epochOf(have)
	renewed := have.DeepCopy()
	now := metav1.NowMicro()
	renewed.Spec.RenewTime, renewed.Spec.LeaseDurationSeconds = &now, seconds(ttl)
	if of := holderOf(have); of != holder {
		if of != "" && !l.expired(name, have) {
			return false, epoch, nil
		}
		epoch++
		setEpoch(renewed, epoch)
		transitions := int32(1)
		if have.Spec.LeaseTransitions != nil {
			transitions += *have.Spec.LeaseTransitions
		}
		renewed.Spec.HolderIdentity, renewed.Spec.AcquireTime, renewed.Spec.LeaseTransitions = &holder, &now, &transitions
	}
	// The update demands the revision that was read.
	written, err := l.client.Update(ctx, renewed, metav1.UpdateOptions{})
	switch {
	case apierrors.IsConflict(err): // somebody else was faster; who, the next call tells
		return false, epochOf(have), nil
	case err != nil:
		return false, 0, fmt.Errorf("lease %s: %w", name, explained(err))
	}
	l.saw(name, written.ResourceVersion)
	return true, epoch, nil
}

func (l *Leases) create(ctx context.Context, name, holder string, ttl time.Duration) (held bool, epoch uint64, err error) {
	now, transitions := metav1.NowMicro(), int32(0)
	made := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: objectName(name), Annotations: map[string]string{NameAnnotation: name}},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: seconds(ttl), AcquireTime: &now, RenewTime: &now, LeaseTransitions: &transitions,
		},
	}
	epoch = uint64(now.UnixMicro()) // greater than that of an object that was deleted.
	setEpoch(made, epoch)
	written, err := l.client.Create(ctx, made, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		return false, 0, nil
	case err != nil:
		return false, 0, fmt.Errorf("lease %s: %w", name, explained(err))
	}
	l.saw(name, written.ResourceVersion)
	return true, epoch, nil
}

// expired says whether the object has not changed for its time to live, as far as this process has seen.
func (l *Leases) expired(name string, have *coordinationv1.Lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, ok := l.seen[name]
	if !ok || s.revision != have.ResourceVersion {
		l.seen[name] = sighting{have.ResourceVersion, time.Now()}
		return false
	}
	ttl := lease.DefaultTTL
	if d := have.Spec.LeaseDurationSeconds; d != nil {
		ttl = time.Duration(*d) * time.Second
	}
	return time.Since(s.at) >= ttl
}

func (l *Leases) saw(name, revision string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[name] = sighting{revision, time.Now()}
}

// Release implements lease.Store.
func (l *Leases) Release(ctx context.Context, name, holder string) error {
	have, err := l.client.Get(ctx, objectName(name), metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && holderOf(have) != holder {
		return nil
	}
	if err == nil {
		nobody := ""
		have.Spec.HolderIdentity = &nobody
		_, err = l.client.Update(ctx, have, metav1.UpdateOptions{})
	}
	if err != nil && !apierrors.IsConflict(err) { // in a conflict somebody else has taken it
		return fmt.Errorf("release lease %s: %w", name, explained(err))
	}
	return nil
}

func holderOf(l *coordinationv1.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

func epochOf(l *coordinationv1.Lease) uint64 {
	epoch, _ := strconv.ParseUint(l.Annotations[EpochAnnotation], 10, 64) // without one it is the first
	return epoch
}

func setEpoch(l *coordinationv1.Lease, epoch uint64) {
	if l.Annotations == nil {
		l.Annotations = make(map[string]string)
	}
	l.Annotations[EpochAnnotation] = strconv.FormatUint(epoch, 10)
}

// seconds rounds up: a grant must not end in the object before it ends for its holder.
func seconds(ttl time.Duration) *int32 {
	s := int32(min((ttl+time.Second-1)/time.Second, 1<<30)) //nolint:gosec // bounded.
	return &s
}
