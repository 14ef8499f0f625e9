package summaries

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// maxRaised is the maximum number of entries in Controller.raisedProfiles.
const maxRaised = 4096

// OwnerKey returns the value of OwnerIndex for a profile, whose namespace is "" for a ClusterProfile. The UID alone
// does not identify the profile: a user who may write summaries in one namespace could otherwise name that of a
// ClusterProfile, or of a Profile of others, as the UID of something else.
func OwnerKey(kind, namespace string, uid types.UID) string {
	return kind + "/" + namespace + "/" + string(uid)
}

// OwnerKeys returns the values of OwnerIndex for a summary. A Profile has summaries in its own namespace only.
func OwnerKeys(summary client.Object) []string {
	profile := ProfileOf(summary)
	switch {
	case profile == nil:
		return nil
	case profile.Kind == configv1beta1.ProfileKind:
		return []string{OwnerKey(profile.Kind, summary.GetNamespace(), profile.UID)}
	}
	return []string{OwnerKey(profile.Kind, "", profile.UID)}
}

// raisePriority queues the summaries of the same profile that this process has not reconciled yet before all others, if
// the delivered bundle of s was built from other inputs. After a start of the hub all summaries are queued with a low
// priority, and most of them are unchanged. A change of a profile or its content concerns all its summaries: without
// this, they would be delivered one by one, as the queue comes to them.
func (c *Controller) raisePriority(ctx context.Context, s *state, delivered string, inputs deliveredInputs) error {
	owners := OwnerKeys(s.summary)
	if delivered == "" || !inputs.isKnown || len(owners) == 0 {
		return nil
	}
	owner := owners[0]
	if _, ok := c.raisedProfiles.Get(owner); ok {
		return nil
	}
	if isSame, err := inputs.isDigest(delivered); isSame || err != nil {
		return err
	}
	c.raisedProfiles.Add(owner, nil)
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{OwnerIndex: owner}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the summaries of the same profile: %w", err)
	}
	for i := range list.Items {
		key := types.NamespacedName{Namespace: list.Items[i].Namespace, Name: list.Items[i].Name}
		if !c.references.has(key) {
			c.slots.Queue.Add(reconcile.Request{NamespacedName: key}) // with the normal priority
		}
	}
	return nil
}
