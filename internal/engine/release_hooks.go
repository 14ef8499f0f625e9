package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

const (
	// annotationHookRun on the object of a hook has the release, the revision, the event and the attempt of its run.
	annotationHookRun = "towline.dev/hook-run"
	// logLines and logBytes limit the log of a failed hook that is reported, and logTimeout the time to read it.
	logLines   = 10
	logBytes   = 2 << 10
	logTimeout = 5 * time.Second
)

// releaseError is the error that ends an operation of a release as failed. The next attempt is a new revision.
type releaseError struct{ text string }

// Error returns the reason.
func (e *releaseError) Error() string { return e.text }

// releaseOp is an operation on one Helm release. It saves its state before each step that must not run twice.
type releaseOp struct {
	engine *Engine
	id     bundle.ID
	// account is the "namespace/name" of the ServiceAccount as which all requests are sent, "" for the engine. Requests
	// for metadata and for the inventory are sent as the engine.
	account   string
	inventory *inventory.Record // the next inventory, which contains state
	save      func(context.Context) error
	state     *inventory.ReleaseState
	hooks     []release.Hook
	// waiting is the condition that the release waits for, or nil.
	waiting *pendingWait
	// releaseRecord caches the release record of the deployed item, because encoding its manifest is expensive.
	releaseRecord *helm.Release
	// stored is the record that the hooks or the item were read from, nil if there is none.
	stored *release.StoredRecord
}

// useRecord keeps record, from which the hooks or the item are read, until close is called.
func (o *releaseOp) useRecord(record *release.StoredRecord) {
	o.close()
	o.stored = record
}

// close releases the memory of the operation. It must be called after the operation.
func (o *releaseOp) close() { o.stored.Close() }

// setWait makes the release wait until isOver returns true, after the end of the run: see pendingWait.
func (o *releaseOp) setWait(message string, isOver func(context.Context) bool) {
	account := o.account
	o.waiting = &pendingWait{message: message, since: o.engine.clock.Now(), isOver: func(ctx context.Context) bool {
		return isOver(withReadingAccount(ctx, account))
	}}
}

// runHooks runs the hooks of an event one after the other, except for those that have succeeded in this operation. done
// is false while a hook runs. It fails with a releaseError if a hook fails.
func (o *releaseOp) runHooks(ctx context.Context, event helm.HookEvent) (done bool, err error) {
	hooks := release.ForEvent(o.hooks, event)
	for i, h := range hooks {
		done, err := o.runHook(ctx, event, h)
		var failure *releaseError
		if errors.As(err, &failure) {
			return false, errors.Join(err, o.deleteSucceededHooks(ctx, event, hooks[:i]))
		}
		if err != nil || !done {
			return false, err
		}
	}
	return true, o.deleteSucceededHooks(ctx, event, hooks)
}

// deleteSucceededHooks deletes the hooks with the delete policy hook-succeeded, last one first.
func (o *releaseOp) deleteSucceededHooks(ctx context.Context, event helm.HookEvent, hooks []release.Hook) error {
	for _, h := range slices.Backward(hooks) {
		if !h.IsDeletedOn(helm.HookSucceeded) {
			continue
		}
		if err := o.deleteHook(ctx, event, h); err != nil {
			return err
		}
	}
	return nil
}

// deleteHook deletes the object that was created for a hook and an event.
func (o *releaseOp) deleteHook(ctx context.Context, event helm.HookEvent, h release.Hook) error {
	ref, resource, err := o.locateHook(h)
	if err != nil {
		return err
	}
	if run := findHookRun(o.state, event, ref); run != nil && run.UID != "" {
		err = removeAs(ctx, o.account, !run.FoundByAnnotation, func(ctx context.Context) error {
			return o.engine.member.delete(ctx, objectLocation{key: ref, resource: resource}, run.UID)
		})
	}
	if err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete hook %s: %w", ref, err)
	}
	return nil
}

// deleteAbandoned deletes the hook objects of operations that were replaced before they ended.
func (o *releaseOp) deleteAbandoned(ctx context.Context) error {
	for _, run := range o.state.Abandoned {
		resource, err := o.engine.member.mapper.ResourceInAnyVersion(run.Ref.GVK())
		if meta.IsNoMatchError(err) {
			continue // a kind that is not served has no objects
		}
		if err != nil {
			return fmt.Errorf("find the resource of hook %s of the former operation: %w", run.Ref, err)
		}
		err = removeAs(ctx, o.account, !run.FoundByAnnotation, func(ctx context.Context) error {
			return o.engine.member.delete(ctx, objectLocation{key: run.Ref.Key(), resource: resource}, run.UID)
		})
		if err != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete hook %s of the former operation: %w", run.Ref, err)
		}
	}
	o.state.Abandoned = nil
	return nil
}

