// Package testbed starts the real servers that the tests run against. They are built from their Go modules, each a module of
// its own in a folder here, into .cache/testbed, once for each version.
package testbed

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// server is a program that is built from a module in a folder of this package.
type server struct {
	folder, program, version string
	ldflags                  string
}

// Build builds all servers that are not there yet. Tests build what they need themselves; but several at once would each build it, within the time that
// they have.
func Build(ctx context.Context, log io.Writer) error {
	for _, s := range []server{apiServer, etcd, consul, NATSOldest, NATSTooOld} {
		if _, err := s.binary(ctx, log); err != nil {
			return err
		}
	}
	return nil
}

// binary returns the path of the program, and builds it if it is not there. The first build takes minutes.
func (s server) binary(ctx context.Context, log io.Writer) (string, error) {
	_, self, _, _ := runtime.Caller(0)
	here := filepath.Dir(self)
	path := filepath.Join(here, "..", "..", ".cache", "testbed", s.folder+"-"+s.version)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	_, _ = fmt.Fprintf(log, "building %s %s, which takes some minutes the first time\n", s.folder, s.version)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w "+s.ldflags, "-o", path+".new", s.program) //nolint:gosec // our own list.
	cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(here, s.folder), log, log
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("build %s: %w", s.folder, err)
	}
	return path, os.Rename(path+".new", path)
}

// process is a server that runs.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// start runs a program until it is killed or the process that started it has ended. What it says goes to a file.
func start(log string, path string, args ...string) (*process, error) {
	f, err := os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.Command(path, args...) //nolint:noctx // one of ours; it is ended by kill and wait.
	cmd.Stdout, cmd.Stderr = f, f
	// A test that is killed leaves no server behind.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		// The kernel ties the child to the thread that made it, so the thread must last as long.
		runtime.LockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // however it ends
		}
	}()
	return p, <-started
}

// kill ends the process at once and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

// FreeAddresses are addresses on which nobody listens.
func FreeAddresses(ctx context.Context, n int) ([]string, error) {
	var lc net.ListenConfig
	addresses := make([]string, n)
	for i := range addresses {
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }()
		addresses[i] = l.Addr().String()
	}
	return addresses, nil
}

// await asks until ready says yes.
func await(ctx context.Context, what, log string, p *process, ready func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for !ready() {
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready: %s", what, tail(log))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %s", what, ctx.Err(), tail(log))
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// tail is the end of a log.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}
