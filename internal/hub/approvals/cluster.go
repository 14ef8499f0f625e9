package approvals

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// deletionRetryInterval is the interval of the checks whether an earlier Cluster with the same name is deleted.
const deletionRetryInterval = 500 * time.Millisecond

// ensureCluster creates the Cluster, or adopts an existing Cluster for which the token is valid.
func (c *Controller) ensureCluster(ctx context.Context, s *state) error {
	existing, found, err := c.getCluster(ctx, s.parsed.Cluster)
	if err != nil {
		return err
	}
	if err := s.checkNotRemoved(existing, found); err != nil {
		return err
	}
	if found {
		return c.adoptCluster(ctx, s, existing)
	}
	created := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: s.parsed.Cluster, Annotations: map[string]string{
			kube.AnnotationBootstrapToken: s.parsed.TokenID,
			kube.AnnotationFirstUse:       s.firstUse,
			requestsAnnotation:            string(s.csr.UID),
		}},
		Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull, ID: s.parsed.ID},
	}
	err = karmada.CreateCluster(ctx, c.Live, created)
	if err == nil {
		s.cluster = created
		return nil
	}
	if !errors.Is(err, karmada.ErrAlreadyRegistered) {
		return fmt.Errorf("create Cluster %s: %w", s.parsed.Cluster, err)
	}
	// A concurrent request of the same cluster may have created it.
	if existing, found, err = c.getCluster(ctx, s.parsed.Cluster); err != nil {
		return err
	}
	if !found {
		return s.takenError()
	}
	return c.adoptCluster(ctx, s, existing)
}

// takenError returns the denial for a name or an ID that another cluster has.
func (s *state) takenError() error {
	return denied(bootstrap.ReasonClusterTaken, karmada.AlreadyRegisteredError{ID: s.parsed.ID, Name: s.parsed.Cluster})
}

// getCluster reads a Cluster from the API server. If it does not exist, found is false and err is nil.
func (c *Controller) getCluster(ctx context.Context, name string) (live *clusterv1alpha1.Cluster, found bool, err error) {
	live = &clusterv1alpha1.Cluster{}
	err = c.Live.Get(ctx, client.ObjectKey{Name: name}, live)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read Cluster %s: %w", name, err)
	}
	return live, err == nil, nil
}

// adoptCluster uses an existing Cluster for the request. The request must be a retry (an earlier request with the same
// token created the Cluster, which is not ready yet), or its token must be bound to this Cluster.
func (c *Controller) adoptCluster(ctx context.Context, s *state, existing *clusterv1alpha1.Cluster) error {
	if existing.Spec.SyncMode != clusterv1alpha1.Pull || existing.Spec.ID != s.parsed.ID {
		return s.takenError()
	}
	if !existing.DeletionTimestamp.IsZero() {
		return phase.Wait{After: deletionRetryInterval, Reason: "the Cluster of an earlier registration is being deleted"}
	}
	boundCluster, isBound := bootstrap.BoundCluster(s.csr.Spec.Groups)
	isBound = isBound && boundCluster == existing.Name
	isRetry := existing.Annotations[kube.AnnotationBootstrapToken] == s.parsed.TokenID && !fleet.FromCluster(existing).Ready
	if !isRetry && !isBound {
		return s.takenError()
	}
	err := karmada.ReserveID(ctx, c.Live, existing)
	if errors.Is(err, karmada.ErrAlreadyRegistered) {
		return s.takenError()
	}
	if err != nil {
		return err
	}
	s.cluster = existing
	if !isRetry {
		// The Cluster existed before the token was used. The token must not be valid for a later Cluster with the same name.
		return c.restrictToken(ctx, s.parsed.TokenID, existing)
	}
	if hasRequest(existing, s.csr.UID) {
		return nil
	}
	return c.recordRequest(ctx, s)
}

// recordRequest adds the UID of this request to requestsAnnotation of the Cluster. It ignores a Cluster without this
// annotation: no request created it, so a rollback must not delete it. It does not change kube.AnnotationFirstUse:
// retries must not prolong the reservation of a cluster ID.
func (c *Controller) recordRequest(ctx context.Context, s *state) error {
	if len(requestUIDs(s.cluster)) == 0 {
		return nil
	}
	patched := s.cluster.DeepCopy()
	addRequest(patched, s.csr.UID)
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate Cluster %s with the request: %w", patched.Name, err)
	}
	s.cluster = patched
	return nil
}

// rollBack deletes the Cluster that was created for this request, and marks its token as unused, unless other requests
// use them.
func (c *Controller) rollBack(ctx context.Context, s *state) error {
	if s.parsed.TokenID == "" {
		return nil
	}
	if err := c.rollBackCluster(ctx, s); err != nil {
		return err
	}
	secret, found, err := c.getTokenSecret(ctx, s.parsed.TokenID)
	if err != nil || !found || !hasRequest(secret, s.csr.UID) {
		return err
	}
	patched := secret.DeepCopy()
	if removeRequest(patched, s.csr.UID) {
		for _, annotation := range []string{kube.AnnotationRegistered, requestsAnnotation, kube.AnnotationFirstUse, clusterUIDAnnotation} {
			delete(patched.Annotations, annotation)
		}
	}
	return c.patchToken(ctx, secret, patched)
}

// rollBackCluster removes this request from the Cluster, and deletes the Cluster if this was its only request.
func (c *Controller) rollBackCluster(ctx context.Context, s *state) error {
	existing, found, err := c.getCluster(ctx, s.parsed.Cluster)
	if err != nil || !found || !hasRequest(existing, s.csr.UID) {
		return err
	}
	patched := existing.DeepCopy()
	if removeRequest(patched, s.csr.UID) {
		err = c.Live.Delete(ctx, existing, client.Preconditions{UID: &existing.UID, ResourceVersion: &existing.ResourceVersion})
	} else {
		err = c.Live.Patch(ctx, patched, client.MergeFromWithOptions(existing, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("roll back Cluster %s: %w", existing.Name, err)
	}
	return nil
}
