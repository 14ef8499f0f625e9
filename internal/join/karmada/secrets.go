package karmada

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// errForeignSecret is the error for a Secret that no registration created.
var errForeignSecret = errors.New("it exists and was not made by a registration; choose another cluster name or --cluster-namespace")

// writeSecret writes credentials of cluster, and makes cluster their owner. A Secret of a deleted Cluster is replaced.
func writeSecret(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, ref clusterv1alpha1.LocalSecretReference, data map[string][]byte) error {
	err := retryStale(ctx, func() error {
		secret, err := getSecret(ctx, hub, cluster, ref)
		if err != nil {
			return err
		}
		secret.Data = data
		SetOwnerLabels(secret, cluster)
		metav1.SetMetaDataAnnotation(&secret.ObjectMeta, attemptAnnotation, cluster.Annotations[attemptAnnotation])
		if secret.UID == "" {
			return hub.Create(ctx, secret, client.FieldOwner(kube.FieldManager))
		}
		return hub.Update(ctx, secret, client.FieldOwner(kube.FieldManager))
	})
	if err != nil && !errors.Is(err, ErrAlreadyRegistered) {
		return fmt.Errorf("write Secret %s/%s on the control plane: %w", ref.Namespace, ref.Name, err)
	}
	return err
}

// removeSecrets deletes the Secrets of cluster that the run with this attempt wrote.
func removeSecrets(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, attempt string) error {
	var errs []error
	for _, ref := range secretsOf(cluster) {
		secret := named(corev1.SchemeGroupVersion.WithKind("Secret"), ref.Namespace, ref.Name)
		err := hub.Get(ctx, client.ObjectKeyFromObject(secret), secret)
		if err == nil && isOwnedBy(secret, cluster.Name) && OwnerUID(secret) == cluster.UID && secret.Annotations[attemptAnnotation] == attempt {
			err = deleteIfUnchanged(ctx, hub, secret)
		}
		if client.IgnoreNotFound(err) != nil {
			errs = append(errs, fmt.Errorf("delete Secret %s/%s on the control plane: %w", ref.Namespace, ref.Name, err))
		}
	}
	return errors.Join(errs...)
}

// getSecret reads a Secret so that the registration of cluster can write it. If it does not exist, getSecret returns a
// new object without a UID. It fails if the Secret is foreign, or belongs to another existing Cluster.
func getSecret(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, ref clusterv1alpha1.LocalSecretReference) (*corev1.Secret, error) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name}}
	if err := hub.Get(ctx, client.ObjectKeyFromObject(secret), secret); err != nil {
		return secret, client.IgnoreNotFound(err)
	}
	if secret.Labels[clusterv1alpha1.SystemLabel] != "true" {
		return nil, errForeignSecret
	}
	owner := OwnerUID(secret)
	if owner == "" || owner == cluster.UID {
		return secret, nil
	}
	other := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: secret.Labels[clusterLabel]}, other)
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	// After a restore from a backup, the other Cluster has a new UID, but its spec still refers to the Secret.
	if err == nil && other.UID != cluster.UID && (other.UID == owner || slices.Contains(secretsOf(other), ref)) {
		return nil, AlreadyRegisteredError{ID: other.Spec.ID, Name: cluster.Name}
	}
	return secret, nil
}

// AdoptSecrets makes cluster the owner of the Secrets in its spec if an earlier Cluster with the same name was their
// owner, as after a restore of the hub. hub must read from the API server.
func AdoptSecrets(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	for _, ref := range []*clusterv1alpha1.LocalSecretReference{cluster.Spec.SecretRef, cluster.Spec.ImpersonatorSecretRef} {
		if ref == nil {
			continue
		}
		secret := &corev1.Secret{}
		err := hub.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret)
		if err == nil && isOwnedBy(secret, cluster.Name) && OwnerUID(secret) != cluster.UID {
			err = Adopt(ctx, hub, cluster, secret)
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("adopt Secret %s/%s: %w", ref.Namespace, ref.Name, err)
		}
	}
	return nil
}
