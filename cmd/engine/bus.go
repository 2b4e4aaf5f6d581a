package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/app"
)

// keeper is a bus that keeps queues beyond its processes.
type keeper interface {
	engine.Bus
	Replicas() ([]engine.Member, []engine.Partition)
	Queues(ctx context.Context) (map[string]int, error)
	RemoveQueue(ctx context.Context, controller string) error
	Migrate(ctx context.Context, controller string) (int, error)
}

func busCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "bus", Short: "Look after what an engine keeps on its bus"}
	cmd.AddCommand(migrateCommand(), pruneCommand())
	return cmd
}

// withBus opens the bus of a config.
func withBus(cmd *cobra.Command, files []string, f func(ctx context.Context, plan *app.Plan, bus keeper) error) error {
	plan, err := load(cmd.OutOrStdout(), files)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return plan.WithBus(cmd.Context(), log, func(ctx context.Context, bus engine.Bus) error {
		k, ok := bus.(keeper)
		if !ok {
			return errors.New("the bus of this config keeps nothing")
		}
		for !self(k) { // what it knows of the others comes with what it knows of itself
			if err := nap(ctx); err != nil {
				return err
			}
		}
		return f(ctx, plan, k)
	})
}

// self says whether the bus knows of this process.
func self(bus keeper) bool {
	members, _ := bus.Replicas()
	return slices.ContainsFunc(members, func(m engine.Member) bool { return m.Self })
}

// atWork returns the members that work on a controller's keys, or on anything for an empty name.
func atWork(bus keeper, controller string) (ids []string) {
	members, _ := bus.Replicas()
	for _, m := range members {
		if controller == "" && len(m.Controllers) > 0 || slices.Contains(m.Controllers, controller) {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

func migrateCommand() *cobra.Command {
	var files []string
	cmd := &cobra.Command{
		Use: "migrate -c FILE", Short: "Bring the queues to the number of partitions that the config says", Args: noArgs,
		Long: `migrate moves what waits, is delayed or parked to the partitions that the config says
(bus.nats.partitions, bus.redis.partitions). All replicas must be stopped; changes wait in their
systems until they are started again. It may be interrupted, and run again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withBus(cmd, files, func(ctx context.Context, _ *app.Plan, bus keeper) error {
				if ids := atWork(bus, ""); ids != nil {
					return fmt.Errorf("these replicas are at work; stop them first: %s", strings.Join(ids, ", "))
				}
				queues, err := bus.Queues(ctx)
				if err != nil {
					return err
				}
				for _, name := range slices.Sorted(maps.Keys(queues)) {
					moved, err := bus.Migrate(ctx, name)
					if err != nil {
						return err
					}
					fmt.Fprintf(cmd.OutOrStdout(), "%s: %d of %d moved\n", name, moved, queues[name])
				}
				return nil
			})
		},
	}
	configFlag(cmd, &files)
	return cmd
}

func pruneCommand() *cobra.Command {
	var files []string
	var yes bool
	cmd := &cobra.Command{
		Use: "prune -c FILE [--yes]", Short: "Show what controllers left behind that are not in the config, and remove it", Args: noArgs,
		Long: `prune shows what the bus keeps for controllers that the config does not have any more: requests
and state records, who owns which object, and suspensions. With --yes it removes that. Objects
stay as they are; without their records nobody owns them.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withBus(cmd, files, func(ctx context.Context, plan *app.Plan, bus keeper) error {
				return prune(ctx, cmd, plan, bus, yes)
			})
		},
	}
	configFlag(cmd, &files)
	cmd.Flags().BoolVar(&yes, "yes", false, "remove it")
	return cmd
}

func prune(ctx context.Context, cmd *cobra.Command, plan *app.Plan, bus keeper, yes bool) error {
	known := func(controller string) bool {
		return slices.ContainsFunc(plan.Config.Controllers, func(c app.ControllerConfig) bool { return c.Name == controller })
	}
	queues, err := bus.Queues(ctx)
	if err != nil {
		return err
	}
	maps.DeleteFunc(queues, func(name string, _ int) bool { return known(engine.ControllerOf(name)) })
	entries, err := engine.Leftovers(ctx, bus.Store(), known)
	if err != nil {
		return err
	}
	if len(queues)+len(entries) == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "nothing is left of controllers that the config does not have")
		return nil
	}
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "LEFT BY\tREQUESTS AND STATES\tRECORDS")
	names := make(map[string]bool)
	for name := range queues {
		names[name] = true
	}
	for name := range entries {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, queues[name], len(entries[name]))
	}
	if err := t.Flush(); err != nil || !yes {
		fmt.Fprintln(cmd.OutOrStdout(), "\n--yes removes it")
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if ids := atWork(bus, name); ids != nil {
			return fmt.Errorf("%s is worked on, by %s: is this the config of that engine?", name, strings.Join(ids, ", "))
		}
		if _, ok := queues[name]; ok {
			if err := bus.RemoveQueue(ctx, name); err != nil {
				return err
			}
		}
		for _, e := range entries[name] {
			if err := bus.Store().Delete(ctx, e.Key, e.Revision); err != nil {
				return fmt.Errorf("remove the record %q: %w", e.Key, err)
			}
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: removed\n", name)
	}
	return nil
}
