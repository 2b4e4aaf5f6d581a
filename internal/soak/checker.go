package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// checker reads what the engines have noted and written, in the order in which the server has it.
type checker struct {
	journal, results uint64 // what has been read

	done    map[string]int // by key: the newest version whose run ended well
	fences  map[string]uint64
	began   map[string]time.Time // by key: when the first run with that fence did
	holders map[string]int       // by key and fence: which process
	due     map[string]time.Time
	written map[string]uint64 // by key: the highest fence that wrote its result

	runs, overlaps, stale, early int
	outdated                     int // runs of a former owner that were noted after its successor had begun, begun before that
	late                         []time.Duration
}

func newChecker() *checker {
	return &checker{
		done: map[string]int{}, fences: map[string]uint64{}, began: map[string]time.Time{}, holders: map[string]int{}, due: map[string]time.Time{}, written: map[string]uint64{},
	}
}

// read goes on from where it ended last.
func (c *checker) read(ctx context.Context, js jetstream.JetStream) error {
	if err := follow(ctx, js, journal, &c.journal, func(m jetstream.Msg) error {
		var n note
		if err := json.Unmarshal(m.Data(), &n); err != nil {
			return err
		}
		c.see(n)
		return nil
	}); err != nil {
		return err
	}
	return follow(ctx, js, "KV_results", &c.results, func(m jetstream.Msg) error {
		key := strings.TrimPrefix(m.Subject(), "$KV.results.")
		fence, err := strconv.ParseUint(m.Headers().Get("Windlass-Fence"), 10, 64)
		if err != nil {
			return fmt.Errorf("result of %s: %w", key, err)
		}
		if fence < c.written[key] {
			c.stale++
		}
		c.written[key] = max(c.written[key], fence)
		return nil
	})
}

// follow passes on what a stream has beyond a sequence.
func follow(ctx context.Context, js jetstream.JetStream, stream string, from *uint64, yield func(jetstream.Msg) error) error {
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	last := s.CachedInfo().State.LastSeq
	if last <= *from {
		return nil
	}
	consumer, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: *from + 1, AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true,
	})
	if err != nil {
		return err
	}
	defer func() { _ = s.DeleteConsumer(ctx, consumer.CachedInfo().Name) }() // the server removes it otherwise
	for *from < last {
		batch, err := consumer.Fetch(500, jetstream.FetchMaxWait(2*time.Second))
		if err != nil {
			return err
		}
		n := 0
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			n++
			if err := yield(m); err != nil {
				return err
			}
			*from = meta.Sequence.Stream
		}
		if err := batch.Error(); err != nil {
			return err
		}
		if n == 0 {
			return errors.New("the server sends nothing")
		}
	}
	return nil
}

// see judges one line of the journal.
func (c *checker) see(n note) {
	at := n.Key + "/" + strconv.FormatUint(n.Fence, 10)
	if !n.End {
		c.runs++
		holder, known := c.holders[at]
		former := n.Fence < c.fences[n.Key]
		// Begun by a former owner after its successor had begun, by two with one fence, or twice in one process. What a former
		// owner had begun before, and noted later, has no valid fence; it is counted apart.
		switch {
		case former && n.At.After(c.began[n.Key]), known && holder != n.Process, n.Overlap:
			c.overlaps++
		case former:
			c.outdated++
		}
		if n.Fence > c.fences[n.Key] {
			c.fences[n.Key], c.began[n.Key] = n.Fence, n.At
		}
		c.holders[at] = n.Process
		if due := c.due[n.Key]; n.Requeued && !due.IsZero() {
			if n.At.Before(due) {
				c.early++
			}
			c.late = append(c.late, n.At.Sub(due))
		}
		return
	}
	c.done[n.Key] = max(c.done[n.Key], n.Version)
	c.due[n.Key] = n.Due
}
