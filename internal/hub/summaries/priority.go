package summaries

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// maxRaised is the maximum number of entries in Controller.raisedProfiles.
const maxRaised = 4096

// OwnerUIDs returns the values of OwnerIndex.
func OwnerUIDs(obj client.Object) []string {
	var uids []string
	for _, owner := range obj.GetOwnerReferences() {
		uids = append(uids, string(owner.UID))
	}
	return uids
}

// raisePriority queues the summaries of the same profile that this process has not reconciled yet before all others, if
// the delivered bundle of s was built from other inputs. After a start of the hub all summaries are queued with a low
// priority, and most of them are unchanged. A change of a profile or its content concerns all its summaries: without
// this, they would be delivered one by one, as the queue comes to them.
func (c *Controller) raisePriority(ctx context.Context, s *state, delivered string, inputs deliveredInputs) error {
	owner := metav1.GetControllerOf(s.summary)
	if delivered == "" || !inputs.isKnown || owner == nil {
		return nil
	}
	if _, ok := c.raisedProfiles.Get(owner.UID); ok {
		return nil
	}
	if isSame, err := inputs.isDigest(delivered); isSame || err != nil {
		return err
	}
	c.raisedProfiles.Add(owner.UID, nil)
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{OwnerIndex: string(owner.UID)}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the summaries of %s %s: %w", owner.Kind, owner.Name, err)
	}
	for i := range list.Items {
		key := types.NamespacedName{Namespace: list.Items[i].Namespace, Name: list.Items[i].Name}
		if !c.references.has(key) {
			c.slots.Queue.Add(reconcile.Request{NamespacedName: key}) // with the normal priority
		}
	}
	return nil
}
