package owner

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/windlass-dev/windlass/engine/kv"
)

// Suspects keeps, in a store, how often a process has ended while it ran a key.
type Suspects[K comparable] struct {
	Store kv.Store
	// Prefix is that of the entries of one controller.
	Prefix string
	// Parse reads what the key's String wrote.
	Parse func(text string) (K, error)
}

// Crashes returns the counts of the keys that match.
func (s Suspects[K]) Crashes(ctx context.Context, match func(key K) bool) (map[K]int, error) {
	entries, err := s.Store.List(ctx, s.Prefix)
	if err != nil {
		return nil, fmt.Errorf("keys under suspicion: %w", err)
	}
	crashes := make(map[K]int)
	for _, e := range entries {
		key, err := s.Parse(strings.TrimPrefix(e.Key, s.Prefix))
		n, err2 := strconv.Atoi(string(e.Value))
		if err != nil || err2 != nil {
			continue // it is only a suspicion
		}
		if match(key) {
			crashes[key] = n
		}
	}
	return crashes, nil
}

// Suspect stores the count of a key. 0 removes it.
func (s Suspects[K]) Suspect(ctx context.Context, key K, crashes int) error {
	at := s.Prefix + fmt.Sprint(key)
	if crashes == 0 {
		return s.Store.Delete(ctx, at, "")
	}
	have, err := s.Store.Get(ctx, at)
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		return fmt.Errorf("key under suspicion: %w", err)
	}
	_, err = s.Store.Put(ctx, at, []byte(strconv.Itoa(crashes)), have.Revision)
	return err
}
