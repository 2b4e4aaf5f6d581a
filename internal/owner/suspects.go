package owner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

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

// died is how many owners of a partition have died in a row, and when the last was found to have.
type died struct {
	Times int       `json:"times"`
	Last  time.Time `json:"last"`
}

// Died notes that the owner of a partition has died, and returns how many have in a row, each within DeathsTell of the one before.
func (s Suspects[K]) Died(ctx context.Context, partition int) (int, error) {
	at := s.Prefix + "partition " + strconv.Itoa(partition)
	have, err := s.Store.Get(ctx, at)
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		return 0, fmt.Errorf("owners that died: %w", err)
	}
	var d died
	if json.Unmarshal(have.Value, &d) != nil || time.Since(d.Last) > DeathsTell { // what cannot be read tells nothing
		d = died{}
	}
	d.Times, d.Last = d.Times+1, time.Now()
	value, err := json.Marshal(d)
	if err == nil {
		_, err = s.Store.Put(ctx, at, value, have.Revision)
	}
	return d.Times, err
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
