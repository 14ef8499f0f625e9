package deliver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/singleflight"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// PullTransport is the Transport for pull members. It writes bundles to the hub, where the member's agent fetches them.
// It is safe for concurrent use, but not for concurrent calls with the same bundle.ID and member. Only one process per
// shard of a hub may use one: the leader of the shard.
type PullTransport struct {
	shard   fleet.Shard
	hub     client.Client
	live    client.Reader
	encoder *encoder
	// rootKey is the key of the hub, which is the same in all shards: a cluster keeps its contentKey when it changes
	// its shard.
	rootKey Key
	// storedKeys has the IDs of the content keys that this process has written, by the name of the Secret.
	storedKeys sync.Map
	tracker    *contentTracker
	// creations merges concurrent requests to create the same content or the same key.
	creations singleflight.Group
	// trigger wakes the GarbageCollector.
	trigger chan struct{}
}

var _ Transport = (*PullTransport)(nil)

// NewPullTransport returns a PullTransport of the hub. hub may read groups, namespaces (as metadata) and Leases from a
// cache; live reads from the API server. Both need a timeout per request. The caller must watch groups and call Deliver
// again when a group changes.
func NewPullTransport(hub client.Client, live client.Reader, key Key) (*PullTransport, error) {
	return NewShardPullTransport(hub, live, key, "")
}

// NewShardPullTransport returns a PullTransport for the members of one shard. Its ConfigurationBundles have their own
// names and a label, so that only the GarbageCollector of this PullTransport deletes them: other processes do not know
// which content its running deliveries use.
func NewShardPullTransport(hub client.Client, live client.Reader, key Key, shard fleet.Shard) (*PullTransport, error) {
	encoder, err := newEncoder(key.forShard(shard))
	if err != nil {
		return nil, err
	}
	return &PullTransport{shard: shard, hub: hub, live: live, encoder: encoder, rootKey: key, tracker: newContentTracker(), trigger: make(chan struct{}, 1)}, nil
}

// desiredBundle is the bundle that a member must have.
type desiredBundle struct {
	member fleet.Member
	bundle bundle.Bundle
	digest bundle.Digest
}

// Deliver writes b for m and returns the last report of the agent. It sends no request if the group requests b already
// and needs no content. After an error the bundle that was delivered before is unchanged.
func (t *PullTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	pending := bundle.Report{ID: b.ID, State: bundle.StatePending}
	if err := t.checkClaim(ctx, m); err != nil {
		return pending, fmt.Errorf("deliver %s to member %s: %w", b.ID, m.Key(), err)
	}
	digest, err := b.Digest()
	if err != nil {
		return pending, err
	}
	group, err := t.readGroup(ctx, t.hub, m, b.ID)
	if err != nil {
		return pending, err
	}
	if group.DeletionTimestamp != nil {
		// The delete event triggers the next call, which creates the group again.
		return pending, nil
	}
	desired := desiredBundle{member: m, bundle: b, digest: digest}
	if isRequested(group, digest) {
		group, err = t.refreshGroup(ctx, desired, group)
	} else {
		group, err = t.writeBundle(ctx, desired, group)
	}
	if err != nil {
		return pending, fmt.Errorf("deliver %s to member %s: %w", b.ID, m.Key(), err)
	}
	report := ReportOf(group)
	report.ID = b.ID
	t.triggerIfProvisioned(group, report, digest)
	return report, nil
}

// isRequested returns whether group requests the bundle with digest.
func isRequested(group *libv1beta1.ConfigurationGroup, digest bundle.Digest) bool {
	return isStored(group) && group.Spec.Action == libv1beta1.ActionDeploy && bundle.DigestFromBytes(group.Spec.RequestorHash) == digest
}

// refreshGroup writes missing content and changed inputs of d, although group requests d already.
func (t *PullTransport) refreshGroup(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	group, err := t.ensureContent(ctx, d, group)
	if err != nil {
		return nil, err
	}
	return t.refreshInputs(ctx, d, group)
}

