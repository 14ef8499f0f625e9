package summaries

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// addFinalizer adds the finalizer to the summary before the first delivery. A summary without the finalizer has neither
// objects on the member nor generated values.
func (c *Controller) addFinalizer(ctx context.Context, s *state) error {
	if len(s.compositions)+len(s.local.compositions) == 0 && len(s.deployed)+len(s.local.deployed) == 0 {
		return nil
	}
	return c.ensureFinalizer(ctx, s)
}

// ensureFinalizer adds the finalizer if it is missing. It fails with a conflict if the summary has changed.
func (c *Controller) ensureFinalizer(ctx context.Context, s *state) error {
	if controllerutil.ContainsFinalizer(s.summary, configv1beta1.ClusterSummaryFinalizer) {
		return nil
	}
	updated := s.summary.DeepCopy()
	controllerutil.AddFinalizer(updated, configv1beta1.ClusterSummaryFinalizer)
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, updated, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.summary = updated
	return nil
}

// removeFinalizer removes the finalizer of a deleted summary after everything is withdrawn or abandoned.
func (c *Controller) removeFinalizer(ctx context.Context, s *state) error {
	if !s.isDeleting() || !s.isWithdrawn || !s.local.isWithdrawn {
		return nil
	}
	updated := s.summary.DeepCopy()
	if !controllerutil.RemoveFinalizer(updated, configv1beta1.ClusterSummaryFinalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	err := c.Hub.Patch(ctx, updated, patch, client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil // an earlier reconcile has removed the finalizer, and the cache is behind
	}
	if err != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	if s.abandonment == nil {
		return nil
	}
	return c.reportAbandoned(ctx, s)
}