// runHook starts a hook, or checks its result if it runs already. done is true if it has succeeded.
func (o *releaseOp) runHook(ctx context.Context, event helm.HookEvent, h release.Hook) (done bool, err error) {
	ref, resource, err := o.locateHook(h)
	if err != nil {
		return false, err
	}
	if run := findHookRun(o.state, event, ref); run == nil {
		o.state.Hooks = append(o.state.Hooks, inventory.HookRun{Event: event, Ref: ref, Started: o.engine.now(), Phase: helm.HookPhaseUnknown,
			DeleteOnSuccess: h.IsDeletedOn(helm.HookSucceeded)})
	} else if run.Phase == helm.HookPhaseSucceeded {
		return true, nil
	}
	run := findHookRun(o.state, event, ref)
	if run.Phase == helm.HookPhaseUnknown {
		free, err := o.deleteEarlierRun(ctx, h, run, resource)
		if err != nil || !free {
			return false, o.failHook(ctx, h, run, err)
		}
		run.Phase, run.Started = helm.HookPhaseRunning, o.engine.now()
		if err := o.save(ctx); err != nil {
			return false, err
		}
	}
	obj, err := o.ensureHook(ctx, h, run, resource)
	if err != nil {
		return false, o.failHook(ctx, h, run, err)
	}
	completed, err := hookResult(obj)
	switch {
	case err != nil:
		return false, o.failHook(ctx, h, run, &releaseError{text: err.Error() + o.readLogTail(ctx, ref)})
	case completed:
		run.Phase, run.Completed = helm.HookPhaseSucceeded, o.engine.now()
		return true, o.save(ctx)
	}
	err = o.setHookWait(ctx, run, ref)
	return false, o.failHook(ctx, h, run, err)
}

// setHookWait sets the wait for the Job or Pod of a hook. It fails with a releaseError after the timeout.
func (o *releaseOp) setHookWait(ctx context.Context, run *inventory.HookRun, ref kube.Ref) error {
	limit := o.state.Options.TimeoutOrDefault()
	deadline := run.Started.Add(limit)
	if !o.engine.now().Before(deadline) {
		return &releaseError{text: fmt.Sprintf("it did not end within %s", limit) + o.readLogTail(ctx, ref)}
	}
	engine, uid := o.engine, run.UID
	o.setWait(fmt.Sprintf("waiting for %s hook %s", run.Event, ref), func(ctx context.Context) bool {
		obj, ok, err := engine.member.readObject(ctx, ref)
		if err != nil {
			return !engine.now().Before(deadline)
		}
		if !ok || obj.GetUID() != uid {
			return true
		}
		completed, err := hookResult(obj)
		return completed || err != nil || !engine.now().Before(deadline)
	})
	return nil
}

// failHook returns err, which can be nil. If err is a releaseError, it marks the hook as failed and deletes its object
// if it has the delete policy hook-failed.
func (o *releaseOp) failHook(ctx context.Context, h release.Hook, run *inventory.HookRun, err error) error {
	var failure *releaseError
	if !errors.As(err, &failure) {
		return err
	}
	run.Phase, run.Completed = helm.HookPhaseFailed, o.engine.now()
	failed := &releaseError{text: fmt.Sprintf("%s hook %s failed: %s", run.Event, run.Ref, failure.text)}
	if h.IsDeletedOn(helm.HookFailed) {
		return errors.Join(failed, o.deleteHook(ctx, run.Event, h))
	}
	return failed
}

// locateHook returns the reference and the resource of the object of a hook.
func (o *releaseOp) locateHook(h release.Hook) (kube.Ref, kube.Resource, error) {
	ref := kube.RefOf(h.Object)
	resource, err := o.engine.member.mapper.Resource(ref.GVK())
	if meta.IsNoMatchError(err) {
		o.engine.member.mapper.Reset()
		resource, err = o.engine.member.mapper.Resource(ref.GVK())
	}
	if meta.IsNoMatchError(err) {
		return ref, resource, &releaseError{text: fmt.Sprintf("hook %s: the cluster does not know this kind", ref)}
	}
	if err != nil {
		return ref, resource, err
	}
	switch {
	case !resource.Namespaced:
		ref.Namespace = ""
	case ref.Namespace == "":
		ref.Namespace = o.state.Namespace
	}
	return ref, resource, nil
}

// deleteEarlierRun deletes the object of an earlier run, if the hook has the delete policy before-hook-creation. free
// is false while the object still exists.
func (o *releaseOp) deleteEarlierRun(ctx context.Context, h release.Hook, run *inventory.HookRun, resource kube.Resource) (free bool, err error) {
	if !h.IsDeletedOn(helm.HookBeforeHookCreation) {
		return true, nil
	}
	api := o.engine.member.metadataAt(resource, run.Ref.Namespace)
	err = api.Delete(ctx, run.Ref.Name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, asReleaseError(fmt.Errorf("delete the object of an earlier run: %w", err))
	}
	if _, err := api.Get(ctx, run.Ref.Name, metav1.GetOptions{}); err != nil {
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	}
	limit := o.state.Options.TimeoutOrDefault()
	deadline := run.Started.Add(limit)
	if !o.engine.now().Before(deadline) {
		return false, &releaseError{text: fmt.Sprintf("the object of an earlier run was not deleted within %s", limit)}
	}
	engine, ref := o.engine, run.Ref
	o.setWait(fmt.Sprintf("waiting for the deletion of an earlier %s hook %s", run.Event, ref), func(ctx context.Context) bool {
		_, ok, err := engine.member.readObject(ctx, ref)
		return err == nil && !ok || !engine.now().Before(deadline)
	})
	return false, nil
}

