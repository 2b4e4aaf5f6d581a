package k8s

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/windlass-dev/windlass/engine"
)

// The annotations that people put on objects, and what answers them.
const (
	// PausedAnnotation holds an object back: "true", or a time in RFC 3339 until when. A deletion is carried out all the same.
	PausedAnnotation = "windlass.dev/paused"
	// ReconcileAnnotation asks for a run now: any value that is not the last one. It is echoed as status.lastHandledReconcileAt.
	ReconcileAnnotation = "windlass.dev/reconcile-requested-at"
)

// The condition types and reasons that Conventions writes; Ready, Reconciling and Stalled are kstatus's.
const (
	ConditionReady       = "Ready"
	ConditionReconciling = "Reconciling"
	ConditionStalled     = "Stalled"
	ConditionPaused      = "Paused"

	reasonSucceeded = "ReconcileSucceeded"
	reasonFailed    = "ReconcileFailed"
	reasonPaused    = "ReconcilePaused"
	reasonNotPaused = "NotPaused"
	reasonStalled   = "TerminalError"
)

// Conventions returns middleware that does for the primary objects of a controller what Kubernetes operators expect: it honours
// PausedAnnotation and ReconcileAnnotation, and writes the outcome of each run as conditions with the observed generation, whose
// transition times change with their status only. The kind must have a status with conditions. What the handler itself writes into the
// status must be conditions.
func Conventions() engine.Middleware {
	return func(next engine.Handler) engine.Handler {
		return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			object, err := primary(ctx, rt, req.Key)
			if engine.IsNotFound(err) {
				return next(ctx, rt, req)
			}
			if err != nil {
				return engine.Result{}, err
			}
			if until, paused := pausedUntil(ctx, rt, object); paused && object.GetDeletionTimestamp() == nil {
				err := writeConditions(ctx, rt, object, metav1.Condition{
					Type: ConditionPaused, Status: metav1.ConditionTrue, Reason: reasonPaused, Message: "held back by the annotation " + PausedAnnotation,
				})
				if until.IsZero() {
					return engine.Result{}, err // a change of the annotation is an event
				}
				return engine.Result{RequeueAfter: time.Until(until)}, err
			}
			result, outcome := next(ctx, rt, req)
			if object, err = primary(ctx, rt, req.Key); engine.IsNotFound(err) {
				return result, outcome // it was the last run
			}
			if err == nil {
				err = writeConditions(ctx, rt, object, conditionsOf(outcome)...)
			}
			if outcome == nil {
				outcome = err
			}
			return result, outcome
		}
	}
}

// primary reads the object of the run's key.
func primary(ctx context.Context, rt engine.Runtime, key engine.Key) (*unstructured.Unstructured, error) {
	o, err := rt.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	value, ok := o.Value.(runtime.Object)
	if !ok {
		return nil, engine.Terminal(fmt.Errorf("%w: %s is not of a source of this package", engine.ErrInvalid, key))
	}
	return &unstructured.Unstructured{Object: treeOf(value)}, nil
}

// pausedUntil says whether an object is held back, and until when; a zero time is until the annotation goes.
func pausedUntil(ctx context.Context, rt engine.Runtime, o *unstructured.Unstructured) (until time.Time, paused bool) {
	switch text := o.GetAnnotations()[PausedAnnotation]; text {
	case "", "false":
		return until, false
	case "true":
		return until, true
	default:
		until, err := time.Parse(time.RFC3339, text)
		if err != nil {
			rt.Note(ctx, engine.Note{Warning: true, Reason: "BadPause", Message: fmt.Sprintf("%s: %q is neither \"true\" nor a time such as 2026-01-02T15:04:05Z", PausedAnnotation, text)})
			return until, false
		}
		return until, time.Now().Before(until)
	}
}

