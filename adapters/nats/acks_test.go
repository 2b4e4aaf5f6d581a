package nats

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
)

// reader takes the messages of a class from a stream that has another class too.
type reader struct {
	*acks

	t        *testing.T
	consumer jetstream.Consumer
}

func newReader(t *testing.T, messages int) *reader {
	t.Helper()
	conn := syncing(t)
	stream, err := conn.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Retention: jetstream.WorkQueuePolicy})
	require.NoError(t, err)
	for i := range messages {
		for _, class := range []string{"ab", "ba"}[i%2] {
			_, err := conn.js.PublishMsgAsync(published(fmt.Sprintf("s.%c.%d", class, i), ""))
			require.NoError(t, err)
		}
		if i%1000 == 999 {
			<-conn.js.PublishAsyncComplete()
		}
	}
	<-conn.js.PublishAsyncComplete()
	r := &reader{acks: newAcks(conn, stream, true), t: t}
	r.expect("c", "s.a.>")
	r.consumer, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Name: "c", FilterSubject: "s.a.>", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1, MemoryStorage: true,
	})
	require.NoError(t, err)
	return r
}

// read passes on n messages, at most as many at once as there is room for.
func (r *reader) read(n int, see func(m jetstream.Msg, meta *jetstream.MsgMetadata)) {
	r.t.Helper()
	for n > 0 {
		batch, err := r.consumer.Fetch(min(n, r.room(r.t.Context(), r.of("c"))), jetstream.FetchMaxWait(10*time.Second))
		require.NoError(r.t, err)
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			require.NoError(r.t, err)
			see(m, meta)
			n--
		}
		require.NoError(r.t, batch.Error())
	}
}

// left returns the sequences of the messages of a class that the stream holds.
func (r *reader) left(class string) (seqs []uint64) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(r.t, r.settle(ctx, "c"))
	for seq := uint64(1); ; {
		m, err := r.stream.GetMsg(r.t.Context(), seq, jetstream.WithGetMsgSubject("s."+class+".>"))
		if err != nil {
			require.ErrorIs(r.t, err, jetstream.ErrMsgNotFound)
			return seqs
		}
		seqs, seq = append(seqs, m.Sequence), m.Sequence+1
	}
}

func TestWhatIsDoneIsRemovedAndNothingElse(t *testing.T) {
	r := newReader(t, 2500)
	var undone []uint64
	var acks []func()
	random := rand.New(rand.NewPCG(1, 2))
	r.read(2500, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		ack := r.delivered(r.of("c"), m, meta)
		if random.IntN(100) == 0 {
			undone = append(undone, meta.Sequence.Stream)
			return
		}
		if acks = append(acks, ack); len(acks) == 16 { // as so many workers would
			random.Shuffle(len(acks), func(i, j int) { acks[i], acks[j] = acks[j], acks[i] })
			for _, ack := range acks {
				ack()
			}
			acks = nil
		}
	})
	for _, ack := range acks {
		ack()
	}
	require.NotEmpty(t, undone)
	require.Equal(t, undone, r.left("a"))
	require.Len(t, r.left("b"), 2500)
	info, err := r.consumer.Info(t.Context())
	require.NoError(t, err)
	require.Equal(t, len(undone), info.NumAckPending)
}

func TestWhatIsDoneTogetherIsRemovedInOneWrite(t *testing.T) {
	r := newReader(t, 400)
	var acks []func()
	r.read(400, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		acks = append(acks, r.delivered(r.of("c"), m, meta))
	})
	r.busy = true // the round under way lasts
	for _, ack := range acks {
		ack()
	}
	removals, more := r.next()
	require.True(t, more)
	require.Len(t, removals, 1)
	require.Len(t, removals[0].acked, 400)
	require.Zero(t, removals[0].single)
	require.NotZero(t, removals[0].below)
}

func TestNothingIsPurgedThatWasLostOnItsWay(t *testing.T) {
	r := newReader(t, 300)
	var acks []func()
	lost := uint64(0)
	r.read(300, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		if meta.Sequence.Consumer == 150 {
			lost = meta.Sequence.Stream
			return
		}
		acks = append(acks, r.delivered(r.of("c"), m, meta))
	})
	for _, ack := range acks {
		ack()
	}
	require.Equal(t, []uint64{lost}, r.left("a"))
}

func TestWhatIsDeliveredAgainIsRemovedByOneAck(t *testing.T) {
	r := newReader(t, 3)
	var acks []func()
	r.read(3, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		acks = append(acks, r.delivered(r.of("c"), m, meta))
		if meta.Sequence.Stream == 1 && meta.NumDelivered == 1 {
			require.NoError(t, m.Nak())
		}
	})
	r.read(1, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		require.EqualValues(t, 2, meta.NumDelivered)
		r.delivered(r.of("c"), m, meta)
	})
	for _, ack := range acks {
		ack()
	}
	require.Empty(t, r.left("a"))
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Empty(t, r.given["c"].messages)
}

func TestAConsumerThatWasMadeAnewIsPurgedOnlyOfWhatItDelivered(t *testing.T) {
	r := newReader(t, 100)
	var first []func()
	r.read(50, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		first = append(first, r.delivered(r.of("c"), m, meta))
	})
	require.NoError(t, r.stream.DeleteConsumer(t.Context(), "c"))
	r.expect("c", "s.a.>")
	var err error
	r.consumer, err = r.stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
		Name: "c", FilterSubject: "s.a.>", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1, MemoryStorage: true,
	})
	require.NoError(t, err)
	r.read(20, func(m jetstream.Msg, meta *jetstream.MsgMetadata) { r.delivered(r.of("c"), m, meta) })
	for _, ack := range first[:19] {
		ack() // by its former delivery
	}
	left := r.left("a")
	require.Len(t, left, 81)
	require.EqualValues(t, 40, left[0], "the twentieth of its class")
	first[40]() // which the server has not delivered again: it does not hear that, and will
	first[19]()
	require.Len(t, r.left("a"), 80)
}

func TestThereIsRoomForAWindowAndNoMore(t *testing.T) {
	r := newReader(t, window+10)
	var acks []func()
	r.read(window, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		acks = append(acks, r.delivered(r.of("c"), m, meta))
	})
	full, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.Zero(t, r.room(full, r.of("c")))
	for _, ack := range acks {
		ack()
	}
	r.read(10, func(m jetstream.Msg, meta *jetstream.MsgMetadata) { r.delivered(r.of("c"), m, meta)() })
	require.Empty(t, r.left("a"))
}
