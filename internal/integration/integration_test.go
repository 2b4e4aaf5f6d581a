// Package integration tests the program as its users run it: as processes, against real servers, with clients that are
// not ours.
package integration

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
)

// binary is the engine, built once for all tests.
var binary string

func TestMain(m *testing.M) {
	if os.Getenv(helperDir) != "" {
		os.Exit(helper())
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "windlass-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "engine")
		build := exec.Command("go", "build", "-o", binary, "../../cmd/engine")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return 1
		}
		return m.Run()
	}())
}

// process is a program that a test started.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan struct{}

	mu  sync.Mutex
	out bytes.Buffer
}

// Write collects what the process prints.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// start runs the engine in dir until the test ends.
func start(t *testing.T, dir string, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, p, p
	p.cmd.Env = append(os.Environ(), env...)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // its exit code is looked at by wait
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("output of %s:\n%s", name, p.output())
		}
	})
	return p
}

// wait returns the exit code.
func (p *process) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(60 * time.Second):
		p.t.Fatal("the process does not end")
		return 0
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
}

func (p *process) says(text string) {
	p.t.Helper()
	eventually(p.t, text, func() bool { return strings.Contains(p.output(), text) })
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 30*time.Second, 5*time.Millisecond, what)
}

// freePort returns a port that nobody listens on.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// client connects a client that is not ours, as soon as the server is there.
func client(t *testing.T, port int) jetstream.JetStream {
	t.Helper()
	var nc *natsgo.Conn
	eventually(t, "the server listens", func() bool {
		var err error
		nc, err = natsgo.Connect(fmt.Sprintf("nats://127.0.0.1:%d", port))
		return err == nil
	})
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	require.NoError(t, err)
	return js
}

// bucket opens a bucket as soon as it is there.
func bucket(t *testing.T, js jetstream.JetStream, name string) jetstream.KeyValue {
	t.Helper()
	var kv jetstream.KeyValue
	eventually(t, "bucket "+name, func() bool {
		var err error
		kv, err = js.KeyValue(t.Context(), name)
		return err == nil
	})
	return kv
}

func put(t *testing.T, kv jetstream.KeyValue, key, value string) {
	t.Helper()
	_, err := kv.PutString(t.Context(), key, value)
	require.NoError(t, err)
}

func get(kv jetstream.KeyValue, key string) string {
	e, err := kv.Get(context.Background(), key)
	if err != nil {
		return ""
	}
	return string(e.Value())
}
