package nats

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
)

// syncing connects to a server of its own, which syncs always.
func syncing(t *testing.T) *Connection {
	t.Helper()
	s, err := StartServer(ServerConfig{DataDir: t.TempDir()})
	require.NoError(t, err)
	t.Cleanup(s.Shutdown)
	conn, err := s.Connect(t.Context(), "")
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

// committing returns a committer for a stream.
func committing(t *testing.T) (*committer, jetstream.Stream) {
	t.Helper()
	conn := syncing(t)
	stream, err := conn.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, AllowAtomicPublish: true, AllowDirect: true})
	require.NoError(t, err)
	return &committer{conn: conn, groups: true}, stream
}

func published(subject, data string) *natsgo.Msg {
	m := natsgo.NewMsg(subject)
	m.Data = []byte(data)
	return m
}

func TestEveryMessageOfAGroupIsStoredWhereItIsSaidToBe(t *testing.T) {
	c, stream := committing(t)
	var group sync.WaitGroup
	for i := range 300 {
		group.Go(func() {
			subject := fmt.Sprint("s.", i)
			seq, err := c.publish(t.Context(), published(subject, "x"), nil)
			if err != nil {
				t.Error(err)
				return
			}
			m, err := stream.GetMsg(t.Context(), seq)
			if err != nil || m.Subject != subject {
				t.Errorf("message %d is of %v, %v: want %s", seq, m, err, subject)
			}
		})
	}
	group.Wait()
	info, err := stream.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 300, info.State.Msgs)
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Empty(t, c.waiting)
}

// held puts messages in the line and then lets the committer begin.
func held(t *testing.T, c *committer, group []*publication) {
	t.Helper()
	for _, p := range group {
		p.done = make(chan struct{})
	}
	c.waiting, c.busy = slices.Clone(group), true
	c.run(t.Context())
	for _, p := range group {
		<-p.done
	}
}

func TestOneMessageThatIsRefusedDoesNotTakeTheOthersWithIt(t *testing.T) {
	c, stream := committing(t)
	wrong, right := uint64(7), uint64(0)
	group := []*publication{
		{msg: published("s.a", "1")}, {msg: published("s.b", "1"), expected: &wrong}, {msg: published("s.c", "1"), expected: &right},
	}
	held(t, c, group)
	require.NoError(t, group[0].err)
	require.ErrorIs(t, group[1].err, engine.ErrConflict)
	require.NoError(t, group[2].err)
	m, err := stream.GetMsg(t.Context(), group[2].seq)
	require.NoError(t, err)
	require.Equal(t, "s.c", m.Subject)
}

func TestMessagesOfOneSubjectStayInOrder(t *testing.T) {
	c, stream := committing(t)
	var group []*publication
	for i := range 20 {
		group = append(group, &publication{msg: published(fmt.Sprint("s.", i%3), fmt.Sprint(i))})
	}
	held(t, c, group)
	for i, p := range group {
		require.NoError(t, p.err)
		if i >= 3 {
			require.Greater(t, p.seq, group[i-3].seq)
		}
		m, err := stream.GetMsg(t.Context(), p.seq)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(i), string(m.Data))
	}
}

func TestWhoWaitsForAGroupCanGiveUp(t *testing.T) {
	c, _ := committing(t)
	c.busy = true // somebody else's group never ends
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := c.publish(ctx, published("s.a", "1"), nil)
	require.ErrorIs(t, err, ctx.Err())
}
