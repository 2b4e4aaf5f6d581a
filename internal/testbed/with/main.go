// Command with starts the servers, runs a command with their addresses in its environment, and stops them:
//
//	go run ./internal/testbed/with -- go test -tags e2e ./...
//
// WINDLASS_KUBECONFIG names a kubeconfig of the administrator of the API server.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/windlass-dev/windlass/internal/testbed"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) //nolint:forbidigo // the process's own.
	code, err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		code = max(code, 1)
	}
	os.Exit(code) //nolint:forbidigo // that of the command.
}

func run(ctx context.Context, args []string) (code int, err error) {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return 2, errors.New("name a command to run")
	}
	dir, err := os.MkdirTemp("", "windlass-testbed-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := testbed.Build(ctx, os.Stderr); err != nil {
		return 1, err
	}
	k, err := testbed.StartKubernetes(ctx, dir, os.Stderr)
	if err != nil {
		return 1, err
	}
	defer k.Stop()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // what the caller asks for.
	cmd.Env = append(os.Environ(), "WINDLASS_KUBECONFIG="+k.Kubeconfig)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}
