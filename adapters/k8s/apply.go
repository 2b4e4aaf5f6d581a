package k8s

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/dynamic"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/nearest"
)

// How objects are written.
const (
	// ModeApply is server-side apply: fields that others set stay, fields that are no longer wanted go.
	ModeApply = "apply"
	// ModeCreate makes objects that are absent and leaves the others as they are.
	ModeCreate = "create"
	// ModeUpdate replaces the whole object.
	ModeUpdate = "update"
	// ModeMerge sets the wanted fields by a JSON merge patch: fields that are no longer wanted stay.
	ModeMerge = "merge"
)

const (
	conflictsForce = "force"
	conflictsFail  = "fail"
)

// WriteConfig says how objects are written.
type WriteConfig struct {
	// Mode is apply (the default), create, update or merge.
	Mode string `yaml:"mode"`
	// FieldManager is the name under which fields are applied. Default: "windlass".
	FieldManager string `yaml:"fieldManager"`
	// Conflicts says what becomes of a wanted field that another manager has applied: force (the default) takes it, so that what
	// was changed by hand is put right, as Kubernetes recommends to controllers; fail is an error, which is retried with backoff.
	Conflicts string `yaml:"conflicts"`
	// Propagation is what becomes of what a deleted object owns: Background, Foreground or Orphan. Default: the server's.
	Propagation string `yaml:"propagation"`
	// DryRun has the server check every write and carry out none.
	DryRun bool `yaml:"dryRun"`
}

func (c WriteConfig) validate() error {
	var errs []error
	oneOf := func(field, value string, known ...string) {
		if value != "" && !slices.Contains(known, value) {
			errs = append(errs, fmt.Errorf("%s: %q is none of %v%s", field, value, known, nearest.Hint(value, slices.Clone(known))))
		}
	}
	oneOf("mode", c.Mode, ModeApply, ModeCreate, ModeUpdate, ModeMerge)
	oneOf("conflicts", c.Conflicts, conflictsForce, conflictsFail)
	oneOf("propagation", c.Propagation, string(metav1.DeletePropagationBackground), string(metav1.DeletePropagationForeground), string(metav1.DeletePropagationOrphan))
	return errors.Join(errs...)
}

func (c WriteConfig) dryRuns() []string {
	if c.DryRun {
		return []string{metav1.DryRunAll}
	}
	return nil
}

// neverARevision is one that no object has: an apply that demands it makes an object, and is refused if there is one.
const neverARevision = "1"

// Apply implements engine.Sink. The value is an object as JSON, as a tree or as one of client-go's types; name, namespace, kind and
// marks are filled in.
func (r *Resource) Apply(ctx context.Context, o engine.Object, w engine.Write) (string, error) {
	at, err := r.writer(o.Key.Namespace)
	if err != nil {
		return "", err
	}
	if w.Release {
		return r.release(ctx, at, o.Key.Name, w.Revision)
	}
	body, err := treeFrom(o)
	if err != nil {
		return "", err
	}
	u := &unstructured.Unstructured{Object: body}
	if err := r.mark(ctx, u, o, w); err != nil {
		return "", err
	}
	if !r.selector.Matches(labels.Set(u.GetLabels())) {
		return "", fmt.Errorf("%w: %s: the labelSelector of %s, %s, would not choose it, so it would not be seen again: give it the labels",
			engine.ErrInvalid, o.Key, r.cfg.Name, r.cfg.LabelSelector)
	}
	if w.Absent && r.cfg.Mode != ModeApply && r.cfg.Mode != "" {
		return r.written(at.Create(ctx, u, metav1.CreateOptions{FieldManager: r.cfg.FieldManager, DryRun: r.cfg.dryRuns()}))
	}
	switch r.cfg.Mode {
	case ModeCreate:
		return w.Revision, nil
	case ModeUpdate:
		u.SetResourceVersion(w.Revision)
		return r.written(at.Update(ctx, u, metav1.UpdateOptions{FieldManager: r.cfg.FieldManager, DryRun: r.cfg.dryRuns()}))
	case ModeMerge:
		u.SetResourceVersion(w.Revision)
		return r.patched(ctx, at, o.Key.Name, types.MergePatchType, u.Object)
	default:
		if u.SetResourceVersion(w.Revision); w.Absent {
			u.SetResourceVersion(neverARevision)
		}
		return r.patched(ctx, at, o.Key.Name, types.ApplyPatchType, u.Object)
	}
}

