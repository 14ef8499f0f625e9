package deliver

import (
	"context"
	"fmt"

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

// Outbox is the Transport of pull: it leaves bundles on the hub, where the member's agent fetches them. It is safe for concurrent use,
// but not for the same bundle.ID of the same member at once. At most one process per shard of a hub may use one (the shard's leader).
type Outbox struct {
	shard   fleet.Shard
	hub     client.Client
	live    client.Reader
	encoder *encoder
	staging *staging
	trigger chan struct{}
}

var _ Transport = (*Outbox)(nil)

// NewOutbox returns an Outbox of the hub. hub may read groups from a cache; live reads from the API server. Both want a timeout per
// request: a delivery that hangs keeps a sweep waiting, and the sweep keeps other deliveries waiting. The caller watches groups and
// delivers again when one changes.
func NewOutbox(hub client.Client, live client.Reader, key Key) (*Outbox, error) {
	return NewShardOutbox(hub, live, key, "")
}

// NewShardOutbox returns an Outbox for the members of one shard. Its bundles have names and a mark of their own, so that only the Sweeper
// of this Outbox deletes them: that of another process cannot know what is about to be pointed at.
func NewShardOutbox(hub client.Client, live client.Reader, key Key, shard fleet.Shard) (*Outbox, error) {
	encoder, err := newEncoder(key.of(shard))
	if err != nil {
		return nil, err
	}
	return &Outbox{shard: shard, hub: hub, live: live, encoder: encoder, staging: newStaging(), trigger: make(chan struct{}, 1)}, nil
}

// order is one bundle for one member.
type order struct {
	member fleet.Member
	bundle bundle.Bundle
	digest bundle.Digest
}

// Deliver writes b for m unless it is there already, which takes no request, and returns what the agent said last.
// A bundle that cannot be encoded changes nothing that was delivered before.
func (o *Outbox) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
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
		// It must be gone before it can be made anew; the watch on groups tells.
		return pending, nil
	}
	if !exists(group) || group.Spec.Action != libv1beta1.ActionDeploy || bundle.DigestFromBytes(group.Spec.RequestorHash) != digest {
		group, err = o.stage(ctx, order{member: m, bundle: b, digest: digest}, group)
	} else {
		group, err = o.maintain(ctx, order{member: m, bundle: b, digest: digest}, group)
	}
	if err != nil {
		return pending, fmt.Errorf("deliver %s to member %s: %w", b.ID, m.Key(), err)
	}
	report := ReportOf(group)
	report.ID = b.ID
	o.observe(group, report, digest)
	return report, nil
}

// observe lets the sweeper know once a group has been provisioned.
func (o *Outbox) observe(group *libv1beta1.ConfigurationGroup, report bundle.Report, digest bundle.Digest) {
	key := client.ObjectKeyFromObject(group)
	if report.State != bundle.StateApplied || report.Digest != digest {
		o.staging.await(key)
		return
	}
	if o.staging.arrived(key) {
		o.Trigger()
	}
}

// maintain sees to it that the agent can get at the content of group, which asks for the ordered bundle already.
func (o *Outbox) maintain(ctx context.Context, ord order, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	state := ReportOf(group).State
	if state == bundle.StateMissing {
		return o.restage(ctx, ord, group)
	}
	if observed(group) && state != bundle.StateApplying {
		// The agent keeps what it has seen, also while it does not manage to apply it.
		return group, nil
	}
	there, err := o.contentExists(ctx, group)
	if err != nil || there {
		return group, err
	}
	return o.stage(ctx, ord, group)
}

// contentExists says whether all bundles of group exist, as far as this process must assume. It asks the hub once per bundle.
func (o *Outbox) contentExists(ctx context.Context, group *libv1beta1.ConfigurationGroup) (bool, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef == nil {
			return false, nil
		}
		key := client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}
		if o.staging.knows(key) {
			continue
		}
		obj := &metav1.PartialObjectMetadata{}
		obj.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind))
		err := o.live.Get(ctx, key, obj)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("look for bundle %s: %w", key, err)
		}
		o.staging.note(key)
	}
	return true, nil
}

// restage writes content that the agent missed and takes back its complaint, which wakes the agent. The status is the agent's but for
// this one answer; the answer is refused if the agent wrote meanwhile.
func (o *Outbox) restage(ctx context.Context, ord order, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	for _, item := range group.Spec.ConfigurationItems {
		if item.ContentRef != nil {
			o.staging.forget(client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name})
		}
	}
	staged, err := o.stage(ctx, ord, group)
	if err != nil {
		return nil, err
	}
	if staged.Generation != group.Generation {
		// The new generation is an answer, too.
		return staged, nil
	}
	answered := group.DeepCopy()
	answered.Status.ContentMissing = false
	answered.Status.FailureMessage = ""
	err = o.hub.Status().Patch(ctx, answered, client.MergeFromWithOptions(group, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return group, nil
	}
	if err != nil {
		return nil, fmt.Errorf("answer group %s: %w", client.ObjectKeyFromObject(group), err)
	}
	return answered, nil
}

