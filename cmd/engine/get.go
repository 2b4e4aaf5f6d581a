package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/admin"
)

// client asks a running engine.
type client struct {
	server    string
	tokenFile string
	output    string
}

// flags adds those of all commands that ask.
func (c *client) flags(cmd *cobra.Command, outputs string) {
	server := os.Getenv("WINDLASS_SERVER")
	if server == "" {
		server = "http://127.0.0.1:8090"
	}
	cmd.Flags().StringVar(&c.server, "server", server, "the address of the engine's API (server.admin), also in WINDLASS_SERVER")
	cmd.Flags().StringVar(&c.tokenFile, "token-file", "", "a file that holds the token of the API, if it wants one")
	cmd.Flags().StringVarP(&c.output, "output", "o", "table", outputs)
}

// get asks for a path and decodes the answer.
func (c *client) get(ctx context.Context, path string, into any) error {
	base := c.server
	if !strings.Contains(base, "://") {
		base = "http://" + base
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(base, "/")+"/api/v1/"+path, nil)
	if err != nil {
		return usageError{fmt.Errorf("--server: %w", err)}
	}
	if c.tokenFile != "" {
		token, err := os.ReadFile(c.tokenFile)
		if err != nil {
			return fmt.Errorf("--token-file: %w", err)
		}
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	answer, err := (&http.Client{Timeout: 30 * time.Second}).Do(r)
	if err != nil {
		return fmt.Errorf("ask the engine at %s: %w: is it running, and is that its server.admin.address?", c.server, errors.Unwrap(err))
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("ask the engine at %s: %w", c.server, err)
	}
	if answer.StatusCode != http.StatusOK {
		var p admin.Problem
		if json.Unmarshal(body, &p) != nil || p.Error == "" {
			return fmt.Errorf("%s answers %s: is that an engine's server.admin.address?", c.server, answer.Status)
		}
		return errors.New(p.Error)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("the answer of %s cannot be read: %w", c.server, err)
	}
	return nil
}

// print writes what was answered: as a table with these rows, or whole.
func (c *client) print(w io.Writer, whole any, header string, rows [][]string) error {
	switch c.output {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(whole)
	case "yaml":
		// By way of JSON, which has the names that the API has.
		data, err := json.Marshal(whole)
		if err != nil {
			return err
		}
		var plain any
		if err := yaml.Unmarshal(data, &plain); err != nil {
			return err
		}
		e := yaml.NewEncoder(w)
		e.SetIndent(2)
		return e.Encode(plain)
	case "name":
		for _, row := range rows {
			fmt.Fprintln(w, row[0])
		}
		return nil
	default:
		t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		fmt.Fprintln(t, header)
		for _, row := range rows {
			fmt.Fprintln(t, strings.Join(row, "\t"))
		}
		return t.Flush()
	}
}

func (c *client) validate(outputs ...string) error {
	if slices.Contains(outputs, c.output) {
		return nil
	}
	return usageError{fmt.Errorf("--output %q is none of %s", c.output, strings.Join(outputs, ", "))}
}

func getCommand() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "get controllers | members | partitions | items CONTROLLER", Short: "Show what a running engine works on",
		Long: `get asks a running engine.

  controllers        their names
  members            the replicas of the engine, and how many partitions each has
  partitions         who works on which part of each controller's keys
  items CONTROLLER   the keys that wait, run, are delayed or parked, in all replicas`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 2 && args[0] == "items" || len(args) == 1 && (args[0] == "controllers" || args[0] == "members" || args[0] == "partitions") {
				return nil
			}
			return usageError{errors.New("say what: controllers, members, partitions, or items and a controller")}
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.validate("table", "json", "yaml", "name"); err != nil {
				return err
			}
			switch args[0] {
			case "controllers":
				return c.controllers(cmd)
			case "members":
				return c.members(cmd)
			case "partitions":
				return c.partitions(cmd)
			default:
				return c.items(cmd, args[1])
			}
		},
	}
	c.flags(cmd, "table, json, yaml or name")
	return cmd
}