func (r *Resource) writer(namespace string) (dynamic.ResourceInterface, error) {
	if _, err := r.at(namespace); err != nil { // it checks the namespace
		return nil, err
	}
	m, _, err := r.resolve()
	if err != nil {
		return nil, err
	}
	return r.conn.dynamic.Resource(m.Resource).Namespace(namespace), nil
}

// mark fills in what an object is called and who owns it.
func (r *Resource) mark(ctx context.Context, u *unstructured.Unstructured, o engine.Object, w engine.Write) error {
	applied := appliedHash(u.Object)
	u.SetGroupVersionKind(r.gvk)
	u.SetName(o.Key.Name)
	u.SetNamespace(o.Key.Namespace)
	annotations, labels := u.GetAnnotations(), u.GetLabels()
	if annotations == nil {
		annotations = make(map[string]string)
	}
	annotations[AppliedAnnotation] = applied
	if w.Traceparent != "" {
		annotations[TraceparentAnnotation] = w.Traceparent
	}
	if !o.Owner.IsZero() {
		annotations[OwnerAnnotation] = o.Owner.String()
		if labels == nil {
			labels = make(map[string]string)
		}
		labels[OwnerLabel] = hashOf(o.Owner)
		ref, err := r.conn.ownerReference(ctx, o.Owner, o.Key.Namespace)
		if err != nil {
			return fmt.Errorf("owner of %s: %w", o.Key, err)
		}
		if ref != nil {
			if err := unstructured.SetNestedSlice(u.Object, []any{ref}, "metadata", "ownerReferences"); err != nil {
				return fmt.Errorf("%w: owner of %s: %w", engine.ErrInvalid, o.Key, err)
			}
		}
	}
	u.SetAnnotations(annotations)
	u.SetLabels(labels)
	return nil
}

// release removes the marks of the owner, and nothing else.
func (r *Resource) release(ctx context.Context, at dynamic.ResourceInterface, name, revision string) (string, error) {
	have, err := at.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", explained(err)
	}
	kept := slices.DeleteFunc(have.GetOwnerReferences(), func(ref metav1.OwnerReference) bool { return ref.Controller != nil && *ref.Controller })
	return r.patched(ctx, at, name, types.MergePatchType, map[string]any{"metadata": map[string]any{
		"resourceVersion": revision, "ownerReferences": kept,
		"annotations": map[string]any{OwnerAnnotation: nil, AppliedAnnotation: nil}, "labels": map[string]any{OwnerLabel: nil},
	}})
}

func (r *Resource) patched(ctx context.Context, at dynamic.ResourceInterface, name string, t types.PatchType, body map[string]any) (string, error) {
	opts := metav1.PatchOptions{FieldManager: r.cfg.FieldManager, DryRun: r.cfg.dryRuns()}
	if t == types.ApplyPatchType {
		force := r.cfg.Conflicts != conflictsFail
		opts.Force = &force
	}
	return r.written(at.Patch(ctx, name, t, mustJSON(body), opts))
}

// written enters the answer to a write, so that the next run of the key sees it.
func (r *Resource) written(u *unstructured.Unstructured, err error) (string, error) {
	if err != nil {
		return "", explained(err)
	}
	if r.index.isSynced() && !r.cfg.DryRun && r.watches(u) {
		if o, err := r.typed(u); err == nil {
			r.index.put(nameIn(o), r.entryOf(o, r.keepsObjects()), false)
		}
	}
	return u.GetResourceVersion(), nil
}