// triggerIfProvisioned triggers the garbage collector when a group becomes provisioned.
func (t *PullTransport) triggerIfProvisioned(group *libv1beta1.ConfigurationGroup, report bundle.Report, digest bundle.Digest) {
	key := client.ObjectKeyFromObject(group)
	if report.State != bundle.StateApplied || report.Digest != digest {
		t.tracker.addUnprovisioned(key)
		return
	}
	if t.tracker.removeUnprovisioned(key) {
		t.Trigger()
	}
}

// ensureContent writes the content of group again if the agent needs it and it is missing. group requests d already.
func (t *PullTransport) ensureContent(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	state := ReportOf(group).State
	if state == bundle.StateMissing {
		return t.rewriteContent(ctx, d, group)
	}
	if isObserved(group) && state == bundle.StateApplied {
		return group, nil
	}
	// The content of a group that is not provisioned stays on the hub, so its encryption must be current.
	isOutdated, err := t.hasOutdatedEncryption(ctx, d, group)
	if err != nil {
		return nil, err
	}
	if isOutdated {
		return t.writeBundle(ctx, d, group)
	}
	if isObserved(group) && state != bundle.StateApplying {
		// The agent has stored the content, even if it fails to apply it.
		return group, nil
	}
	stored, err := t.isContentStored(ctx, group)
	if err != nil || stored {
		return group, err
	}
	return t.writeBundle(ctx, d, group)
}

// refreshInputs writes Bundle.Inputs to the annotation of group if they differ, for example because an upgraded hub
// built the same bundle from other inputs. With outdated inputs the hub would build the bundle after each restart.
// refreshInputs also writes a missing label of the shard.
func (t *PullTransport) refreshInputs(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	isSame := d.bundle.Inputs == "" || group.Annotations[annotationInputs] == d.bundle.Inputs
	if isSame && t.shard.HasLabel(group) {
		return group, nil
	}
	want, err := deployGroup(d.member, d.bundle, d.digest, group.Spec.ConfigurationItems)
	if err != nil {
		return nil, err
	}
	if id := group.Annotations[annotationEncryption]; id != "" {
		want.Annotations[annotationEncryption] = id
	}
	return t.writeGroup(ctx, group, want)
}

// isContentStored returns whether all content of group exists. It sends one request for each object that is not known
// to exist.
func (t *PullTransport) isContentStored(ctx context.Context, group *libv1beta1.ConfigurationGroup) (bool, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef == nil {
			return false, nil
		}
		key := client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}
		if t.tracker.isKnownToExist(key) {
			continue
		}
		obj := &metav1.PartialObjectMetadata{}
		obj.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind))
		err := t.live.Get(ctx, key, obj)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("read content %s: %w", key, err)
		}
		if !t.shard.HasLabel(obj) {
			return false, nil // the collector of the cluster's former shard does not know that it is needed
		}
		t.tracker.setKnownToExist(key, true)
	}
	return true, nil
}

// rewriteContent writes content that the agent reports as missing, and then clears contentMissing and failureMessage of
// the status: the agent watches its group, and fetches the content again. The hub writes no other fields of a status.
// If the agent has changed the status meanwhile, its status is kept.
func (t *PullTransport) rewriteContent(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef != nil {
			t.tracker.setKnownToExist(client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}, false)
		}
	}
	t.forgetContentKey(d.member)
	written, err := t.writeBundle(ctx, d, group)
	if err != nil {
		return nil, err
	}
	if written.Generation != group.Generation {
		// The new generation already triggers the agent.
		return written, nil
	}
	updated := group.DeepCopy()
	updated.Status.ContentMissing = false
	updated.Status.FailureMessage = ""
	err = t.hub.Status().Patch(ctx, updated, client.MergeFromWithOptions(group, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return group, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reset the status of group %s: %w", client.ObjectKeyFromObject(group), err)
	}
	return updated, nil
}

