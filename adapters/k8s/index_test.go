package k8s

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/windlass-dev/windlass/engine"
)

// TestIndexAgainstAModel compares the index with a map, and what is told with what changed.
func TestIndexAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := &index{indexed: []string{"app"}}
		x.init()
		kind := engine.KindOf("test/owner")
		key := func(n name) engine.Key { return engine.Key{Kind: kind, Name: n.name} }
		model, told := map[name]*entry{}, map[name]string{} // what is there; what the listener believes
		names := rapid.SampledFrom([]name{{"", "a"}, {"", "b"}, {"n", "a"}})
		words := rapid.SampledFrom([]string{"", "x", "y"})
		revision := 100
		tell := func(n name) {
			e, ok := x.tell(n)
			if !ok {
				return
			}
			if e.Operation == engine.Delete {
				delete(told, n)
			} else {
				told[n] = e.Revision
			}
			x.wasTold(n, e.Revision, e.New)
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				n, w := names.Draw(t, "name"), words.Draw(t, "word")
				revision++
				e := &entry{revision: strconv.Itoa(revision), meta: &engine.Meta{Labels: map[string]string{"app": w}, Fields: map[string]string{"f": w}}}
				if w != "" {
					e.meta.Owner = key(name{"", w})
				}
				x.put(n, e, false)
				model[n] = e
			},
			"an older one": func(t *rapid.T) {
				n := names.Draw(t, "name")
				if was := model[n]; was != nil {
					x.put(n, &entry{revision: "1", meta: &engine.Meta{}}, false)
				}
			},
			"remove": func(t *rapid.T) {
				n := names.Draw(t, "name")
				revision++
				x.remove(n, strconv.Itoa(revision))
				delete(model, n)
			},
			"tell": func(t *rapid.T) { tell(names.Draw(t, "name")) },
			"": func(t *rapid.T) {
				for _, w := range []string{"x", "y"} {
					want := 0
					for _, e := range model {
						if e.meta.Labels["app"] == w {
							want++
						}
					}
					objectOf := func(name, *entry) engine.Object { return engine.Object{} }
					require.Len(t, x.ownedBy(key(name{"", w}), key), want)
					require.Len(t, x.found(lookup{"label", "app", w}, objectOf), want)
					require.Len(t, x.found(lookup{"field", "f", w}, objectOf), want)
				}
				for _, n := range []name{{"", "a"}, {"", "b"}, {"n", "a"}} {
					e, ok := x.get(n)
					require.Equal(t, model[n] != nil, ok)
					if ok {
						require.Equal(t, model[n].revision, e.revision)
					}
				}
			},
		})
		for n := range x.names() {
			tell(n)
		}
		want := map[name]string{}
		for n, e := range model {
			want[n] = e.revision
		}
		require.Equal(t, want, told)
		require.Len(t, x.names(), len(model), "what is gone and told is forgotten")
	})
}
