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

// ProfileIndexKey returns the value of ProfileIndex for a profile. The namespace of a ClusterProfile is "". The UID
// alone is not enough: a user who may write summaries in one namespace can set any UID in their owner references, for
// example the UID of a Profile in another namespace.
func ProfileIndexKey(kind, namespace string, uid types.UID) string {
	return kind + "/" + namespace + "/" + string(uid)
}

// ProfileIndexKeys returns the values of ProfileIndex for a summary. A Profile has summaries in its own namespace only.
func ProfileIndexKeys(summary client.Object) []string {
	profile := ProfileOf(summary)
	switch {
	case profile == nil:
		return nil
	case profile.Kind == configv1beta1.ProfileKind:
		return []string{ProfileIndexKey(profile.Kind, summary.GetNamespace(), profile.UID)}
	}
	return []string{ProfileIndexKey(profile.Kind, "", profile.UID)}
}

// raisePriority delivers the summaries of a changed profile before unchanged ones. After a start of the hub, all
// summaries are in the queue with a low priority, and most of them are unchanged. If the bundle of s was delivered with
// other inputs, the profile or its content has probably changed. Then the other summaries of the profile are queued
// with the normal priority, except those that this process has already reconciled. delivered is the digest of the
// delivered inputs, "" if there is none.
func (c *Controller) raisePriority(ctx context.Context, s *state, delivered string, inputs currentInputs) error {
	owners := ProfileIndexKeys(s.summary)
	if delivered == "" || !inputs.isKnown || len(owners) == 0 {
		return nil
	}
	owner := owners[0]
	if _, ok := c.raisedProfiles.Get(owner); ok {
		return nil
	}
	if isSame, err := inputs.matchesDigest(delivered); isSame || err != nil {
		return err
	}
	c.raisedProfiles.Add(owner, nil)
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{ProfileIndex: owner}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the summaries of the same profile: %w", err)
	}
	for i := range list.Items {
		key := types.NamespacedName{Namespace: list.Items[i].Namespace, Name: list.Items[i].Name}
		if !c.references.hasReferences(key) {
			c.slots.Queue.Add(reconcile.Request{NamespacedName: key}) // with the normal priority
		}
	}
	return nil
}