// writeBundle writes the content of d, and then the group that refers to it if it differs.
func (t *PullTransport) writeBundle(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	m, b := d.member, d.bundle
	chunks, err := t.encoder.encode(b)
	if err != nil {
		return nil, err
	}
	if chunks, err = t.assignContentKey(ctx, m, chunks); err != nil {
		return nil, err
	}
	items := make([]libv1beta1.ConfigurationItem, 0, len(chunks))
	for _, c := range chunks {
		items = append(items, configurationItem(contentNamespace(m, b, c), c))
	}
	want, err := deployGroup(m, b, d.digest, items)
	if err != nil {
		return nil, err
	}
	setEncryptionAnnotation(want, chunks)
	for _, c := range chunks {
		obj := contentObject(m, b.ID, contentNamespace(m, b, c), c)
		endUse, err := t.tracker.beginUse(ctx, client.ObjectKeyFromObject(obj))
		if err != nil {
			return nil, err
		}
		defer endUse() // after the group is written
		t.shard.SetLabel(obj)
		if err := t.createContent(ctx, obj); err != nil {
			return nil, err
		}
	}
	if isStored(group) && hasSpecOf(group, want) {
		return group, nil
	}
	return t.writeGroup(ctx, group, want)
}

// hasSpecOf returns whether group requests the same bundle as want, with the same content. The digest covers the
// other fields, except the inputs (see refreshInputs), the hub, and Release.IsUnconfirmed.
func hasSpecOf(group, want *libv1beta1.ConfigurationGroup) bool {
	return group.Spec.Action == want.Spec.Action &&
		apiequality.Semantic.DeepEqual(group.Spec.RequestorHash, want.Spec.RequestorHash) &&
		apiequality.Semantic.DeepEqual(group.Spec.ConfigurationItems, want.Spec.ConfigurationItems)
}

// contentNamespace returns the namespace of a chunk of b: the hub's own one if several members have the same chunk and
// it is not private.
func contentNamespace(m fleet.Member, b bundle.Bundle, c chunk) string {
	if b.SharedBy > 1 && !c.private {
		return kube.AgentNamespace
	}
	return m.DeliveryNamespace
}

// createContent creates an immutable ConfigurationBundle. An existing one with the same name has the same content,
// since the name is a hash of the content.
func (t *PullTransport) createContent(ctx context.Context, obj *libv1beta1.ConfigurationBundle) error {
	key := client.ObjectKeyFromObject(obj)
	if t.tracker.isKnownToExist(key) {
		return nil
	}
	// Other deliveries may wait for this request, so it must not end with the context of this delivery.
	creationCtx := context.WithoutCancel(ctx)
	_, err, _ := t.creations.Do(key.String(), func() (any, error) {
		if t.tracker.isKnownToExist(key) {
			return nil, nil //nolint:nilnil // the result is the error
		}
		if err := t.hub.Create(creationCtx, obj); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("write content %s: %w", key, err)
		}
		t.tracker.setKnownToExist(key, true)
		return nil, nil //nolint:nilnil // the result is the error
	})
	return err
}

// writeGroup writes want in one request, and returns the stored group. existing may be older than the stored group, and
// is empty if there is none. The hub alone writes the labels, the annotations and the spec of groups.
func (t *PullTransport) writeGroup(ctx context.Context, existing, want *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	key := client.ObjectKeyFromObject(want)
	written := want.DeepCopy()
	t.shard.SetLabel(written)
	write := t.applyGroup
	if isStored(existing) {
		write = t.replaceGroup
	}
	err := write(ctx, written)
	if apierrors.IsNotFound(err) && isStored(existing) {
		err = t.applyGroup(ctx, written)
	}
	if err != nil {
		return nil, fmt.Errorf("write group %s: %w", key, err)
	}
	return written, nil
}

