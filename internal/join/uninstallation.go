package join

import (
	"context"
	"fmt"
	"slices"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// FindUninstalling returns "<kind> <key>" of the first of objects that is being deleted, or that the garbage collector
// will delete because its owner is deleted: role, or an earlier ClusterRole with its name. It returns "" if there is no
// such object. If the ClusterRole does not exist, role has only its name.
func FindUninstalling(ctx context.Context, member client.Reader, role *rbacv1.ClusterRole, objects []kube.Ref) (string, error) {
	for _, ref := range objects {
		live, key := &metav1.PartialObjectMetadata{}, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}
		live.SetGroupVersionKind(ref.GVK())
		found, err := read(ctx, member, live, key)
		if err != nil {
			return "", fmt.Errorf("on the cluster: %w", err)
		}
		hasDeletedOwner := slices.ContainsFunc(live.OwnerReferences, func(owner metav1.OwnerReference) bool {
			return owner.Kind == "ClusterRole" && owner.Name == role.Name && (owner.UID != role.UID || role.DeletionTimestamp != nil)
		})
		if found && (hasDeletedOwner || live.DeletionTimestamp != nil) {
			return ref.Kind + " " + key.String(), nil
		}
	}
	return "", nil
}

// AwaitUninstallation calls find, which must call FindUninstalling, until it returns "". It calls report for each new
// object.
func AwaitUninstallation(ctx context.Context, timeout time.Duration, find func(context.Context) (string, error), report func(object string)) error {
	var reported string
	var findErr error
	err := wait.PollUntilContextTimeout(ctx, readyPoll, timeout, true, func(context.Context) (bool, error) {
		// find gets ctx without the timeout, so that the objects are read at least once.
		var object string
		if object, findErr = find(ctx); object != "" && object != reported {
			report(object)
			reported = object
		}
		return object == "", findErr
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case findErr != nil: // wait.Interrupted is true for the timeout of a request of find, too
		return findErr
	case wait.Interrupted(err):
		return fmt.Errorf("a former agent is still being removed from the cluster: %s; try again when it is gone", reported)
	}
	return err
}
