package deliver

import (
	"context"
	"fmt"

	"golang.org/x/sync/singleflight"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
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
	tracker *bundleTracker
	// creations makes one request for a bundle that several deliveries need at the same time.
	creations singleflight.Group
	trigger   chan struct{}
}

var _ Transport = (*PullTransport)(nil)

// NewPullTransport returns a PullTransport of the hub. hub may read groups from a cache; live reads from the API
// server. Both need a timeout per request. The caller must watch groups and call Deliver again when a group changes.
func NewPullTransport(hub client.Client, live client.Reader, key Key) (*PullTransport, error) {
	return NewShardPullTransport(hub, live, key, "")
}

// NewShardPullTransport returns a PullTransport for the members of one shard. Its ConfigurationBundles have their own
// names and a label, so that only the GarbageCollector of this PullTransport deletes them: other processes do not know
// the bundles of its running deliveries.
func NewShardPullTransport(hub client.Client, live client.Reader, key Key, shard fleet.Shard) (*PullTransport, error) {
	encoder, err := newEncoder(key.forShard(shard))
	if err != nil {
		return nil, err
	}
	return &PullTransport{shard: shard, hub: hub, live: live, encoder: encoder, tracker: newBundleTracker(), trigger: make(chan struct{}, 1)}, nil
}

// request is a request to deliver one bundle to one member.
type request struct {
	member fleet.Member
	bundle bundle.Bundle
	digest bundle.Digest
}

// Deliver writes b for m and returns the last report of the agent. It sends no request if b is written already. An
// error does not change the bundle that was delivered before.
func (o *PullTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	pending := bundle.Report{ID: b.ID, State: bundle.StatePending}
	claimed, err := o.checkClaim(ctx, m)
	if err == nil && !claimed {
		err = errUnclaimed
	}
	if err != nil {
		return pending, fmt.Errorf("deliver %s to member %s: %w", b.ID, m.Key(), err)
	}
	digest, err := b.Digest()
	if err != nil {
		return pending, err
	}
	group, err := o.readGroup(ctx, o.hub, m, b.ID)
	if err != nil {
		return pending, err
	}
	if group.DeletionTimestamp != nil {
		// It can be created again after it is deleted, which triggers the watch on groups.
		return pending, nil
	}
	if !exists(group) || group.Spec.Action != libv1beta1.ActionDeploy || bundle.DigestFromBytes(group.Spec.RequestorHash) != digest {
		group, err = o.writeContent(ctx, request{member: m, bundle: b, digest: digest}, group)
	} else if group, err = o.ensureContent(ctx, request{member: m, bundle: b, digest: digest}, group); err == nil {
		group, err = o.refreshInputs(ctx, request{member: m, bundle: b, digest: digest}, group)
	}
	if err != nil {
		return pending, fmt.Errorf("deliver %s to member %s: %w", b.ID, m.Key(), err)
	}
	report := ReportOf(group)
	report.ID = b.ID
	o.trackReport(group, report, digest)
	return report, nil
}

// trackReport triggers the garbage collector when a group is provisioned.
func (o *PullTransport) trackReport(group *libv1beta1.ConfigurationGroup, report bundle.Report, digest bundle.Digest) {
	key := client.ObjectKeyFromObject(group)
	if report.State != bundle.StateApplied || report.Digest != digest {
		o.tracker.trackGroup(key)
		return
	}
	if o.tracker.untrackGroup(key) {
		o.Trigger()
	}
}

// ensureContent writes the content of group again if the agent needs it and it is missing. group already requests the
// bundle.
func (o *PullTransport) ensureContent(ctx context.Context, r request, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	state := ReportOf(group).State
	if state == bundle.StateMissing {
		return o.rewriteContent(ctx, r, group)
	}
	if isObserved(group) && state != bundle.StateApplying {
		// The agent has stored the content, even if it fails to apply it.
		return group, nil
	}
	exists, err := o.contentExists(ctx, group)
	if err != nil || exists {
		return group, err
	}
	return o.writeContent(ctx, r, group)
}