// replaceGroup replaces the labels, the annotations and the spec of a stored group, whatever its version.
func (t *PullTransport) replaceGroup(ctx context.Context, group *libv1beta1.ConfigurationGroup) error {
	kube.DropManagedFields(group)
	operations := []map[string]any{}
	for path, value := range map[string]any{
		"/metadata/labels": group.Labels, "/metadata/annotations": group.Annotations, "/metadata/managedFields": group.ManagedFields, "/spec": group.Spec,
	} {
		operations = append(operations, map[string]any{"op": "add", "path": path, "value": value})
	}
	patch, err := json.Marshal(operations)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	return t.hub.Patch(ctx, group, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(kube.FieldManager))
}

// applyGroup creates group, or replaces its fields if another reconcile has created it a moment ago.
func (t *PullTransport) applyGroup(ctx context.Context, group *libv1beta1.ConfigurationGroup) error {
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(group)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	delete(raw["metadata"].(map[string]any), "managedFields")
	obj := &unstructured.Unstructured{Object: raw}
	if err := t.hub.Apply(ctx, client.ApplyConfigurationFromUnstructured(obj), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
		return err
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, group)
}

// Withdraw requests the agent to remove w. done is true after the agent has reported the removal. If there is no group,
// Withdraw creates one: the agent may have the bundle although the hub has lost its group.
func (t *PullTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	group, err := t.readClaimedGroup(ctx, t.hub, m, w.ID)
	if err == nil && !isStored(group) {
		// The cache may not have a group that was written a moment ago.
		group, err = t.readGroup(ctx, t.live, m, w.ID)
	}
	if err != nil {
		return false, err
	}
	if group.DeletionTimestamp != nil {
		return false, nil // the delete event triggers the next call, which creates the group again
	}
	if group.Spec.Action != libv1beta1.ActionRemove || group.Spec.LeavePolicies != w.Orphan || w.ServiceAccount != "" && serviceAccountOf(group) != w.ServiceAccount {
		if group, err = t.writeGroup(ctx, group, removeGroup(m, w, group)); err != nil {
			return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
		}
	}
	if ReportOf(group).State != bundle.StateRemoved || !isObserved(group) {
		return false, nil
	}
	if err := t.deleteGroup(ctx, group); err != nil {
		return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
	}
	return true, nil
}

// deleteGroup deletes a group. It fails if the group has changed since it was read, so that a new delivery is not lost.
func (t *PullTransport) deleteGroup(ctx context.Context, group *libv1beta1.ConfigurationGroup) error {
	key := client.ObjectKeyFromObject(group)
	err := t.hub.Delete(ctx, group, client.Preconditions{UID: &group.UID, ResourceVersion: &group.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete group %s: %w", key, err)
	}
	t.tracker.removeUnprovisioned(key)
	t.Trigger()
	return nil
}

// isStored returns whether the hub has the group.
func isStored(group *libv1beta1.ConfigurationGroup) bool { return group.UID != "" }

// readClaimedGroup reads the group of id. It fails if m's claim is on another namespace. A missing claim is no error.
func (t *PullTransport) readClaimedGroup(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
	if err := t.checkClaim(ctx, m); err != nil && !errors.Is(err, errUnclaimed) {
		return nil, fmt.Errorf("read group of member %s: %w", m.Key(), err)
	}
	return t.readGroup(ctx, reader, m, id)
}

// readGroup reads the group of id on m. The group is empty if it does not exist. A group that the cache lacks can have
// the label of another shard, if m is or was in one.
func (t *PullTransport) readGroup(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
	group := &libv1beta1.ConfigurationGroup{}
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: GroupName(m, id)}
	err := reader.Get(ctx, key, group)
	if apierrors.IsNotFound(err) && m.CacheMayLackObjects {
		err = t.live.Get(ctx, key, group)
	}
	if apierrors.IsNotFound(err) {
		return &libv1beta1.ConfigurationGroup{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read group %s: %w", key, err)
	}
	return group, nil
}
