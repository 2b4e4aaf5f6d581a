package nats_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/nats"
	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/tlsfile/tlstest"
)

// TestEngineGoesOnAfterTheServerRestarted takes the user's server away while keys are pending, failing and delayed.
func TestEngineGoesOnAfterTheServerRestarted(t *testing.T) {
	dir := t.TempDir()
	server := func(port int) *natsserver.Server {
		s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true})
		require.NoError(t, err)
		s.Start()
		require.True(t, s.ReadyForConnections(10*time.Second))
		return s
	}
	s := server(natsserver.RANDOM_PORT)
	address := s.ClientURL()
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: address, Scope: "main", Logger: logger()})
	require.NoError(t, err)
	defer conn.Close()
	bus, err := nats.NewBus(t.Context(), conn, nats.BusConfig{Engine: "shop", Partitions: 2})
	require.NoError(t, err)
	orders, err := nats.NewBucket(t.Context(), conn, nats.BucketConfig{Bucket: "orders", Create: true})
	require.NoError(t, err)
	seen := &runs{}
	running, finish := make(chan struct{}), make(chan struct{})
	c := engine.NewController("c").For(orders).WithConcurrency(4).WithBackoff(engine.Backoff{Initial: 2 * time.Second}).WithHandler(
		func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			seen.add(req)
			switch {
			case req.Key.Name == "running" && len(seen.of("running")) == 1:
				close(running)
				<-finish
			case req.Key.Name == "failing" && req.Attempt == 0:
				return engine.Result{}, errors.New("not yet")
			}
			return engine.Result{}, nil
		})
	e, stop := run(t, engine.Config{Name: "shop", Controllers: []engine.Controller{c}, Bus: bus})
	put := func(keys ...string) {
		nc, err := natsgo.Connect(address)
		require.NoError(t, err)
		defer nc.Close()
		js, err := jetstream.New(nc)
		require.NoError(t, err)
		kv, err := js.KeyValue(t.Context(), "orders")
		require.NoError(t, err)
		for _, k := range keys {
			_, err = kv.PutString(t.Context(), k, "1")
			require.NoError(t, err)
		}
	}
	put("failing", "running")
	<-running
	eventually(t, "it failed once", func() bool { return len(seen.of("failing")) == 1 })
	s.Shutdown()
	s.WaitForShutdown()
	close(finish) // its run ends while there is no server to tell
	eventually(t, "the engine says so", func() bool { _, err := e.BusStatus(); return err != nil })
	time.Sleep(time.Second)
	s = server(portOf(t, address))
	defer func() { s.Shutdown(); s.WaitForShutdown() }()
	put("after")
	eventually(t, "a change after the restart", func() bool { return len(seen.of("after")) == 1 })
	eventually(t, "the retry", func() bool { r := seen.of("failing"); return len(r) > 1 && r[len(r)-1].Attempt == 1 })
	eventually(t, "nothing is left", func() bool {
		items, err := e.Items("c")
		require.NoError(t, err)
		return len(items) == 0
	})
	require.NotZero(t, seen.of("after")[0].Fence)
	known, err := e.BusStatus()
	require.True(t, known)
	require.NoError(t, err)
	stop()
	bus.Close(t.Context())
}

func TestTLS(t *testing.T) {
	certFile, keyFile := tlstest.Certificate(t)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pemBytes, err := os.ReadFile(certFile)
	require.NoError(t, err)
	pool.AppendCertsFromPEM(pemBytes)
	s := foreignServer(t, natsserver.Options{
		TLS: true, TLSVerify: true, TLSTimeout: 5,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, MinVersion: tls.VersionTLS12},
	})
	conn, err := nats.Connect(t.Context(), nats.ConnectionConfig{URL: s.ClientURL(), TLS: nats.TLS{CAFile: certFile, CertFile: certFile, KeyFile: keyFile}})
	require.NoError(t, err)
	conn.Close()
	_, err = nats.Connect(t.Context(), nats.ConnectionConfig{URL: s.ClientURL()})
	require.ErrorContains(t, err, "check")
	other, _ := tlstest.Certificate(t)
	_, err = nats.Connect(t.Context(), nats.ConnectionConfig{URL: s.ClientURL(), TLS: nats.TLS{CAFile: other, CertFile: certFile, KeyFile: keyFile}})
	require.ErrorContains(t, err, "certificate")
}