// refreshInputs writes the inputs of a request to the annotation of group if they differ, for example after an upgrade
// of the hub that built the same bundle. Otherwise the bundle would be built after each further restart of the hub. It
// writes the whole group with its items, because an annotation of another field manager would stay for later bundles.
func (o *PullTransport) refreshInputs(ctx context.Context, r request, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	if r.bundle.Inputs == "" || group.Annotations[annotationInputs] == r.bundle.Inputs {
		return group, nil
	}
	want, err := deployGroup(r.member, r.bundle, r.digest, group.Spec.ConfigurationItems)
	if err != nil {
		return nil, err
	}
	return o.apply(ctx, want)
}

// contentExists returns whether all ConfigurationBundles of group exist. It sends one request for each bundle that is
// not known to exist.
func (o *PullTransport) contentExists(ctx context.Context, group *libv1beta1.ConfigurationGroup) (bool, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef == nil {
			return false, nil
		}
		key := client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}
		if o.tracker.exists(key) {
			continue
		}
		obj := &metav1.PartialObjectMetadata{}
		obj.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind))
		err := o.live.Get(ctx, key, obj)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("read bundle %s: %w", key, err)
		}
		o.tracker.setExists(key, true)
	}
	return true, nil
}

// rewriteContent writes content that the agent reports as missing, and resets that report in the status, which triggers
// the agent. In all other cases only the agent writes the status. If the
// agent has written it meanwhile, its status is kept.
func (o *PullTransport) rewriteContent(ctx context.Context, r request, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef != nil {
			o.tracker.setExists(client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}, false)
		}
	}
	written, err := o.writeContent(ctx, r, group)
	if err != nil {
		return nil, err
	}
	if written.Generation != group.Generation {
		// The new generation triggers the agent, too.
		return written, nil
	}
	updated := group.DeepCopy()
	updated.Status.ContentMissing = false
	updated.Status.FailureMessage = ""
	err = o.hub.Status().Patch(ctx, updated, client.MergeFromWithOptions(group, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return group, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reset the status of group %s: %w", client.ObjectKeyFromObject(group), err)
	}
	return updated, nil
}

// writeContent writes the ConfigurationBundles of a request, and then the group that refers to them if it differs.
func (o *PullTransport) writeContent(ctx context.Context, r request, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	m, b := r.member, r.bundle
	chunks, err := o.encoder.encode(b)
	if err != nil {
		return nil, err
	}
	items := make([]libv1beta1.ConfigurationItem, 0, len(chunks))
	for _, c := range chunks {
		items = append(items, configurationItem(namespaceOf(m, b, c), c))
	}
	want, err := deployGroup(m, b, r.digest, items)
	if err != nil {
		return nil, err
	}
	for _, c := range chunks {
		obj := bundleObject(m, b.ID, namespaceOf(m, b, c), c)
		endUse, err := o.tracker.beginUse(ctx, client.ObjectKeyFromObject(obj))
		if err != nil {
			return nil, err
		}
		defer endUse() // after the group is written
		if !o.shard.IsDefault() {
			obj.Labels[labelShard] = labelValue(string(o.shard))
		}
		if err := o.write(ctx, obj); err != nil {
			return nil, err
		}
	}
	if exists(group) && hasSpecOf(group, want) {
		return group, nil
	}
	return o.apply(ctx, want)
}

// hasSpecOf returns whether group requests the same as want.
func hasSpecOf(group, want *libv1beta1.ConfigurationGroup) bool {
	return group.Spec.Action == want.Spec.Action &&
		apiequality.Semantic.DeepEqual(group.Spec.RequestorHash, want.Spec.RequestorHash) &&
		apiequality.Semantic.DeepEqual(group.Spec.ConfigurationItems, want.Spec.ConfigurationItems)
}

// namespaceOf returns the namespace of a chunk of b: a shared one if several members have the same chunk and it is not
// private.
func namespaceOf(m fleet.Member, b bundle.Bundle, c chunk) string {
	if b.SharedBy > 1 && !c.private {
		return kube.AgentNamespace
	}
	return m.DeliveryNamespace
}

