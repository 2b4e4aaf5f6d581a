package redis

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/owner"
	"github.com/windlass-dev/windlass/internal/queue"
)

// moving stands between two numbers of partitions while requests are moved from one to the other: no queue opens then.
const moving = ">"

func (b *Bus) queueKey(controller string) string { return b.partKey(escaped(controller), "queue") }

// Queues returns the names of the queues that the engine has on this bus, and how many entries each holds: requests that wait and
// state records.
func (b *Bus) Queues(ctx context.Context) (map[string]int, error) {
	names, err := b.conn.client.SMembers(ctx, b.key("queues")).Result()
	if err != nil {
		return nil, fmt.Errorf("list the queues: %w", understood(err))
	}
	queues := make(map[string]int)
	for _, name := range names {
		partitions, err := b.partitions(ctx, name)
		if err != nil {
			return nil, err
		}
		queues[name] = 0
		for p := range partitions {
			k := b.partition(owner.Partition{Group: name, Number: p})
			for _, key := range []string{k.requests, k.states} {
				n, err := b.conn.client.HLen(ctx, key).Result()
				if err != nil {
					return nil, fmt.Errorf("queue %s: %w", name, understood(err))
				}
				queues[name] += int(n)
			}
		}
	}
	return queues, nil
}

// partitions is how many a queue has, or had or will have while that is changed.
func (b *Bus) partitions(ctx context.Context, controller string) (int, error) {
	text, err := b.conn.client.HGet(ctx, b.queueKey(controller), "partitions").Result()
	if err != nil {
		return 0, fmt.Errorf("queue %s: %w", controller, understood(err))
	}
	most := 0
	for part := range strings.SplitSeq(text, moving) {
		n, err := strconv.Atoi(part)
		if err != nil || n < 1 || n > maxPartitions {
			return 0, fmt.Errorf("queue %s: %w: partitions are %q", controller, engine.ErrMalformed, text)
		}
		most = max(most, n)
	}
	return most, nil
}

// RemoveQueue removes a queue with all that it holds.
func (b *Bus) RemoveQueue(ctx context.Context, controller string) error {
	partitions, err := b.partitions(ctx, controller)
	if err != nil {
		return err
	}
	for p := range partitions {
		if err := b.removePartition(ctx, owner.Partition{Group: controller, Number: p}); err != nil {
			return err
		}
	}
	if err := b.conn.client.Del(ctx, b.queueKey(controller)).Err(); err != nil {
		return fmt.Errorf("remove queue %s: %w", controller, understood(err))
	}
	if err := b.conn.client.SRem(ctx, b.key("queues"), controller).Err(); err != nil {
		return fmt.Errorf("remove queue %s: %w", controller, understood(err))
	}
	return nil
}

func (b *Bus) removePartition(ctx context.Context, p owner.Partition) error {
	k := b.partition(p)
	keys := []string{k.owner, k.requests, k.states}
	for c := range queue.Classes {
		keys = append(keys, k.class(c))
	}
	if err := b.conn.client.Del(ctx, keys...).Err(); err != nil {
		return fmt.Errorf("remove partition %d of queue %s: %w", p.Number, p.Group, understood(err))
	}
	return nil
}

// Migrate brings a queue to the number of partitions that this bus is configured for, and returns how many entries it moved.
// Nobody may work on the queue meanwhile. When it fails, or its process ends, no queue of that name opens until it was called again.
func (b *Bus) Migrate(ctx context.Context, controller string) (moved int, err error) {
	have, err := b.conn.client.HGet(ctx, b.queueKey(controller), "partitions").Result()
	if err != nil {
		return 0, fmt.Errorf("queue %s: %w", controller, understood(err))
	}
	want := strconv.Itoa(b.cfg.Partitions)
	if have == want {
		return 0, nil
	}
	former, err := b.partitions(ctx, controller)
	if err != nil {
		return 0, err
	}
	if err := b.label(ctx, controller, have+moving+want); err != nil {
		return 0, err
	}
	for p := range former {
		n, err := b.move(ctx, owner.Partition{Group: controller, Number: p})
		if moved += n; err != nil {
			return moved, fmt.Errorf("move partition %d of queue %s: %w", p, controller, understood(err))
		}
	}
	for p := b.cfg.Partitions; p < former; p++ {
		if err := b.removePartition(ctx, owner.Partition{Group: controller, Number: p}); err != nil {
			return moved, err
		}
	}
	return moved, b.label(ctx, controller, want)
}

func (b *Bus) label(ctx context.Context, controller, partitions string) error {
	if err := b.conn.client.HSet(ctx, b.queueKey(controller), "partitions", partitions).Err(); err != nil {
		return fmt.Errorf("queue %s: %w", controller, understood(err))
	}
	return nil
}

// move puts what is in a partition and does not belong there any more where it belongs, and then removes it: in this order, for
// a Cluster may keep the two apart.
func (b *Bus) move(ctx context.Context, from owner.Partition) (moved int, err error) {
	client, there := b.conn.client, b.partition(from)
	elsewhere := func(text string) (partKeys, bool, error) {
		key, err := engine.ParseKey(text)
		if err != nil {
			return partKeys{}, false, err
		}
		p := owner.Partition{Group: from.Group, Number: b.PartitionOf(key)}
		return b.partition(p), p != from, nil
	}
	if err := scan(ctx, client, there.states, "*", func(text, record string) error {
		to, away, err := elsewhere(text)
		if err != nil || !away {
			return err
		}
		moved++
		if err := client.HSet(ctx, to.states, text, record).Err(); err != nil {
			return err
		}
		return client.HDel(ctx, there.states, text).Err()
	}); err != nil {
		return moved, err
	}
	for c := range queue.Classes {
		waiting, err := client.ZRangeWithScores(ctx, there.class(c), 0, -1).Result()
		if err != nil {
			return moved, err
		}
		for _, z := range waiting {
			member, _ := z.Member.(string)
			text, _, _ := strings.Cut(member, laterMark)
			to, away, err := elsewhere(text)
			if err != nil {
				return moved, err
			}
			if !away {
				continue
			}
			field := classTokens[c] + member
			request, err := client.HGet(ctx, there.requests, field).Result()
			if err != nil {
				return moved, err
			}
			if _, err := client.TxPipelined(ctx, func(pipe goredis.Pipeliner) error {
				pipe.HSet(ctx, to.requests, field, request)
				pipe.ZAdd(ctx, to.class(c), z)
				return nil
			}); err != nil {
				return moved, err
			}
			moved++
			if _, err := client.TxPipelined(ctx, func(pipe goredis.Pipeliner) error {
				pipe.ZRem(ctx, there.class(c), member)
				pipe.HDel(ctx, there.requests, field)
				return nil
			}); err != nil {
				return moved, err
			}
		}
	}
	return moved, nil
}
