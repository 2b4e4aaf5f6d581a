package k8s

import (
	"crypto/sha256"
	"encoding/base32"
	"maps"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/windlass-dev/windlass/engine"
)

// The marks on objects that the engine writes, and the annotations that it reads.
const (
	// OwnerAnnotation holds the owner's whole key, which a label could not: it may be long and hold any byte.
	OwnerAnnotation = "windlass.dev/owner"
	// OwnerLabel holds a hash of it, to select by.
	OwnerLabel = "windlass.dev/owner"
	// AppliedAnnotation holds a hash of what was last applied.
	AppliedAnnotation = "windlass.dev/applied"
	// TraceparentAnnotation holds the trace context of the write.
	TraceparentAnnotation = "tracing.k8s.io/traceparent"
)

// hashOf is the value of the owner label.
func hashOf(key engine.Key) string {
	sum := sha256.Sum256([]byte(key.String()))
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:20]))
}

// metaOf is what mappers see of an object.
func (r *Resource) metaOf(m metav1.Object) *engine.Meta {
	out := &engine.Meta{Labels: m.GetLabels(), Annotations: m.GetAnnotations(), Owner: r.ownerOf(m)}
	if _, ok := out.Annotations[metav1LastApplied]; ok {
		out.Annotations = maps.Clone(out.Annotations)
		delete(out.Annotations, metav1LastApplied) // as large as the object
	}
	return out
}

const metav1LastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// ownerOf is the key that the engine's mark names, or else the owner reference that controls the object. A mark that is
// no key names nobody.
func (r *Resource) ownerOf(m metav1.Object) engine.Key {
	if mark, ok := m.GetAnnotations()[OwnerAnnotation]; ok {
		key, err := engine.ParseKey(mark)
		if err != nil {
			return engine.Key{}
		}
		return key
	}
	ref := metav1.GetControllerOfNoCopy(m)
	if ref == nil {
		return engine.Key{}
	}
	gvk := schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind)
	key := engine.Key{Kind: KindOf(gvk.Group, gvk.Kind), Scope: r.conn.scope, Namespace: m.GetNamespace(), Name: ref.Name}
	// An owner reference says no namespace: it is the object's own, or the owner has none.
	if r.informer != nil {
		return key
	}
	if mapping, err := r.conn.mapper.RESTMapping(gvk.GroupKind()); err == nil && mapping.Scope.Name() == meta.RESTScopeNameRoot {
		key.Namespace = ""
	}
	return key
}