// write creates an immutable ConfigurationBundle. An existing one with the same name has the same content, since the
// name is a hash of the content.
func (o *PullTransport) write(ctx context.Context, obj *libv1beta1.ConfigurationBundle) error {
	key := client.ObjectKeyFromObject(obj)
	if o.tracker.exists(key) {
		return nil
	}
	// The deliveries that wait for this request must not fail if the one that sends it ends.
	creationCtx := context.WithoutCancel(ctx)
	_, err, _ := o.creations.Do(key.String(), func() (any, error) {
		if o.tracker.exists(key) {
			return nil, nil //nolint:nilnil // the result is the error
		}
		if err := o.hub.Create(creationCtx, obj); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("write bundle %s: %w", key, err)
		}
		o.tracker.setExists(key, true)
		return nil, nil //nolint:nilnil // the result is the error
	})
	return err
}

// apply writes a group in one request and returns the stored group.
func (o *PullTransport) apply(ctx context.Context, want *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	key := client.ObjectKeyFromObject(want)
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(want)
	if err != nil {
		return nil, fmt.Errorf("encode group %s: %w", key, err)
	}
	obj := &unstructured.Unstructured{Object: raw}
	err = o.hub.Apply(ctx, client.ApplyConfigurationFromUnstructured(obj), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return nil, fmt.Errorf("write group %s: %w", key, err)
	}
	got := &libv1beta1.ConfigurationGroup{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, got); err != nil {
		return nil, fmt.Errorf("decode group %s: %w", key, err)
	}
	return got, nil
}

// Withdraw requests the agent to remove w. done is true after the agent has reported the removal. Without a group it
// creates one, since only the agent knows its bundles.
func (o *PullTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	group, err := o.readClaimedGroup(ctx, o.hub, m, w.ID)
	if err == nil && !exists(group) {
		// The cache may not have a group that was written a moment ago.
		group, err = o.readGroup(ctx, o.live, m, w.ID)
	}
	if err != nil {
		return false, err
	}
	if group.DeletionTimestamp != nil {
		return false, nil // it is created again after it is deleted, which triggers the watch
	}
	if group.Spec.Action != libv1beta1.ActionRemove || group.Spec.LeavePolicies != w.Orphan {
		if group, err = o.apply(ctx, removeGroup(m, w, group)); err != nil {
			return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
		}
	}
	if ReportOf(group).State != bundle.StateRemoved || !isObserved(group) {
		return false, nil
	}
	if err := o.deleteGroup(ctx, group); err != nil {
		return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
	}
	return true, nil
}

// deleteGroup deletes a group. It fails if the group has changed since it was read, so that a new delivery is not lost.
func (o *PullTransport) deleteGroup(ctx context.Context, group *libv1beta1.ConfigurationGroup) error {
	key := client.ObjectKeyFromObject(group)
	err := o.hub.Delete(ctx, group, client.Preconditions{UID: &group.UID, ResourceVersion: &group.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete group %s: %w", key, err)
	}
	o.tracker.untrackGroup(key)
	o.Trigger()
	return nil
}

// exists returns whether the hub has the group.
func exists(group *libv1beta1.ConfigurationGroup) bool { return group.UID != "" }

// readClaimedGroup reads the group of id. It fails if another namespace is claimed for m. It also reads if no namespace
// is claimed yet.
func (o *PullTransport) readClaimedGroup(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
	if _, err := o.checkClaim(ctx, m); err != nil {
		return nil, fmt.Errorf("read group of member %s: %w", m.Key(), err)
	}
	return o.readGroup(ctx, reader, m, id)
}

// readGroup reads the group of id on m. The group is empty if it does not exist.
func (o *PullTransport) readGroup(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
	group := &libv1beta1.ConfigurationGroup{}
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: GroupName(m, id)}
	err := reader.Get(ctx, key, group)
	if apierrors.IsNotFound(err) {
		return &libv1beta1.ConfigurationGroup{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read group %s: %w", key, err)
	}
	return group, nil
}
