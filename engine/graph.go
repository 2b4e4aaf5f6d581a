package engine

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Edge says that a change of From makes Controller write To.
type Edge struct{ From, Controller, To string }

// Graph is which sources and sinks depend on which, through which controllers.
type Graph []Edge

// Graph returns the dependencies between what the controllers watch and what they write. That a controller puts right
// what it owns is no dependency.
func (e *Engine) Graph() Graph {
	var g Graph
	e.mu.RLock()
	defer e.mu.RUnlock()
	for _, c := range e.runners {
		from := []string{c.primary.Name()}
		for _, w := range c.watches {
			from = append(from, w.source.Name())
		}
		for _, s := range c.sinks {
			for _, f := range from {
				if x := (Edge{f, c.name, s.Name()}); !slices.Contains(g, x) {
					g = append(g, x)
				}
			}
		}
	}
	slices.SortFunc(g, func(a, b Edge) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), cmp.Compare(a.Controller, b.Controller))
	})
	return g
}

// Mermaid draws the graph as a Mermaid flowchart.
func (g Graph) Mermaid() string {
	var b strings.Builder
	b.WriteString("flowchart TD\n")
	for _, e := range g {
		fmt.Fprintf(&b, "    %s -- %s --> %s\n", e.From, e.Controller, e.To)
	}
	return b.String()
}

// Cycles returns the chains of sources, of any length, in which a change can come back to where it began. Each begins and
// ends with the same name, the least of its names. A cycle is no mistake by itself: controllers that meet on one object
// can settle. One that does not is slowed.
func (g Graph) Cycles() [][]string {
	next := make(map[string][]string)
	for _, e := range g {
		if !slices.Contains(next[e.From], e.To) {
			next[e.From] = append(next[e.From], e.To)
		}
	}
	var cycles [][]string
	var walk func(start string, path []string)
	walk = func(start string, path []string) {
		for _, to := range next[path[len(path)-1]] {
			switch {
			case to == start:
				cycles = append(cycles, append(slices.Clone(path), start))
			case to > start && !slices.Contains(path, to): // each cycle is found from the least of its names
				walk(start, append(path, to))
			}
		}
	}
	starts := make([]string, 0, len(next))
	for name := range next {
		starts = append(starts, name)
	}
	slices.Sort(starts)
	for _, s := range starts {
		walk(s, []string{s})
	}
	return cycles
}