func (c *client) controllers(cmd *cobra.Command) error {
	var names []string
	if err := c.get(cmd.Context(), "controllers", &names); err != nil {
		return err
	}
	var rows [][]string
	for _, name := range names {
		rows = append(rows, []string{name})
	}
	return c.print(cmd.OutOrStdout(), names, "CONTROLLER", rows)
}

func (c *client) members(cmd *cobra.Command) error {
	var members []engine.Member
	if err := c.get(cmd.Context(), "members", &members); err != nil {
		return err
	}
	var rows [][]string
	for _, m := range members {
		asked := ""
		if m.Self {
			asked = "this one was asked"
		}
		rows = append(rows, []string{m.ID, strconv.Itoa(m.Partitions), strings.Join(m.Controllers, ","), asked})
	}
	return c.print(cmd.OutOrStdout(), members, "MEMBER\tPARTITIONS\tCONTROLLERS\t", rows)
}

func (c *client) partitions(cmd *cobra.Command) error {
	var partitions []engine.Partition
	if err := c.get(cmd.Context(), "partitions", &partitions); err != nil {
		return err
	}
	var rows [][]string
	for _, p := range partitions {
		owner := p.Owner
		if owner == "" {
			owner = "(nobody at present)"
		}
		rows = append(rows, []string{p.Controller + "/" + strconv.Itoa(p.Number), owner, strconv.FormatUint(p.Epoch, 10)})
	}
	return c.print(cmd.OutOrStdout(), partitions, "PARTITION\tOWNER\tEPOCH", rows)
}

func (c *client) items(cmd *cobra.Command, controller string) error {
	var items admin.Items
	if err := c.get(cmd.Context(), "controllers/"+url.PathEscape(controller)+"/items", &items); err != nil {
		return err
	}
	var rows [][]string
	for _, x := range items.Items {
		next := ""
		if !x.Next.IsZero() {
			next = "in " + time.Until(x.Next).Round(time.Second).String()
		}
		rows = append(rows, []string{x.Key.String(), x.State, strconv.Itoa(x.Attempt), next, x.Error})
	}
	if err := c.print(cmd.OutOrStdout(), items, "KEY\tSTATE\tATTEMPT\tNEXT\tERROR", rows); err != nil {
		return err
	}
	if more := items.Total - len(items.Items); more > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "and %d more\n", more)
	}
	if items.Error != "" {
		return errors.New(items.Error)
	}
	return nil
}

func explainCommand() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "explain CONTROLLER KEY", Short: "Say why a key ran, why it does not, and when it will",
		Example: "  engine explain order-shipping nats/kv@main:orders/o1",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usageError{errors.New("a controller and a key are needed")}
			}
			if _, err := engine.ParseKey(args[1]); err != nil {
				return usageError{err}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.validate("table", "json", "yaml"); err != nil {
				return err
			}
			var x engine.Explanation
			if err := c.get(cmd.Context(), "controllers/"+url.PathEscape(args[0])+"/items/"+url.PathEscape(args[1]), &x); err != nil {
				return err
			}
			if c.output != "table" {
				return c.print(cmd.OutOrStdout(), x, "", nil)
			}
			explain(cmd.OutOrStdout(), x)
			return nil
		},
	}
	c.flags(cmd, "table, json or yaml")
	return cmd
}

// explain tells how a key stands, for people.
func explain(w io.Writer, x engine.Explanation) {
	fmt.Fprintf(w, "%s is %s: %s\n", x.Key, x.State, x.Reason)
	if !x.Next.IsZero() {
		fmt.Fprintf(w, "it runs again in %s\n", time.Until(x.Next).Round(time.Second))
	}
	for _, cause := range x.Waiting {
		fmt.Fprintf(w, "it waits because of %s\n", cause)
	}
	if len(x.Runs) == 0 {
		return
	}
	fmt.Fprintln(w, "\nits last runs, the newest first:")
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "STARTED\tTOOK\tATTEMPT\tOUTCOME\tBECAUSE OF\tERROR")
	for _, r := range x.Runs {
		because := ""
		if len(r.Causes) > 0 {
			because = r.Causes[len(r.Causes)-1].String()
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\n", r.Started.Format(time.TimeOnly), r.Took.Round(time.Microsecond), r.Attempt, r.Outcome, because, r.Error)
	}
	_ = t.Flush() // w has failed, and who reads it is gone
}
