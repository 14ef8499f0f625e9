package executionnamespaces

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
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// idRetryInterval is the interval between two attempts to claim an ID that another Cluster has. The deletion of
	// that Cluster triggers a reconcile sooner.
	idRetryInterval = 30 * time.Second
	// RegistrationTimeout is the time from the first use of a bootstrap token until the registration must be complete.
	// Then the Cluster of an incomplete registration is deleted.
	RegistrationTimeout = 15 * time.Minute
	// registrationInterval is the interval between two checks of an incomplete registration whose Cluster is ready, or
	// that has exceeded RegistrationTimeout. No watch reports that its agent becomes alive or silent.
	registrationInterval = 10 * time.Second
	// namespaceRetryInterval is the interval between two checks while the execution namespace of an earlier Cluster with
	// the same name is being deleted.
	namespaceRetryInterval = time.Second
)

// clearDeregistration removes the annotations of an earlier removal from a Cluster that was restored from a backup.
func (c *Controller) clearDeregistration(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	if !fleet.RemoveDeregistration(changed) {
		return nil
	}
	// The optimistic lock makes the patch fail if the Cluster has been deleted meanwhile.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("remove the annotations of an earlier removal: %w", err)
	}
	s.cluster, s.member = changed, fleet.FromCluster(changed)
	return nil
}

// validate stops the reconcile of a refused Cluster. Nothing is created for it, so it needs no finalizer.
func (c *Controller) validate(_ context.Context, s *state) error {
	if isIDTaken(s.cluster) { // this sets Refused too, but claimID must try again
		return nil
	}
	if s.member.Refused != "" {
		return phase.TerminalError{Err: errors.New(s.member.Refused)}
	}
	return nil
}

// isIDTaken returns whether the Ready condition reports that another Cluster has the ID.
func isIDTaken(cluster *clusterv1alpha1.Cluster) bool {
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	return ready != nil && ready.Reason == fleet.ReasonIDTaken
}

// claimID reserves the ID for the Cluster. If another Cluster has the ID, it reports that in the Ready condition and
// stops the reconcile until idRetryInterval has passed.
func (c *Controller) claimID(ctx context.Context, s *state) error {
	err := karmada.ReserveID(ctx, c.Live, s.cluster)
	if err != nil && !errors.Is(err, karmada.ErrAlreadyRegistered) {
		return err
	}
	if (err != nil) == isIDTaken(s.cluster) { // the Ready condition is correct already
		if err != nil {
			s.requeueAfter = idRetryInterval
			return phase.TerminalError{Err: err}
		}
		return nil
	}
	changed := s.cluster.DeepCopy()
	if err == nil {
		// The health check of the Cluster sets the condition again.
		meta.RemoveStatusCondition(&changed.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	} else {
		meta.SetStatusCondition(&changed.Status.Conditions, metav1.Condition{
			Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionFalse, Reason: fleet.ReasonIDTaken, Message: err.Error(),
			LastTransitionTime: metav1.NewTime(c.Clock.Now()),
		})
	}
	// The optimistic lock keeps the conditions of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if patchErr := c.Live.Status().Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); patchErr != nil {
		return fmt.Errorf("set the Ready condition for the cluster ID: %w", patchErr)
	}
	s.cluster, s.member, s.requeueAfter = changed, fleet.FromCluster(changed), idRetryInterval
	if err != nil {
		c.Events.Eventf(changed, nil, corev1.EventTypeWarning, fleet.ReasonIDTaken, "Claim", "%s", err)
		return phase.TerminalError{Err: err}
	}
	s.requeueAfter = 0
	return nil
}

// ensureFinalizer sets the finalizer and the hub ID on the Cluster before anything is created for it.
func (c *Controller) ensureFinalizer(ctx context.Context, s *state) error {
	withFinalizer := s.cluster.DeepCopy()
	changed := controllerutil.AddFinalizer(withFinalizer, clusterv1alpha1.ClusterFinalizer)
	if withFinalizer.Annotations[kube.AnnotationHub] == "" {
		hubID, err := join.ClusterUID(ctx, c.Live)
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&withFinalizer.ObjectMeta, kube.AnnotationHub, hubID)
		changed = true
	}
	if !changed {
		return nil
	}
	// The optimistic lock keeps the finalizers of others.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, withFinalizer, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.cluster, s.member = withFinalizer, fleet.FromCluster(withFinalizer)
	return nil
}