// stage writes the bundles of an order and then, unless group says it already, the group that points at them.
func (o *Outbox) stage(ctx context.Context, ord order, group *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
	m, b := ord.member, ord.bundle
	chunks, err := o.encoder.encode(b)
	if err != nil {
		return nil, err
	}
	items := make([]libv1beta1.ConfigurationItem, 0, len(chunks))
	for _, c := range chunks {
		items = append(items, itemOf(namespaceOf(m, b, c), c))
	}
	want, err := deployGroup(m, b, ord.digest, items)
	if err != nil {
		return nil, err
	}
	o.staging.delivery.RLock()
	defer o.staging.delivery.RUnlock()
	for _, c := range chunks {
		obj := bundleObject(m, b.ID, namespaceOf(m, b, c), c)
		if !o.shard.IsDefault() {
			obj.Labels[labelShard] = labelValue(string(o.shard))
		}
		if err := o.write(ctx, obj); err != nil {
			return nil, err
		}
	}
	if exists(group) && pointsAt(group, want) {
		return group, nil
	}
	return o.apply(ctx, want)
}

// pointsAt says whether group asks for want already.
func pointsAt(group, want *libv1beta1.ConfigurationGroup) bool {
	return group.Spec.Action == want.Spec.Action &&
		apiequality.Semantic.DeepEqual(group.Spec.RequestorHash, want.Spec.RequestorHash) &&
		apiequality.Semantic.DeepEqual(group.Spec.ConfigurationItems, want.Spec.ConfigurationItems)
}

// namespaceOf returns where a chunk of b is stored: once for all members, if several want it and it holds nothing private.
func namespaceOf(m fleet.Member, b bundle.Bundle, c chunk) string {
	if b.Audience > 1 && !c.private {
		return kube.AgentNamespace
	}
	return m.DeliveryNamespace
}

// write creates an immutable bundle. One that exists is the same, since its name is made from its content.
func (o *Outbox) write(ctx context.Context, obj *libv1beta1.ConfigurationBundle) error {
	key := client.ObjectKeyFromObject(obj)
	if o.staging.use(key) {
		return nil
	}
	if err := o.hub.Create(ctx, obj); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write bundle %s: %w", key, err)
	}
	o.staging.note(key)
	return nil
}

// apply writes a group in one request and returns it as the hub has it now.
func (o *Outbox) apply(ctx context.Context, want *libv1beta1.ConfigurationGroup) (*libv1beta1.ConfigurationGroup, error) {
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

// Withdraw asks the agent to remove w and is done once it did. Where there is no group, one is made: the agent alone knows what it holds.
func (o *Outbox) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	group, err := o.group(ctx, o.hub, m, w.ID)
	if err == nil && !exists(group) {
		// Only the API server knows: a cache may not have seen what was delivered a moment ago.
		group, err = o.readGroup(ctx, o.live, m, w.ID)
	}
	if err != nil {
		return false, err
	}
	if group.DeletionTimestamp != nil {
		return false, nil // the next one is made once it is gone; the watch tells
	}
	if group.Spec.Action != libv1beta1.ActionRemove || group.Spec.LeavePolicies != w.Leave {
		if group, err = o.apply(ctx, removeGroup(m, w, group)); err != nil {
			return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
		}
	}
	if ReportOf(group).State != bundle.StateRemoved || !observed(group) {
		return false, nil
	}
	if err := o.discard(ctx, group); err != nil {
		return false, fmt.Errorf("withdraw %s from member %s: %w", w.ID, m.Key(), err)
	}
	return true, nil
}

// discard deletes a group as it was read; if it changed since, that is an error, so that a new delivery is not lost.
func (o *Outbox) discard(ctx context.Context, group *libv1beta1.ConfigurationGroup) error {
	key := client.ObjectKeyFromObject(group)
	err := o.hub.Delete(ctx, group, client.Preconditions{UID: &group.UID, ResourceVersion: &group.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete group %s: %w", key, err)
	}
	o.staging.arrived(key)
	o.Trigger()
	return nil
}

// exists says whether the hub has a group.
func exists(group *libv1beta1.ConfigurationGroup) bool { return group.UID != "" }

// group does what readGroup does, after checkClaim.
func (o *Outbox) group(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
	if _, err := o.checkClaim(ctx, m); err != nil {
		return nil, fmt.Errorf("read group of member %s: %w", m.Key(), err)
	}
	return o.readGroup(ctx, reader, m, id)
}

// readGroup reads the group of id on m; one that does not exist is empty.
func (o *Outbox) readGroup(ctx context.Context, reader client.Reader, m fleet.Member, id bundle.ID) (*libv1beta1.ConfigurationGroup, error) {
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
