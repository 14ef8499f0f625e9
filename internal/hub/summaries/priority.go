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

// OwnerKey returns the value of OwnerIndex for a profile. The namespace of a ClusterProfile is "". The UID alone is not
// enough: a user who may write summaries in one namespace can set any UID in their owner references, for example the
// UID of a Profile in another namespace.
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

// raisePriority queues the other summaries of the profile with the normal priority, if the delivered bundle of s was
// built from other inputs. It skips summaries that this process has reconciled. After a start of the hub, all summaries
// are in the queue with a low priority, and most of them are unchanged. If one of them has changed, its profile or the
// content has probably changed, and so the other summaries of the profile are delivered before the unchanged ones.
func (c *Controller) raisePriority(ctx context.Context, s *state, delivered string, inputs currentInputs) error {
	owners := OwnerKeys(s.summary)
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
