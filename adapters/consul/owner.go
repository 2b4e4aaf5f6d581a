package consul

import (
	"fmt"
	"maps"

	"github.com/windlass-dev/windlass/engine"
)

// OwnerMeta is the key in the Meta of services and config entries that holds the key of their owner.
const OwnerMeta = "windlass-owner"

// longestMeta is what Consul takes as a value of Meta.
const longestMeta = 512

// withOwner returns meta with the mark of an owner, without one for the zero key.
func withOwner(meta map[string]string, owner engine.Key) (map[string]string, error) {
	out := maps.Clone(meta)
	delete(out, OwnerMeta)
	if owner.IsZero() {
		return out, nil
	}
	if out == nil {
		out = make(map[string]string, 1)
	}
	if out[OwnerMeta] = owner.String(); len(out[OwnerMeta]) > longestMeta {
		return nil, fmt.Errorf("%w: the owner's key %s is longer than the %d bytes that Meta takes", engine.ErrInvalid, owner, longestMeta)
	}
	return out, nil
}

// metaOf is what mappers see of something with a Meta: the rest of it as labels, and the owner. A mark that is no key names nobody.
func metaOf(meta map[string]string) engine.Meta {
	labels := maps.Clone(meta)
	delete(labels, OwnerMeta)
	out := engine.Meta{Labels: labels}
	if owner, err := engine.ParseKey(meta[OwnerMeta]); err == nil {
		out.Owner = owner
	}
	return out
}
