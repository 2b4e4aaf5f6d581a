package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine/app"
)

func rbacCommand() *cobra.Command {
	var files []string
	var account string
	cmd := &cobra.Command{
		Use: "rbac -c FILE", Short: "Print the least Kubernetes roles that a config needs", Args: noArgs,
		Long: `rbac prints a Role for each namespace that a config names, and a ClusterRole for what it watches in all of them, with the
verbs that its controllers need and no others. With --service-account it prints their bindings too.

For a kind that is not built in it must know the plural: say it as 'resource' in the config, or let it ask the cluster.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := load(cmd.OutOrStdout(), files)
			if err != nil {
				return err
			}
			namespace, name, ok := strings.Cut(account, "/")
			if account != "" && (!ok || namespace == "" || name == "") {
				return usageError{fmt.Errorf("--service-account: %q is not of the form namespace/name", account)}
			}
			return printRoles(cmd.Context(), cmd.OutOrStdout(), plan, account)
		},
	}
	configFlag(cmd, &files)
	cmd.Flags().StringVar(&account, "service-account", "", "namespace/name of who runs the engine, to print bindings for")
	return cmd
}

// place is where a role holds: a namespace of a cluster, or with none the whole cluster.
type place struct{ connection, namespace string }

func printRoles(ctx context.Context, out io.Writer, plan *app.Plan, account string) error {
	roles, err := rolesOf(ctx, plan)
	if err != nil {
		return err
	}
	if len(roles) == 0 {
		return errors.New("the controllers of this config use nothing of Kubernetes")
	}
	places := slices.SortedFunc(maps.Keys(roles), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.connection, b.connection), cmp.Compare(a.namespace, b.namespace))
	})
	name := "windlass-" + plan.Config.Metadata.Name
	last := ""
	for _, p := range places {
		if p.connection != last {
			fmt.Fprintf(out, "# for the cluster of connection %s\n", p.connection)
			last = p.connection
		}
		for _, o := range objectsFor(p, name, roles[p], account) {
			text, err := yaml.Marshal(o)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "---\n%s", text)
		}
	}
	return nil
}

// objectsFor are a role and, for an account, its binding.
func objectsFor(p place, name string, rules []rbacv1.PolicyRule, account string) []any {
	about := metav1.ObjectMeta{Name: name, Namespace: p.namespace}
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}
	meta := func(kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: kind}
	}
	namespace, who, bound := strings.Cut(account, "/")
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: who}}
	var objects []any
	if p.namespace != "" {
		objects = append(objects, rbacv1.Role{TypeMeta: meta("Role"), ObjectMeta: about, Rules: rules})
		if bound {
			objects = append(objects, rbacv1.RoleBinding{TypeMeta: meta("RoleBinding"), ObjectMeta: about, RoleRef: ref, Subjects: subjects})
		}
		return objects
	}
	ref.Kind = "ClusterRole"
	objects = append(objects, rbacv1.ClusterRole{TypeMeta: meta("ClusterRole"), ObjectMeta: about, Rules: rules})
	if bound {
		objects = append(objects, rbacv1.ClusterRoleBinding{TypeMeta: meta("ClusterRoleBinding"), ObjectMeta: about, RoleRef: ref, Subjects: subjects})
	}
	return objects
}

// rolesOf returns the rules that a config needs, by place.
func rolesOf(ctx context.Context, plan *app.Plan) (map[place][]rbacv1.PolicyRule, error) {
	verbs := make(map[place]map[[2]string][]string) // by group and plural
	uses := plan.Uses()
	for name, use := range uses {
		cfg, ok := use.Config.(kubernetesConfig)
		if !ok {
			continue
		}
		connection, err := onlyConnection(plan, cfg.Connection)
		if err != nil {
			return nil, err
		}
		group, plural, err := cfg.Plural()
		if err != nil {
			if plural, err = askPlural(ctx, plan, connection, cfg); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
		need := k8s.Use{Watched: use.Watched, Read: use.Read, Written: use.Written, Owner: ownsIn(uses, name, cfg)}
		namespaces := cfg.Namespaces
		if len(namespaces) == 0 {
			namespaces = []string{""}
		}
		for _, namespace := range namespaces {
			at := place{connection, namespace}
			if verbs[at] == nil {
				verbs[at] = make(map[[2]string][]string)
			}
			verbs[at][[2]string{group, plural}] = append(verbs[at][[2]string{group, plural}], cfg.Verbs(need)...)
		}
	}
	roles := make(map[place][]rbacv1.PolicyRule)
	for at, kinds := range verbs {
		for _, kind := range slices.SortedFunc(maps.Keys(kinds), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
			roles[at] = append(roles[at], rbacv1.PolicyRule{
				APIGroups: []string{kind[0]}, Resources: []string{kind[1]}, Verbs: slices.Compact(slices.Sorted(slices.Values(kinds[kind]))),
			})
		}
	}
	return roles, nil
}

// ownsIn says whether objects of a source own what is written into the same cluster.
func ownsIn(uses map[string]app.Use, name string, cfg kubernetesConfig) bool {
	for _, use := range uses {
		to, ok := use.Config.(kubernetesConfig)
		if ok && to.Connection == cfg.Connection && slices.Contains(use.Owners, name) {
			return true
		}
	}
	return false
}

// onlyConnection is the connection that a component means.
func onlyConnection(plan *app.Plan, name string) (string, error) {
	if name != "" {
		return name, nil
	}
	var found []string
	for name, c := range plan.Config.Connections {
		if c.Type == "kubernetes" {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("connection: there are %d to Kubernetes that could be meant; name one", len(found))
	}
	return found[0], nil
}

func askPlural(ctx context.Context, plan *app.Plan, connection string, cfg kubernetesConfig) (string, error) {
	to, ok := plan.ConnectionConfig(connection).(k8s.ConnectionConfig)
	if !ok {
		return "", fmt.Errorf("connection %q is not to Kubernetes", connection)
	}
	conn, err := k8s.Connect(ctx, to)
	if err != nil {
		return "", fmt.Errorf("resource: say the plural of %s, or let the cluster be asked: %w", cfg.Kind, err)
	}
	defer conn.Close()
	return conn.AskPlural(cfg.ResourceConfig)
}