// ensureNamespace creates or repairs the execution namespace, and the agent's RBAC for a pull member. It first deletes
// the namespace of an earlier Cluster with the same name.
func (c *Controller) ensureNamespace(ctx context.Context, s *state) error {
	namespace := &corev1.Namespace{}
	err := c.Live.Get(ctx, client.ObjectKey{Name: s.member.Namespace}, namespace)
	if err == nil && namespace.DeletionTimestamp.IsZero() && karmada.BelongsToEarlierCluster(namespace, s.cluster) {
		// All objects of the earlier Cluster are deleted with its namespace.
		preconditions := client.Preconditions{UID: &namespace.UID, ResourceVersion: &namespace.ResourceVersion}
		if err := c.Live.Delete(ctx, namespace, preconditions); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete the execution namespace of an earlier cluster: %w", err)
		}
		namespace.DeletionTimestamp = ptr.To(metav1.Now()) // the API server has set it too
	}
	if err == nil && !namespace.DeletionTimestamp.IsZero() {
		return phase.Wait{After: namespaceRetryInterval, Reason: "namespace " + namespace.Name + " of an earlier cluster to be deleted"}
	}
	created, err := karmada.EnsureExecutionNamespace(ctx, c.Live, s.cluster)
	if err != nil {
		return fmt.Errorf("ensure the execution namespace: %w", err)
	}
	if created {
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "CreateExecutionSpaceSucceed", "CreateExecutionSpace",
			"created namespace %s for cluster %s", s.member.Namespace, s.cluster.Name)
	}
	if s.member.Mode != fleet.Pull {
		return nil
	}
	return bootstrap.EnsureAgentRBAC(ctx, c.Live, s.cluster)
}

// finishRegistration completes the registration with a bootstrap token when the Cluster is ready and its agent is
// alive. After RegistrationTimeout it deletes the Cluster of an incomplete registration, so that the holder of a token
// cannot reserve the ID of another cluster forever. An incomplete registration has kube.AnnotationFirstUse, the time of
// the first use of the token. A complete registration never expires, even if the Lease and the status are lost.
func (c *Controller) finishRegistration(ctx context.Context, s *state) error {
	started, err := time.Parse(time.RFC3339, s.cluster.Annotations[kube.AnnotationFirstUse])
	if err != nil {
		return nil //nolint:nilerr // the registration is complete, or it used no token
	}
	alive, err := c.isAgentAlive(ctx, s)
	if err != nil {
		return err
	}
	isReady := s.member.Ready && !s.member.Down
	if alive && isReady {
		return c.completeRegistration(ctx, s)
	}
	if created := s.cluster.CreationTimestamp.Time; created.After(started.Add(RegistrationTimeout)) {
		// The Cluster was restored from a backup. Its agent needs time to reconnect.
		started = created
	}
	remaining := RegistrationTimeout - c.Clock.Since(started)
	switch {
	case remaining <= 0 && !alive:
		return c.deleteIncompleteRegistration(ctx, s)
	case remaining <= 0 || isReady:
		s.requeueAfter = registrationInterval
	default:
		s.requeueAfter = remaining
	}
	return nil
}

// completeRegistration removes kube.AnnotationFirstUse from the Cluster.
func (c *Controller) completeRegistration(ctx context.Context, s *state) error {
	changed := s.cluster.DeepCopy()
	delete(changed.Annotations, kube.AnnotationFirstUse)
	// The optimistic lock makes the patch fail if the Cluster has changed since it was read.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("record that the registration is complete: %w", err)
	}
	s.cluster = changed
	return nil
}

// deleteIncompleteRegistration deletes the Cluster of an incomplete registration. If the Cluster has content, it is in
// use, so deleteIncompleteRegistration completes the registration instead.
func (c *Controller) deleteIncompleteRegistration(ctx context.Context, s *state) error {
	for _, list := range []client.ObjectList{&workv1alpha1.WorkList{}, &libv1beta1.ConfigurationGroupList{}} {
		if err := c.Live.List(ctx, list, client.InNamespace(s.member.Namespace), client.Limit(1)); err != nil {
			return fmt.Errorf("list the content of the cluster: %w", err)
		}
		if meta.LenList(list) > 0 {
			return c.completeRegistration(ctx, s)
		}
	}
	log.FromContext(ctx).Info("deleting the cluster of an abandoned registration")
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "RegistrationAbandoned", "Delete",
		"no agent has made cluster %s ready within %s", s.cluster.Name, RegistrationTimeout)
	// If the Cluster has become ready since it was read, the API server returns a conflict.
	preconditions := client.Preconditions{UID: &s.cluster.UID, ResourceVersion: &s.cluster.ResourceVersion}
	if err := c.Live.Delete(ctx, s.cluster, preconditions); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the cluster of an abandoned registration: %w", err)
	}
	return nil
}

// getLease returns the Lease of the agent from the API server, nil if it does not exist.
func (c *Controller) getLease(ctx context.Context, s *state) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	err := c.Live.Get(ctx, client.ObjectKey{Namespace: s.member.Namespace, Name: s.cluster.Name}, lease)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // a missing Lease is no error
	}
	if err != nil {
		return nil, fmt.Errorf("read the Lease of the agent: %w", err)
	}
	return lease, nil
}
