package spaces

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// takenAgain is the time between two looks whether an id that another Cluster has is free; that it goes wakes us sooner.
	takenAgain = 30 * time.Second
	// RegistrationLimit is how long a registration by bootstrap token may take until its agent reports. What is abandoned goes then.
	RegistrationLimit = 15 * time.Minute
	// spaceAgain is the time between two looks whether the execution space of an earlier Cluster of the name is gone.
	spaceAgain = time.Second
)

// reset removes from a Cluster what the hub noted on it when it was leaving: it has been restored from a backup.
func (c *Controller) reset(ctx context.Context, s *state) error {
	clean := s.cluster.DeepCopy()
	if !fleet.RemoveDeregistration(clean) {
		return nil
	}
	// The lock makes sure that it still stays.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, clean, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("remove the orders of an earlier removal: %w", err)
	}
	s.cluster, s.member = clean, fleet.FromCluster(clean)
	return nil
}

// accept stops at a Cluster that cannot have an execution space: nothing is made for it, so that there is nothing to hold it for.
func (c *Controller) accept(_ context.Context, s *state) error {
	if taken(s.cluster) {
		return nil
	}
	if s.member.Refused != "" {
		return phase.Invalid{Err: errors.New(s.member.Refused)}
	}
	return nil
}

// taken says whether it was found that another Cluster had the id first.
func taken(cluster *clusterv1alpha1.Cluster) bool {
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	return ready != nil && ready.Reason == fleet.ReasonTaken
}

// claim gives the id to the Cluster alone. Of one that comes second it says so, and nothing is done to it.
func (c *Controller) claim(ctx context.Context, s *state) error {
	err := karmada.Claim(ctx, c.Live, s.cluster)
	if err != nil && !errors.Is(err, karmada.ErrTaken) {
		return err
	}
	if (err != nil) == taken(s.cluster) {
		if err != nil {
			s.again = takenAgain
			return phase.Invalid{Err: err}
		}
		return nil
	}
	judged := s.cluster.DeepCopy()
	if err == nil {
		// Whoever asks the cluster how it is says the rest.
		meta.RemoveStatusCondition(&judged.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	} else {
		meta.SetStatusCondition(&judged.Status.Conditions, metav1.Condition{
			Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionFalse, Reason: fleet.ReasonTaken, Message: err.Error(),
			LastTransitionTime: metav1.NewTime(c.Clock.Now()),
		})
	}
	// The lock keeps conditions of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if failure := c.Live.Status().Patch(ctx, judged, patch, client.FieldOwner(kube.FieldManager)); failure != nil {
		return fmt.Errorf("say who has the cluster ID: %w", failure)
	}
	s.cluster, s.member, s.again = judged, fleet.FromCluster(judged), takenAgain
	if err != nil {
		c.Events.Eventf(judged, nil, corev1.EventTypeWarning, fleet.ReasonTaken, "Claim", "%s", err)
		return phase.Invalid{Err: err}
	}
	s.again = 0
	return nil
}

// hold puts our finalizer on the Cluster before anything is made for it, and says whose it is.
func (c *Controller) hold(ctx context.Context, s *state) error {
	held := s.cluster.DeepCopy()
	changed := controllerutil.AddFinalizer(held, clusterv1alpha1.ClusterFinalizer)
	if held.Annotations[kube.AnnotationHub] == "" {
		hubID, err := karmada.HubID(ctx, c.Live)
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&held.ObjectMeta, kube.AnnotationHub, hubID)
		changed = true
	}
	if !changed {
		return nil
	}
	// The lock keeps finalizers of others, and fails if the Cluster is not as it was seen.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, held, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.cluster, s.member = held, fleet.FromCluster(held)
	return nil
}