// ensureHook returns the object of a hook, and creates it if necessary. If an earlier run created the object and could
// not save its UID, the annotation identifies it.
func (o *releaseOp) ensureHook(ctx context.Context, h release.Hook, run *inventory.HookRun, resource kube.Resource) (*unstructured.Unstructured, error) {
	api := o.engine.member.dynamicAt(resource, run.Ref.Namespace)
	hookRun := fmt.Sprintf("%s.v%d/%s/%s", o.state.Key(), o.state.Revision, run.Event, o.state.Attempt)
	existing, err := api.Get(ctx, run.Ref.Name, metav1.GetOptions{})
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read hook %s: %w", run.Ref, err)
	case err == nil && (run.UID != "" && existing.GetUID() == run.UID || run.UID == "" && existing.GetAnnotations()[annotationHookRun] == hookRun):
		run.FoundByAnnotation = run.FoundByAnnotation || run.UID == ""
		run.UID = existing.GetUID()
		return existing, nil
	case run.UID != "":
		return nil, &releaseError{text: "it was deleted before its end was seen"}
	}
	obj := h.NewObject()
	obj.SetNamespace(run.Ref.Namespace)
	annotations := obj.GetAnnotations()
	annotations[annotationHookRun] = hookRun
	obj.SetAnnotations(annotations)
	created, err := api.Create(ctx, obj, metav1.CreateOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return nil, asReleaseError(fmt.Errorf("create it: %w", err))
	}
	run.UID = created.GetUID()
	return created, nil
}

// asReleaseError converts err to a releaseError if the API server rejects the request and a retry would not help.
func asReleaseError(err error) error {
	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsAlreadyExists(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) {
		return &releaseError{text: err.Error()}
	}
	return err
}

// jobResult is the result of a Job, or jobRunning.
type jobResult int

const (
	jobRunning jobResult = iota
	jobComplete
	jobFailed
)

// jobResultOf returns the result of a Job according to its conditions, and the message of a failure.
func jobResultOf(obj *unstructured.Unstructured) (jobResult, string) {
	conditions, _, err := unstructured.NestedSlice(obj.Object, "status", "conditions")
	if err != nil {
		return jobRunning, ""
	}
	for _, raw := range conditions {
		condition := mapOf(raw)
		if condition["status"] != "True" {
			continue
		}
		switch condition["type"] {
		case "Complete":
			return jobComplete, ""
		case "Failed":
			message, _ := condition["message"].(string)
			return jobFailed, message
		}
	}
	return jobRunning, ""
}

// hookResult returns whether a hook has succeeded: a Job or Pod is complete, a CustomResourceDefinition is established,
// another object exists. It returns an error if the hook has failed.
func hookResult(obj *unstructured.Unstructured) (completed bool, err error) {
	switch gk := obj.GroupVersionKind().GroupKind(); {
	case gk.Group == "batch" && gk.Kind == "Job":
		result, message := jobResultOf(obj)
		if result == jobFailed {
			return false, errors.New(message)
		}
		return result == jobComplete, nil
	case gk.Group == "" && gk.Kind == "Pod":
		phase, _, _ := unstructured.NestedString(obj.Object, "status", "phase")
		if phase == string(corev1.PodFailed) {
			message, _, _ := unstructured.NestedString(obj.Object, "status", "message")
			return false, errors.New(strings.TrimSpace("the pod failed " + message))
		}
		return phase == string(corev1.PodSucceeded), nil
	case gk.Group == groupAPIExtensions:
		raw, err := obj.MarshalJSON()
		if err != nil {
			return false, err
		}
		established, _, err := crdState(raw)
		return established, err
	}
	return true, nil
}

// readLogTail returns the last log lines of a Pod, or of the newest Pod of a Job, for a message. It returns "" if the
// log cannot be read or may contain secrets.
func (o *releaseOp) readLogTail(ctx context.Context, ref kube.Ref) string {
	if o.state.Sensitive {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	pods := o.engine.member.core.Pods(ref.Namespace)
	name := ref.Name
	if isJob(ref) {
		list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "batch.kubernetes.io/job-name=" + ref.Name})
		if err != nil || len(list.Items) == 0 {
			return ""
		}
		slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
		name = list.Items[len(list.Items)-1].Name
	}
	stream, err := pods.GetLogs(name, &corev1.PodLogOptions{TailLines: ptr.To(int64(logLines)), LimitBytes: ptr.To(int64(logBytes))}).Stream(ctx)
	if err != nil {
		return ""
	}
	defer stream.Close()
	text, err := io.ReadAll(io.LimitReader(stream, logBytes))
	if err != nil {
		return ""
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 0 {
			lines = append(lines, strings.Join(words, " "))
		}
	}
	if len(lines) == 0 {
		return ""
	}
	return "; its last log lines: " + strings.Join(lines, " | ")
}
