package engine

import (
	"context"
	"fmt"
	"strings"

	"github.com/windlass-dev/windlass/engine/kv"
)

// CrashesPrefix begins the entries in which buses keep, by controller and key, which keys ended their process.
const CrashesPrefix = "crashes/"

// Leftovers returns what a bus's store holds for controllers that are not known, by controller: who owns which object, and
// suspensions. A controller's queue of failed mappings goes by its own name.
func Leftovers(ctx context.Context, store kv.Store, known func(controller string) bool) (map[string][]kv.Entry, error) {
	entries, err := store.List(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("list the engine's store: %w", err)
	}
	left := make(map[string][]kv.Entry)
	for _, e := range entries {
		var controller string
		prefix, rest, _ := strings.Cut(e.Key, "/")
		switch prefix + "/" {
		case ownershipPrefix:
			_, r, err := readRecord(e)
			if err != nil {
				return nil, err
			}
			controller = r.Owner.Controller
		case pausePrefix, CrashesPrefix:
			controller, _, _ = strings.Cut(rest, "/")
		default:
			continue
		}
		if !known(ControllerOf(controller)) {
			left[ControllerOf(controller)] = append(left[ControllerOf(controller)], e)
		}
	}
	return left, nil
}

// ControllerOf is the controller that a queue belongs to: itself, or the one whose failed mappings it holds.
func ControllerOf(queue string) string { return strings.TrimSuffix(queue, mappingSuffix) }