// typed is an object as reads return it.
func (r *Resource) typed(u *unstructured.Unstructured) (runtime.Object, error) {
	o, err := newTyped(r.gvk)
	if err != nil || o == nil {
		return u, err
	}
	return o, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o)
}

// Delete implements engine.Sink.
func (r *Resource) Delete(ctx context.Context, key engine.Key, w engine.Write) error {
	at, err := r.writer(key.Namespace)
	if err != nil {
		return err
	}
	opts := metav1.DeleteOptions{DryRun: r.cfg.dryRuns()}
	if w.Revision != "" {
		opts.Preconditions = &metav1.Preconditions{ResourceVersion: &w.Revision}
	}
	if r.cfg.Propagation != "" {
		p := metav1.DeletionPropagation(r.cfg.Propagation)
		opts.PropagationPolicy = &p
	}
	return explained(at.Delete(ctx, key.Name, opts))
}

// Patch changes an object by a JSON, merge or strategic merge patch, whoever owns it. It returns the new revision. It is for
// handlers in Go that change what they do not own; Runtime.Apply is what keeps to the rules of ownership.
func (r *Resource) Patch(ctx context.Context, key engine.Key, t types.PatchType, patch []byte) (string, error) {
	at, err := r.writer(key.Namespace)
	if err != nil {
		return "", err
	}
	return r.written(at.Patch(ctx, key.Name, t, patch, metav1.PatchOptions{FieldManager: r.cfg.FieldManager, DryRun: r.cfg.dryRuns()}))
}

// Same says whether applying want would change nothing about have: it is what was last applied, and it is still there.
func (r *Resource) Same(have, want engine.Object) bool {
	tree, err := treeFrom(want)
	if err != nil || have.Annotations[AppliedAnnotation] != appliedHash(tree) {
		return false
	}
	if r.cfg.Cache == CacheFields {
		return false // too little is known of it
	}
	there, err := treeFrom(have)
	return err == nil && contains(there, tree)
}

// contains says whether all of want is in have.
func contains(have, want any) bool {
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return len(w) == 0 && have == nil
		}
		for k, v := range w {
			if !contains(h[k], v) {
				return false
			}
		}
		return true
	case []any:
		h, ok := have.([]any)
		return ok && len(h) == len(w) && !slices.ContainsFunc(indexes(w), func(i int) bool { return !contains(h[i], w[i]) })
	default:
		return reflect.DeepEqual(have, want)
	}
}

func indexes(s []any) []int {
	out := make([]int, len(s))
	for i := range s {
		out[i] = i
	}
	return out
}

// treeFrom returns a copy of an object's value as JSON has it.
func treeFrom(o engine.Object) (map[string]any, error) {
	body, ok := o.Value.([]byte)
	if !ok {
		var err error
		if body, err = json.Marshal(o.Value); err != nil {
			return nil, fmt.Errorf("%w: %s: a %T cannot be written as JSON: %w", engine.ErrInvalid, o.Key, o.Value, err)
		}
	}
	tree := map[string]any{}
	if err := utiljson.Unmarshal(body, &tree); err != nil { // it keeps integers what they are
		return nil, fmt.Errorf("%w: %s: not a JSON object: %w", engine.ErrInvalid, o.Key, err)
	}
	// What a type writes though it is not set.
	if status, ok := tree["status"].(map[string]any); ok && len(status) == 0 {
		delete(tree, "status")
	}
	if m, ok := tree["metadata"].(map[string]any); ok && m["creationTimestamp"] == nil {
		delete(m, "creationTimestamp")
	}
	return tree, nil
}

// appliedHash tells what was applied from what is to be applied. Maps are encoded in the order of their keys.
func appliedHash(tree map[string]any) string {
	sum := sha256.Sum256(mustJSON(tree))
	return hex.EncodeToString(sum[:10])
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // it was decoded from JSON
	}
	return b
}
