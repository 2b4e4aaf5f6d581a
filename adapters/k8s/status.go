package k8s

import (
	"context"
	"fmt"
	"reflect"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/windlass-dev/windlass/engine"
)

var (
	_ engine.StatusWriter = (*Resource)(nil)
	_ engine.MergePatcher = (*Resource)(nil)
	_ engine.Recorder     = (*Resource)(nil)
)

// ApplyStatus implements engine.StatusWriter, by server-side apply under a field manager of its own: what else is applied to the object
// stays as it is.
func (r *Resource) ApplyStatus(ctx context.Context, key engine.Key, status any, w engine.Write) (string, error) {
	at, err := r.writer(key.Namespace)
	if err != nil {
		return "", err
	}
	wanted, err := treeFrom(engine.Object{Key: key, Value: map[string]any{"wanted": status}})
	if err != nil {
		return "", err
	}
	have, err := r.Get(ctx, key)
	if err != nil {
		return "", err
	}
	if there, err := treeFrom(have); err == nil && r.cfg.Cache != CacheFields && reflect.DeepEqual(there["status"], wanted["wanted"]) {
		return have.Revision, nil
	}
	force := true // a status belongs to its controller
	opts := metav1.PatchOptions{FieldManager: r.cfg.FieldManager + "-status", Force: &force, DryRun: r.cfg.dryRuns()}
	return r.written(at.Patch(ctx, key.Name, types.ApplyPatchType, mustJSON(map[string]any{
		"apiVersion": r.cfg.APIVersion, "kind": r.cfg.Kind, "metadata": map[string]any{"name": key.Name, "uid": have.Incarnation}, "status": wanted["wanted"],
	}), opts, "status"))
}

// MergePatch implements engine.MergePatcher.
func (r *Resource) MergePatch(ctx context.Context, key engine.Key, patch []byte, w engine.Write) (string, error) {
	if w.Traceparent != "" {
		tree := map[string]any{}
		if err := utiljson.Unmarshal(patch, &tree); err != nil {
			return "", fmt.Errorf("%w: patch of %s: %w", engine.ErrInvalid, key, err)
		}
		annotate(tree, TraceparentAnnotation, w.Traceparent)
		patch = mustJSON(tree)
	}
	return r.Patch(ctx, key, types.MergePatchType, patch)
}

// annotate adds an annotation to a merge patch.
func annotate(patch map[string]any, name, value string) {
	in := func(m map[string]any, field string) map[string]any {
		if x, ok := m[field].(map[string]any); ok {
			return x
		}
		x := map[string]any{}
		m[field] = x
		return x
	}
	in(in(patch, "metadata"), "annotations")[name] = value
}
