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

// deletionRetryInterval is the interval between two checks whether an earlier Cluster with the same name is deleted.
const deletionRetryInterval = 500 * time.Millisecond

// ensureCluster creates the Cluster, or adopts an existing one that the token is valid for.
func (c *Controller) ensureCluster(ctx context.Context, s *state) error {
	live, found, err := c.getCluster(ctx, s.parsed.Cluster)
	if err != nil {
		return err
	}
	if err := s.checkNotRemoved(live, found); err != nil {
		return err
	}
	if found {
		return c.adoptCluster(ctx, s, live)
	}
	created := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: s.parsed.Cluster, Annotations: map[string]string{
			kube.AnnotationBootstrapToken: s.parsed.TokenID,
			kube.AnnotationApproved:       c.timestamp(),
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
	if live, found, err = c.getCluster(ctx, s.parsed.Cluster); err != nil {
		return err
	}
	if !found {
		return s.takenError()
	}
	return c.adoptCluster(ctx, s, live)
}

// takenError returns the denial of a name or an ID that another cluster has.
func (s *state) takenError() error {
	return denied(bootstrap.ReasonClusterTaken, karmada.AlreadyRegisteredError{ID: s.parsed.ID, Name: s.parsed.Cluster})
}

func (c *Controller) timestamp() string { return c.Clock.Now().UTC().Format(time.RFC3339) }

// getCluster reads a Cluster.
func (c *Controller) getCluster(ctx context.Context, name string) (live *clusterv1alpha1.Cluster, found bool, err error) {
	live = &clusterv1alpha1.Cluster{}
	err = c.Live.Get(ctx, client.ObjectKey{Name: name}, live)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read Cluster %s: %w", name, err)
	}
	return live, err == nil, nil
}

// adoptCluster uses an existing Cluster for the request. It must have been created for an earlier request with the same
// token and never reported, or be the only Cluster that the token is valid for.
func (c *Controller) adoptCluster(ctx context.Context, s *state, live *clusterv1alpha1.Cluster) error {
	if live.Spec.SyncMode != clusterv1alpha1.Pull || live.Spec.ID != s.parsed.ID {
		return s.takenError()
	}
	if !live.DeletionTimestamp.IsZero() {
		return phase.Wait{After: deletionRetryInterval, Reason: "the Cluster of an earlier registration is being deleted"}
	}
	boundCluster, forThisCluster := bootstrap.BoundCluster(s.csr.Spec.Groups)
	forThisCluster = forThisCluster && boundCluster == live.Name
	sameToken := live.Annotations[kube.AnnotationBootstrapToken] == s.parsed.TokenID && !fleet.FromCluster(live).Ready
	if !sameToken && !forThisCluster {
		return s.takenError()
	}
	err := karmada.ReserveID(ctx, c.Live, live)
	if errors.Is(err, karmada.ErrAlreadyRegistered) {
		return s.takenError()
	}
	if err != nil {
		return err
	}
	s.cluster = live
	if !sameToken {
		// The Cluster existed before. The token must not be valid for a later Cluster with the same name.
		return c.restrictToken(ctx, s.parsed.TokenID, live)
	}
	if hasRequest(live, s.csr.UID) {
		return nil
	}
	return c.recordApproval(ctx, s)
}

// recordApproval annotates the Cluster with the time of the approval and with this request. If the Cluster has no
// requests, it was not created for one, and no rollback must delete it.
func (c *Controller) recordApproval(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	if len(requestUIDs(changed)) > 0 {
		addRequest(changed, s.csr.UID)
	}
	metav1.SetMetaDataAnnotation(&changed.ObjectMeta, kube.AnnotationApproved, c.timestamp())
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate Cluster %s with the approval: %w", changed.Name, err)
	}
	s.cluster = changed
	return nil
}

// rollBack deletes the Cluster that was created for this request, and makes its token unused again, unless they have
// other requests.
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
	changed := secret.DeepCopy()
	if removeRequest(changed, s.csr.UID) {
		for _, mark := range []string{kube.AnnotationRegistered, requestsAnnotation, firstUseAnnotation, clusterUIDAnnotation} {
			delete(changed.Annotations, mark)
		}
	}
	return c.patchToken(ctx, secret, changed)
}

func (c *Controller) rollBackCluster(ctx context.Context, s *state) error {
	live, found, err := c.getCluster(ctx, s.parsed.Cluster)
	if err != nil || !found || !hasRequest(live, s.csr.UID) {
		return err
	}
	changed := live.DeepCopy()
	if removeRequest(changed, s.csr.UID) {
		err = c.Live.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion})
	} else {
		err = c.Live.Patch(ctx, changed, client.MergeFromWithOptions(live, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("roll back Cluster %s: %w", live.Name, err)
	}
	return nil
}
