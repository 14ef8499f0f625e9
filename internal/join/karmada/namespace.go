package karmada

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// namespaceWait is how long a namespace that is being deleted may take to go.
const namespaceWait = 20 * time.Second

// makeSystemNamespace makes a namespace of the hub unless it is there. It waits for one to go that is on its way. One
// that another attempt made is noted to be used by others, too: nobody takes it back then.
func makeSystemNamespace(ctx context.Context, hub client.Client, name, attempt string) error {
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, namespaceWait, true, func(context.Context) (bool, error) {
		live := &corev1.Namespace{}
		err := hub.Get(ctx, client.ObjectKey{Name: name}, live)
		if err == nil {
			if !live.DeletionTimestamp.IsZero() {
				return false, nil
			}
			return shareNamespace(ctx, hub, live, attempt)
		}
		if !apierrors.IsNotFound(err) {
			return false, err
		}
		live.Name, live.Labels = name, map[string]string{clusterv1alpha1.SystemLabel: "true"}
		if attempt != "" {
			metav1.SetMetaDataAnnotation(&live.ObjectMeta, attemptAnnotation, attempt)
		}
		err = hub.Create(ctx, live, client.FieldOwner(kube.FieldManager))
		if apierrors.IsAlreadyExists(err) {
			// Another one was faster, who must learn that he is not alone.
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

// shareNamespace notes that not only the attempt uses live that made it, and says whether that is known now.
func shareNamespace(ctx context.Context, hub client.Client, live *corev1.Namespace, attempt string) (bool, error) {
	maker := live.Annotations[attemptAnnotation]
	if maker == "" || maker == attempt {
		return true, nil
	}
	shared := live.DeepCopy()
	delete(shared.Annotations, attemptAnnotation)
	err := hub.Patch(ctx, shared, client.MergeFromWithOptions(live, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// dropNamespace deletes a namespace of the hub that this run made, if nobody else uses it and nothing is in it.
func (j *joining) dropNamespace(ctx context.Context, name string) error {
	live := &corev1.Namespace{}
	err := j.hub.Get(ctx, client.ObjectKey{Name: name}, live)
	if err != nil || live.Annotations[attemptAnnotation] != j.vault.attempt || !live.DeletionTimestamp.IsZero() {
		return client.IgnoreNotFound(err)
	}
	strange, err := footprint{member: j.hub, cluster: j.request.Name, namespace: name, hubID: j.member.hubID}.stranger(ctx)
	if err != nil || strange != "" {
		return err
	}
	// Whoever comes in between makes this a conflict.
	err = j.hub.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("take back namespace %s on the control plane: %w", name, err)
	}
	return nil
}
