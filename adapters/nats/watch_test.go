package nats_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
)

// watched collects what a bucket emits.
type watched struct {
	mu     sync.Mutex
	events []engine.Event
}

func (w *watched) emit(_ context.Context, e engine.Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
	return nil
}

func (w *watched) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := ""
	for _, e := range w.events {
		out += e.Operation.String()
		if e.Key.Name != "" {
			out += " " + e.Key.Name
		}
		if e.Old == nil && e.Operation == engine.Put {
			out += " new"
		}
		if e.Repaired {
			out += " repaired"
		}
		out += "; "
	}
	return out
}

func watch(t *testing.T, b *nats.Bucket) (*watched, func()) {
	t.Helper()
	w := &watched{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx, w.emit) }()
	return w, func() {
		cancel()
		require.NoError(t, <-done)
	}
}

// byKey puts the events of different keys into one order, for they come in any; what a list brackets stays there.
func byKey(text string) string {
	events := strings.Split(strings.TrimSuffix(text, "; "), "; ")
	list := 0
	place := make([]string, len(events))
	for i, e := range events {
		op, rest, _ := strings.Cut(e, " ")
		if strings.HasPrefix(op, "list-") {
			list += 2
			place[i] = fmt.Sprintf("%03d", list-1)
			continue
		}
		name, _, _ := strings.Cut(rest, " ")
		place[i] = fmt.Sprintf("%03d %s", list, name)
	}
	order := make([]int, len(events))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return strings.Compare(place[a], place[b]) })
	var b strings.Builder
	for _, i := range order {
		b.WriteString(events[i] + "; ")
	}
	return b.String()
}

func (w *watched) eventually(t *testing.T, want string) {
	t.Helper()
	want = byKey(want)
	deadline := time.Now().Add(15 * time.Second)
	for byKey(w.text()) != want {
		if time.Now().After(deadline) {
			require.Equal(t, want, byKey(w.text()))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestPutDeleteAndPurgeAreToldApart(t *testing.T) {
	b := newBed(t)
	bucket := b.bucket("b")
	kv := b.kv("b")
	_, err := kv.PutString(t.Context(), "was", "1")
	require.NoError(t, err)
	_, err = kv.PutString(t.Context(), "gone", "1")
	require.NoError(t, err)
	require.NoError(t, kv.Delete(t.Context(), "gone"))
	w, stop := watch(t, bucket)
	defer stop()
	const listed = "list-started; resync was; list-ended; "
	w.eventually(t, listed)
	// One after the other is seen: of two changes before the next look at the bucket, only the last is left to tell.
	seen := listed
	for _, step := range []struct {
		do   func() error
		told string
	}{
		{func() error { _, err := kv.PutString(t.Context(), "a", "1"); return err }, "put a new; "},
		{func() error { _, err := kv.PutString(t.Context(), "a", "2"); return err }, "put a; "},
		{func() error { return kv.Delete(t.Context(), "a") }, "delete a; "},
		{func() error { _, err := kv.PutString(t.Context(), "a", "3"); return err }, "put a new; "},
		{func() error { return kv.Purge(t.Context(), "a") }, "purge a; "},
		{func() error { return kv.Purge(t.Context(), "never") }, ""},
	} {
		require.NoError(t, step.do())
		seen += step.told
		w.eventually(t, seen)
	}
}

func portOf(t *testing.T, address string) int {
	t.Helper()
	u, err := url.Parse(address)
	require.NoError(t, err)
	port, err := strconv.Atoi(u.Port())
	require.NoError(t, err)
	return port
}

func TestEmptyBucketIsListedAtOnce(t *testing.T) {
	b := newBed(t)
	w, stop := watch(t, b.bucket("b"))
	defer stop()
	w.eventually(t, "list-started; list-ended; ")
}

func TestLargeListArrivesWhole(t *testing.T) {
	b := newBed(t)
	bucket, kv := b.bucket("b"), b.kv("b")
	const n = 1500 // several batches
	for i := range n {
		_, err := kv.PutString(t.Context(), fmt.Sprint(i), "1")
		require.NoError(t, err)
	}
	w, stop := watch(t, bucket)
	defer stop()
	eventually(t, "the list", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.events) == n+2 && w.events[n+1].Operation == engine.ListEnded
	})
	objects, err := bucket.List(t.Context())
	require.NoError(t, err)
	require.Len(t, objects, n)
}

// TestWhatTheWatchMissedIsRepaired cuts the connection, and changes the bucket behind the watch's back.
func TestWhatTheWatchMissedIsRepaired(t *testing.T) {
	dir := t.TempDir()
	start := func(port int) *natsserver.Server {
		s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true})
		require.NoError(t, err)
		s.Start()
		require.True(t, s.ReadyForConnections(10*time.Second))
		return s
	}
	end := func(s *natsserver.Server) { s.Shutdown(); s.WaitForShutdown() }
	// edit uses a server of its own on the same files, which the watch cannot reach.
	edit := func(f func(js jetstream.JetStream)) {
		s := start(natsserver.RANDOM_PORT)
		nc, err := natsgo.Connect(s.ClientURL())
		require.NoError(t, err)
		js, err := jetstream.New(nc)
		require.NoError(t, err)
		f(js)
		nc.Close()
		end(s)
	}
	edit(func(js jetstream.JetStream) {
		kv, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b"})
		require.NoError(t, err)
		for _, k := range []string{"kept", "changed", "deleted", "vanished"} {
			_, err = kv.PutString(t.Context(), k, "1")
			require.NoError(t, err)
		}
	})
	s := start(natsserver.RANDOM_PORT)
	address := s.ClientURL()
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: address, Logger: logger()})
	require.NoError(t, err)
	defer conn.Close()
	bucket, err := nats.NewBucket(t.Context(), conn, nats.BucketConfig{Bucket: "b"})
	require.NoError(t, err)
	w, stop := watch(t, bucket)
	defer stop()
	const listed = "list-started; resync kept; resync changed; resync deleted; resync vanished; list-ended; "
	w.eventually(t, listed)
	end(s)
	edit(func(js jetstream.JetStream) {
		kv, err := js.KeyValue(t.Context(), "b")
		require.NoError(t, err)
		_, err = kv.PutString(t.Context(), "changed", "2")
		require.NoError(t, err)
		require.NoError(t, kv.Delete(t.Context(), "deleted"))
		_, err = kv.PutString(t.Context(), "added", "1")
		require.NoError(t, err)
		// vanished leaves not even a marker.
		stream, err := js.Stream(t.Context(), "KV_b")
		require.NoError(t, err)
		require.NoError(t, stream.Purge(t.Context(), jetstream.WithPurgeSubject("$KV.b.vanished")))
	})
	s = start(portOf(t, address))
	defer end(s)
	w.eventually(t, listed+"put changed repaired; delete deleted repaired; put added new repaired; purge vanished repaired; ")
	nc, err := natsgo.Connect(address)
	require.NoError(t, err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	require.NoError(t, err)
	kv, err := js.KeyValue(t.Context(), "b")
	require.NoError(t, err)
	_, err = kv.PutString(t.Context(), "after", "1")
	require.NoError(t, err)
	w.eventually(t, listed+"put changed repaired; delete deleted repaired; put added new repaired; purge vanished repaired; put after new; ")
}
