// Package arch holds the dependency rules of the module.
package arch

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/windlass-dev/windlass/"

// imports returns, for every package of the module, the packages that it imports, and all that it depends on.
func imports(t *testing.T) (direct, deps map[string][]string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.ImportPath}}\t{{join .Imports \" \"}}\t{{join .Deps \" \"}}", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	require.NoError(t, err)
	direct, deps = make(map[string][]string), make(map[string][]string)
	for line := range strings.SplitSeq(strings.TrimSpace(string(out)), "\n") {
		parts := strings.Split(line, "\t")
		name := strings.TrimPrefix(parts[0], module)
		direct[name], deps[name] = strings.Fields(parts[1]), strings.Fields(parts[2])
	}
	return direct, deps
}

// layers says which packages of the module each one may import, by prefix. A package that is not listed fails the test.
var layers = []struct {
	prefix  string
	allowed []string
}{
	{"engine/kv", nil},
	{"engine/lease", nil},
	{"internal/queue", nil},
	{"internal/owner", []string{"internal/queue", "engine/kv"}},
	{"internal/ownedqueue", []string{"engine", "engine/kv", "internal/owner", "internal/queue"}},
	{"internal/tlsfile", nil}, // and tlstest
	{"internal/link", nil},
	{"internal/nearest", nil},
	{"internal/oldest", nil},
	{"internal/envelope", []string{"engine"}},
	{"internal/lanes", []string{"engine"}},
	{"internal/testbed/with", []string{"internal/testbed"}},
	{"internal/testbed", nil},
	{"engine/expr", nil},
	{"engine/sync", []string{"engine", "engine/expr"}},
	{"engine/metrics", []string{"engine"}},
	{"engine/admin", []string{"engine"}},
	{"engine/app", []string{"engine", "engine/admin", "engine/expr", "internal/nearest"}},
	{"engine/bus", []string{"engine", "engine/kv", "internal/queue"}},
	{"engine/cache", []string{"engine"}},
	{"engine/middleware", []string{"engine"}},
	{"engine/enginetest", []string{"engine", "engine/kv", "engine/lease", "internal/owner", "internal/queue"}},
	{"engine", []string{"engine/kv", "engine/lease", "internal/queue"}},
	{"sources/", []string{"engine"}},
	{"sinks/memory", []string{"engine", "sources/memory"}},
	{"sinks/", []string{"engine"}},
	{"adapters/k8s/k8stest", []string{"adapters/k8s"}},
	{"adapters/", []string{"engine", "engine/kv", "engine/lease", "internal/queue", "internal/owner", "internal/ownedqueue", "internal/tlsfile", "internal/envelope", "internal/lanes", "internal/nearest", "internal/oldest"}},
	{"tracing/otlp", nil},
	{"tracing", []string{"engine"}},
	{"cmd/", []string{"engine", "engine/admin", "engine/app", "engine/metrics", "engine/sync", "adapters/consul", "adapters/k8s", "adapters/nats", "adapters/redis", "sources/topic", "tracing", "tracing/otlp"}},
	{"examples/", []string{"engine", "sources/memory"}},
	{"internal/arch", nil},
	{"internal/bench/kube", []string{"engine", "adapters/k8s", "adapters/nats"}},
	{"internal/integration", []string{"engine", "adapters/nats", "internal/testbed"}},
	{"internal/soak", []string{"engine", "adapters/nats", "adapters/redis", "internal/link", "internal/testbed"}},
}

func TestNoArrowRunsBackUp(t *testing.T) {
	direct, _ := imports(t)
	require.NotEmpty(t, direct)
	for name, imported := range direct {
		var rule []string
		found := false
		for _, l := range layers {
			if name == l.prefix || strings.HasPrefix(name, strings.TrimSuffix(l.prefix, "/")+"/") {
				rule, found = l.allowed, true
				break
			}
		}
		require.True(t, found, "%s: say in layers what it may import", name)
		for _, i := range imported {
			if ours, ok := strings.CutPrefix(i, module); ok {
				require.Contains(t, rule, ours, "%s imports %s", name, ours)
			}
		}
	}
}

// foreign returns the packages that are neither ours nor the standard library's.
func foreign(deps []string) []string {
	var out []string
	for _, d := range deps {
		first, _, _ := strings.Cut(d, "/")
		if strings.Contains(first, ".") && !strings.HasPrefix(d, module) {
			out = append(out, d)
		}
	}
	return out
}

func TestBudget(t *testing.T) {
	_, deps := imports(t)
	for name, budget := range map[string]int{"engine": 10, "engine/kv": 0, "engine/lease": 0, "internal/queue": 0, "internal/owner": 0, "sources/memory": 10} {
		require.Contains(t, deps, name)
		got := foreign(deps[name])
		require.LessOrEqual(t, len(got), budget, "%s depends on %v", name, got)
	}
}

func TestTheCoreKnowsNoSystem(t *testing.T) {
	_, deps := imports(t)
	for name, d := range deps {
		if !strings.HasPrefix(name, "engine") {
			continue
		}
		for _, dep := range foreign(d) {
			for _, banned := range []string{
				"k8s.io/", "sigs.k8s.io/", "github.com/nats-io/", "github.com/hashicorp/consul", "github.com/redis/", "google.golang.org/grpc", "go.opentelemetry.io/otel/sdk",
			} {
				require.False(t, strings.HasPrefix(dep, banned), "%s depends on %s", name, dep)
			}
			if name != "engine/metrics" {
				require.False(t, strings.HasPrefix(dep, "github.com/prometheus/"), "%s depends on %s", name, dep)
			}
		}
	}
}

func TestAnAdapterNeverImportsAnother(t *testing.T) {
	direct, _ := imports(t)
	for name, imported := range direct {
		if !strings.HasPrefix(name, "adapters/") {
			continue
		}
		for _, i := range imported {
			if other, ok := strings.CutPrefix(i, module); ok && !strings.HasPrefix(name, other+"/") { // but a part of its own
				require.False(t, strings.HasPrefix(other, "adapters/"), "%s imports %s", name, other)
			}
		}
	}
}
