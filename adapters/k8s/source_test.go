//go:build e2e

package k8s_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/adapters/k8s"
	"github.com/windlass-dev/windlass/engine"
)

func TestAnObjectIsReconciledWhenItIsThereWhenItChangesAndWhenItGoes(t *testing.T) {
	for _, cache := range []string{k8s.CacheMetadata, k8s.CacheFull} {
		t.Run(cache, func(t *testing.T) {
			c := newCluster(t)
			c.putConfigMap("early", "1")
			var h handled
			maps := c.configMaps(k8s.ResourceConfig{Cache: cache})
			c.run(engine.Config{Controllers: []engine.Controller{engine.NewController("maps").For(maps).WithHandler(h.record(dataOf))}})
			eventually(t, "listed", func() bool { return h.last("early") == run{"early", "1", engine.Resynced, false} })

			c.putConfigMap("late", "1")
			eventually(t, "created", func() bool { return h.last("late") == run{"late", "1", engine.Created, false} })
			c.putConfigMap("late", "2")
			eventually(t, "updated", func() bool { return h.last("late") == run{"late", "2", engine.Updated, false} })
			c.deleteConfigMap("late")
			eventually(t, "deleted", func() bool { return h.last("late") == run{"late", "", engine.Deleted, true} })
			require.Len(t, h.of("early"), 1)
		})
	}
}
