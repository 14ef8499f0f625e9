package inventory

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube/logkeys"
)

// DeleteRecordsOfOlderRegistrations deletes the records of earlier registrations with the same hub, which ended without
// a withdrawal. A hub has one registration of a cluster at a time, so no Store reads these records again. The hub must
// have confirmed that the scope of the Store is the present registration. The objects in the records stay on the
// member. An error is only logged, because the records do no harm.
func (s *Store) DeleteRecordsOfOlderRegistrations(ctx context.Context) {
	if err := s.deleteOlder(ctx); err != nil && ctx.Err() == nil {
		log.FromContext(ctx).Info("could not delete the records of earlier registrations", logkeys.Reason, err.Error())
	}
}

func (s *Store) deleteOlder(ctx context.Context) error {
	if s.scope.Hub == "" || s.scope.Registration == "" {
		return nil
	}
	older := fmt.Sprintf("%s=%s,%s!=%s", labelRecordHub, s.scope.hubLabel(), labelRecordScope, s.scope.label())
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
