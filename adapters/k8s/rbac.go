package k8s

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// Use is what an engine does with a kind.
type Use struct {
	// Watched says that it is listed and watched; Read, that single objects are read; Written, that they are; Owner, that its
	// objects own others of the cluster.
	Watched, Read, Written, Owner bool
}

// Verbs returns the least that a resource of this config must be allowed to do for a use.
func (c ResourceConfig) Verbs(u Use) []string {
	var verbs []string
	if u.Watched {
		verbs = append(verbs, "list", "watch")
	}
	if u.Read && c.Cache != CacheFull && c.Cache != CacheFields || u.Owner {
		verbs = append(verbs, "get")
	}
	if u.Written {
		switch c.Mode {
		case ModeCreate:
			verbs = append(verbs, "create", "delete")
		case ModeUpdate:
			verbs = append(verbs, "create", "update", "delete")
		default: // an apply that makes an object needs both
			verbs = append(verbs, "create", "patch", "delete")
		}
	}
	slices.Sort(verbs)
	return verbs
}

// Plural returns the group and the plural of the config's kind, if it says it or the kind is built in.
func (c ResourceConfig) Plural() (group, plural string, err error) {
	gvk := schema.FromAPIVersionAndKind(c.APIVersion, c.Kind)
	switch {
	case c.Resource != "":
		return gvk.Group, c.Resource, nil
	case scheme.Scheme.Recognizes(gvk):
		m, _ := meta.UnsafeGuessKindToResource(gvk) // for the built-in kinds it is right
		return gvk.Group, m.Resource, nil
	default:
		return gvk.Group, "", fmt.Errorf("resource: the plural of %s of %s is not known: say it, or ask the cluster", c.Kind, c.APIVersion)
	}
}

// AskPlural is Plural, by the cluster.
func (c *Connection) AskPlural(cfg ResourceConfig) (string, error) {
	m, err := c.mapping(schema.FromAPIVersionAndKind(cfg.APIVersion, cfg.Kind))
	if err != nil {
		return "", err
	}
	return m.Resource.Resource, nil
}
