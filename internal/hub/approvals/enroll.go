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

// leavePause is the time between two looks whether an earlier Cluster of the name is gone.
const leavePause = 500 * time.Millisecond

// enroll makes the Cluster, unless there is one already that this token may have a certificate for.
func (c *Controller) enroll(ctx context.Context, s *state) error {
	live, found, err := c.cluster(ctx, s.petition.Cluster)
	if err != nil {
		return err
	}
	if err := s.spent(live, found); err != nil {
		return err
	}
	if found {
		return c.adopt(ctx, s, live)
	}
	made := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: s.petition.Cluster, Annotations: map[string]string{
			kube.AnnotationBootstrapToken: s.petition.TokenID,
			kube.AnnotationApproved:       c.now(),
			requestsAnnotation:            string(s.csr.UID),
		}},
		Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull, ID: s.petition.ID},
	}
	err = karmada.Enroll(ctx, c.Live, made)
	if err == nil {
		s.cluster = made
		return nil
	}
	if !errors.Is(err, karmada.ErrTaken) {
		return fmt.Errorf("make Cluster %s: %w", s.petition.Cluster, err)
	}
	// It may be another request of the same cluster that was faster.
	if live, found, err = c.cluster(ctx, s.petition.Cluster); err != nil {
		return err
	}
	if !found {
		return s.taken()
	}
	return c.adopt(ctx, s, live)
}

// taken is the denial for a name or an id that is another cluster's.
func (s *state) taken() error {
	return denied(bootstrap.ReasonTaken, karmada.Taken{ID: s.petition.ID, Name: s.petition.Cluster})
}

func (c *Controller) now() string { return c.Clock.Now().UTC().Format(time.RFC3339) }

// cluster reads a Cluster.
func (c *Controller) cluster(ctx context.Context, name string) (live *clusterv1alpha1.Cluster, found bool, err error) {
	live = &clusterv1alpha1.Cluster{}
	err = c.Live.Get(ctx, client.ObjectKey{Name: name}, live)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read Cluster %s: %w", name, err)
	}
	return live, err == nil, nil
}

// adopt takes a Cluster that is there for the one that is asked for: one that an earlier try with the same token made and that has never reported,
// or any that the token is for alone.
func (c *Controller) adopt(ctx context.Context, s *state, live *clusterv1alpha1.Cluster) error {
	if live.Spec.SyncMode != clusterv1alpha1.Pull || live.Spec.ID != s.petition.ID {
		return s.taken()
	}
	if !live.DeletionTimestamp.IsZero() {
		return phase.Wait{After: leavePause, Reason: "an earlier registration of the cluster is still going"}
	}
	only, renewed := bootstrap.OnlyFor(s.csr.Spec.Groups)
	renewed = renewed && only == live.Name
	again := live.Annotations[kube.AnnotationBootstrapToken] == s.petition.TokenID && !fleet.FromCluster(live).Ready
	if !again && !renewed {
		return s.taken()
	}
	err := karmada.Claim(ctx, c.Live, live)
	if errors.Is(err, karmada.ErrTaken) {
		return s.taken()
	}
	if err != nil {
		return err
	}
	s.cluster = live
	if !again {
		// It was there before. The token is not one for what may come after it.
		return c.restrict(ctx, s.petition.TokenID, live)
	}
	if requested(live, s.csr.UID) {
		return nil
	}
	return c.note(ctx, s)
}

// note writes onto the Cluster that a certificate is approved for it now, and that this request is one of those that it is for. One that bears no
// request is nobody's to take back.
func (c *Controller) note(ctx context.Context, s *state) error {
	noted := s.cluster.DeepCopy()
	if len(requests(noted)) > 0 {
		request(noted, s.csr.UID)
	}
	metav1.SetMetaDataAnnotation(&noted.ObjectMeta, kube.AnnotationApproved, c.now())
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, noted, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write on Cluster %s that it registers: %w", noted.Name, err)
	}
	s.cluster = noted
	return nil
}

// takeBack deletes the Cluster that was made for this request, and makes the token that it used worth a registration again, unless there is another
// request that has done with them what this one did.
func (c *Controller) takeBack(ctx context.Context, s *state) error {
	if s.petition.TokenID == "" {
		return nil
	}
	if err := c.takeBackCluster(ctx, s); err != nil {
		return err
	}
	secret, found, err := c.tokenSecret(ctx, s.petition.TokenID)
	if err != nil || !found || !requested(secret, s.csr.UID) {
		return err
	}
	unmarked := secret.DeepCopy()
	if forget(unmarked, s.csr.UID) {
		for _, mark := range []string{kube.AnnotationRegistered, requestsAnnotation, sinceAnnotation, onlyAnnotation} {
			delete(unmarked.Annotations, mark)
		}
	}
	return c.mark(ctx, secret, unmarked)
}

func (c *Controller) takeBackCluster(ctx context.Context, s *state) error {
	live, found, err := c.cluster(ctx, s.petition.Cluster)
	if err != nil || !found || !requested(live, s.csr.UID) {
		return err
	}
	kept := live.DeepCopy()
	if forget(kept, s.csr.UID) {
		err = c.Live.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion})
	} else {
		err = c.Live.Patch(ctx, kept, client.MergeFromWithOptions(live, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back Cluster %s: %w", live.Name, err)
	}
	return nil
}