// conditionsOf are the conditions after a run.
func conditionsOf(err error) []metav1.Condition {
	is := func(t string, yes bool, reason, message string) metav1.Condition {
		c := metav1.Condition{Type: t, Status: metav1.ConditionFalse, Reason: reason, Message: message}
		if yes {
			c.Status = metav1.ConditionTrue
		}
		return c
	}
	notPaused := is(ConditionPaused, false, reasonNotPaused, "")
	if err == nil {
		return []metav1.Condition{
			is(ConditionReady, true, reasonSucceeded, ""), is(ConditionReconciling, false, reasonSucceeded, ""), is(ConditionStalled, false, reasonSucceeded, ""), notPaused,
		}
	}
	message := err.Error()
	message = message[:min(len(message), 1024)] // a condition may have 32 KiB; nobody reads that
	stalled, reason := engine.IsTerminal(err), reasonFailed
	if stalled {
		reason = reasonStalled
	}
	return []metav1.Condition{
		is(ConditionReady, false, reason, message), is(ConditionReconciling, !stalled, reason, message), is(ConditionStalled, stalled, reason, message), notPaused,
	}
}

// writeConditions writes conditions beside those that are there. An object that does not change is not written.
func writeConditions(ctx context.Context, rt engine.Runtime, o *unstructured.Unstructured, changed ...metav1.Condition) error {
	status, _, err := unstructured.NestedMap(o.Object, "status")
	if err != nil {
		return engine.Terminal(fmt.Errorf("%w: the status of %s is no object: %w", engine.ErrInvalid, o.GetName(), err))
	}
	var have struct {
		Conditions []metav1.Condition `json:"conditions"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(status, &have); err != nil {
		return engine.Terminal(fmt.Errorf("%w: status.conditions of %s: %w", engine.ErrInvalid, o.GetName(), err))
	}
	for _, c := range changed {
		c.ObservedGeneration = o.GetGeneration()
		meta.SetStatusCondition(&have.Conditions, c) // it keeps the transition time unless the status differs
	}
	want := map[string]any{"conditions": have.Conditions, "observedGeneration": o.GetGeneration()}
	if at := o.GetAnnotations()[ReconcileAnnotation]; at != "" {
		want["lastHandledReconcileAt"] = at
	}
	return rt.Status(ctx, want)
}

// Finalizer returns middleware that has cleanup done before an object goes: it puts a finalizer on each primary object before the
// handler first sees it, and when the object is being deleted it calls cleanup in the handler's place until that succeeds, and then removes the
// finalizer. Cleanup may be called again after it succeeded.
func Finalizer(name string, cleanup engine.Handler) engine.Middleware {
	return func(next engine.Handler) engine.Handler {
		return func(ctx context.Context, rt engine.Runtime, req engine.Request) (engine.Result, error) {
			o, err := primary(ctx, rt, req.Key)
			if engine.IsNotFound(err) {
				return next(ctx, rt, req)
			}
			if err != nil {
				return engine.Result{}, err
			}
			has := slices.Contains(o.GetFinalizers(), name)
			set := func(finalizers []string) error {
				// A merge patch replaces the list: the revision keeps it from undoing what others did to it.
				return rt.MergePatch(ctx, map[string]any{"metadata": map[string]any{"finalizers": finalizers, "resourceVersion": o.GetResourceVersion()}})
			}
			switch deleted := o.GetDeletionTimestamp() != nil; {
			case deleted && !has:
				return engine.Result{}, nil // others have still to do theirs
			case deleted:
				result, err := cleanup(ctx, rt, req)
				if err != nil || result != (engine.Result{}) {
					return result, err
				}
				return engine.Result{}, ignoreGone(set(slices.DeleteFunc(o.GetFinalizers(), func(f string) bool { return f == name })))
			case !has:
				if err := set(append(o.GetFinalizers(), name)); err != nil {
					return engine.Result{}, err
				}
			}
			return next(ctx, rt, req)
		}
	}
}

func ignoreGone(err error) error {
	if errors.Is(err, engine.ErrNotFound) {
		return nil
	}
	return err
}