// makeSpace makes or repairs the execution space, and for an agent what it needs there.
func (c *Controller) makeSpace(ctx context.Context, s *state) error {
	space := &corev1.Namespace{}
	err := c.Live.Get(ctx, client.ObjectKey{Name: s.member.Namespace}, space)
	switch {
	case apierrors.IsNotFound(err):
		err = c.createSpace(ctx, s)
	case err == nil && !space.DeletionTimestamp.IsZero():
		return phase.Wait{After: spaceAgain, Reason: "namespace " + space.Name + " of an earlier cluster to be gone"}
	case err == nil:
		err = c.repairSpace(ctx, s, space)
	}
	if err != nil {
		return fmt.Errorf("make the execution space: %w", err)
	}
	if s.member.Mode != fleet.Pull {
		return nil
	}
	return bootstrap.Grant(ctx, c.Live, s.cluster)
}

func (c *Controller) createSpace(ctx context.Context, s *state) error {
	space := karmada.NewSpace(s.cluster)
	if err := c.Live.Create(ctx, space, client.FieldOwner(kube.FieldManager)); err != nil {
		return client.IgnoreAlreadyExists(err)
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "CreateExecutionSpaceSucceed", "CreateExecutionSpace",
		"created namespace %s for cluster %s", space.Name, s.cluster.Name)
	return nil
}

// repairSpace lets the execution space go with the Cluster. One that was that of another cluster of the name is about to be deleted, with all that
// is in it.
func (c *Controller) repairSpace(ctx context.Context, s *state, space *corev1.Namespace) error {
	if !karmada.OfOther(space, s.cluster) {
		return karmada.AdoptSpace(ctx, c.Live, s.cluster, space)
	}
	exact := client.Preconditions{UID: &space.UID, ResourceVersion: &space.ResourceVersion}
	if err := c.Live.Delete(ctx, space, exact); client.IgnoreNotFound(err) != nil {
		return err
	}
	return phase.Wait{After: spaceAgain, Reason: "namespace " + space.Name + " of an earlier cluster to be gone"}
}

// adopt lets the credentials go with the Cluster that went with none, or an earlier one: a registration was cut off in between, or the hub restored.
func (c *Controller) adopt(ctx context.Context, s *state) error {
	if err := karmada.AdoptSecrets(ctx, c.Live, s.cluster); err != nil {
		return fmt.Errorf("adopt the credentials: %w", err)
	}
	return nil
}

// expire deletes a Cluster whose registration was abandoned: a certificate was approved, and no agent ever came.
func (c *Controller) expire(ctx context.Context, s *state) error {
	if s.cluster.Annotations[kube.AnnotationBootstrapToken] == "" || s.member.Ready {
		return nil
	}
	approved, err := time.Parse(time.RFC3339, s.cluster.Annotations[kube.AnnotationApproved])
	if err != nil {
		return nil //nolint:nilerr // without the time of its approval nothing is known of the registration
	}
	came, err := c.came(ctx, s)
	if err != nil || came {
		return err
	}
	if created := s.cluster.CreationTimestamp.Time; created.After(approved) {
		// It was restored from a backup, and its agent has yet to find it.
		approved = created
	}
	if left := RegistrationLimit - c.Clock.Since(approved); left > 0 {
		s.again = left
		return nil
	}
	log.FromContext(ctx).Info("the registration was abandoned")
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "RegistrationAbandoned", "Delete",
		"no agent of cluster %s has reported within %s", s.cluster.Name, RegistrationLimit)
	// An agent that comes now makes this a conflict.
	exact := client.Preconditions{UID: &s.cluster.UID, ResourceVersion: &s.cluster.ResourceVersion}
	if err := c.Live.Delete(ctx, s.cluster, exact); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the abandoned registration: %w", err)
	}
	return nil
}

// came says whether the agent of a pull member has ever been heard of.
func (c *Controller) came(ctx context.Context, s *state) (bool, error) {
	lease, err := c.lease(ctx, s)
	return lease != nil && lease.Spec.RenewTime != nil, err
}

// lease reads the Lease of the agent; nil if there is none.
func (c *Controller) lease(ctx context.Context, s *state) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	err := c.Live.Get(ctx, client.ObjectKey{Namespace: s.member.Namespace, Name: s.cluster.Name}, lease)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no lease is no error
	}
	if err != nil {
		return nil, fmt.Errorf("read the Lease of the agent: %w", err)
	}
	return lease, nil
}
