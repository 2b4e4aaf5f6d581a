// Command engine runs controllers that a config file describes. A program with other components copies this directory
// and changes components.go.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// version is set by the linker.
var version = "dev"

// Exit codes.
const (
	exitProblem  = 1
	exitWrongUse = 2
)

// errProblem ends a command that has already said what it found.
var errProblem = errors.New("problems were found")

// usageError marks what the caller got wrong on the command line.
type usageError struct{ error }

func main() {
	ctx, stop := untilSignal()
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

// untilSignal returns a context that the first SIGINT or SIGTERM ends. The second one ends the process at once.
func untilSignal() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2) // both of a hasty pair count
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		cancel()
		<-signals
		fmt.Fprintln(os.Stderr, "engine: left at once, as a second signal asks")
		os.Exit(exitProblem)
	}()
	return ctx, cancel
}

func run(ctx context.Context, args []string) int {
	root := &cobra.Command{
		Use:   "engine",
		Short: "Keeps things in step across systems: an event-driven controller engine",
		Long: `engine reconciles what a config file describes: it watches sources, maps each change to the
keys that depend on it, and calls a handler for each, one at a time per key, with retries,
delays that survive a restart, and a trace.

  engine demo                    shows what it does, in under a minute
  engine check -c engine.yaml    reports every problem of a config
  engine run -c engine.yaml      runs it
  engine get items CONTROLLER    shows the keys that wait, run, failed or are parked
  engine explain CONTROLLER KEY  says why a key ran, or does not`,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.SetArgs(args)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(runCommand(), checkCommand(), getCommand(), explainCommand(), busCommand(), rbacCommand(), demoCommand(), benchCommand(), versionCommand())
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errProblem):
		return exitProblem
	case errors.As(err, &usage) || cmd == root:
		fmt.Fprintf(os.Stderr, "engine: %s\nsee '%s --help'\n", err, cmd.CommandPath())
		return exitWrongUse
	default:
		fmt.Fprintf(os.Stderr, "engine: %s\n", err)
		return exitProblem
	}
}

// noArgs refuses arguments.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), describeVersion()) },
	}
}
