package engine

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube/logkeys"
)

// ConfirmScope tells Run that the hub has said that Options.Scope is the registration of this cluster. Only then are
// the records of other registrations earlier ones: what the cluster itself remembers of its registration may be wrong.
func (e *Engine) ConfirmScope() { e.confirm() }

// outlive deletes the records of earlier registrations with the same hub, which were given up without being withdrawn: a hub has one
// registration of a cluster at a time, so nobody reads them any more. What they name stays on the cluster, for whoever is to have it.
func (s *store) outlive(ctx context.Context) {
	if err := s.deleteOlder(ctx); err != nil && ctx.Err() == nil {
		log.FromContext(ctx).Info("records of earlier registrations are left", logkeys.Reason, err.Error())
	}
}

func (s *store) deleteOlder(ctx context.Context) error {
	if s.domain.hub == "" || s.domain.scope == "" {
		return nil
	}
	older := fmt.Sprintf("%s=%s,%s!=%s", labelRecordHub, s.domain.hubKey(), labelRecordScope, s.domain.key())
	list, err := s.metadata.List(ctx, metav1.ListOptions{LabelSelector: older})
	if err != nil {
		return fmt.Errorf("list records of earlier registrations: %w", err)
	}
	for i := range list.Items {
		if err := s.metadata.Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete a record of an earlier registration: %w", err)
		}
	}
	return nil
}
