package nats

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/engine"
)

// moving stands between two numbers of partitions while requests are moved from one to the other: no queue opens then.
const moving = ">"

// Queues returns the names of the queues that the engine has on this bus, and how many messages each holds: requests that wait
// and state records.
func (b *Bus) Queues(ctx context.Context) (map[string]int, error) {
	prefix := "rq." + token(b.cfg.Engine) + "."
	queues := make(map[string]int)
	streams := b.conn.js.ListStreams(ctx, jetstream.WithStreamListSubject(prefix+">"))
	for info := range streams.Info() {
		name, err := untoken(strings.TrimSuffix(strings.TrimPrefix(info.Config.Subjects[0], prefix), ".>"))
		if err != nil {
			continue // not one of ours
		}
		queues[name] = int(info.State.Msgs) //nolint:gosec // not that many.
	}
	if err := streams.Err(); err != nil {
		return nil, fmt.Errorf("list the queues: %w", err)
	}
	for name := range queues {
		info, err := b.states.Info(ctx, jetstream.WithSubjectFilter(b.stateSubjects(name)+">"))
		if err != nil {
			return nil, fmt.Errorf("state records of queue %s: %w", name, err)
		}
		queues[name] += len(info.State.Subjects)
	}
	return queues, nil
}

func (b *Bus) stateSubjects(controller string) string {
	return "rqs." + token(b.cfg.Engine) + "." + token(controller) + "."
}

// RemoveQueue removes a queue with all that it holds.
func (b *Bus) RemoveQueue(ctx context.Context, controller string) error {
	if err := b.states.Purge(ctx, jetstream.WithPurgeSubject(b.stateSubjects(controller)+">")); err != nil {
		return fmt.Errorf("remove the state records of queue %s: %w", controller, err)
	}
	if err := b.conn.js.DeleteStream(ctx, requestStream(b.cfg.Engine, controller)); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("remove queue %s: %w", controller, err)
	}
	return b.forgetClaims(ctx, controller)
}

func (b *Bus) forgetClaims(ctx context.Context, controller string) error {
	stream, err := b.conn.js.Stream(ctx, coordinationStream(b.cfg.Engine))
	if err == nil {
		err = stream.Purge(ctx, jetstream.WithPurgeSubject("rqc."+token(b.cfg.Engine)+".c."+token(controller)+".>"))
	}
	if err != nil {
		return fmt.Errorf("forget who worked on queue %s: %w", controller, err)
	}
	return nil
}

// Migrate brings a queue to the number of partitions that this bus is configured for, and returns how many messages it moved.
// Nobody may work on the queue meanwhile. When it fails, or its process ends, no queue of that name opens until it was called again.
func (b *Bus) Migrate(ctx context.Context, controller string) (moved int, err error) {
	name, want := requestStream(b.cfg.Engine, controller), strconv.Itoa(b.cfg.Partitions)
	stream, err := b.conn.js.Stream(ctx, name)
	if err != nil {
		return 0, streamError(name, err)
	}
	have := stream.CachedInfo().Config.Metadata[metaPartitions]
	if have == want {
		return 0, nil
	}
	if stream, err = b.label(ctx, stream, have+moving+want); err != nil {
		return 0, err
	}
	names := stream.ConsumerNames(ctx)
	for c := range names.Name() {
		if err := stream.DeleteConsumer(ctx, c); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return 0, fmt.Errorf("remove consumer %s of queue %s: %w", c, controller, err)
		}
	}
	if err := names.Err(); err != nil {
		return 0, fmt.Errorf("consumers of queue %s: %w", controller, err)
	}
	for s, prefix := range map[jetstream.Stream]string{
		stream: "rq." + token(b.cfg.Engine) + "." + token(controller) + ".", b.states: b.stateSubjects(controller),
	} {
		n, err := b.move(ctx, s, prefix)
		if moved += n; err != nil {
			return moved, fmt.Errorf("move the messages of queue %s: %w", controller, err)
		}
	}
	_, err = b.label(ctx, stream, want)
	return moved, err
}

// label changes the number of partitions that a stream says it was made for.
func (b *Bus) label(ctx context.Context, stream jetstream.Stream, partitions string) (jetstream.Stream, error) {
	cfg := stream.CachedInfo().Config
	cfg.Metadata[metaPartitions] = partitions
	s, err := b.conn.js.UpdateStream(ctx, cfg)
	if err != nil {
		return nil, streamError(cfg.Name, err)
	}
	return s, nil
}

// move publishes every message under a prefix to the partition that its key has now, and removes it where it was.
func (b *Bus) move(ctx context.Context, stream jetstream.Stream, prefix string) (moved int, err error) {
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, err
	}
	for seq, last := uint64(1), info.State.LastSeq; seq <= last; {
		m, err := stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(prefix+">"))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			return moved, err
		}
		if seq = m.Sequence + 1; m.Sequence > last {
			break
		}
		subject, err := b.repartitioned(prefix, m.Subject)
		if err != nil {
			return moved, err
		}
		if subject == m.Subject {
			continue
		}
		out := natsgo.NewMsg(subject)
		out.Header, out.Data = withoutConditions(m.Header), m.Data
		if _, err := b.conn.publish(ctx, out); err != nil {
			return moved, err
		}
		if err := stream.DeleteMsg(ctx, m.Sequence); err != nil {
			return moved, err
		}
		moved++
	}
	return moved, nil
}

// repartitioned is a subject with the partition that its key has now: behind the prefix the partition, for requests the class, and
// the four tokens of the key.
func (b *Bus) repartitioned(prefix, subject string) (string, error) {
	tokens := strings.Split(strings.TrimPrefix(subject, prefix), ".")
	first := 1
	if len(tokens) > 5 && slices.Contains(classTokens[:], tokens[1]) {
		first = 2
	}
	if len(tokens) < first+4 {
		return "", fmt.Errorf("%w: subject %s", engine.ErrMalformed, subject)
	}
	tokens[0] = strconv.Itoa(partition(strings.Join(tokens[first:first+4], "."), b.cfg.Partitions))
	return prefix + strings.Join(tokens, "."), nil
}
