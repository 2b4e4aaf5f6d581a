package owner

import (
	"context"
	"errors"
	"time"
)

// Registry is where the replicas of an engine see each other and share the partitions out. Its methods are safe for
// concurrent use.
type Registry interface {
	// Announce makes or renews a member, for ttl from the call on at least.
	Announce(ctx context.Context, m Member, ttl time.Duration) error
	// Withdraw ends a member at once.
	Withdraw(ctx context.Context, id string) error
	// Claim makes a member the holder of a partition, or nobody with an empty id, if the claim is still the one that was
	// seen. It returns the claim's new epoch, and ErrOvertaken if it was not.
	Claim(ctx context.Context, p Partition, id string, seen uint64) (epoch uint64, err error)
	// Watch tells what members and claims there are, first as soon as it knows and then at every change, until ctx ends.
	Watch(ctx context.Context, changed func(View)) error
}

// ErrOvertaken says that a claim is not the one that was seen.
var ErrOvertaken = errors.New("another replica was quicker")

// Member is a replica as the others see it.
type Member struct {
	ID string `json:"id"`
	// Groups are those whose partitions it works on.
	Groups []string `json:"groups,omitempty"`
	// Alone says that it suffers no other.
	Alone bool `json:"alone,omitempty"`
}

// Partition is one of a group, which is a controller.
type Partition struct {
	Group  string
	Number int
}

// Claim says who works on a partition. The epoch grows with every change; 0 means that there is no claim.
type Claim struct {
	Holder string
	Epoch  uint64
}

// View is what a registry knows. It is not changed any more.
type View struct {
	Members map[string]Member
	Claims  map[Partition]Claim
}
