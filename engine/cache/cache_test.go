package cache_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/cache"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

type pod struct {
	Node   string
	Labels map[string]string
}

func (p pod) DeepCopy() pod {
	return pod{p.Node, maps.Clone(p.Labels)}
}

func names(t *testing.T, objects []engine.Object, err error) string {
	t.Helper()
	require.NoError(t, err)
	var out []string
	for _, o := range objects {
		out = append(out, o.Key.Name)
	}
	return strings.Join(out, " ")
}

var errIndex = errors.New("cannot be indexed")

func byNode(o engine.Object) ([]string, error) {
	p, err := engine.As[pod](o)
	if p.Node == "broken" {
		err = errIndex
	}
	return []string{p.Node}, err
}

// start runs a controller over a cache of pods.
func start(h *enginetest.Harness, pods *memory.Map[pod], handler engine.Handler) *cache.Cache {
	h.T.Helper()
	c, err := cache.New(cache.Config{
		Source: pods, Indexes: map[string]cache.Index{"node": byNode},
		Queries: map[string]cache.Query{"on either": func(c *cache.Cache, args ...any) ([]engine.Object, error) {
			var all []engine.Object
			for _, a := range args {
				found, err := c.By("node", a.(string))
				if err != nil {
					return nil, err
				}
				all = append(all, found...)
			}
			return all, nil
		}},
	})
	require.NoError(h.T, err)
	h.Start(engine.NewController("c").For(c).WithHandler(handler))
	return c
}

func TestIndexFollowsItsObjects(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		pods, rec := memory.New[pod]("pods"), &enginetest.Recorder{}
		pods.Set("a", pod{Node: "one"})
		c := start(h, pods, rec.Handle)
		pods.Set("b", pod{Node: "one"})
		h.Settle()
		found, err := c.By("node", "one")
		require.Equal(t, "a b", names(h.T, found, err))
		pods.Set("a", pod{Node: "two"})
		h.Settle()
		found, err = c.By("node", "one")
		require.Equal(t, "b", names(h.T, found, err), "it moved away")
		found, err = c.Query("on either", "two", "one")
		require.Equal(t, "a b", names(h.T, found, err))
		pods.Remove("b")
		h.Settle()
		found, err = c.By("node", "one")
		require.Empty(t, names(h.T, found, err))
		_, err = c.By("zone", "one")
		require.ErrorIs(t, err, cache.ErrNoIndex)
		require.ErrorContains(t, err, `"zone" of source pods; there are [node]`)
		_, err = c.Query("nothing")
		require.ErrorIs(t, err, cache.ErrNoQuery)
	})
}

func TestFailingIndexLeavesTheCacheAsItWasAndTheEventIsNotLost(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		pods, rec := memory.New[pod]("pods"), &enginetest.Recorder{}
		pods.Set("a", pod{Node: "one"})
		c := start(h, pods, rec.Handle)
		pods.Set("a", pod{Node: "broken"})
		h.Advance(time.Second)
		found, err := c.By("node", "one")
		require.Equal(t, "a", names(h.T, found, err))
		require.Len(t, rec.Times("a"), 1, "nobody is told of what is not there")
		pods.Set("a", pod{Node: "two"})
		h.Advance(time.Second)
		found, err = c.By("node", "two")
		require.Equal(t, "a", names(h.T, found, err))
		require.Greater(t, len(rec.Times("a")), 1)
	})
}

func TestWhatIsHandedOutIsACopy(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		pods := memory.New[pod]("pods")
		pods.Set("a", pod{Node: "one", Labels: map[string]string{"x": "1"}})
		c := start(h, pods, func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			p, err := engine.Get[pod](ctx, rt, req.Key)
			if err == nil {
				p.Labels["x"] = "changed by a handler"
			}
			return engine.Result{}, err
		})
		o, err := c.Get(h.T.Context(), pods.Key("a"))
		require.NoError(t, err)
		p, err := engine.As[pod](o)
		require.NoError(t, err)
		require.Equal(t, "1", p.Labels["x"])
		original, _ := pods.Value("a")
		require.Equal(t, "1", original.Labels["x"])
	})
}

func TestValueThatCannotBeCopiedIsRefused(t *testing.T) {
	m := memory.New[*int]("pointers")
	c, err := cache.New(cache.Config{Source: m})
	require.NoError(t, err)
	enginetest.Run(t, func(h *enginetest.Harness) {
		ctx, cancel := context.WithTimeout(h.T.Context(), time.Second)
		defer cancel()
		m.Set("a", new(int))
		require.NoError(t, c.Run(ctx, func(context.Context, engine.Event) error { return nil }))
		_, err = c.Get(h.T.Context(), m.Key("a"))
		require.ErrorIs(t, err, engine.ErrNotFound)
	})
}

func TestListWithoutAnObjectRemovesIt(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		pods, rec := memory.New[pod]("pods"), &enginetest.Recorder{}
		pods.Set("a", pod{Node: "one"})
		pods.Set("b", pod{Node: "one"})
		c := start(h, pods, rec.Handle)
		h.Stop()
		pods.Remove("a")
		h.Start(engine.NewController("c").For(c).WithHandler(rec.Handle))
		found, err := c.List(h.T.Context())
		require.Equal(t, "b", names(h.T, found, err))
	})
}

func TestMapperByIndex(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		pods, nodes, rec := memory.New[pod]("pods"), memory.New[int]("nodes"), &enginetest.Recorder{}
		c, err := cache.New(cache.Config{Source: pods, Indexes: map[string]cache.Index{"node": byNode}})
		require.NoError(t, err)
		pods.Set("a", pod{Node: "one"})
		pods.Set("b", pod{Node: "two"})
		h.Start(engine.NewController("c").For(c).WithHandler(rec.Handle).
			Watches(nodes, c.Map("node", func(e engine.Event) []string { return []string{e.Key.Name} })))
		nodes.Set("two", 1)
		h.Settle()
		require.Len(t, rec.Times("a"), 1)
		require.Len(t, rec.Times("b"), 2)
	})
}
