package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// vault keeps the credentials of one registration on the hub.
type vault struct {
	hub                         client.Client
	namespace, cluster, attempt string
	undo                        []func(context.Context) error
}

// contents are what one Secret is to hold.
type contents struct {
	name string
	data map[string][]byte
}

// errForeignSecret says that a Secret which a registration would make exists and belongs to someone else.
var errForeignSecret = errors.New("exists and was not made by a registration; choose another cluster name or --cluster-namespace")

// keep writes a Secret before the Cluster exists. One of a Cluster that exists is refused, one that a former
// registration left is refreshed.
func (v *vault) keep(ctx context.Context, want contents) error {
	return v.write(ctx, want, nil)
}

// own writes a Secret that goes with cluster.
func (v *vault) own(ctx context.Context, want contents, cluster *clusterv1alpha1.Cluster) error {
	return v.write(ctx, want, cluster)
}

func (v *vault) write(ctx context.Context, want contents, owner *clusterv1alpha1.Cluster) error {
	err := insist(ctx, func() error {
		secret := systemSecret(v.namespace, want.name)
		err := v.hub.Get(ctx, client.ObjectKeyFromObject(secret), secret)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		found := err == nil
		if found {
			if err := v.check(ctx, secret, owner); err != nil {
				return err
			}
		}
		before := secret.DeepCopy()
		secret.Data = maps.Clone(want.data)
		metav1.SetMetaDataAnnotation(&secret.ObjectMeta, attemptAnnotation, v.attempt)
		unmark(secret)
		if owner != nil {
			Mark(secret, owner)
		}
		// Noted before the request, since a request that was cut off may have done its work.
		v.undo = append(v.undo, func(ctx context.Context) error { return v.takeBack(ctx, before, found) })
		if !found {
			return v.hub.Create(ctx, secret, client.FieldOwner(kube.FieldManager))
		}
		return v.hub.Update(ctx, secret, client.FieldOwner(kube.FieldManager))
	})
	if err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("write Secret %s/%s on the control plane: %w", v.namespace, want.name, err)
	}
	return err
}

// check refuses a Secret that somebody else made, and one of another Cluster than owner.
func (v *vault) check(ctx context.Context, live *corev1.Secret, owner *clusterv1alpha1.Cluster) error {
	if live.Labels[clusterv1alpha1.SystemLabel] != "true" {
		return fmt.Errorf("it %w", errForeignSecret)
	}
	holder := Marked(live)
	if holder == "" || owner != nil && holder == owner.UID {
		return nil
	}
	cluster := &clusterv1alpha1.Cluster{}
	err := v.hub.Get(ctx, client.ObjectKey{Name: live.Labels[clusterLabel]}, cluster)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	// One that was restored has another uid than it had, and refers to the Secret.
	if err == nil && (cluster.UID == holder || slices.Contains(secretsOf(cluster), clusterv1alpha1.LocalSecretReference{Namespace: live.Namespace, Name: live.Name})) {
		return Taken{ID: cluster.Spec.ID, Name: v.cluster}
	}
	return nil
}

// takeBack makes a Secret what it was before this run wrote it, or deletes it if there was none. It leaves alone one
// that another run has written since.
func (v *vault) takeBack(ctx context.Context, before *corev1.Secret, existed bool) error {
	err := insist(ctx, func() error {
		live := &corev1.Secret{}
		if err := v.hub.Get(ctx, client.ObjectKeyFromObject(before), live); err != nil {
			return client.IgnoreNotFound(err)
		}
		if live.Annotations[attemptAnnotation] != v.attempt {
			return nil
		}
		if !existed {
			return client.IgnoreNotFound(v.hub.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}))
		}
		live.Data, live.Annotations, live.Labels = before.Data, before.Annotations, before.Labels
		return client.IgnoreNotFound(v.hub.Update(ctx, live, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("take back Secret %s/%s on the control plane: %w", before.Namespace, before.Name, err)
	}
	return nil
}

// rollBack takes everything back, the newest first.
func (v *vault) rollBack(ctx context.Context) error {
	var errs []error
	for i := len(v.undo) - 1; i >= 0; i-- {
		errs = append(errs, v.undo[i](ctx))
	}
	return errors.Join(errs...)
}

// AdoptSecrets lets the Secrets that cluster refers to go with it: those that its own registration wrote, and was cut
// off before it could do that, and those that went with an earlier Cluster of its name, as after the hub was restored.
// hub must read from the API server.
func AdoptSecrets(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return eachSecret(ctx, hub, cluster, func(secret *corev1.Secret) error {
		if isTrace(secret, cluster.Name) && Marked(secret) != cluster.UID {
			return Adopt(ctx, hub, cluster, secret)
		}
		return markWritten(ctx, hub, cluster, secret)
	})
}

// markOwn is AdoptSecrets for a Cluster that may be gone: only what its own registration wrote is its own.
func markOwn(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	return eachSecret(ctx, hub, cluster, func(secret *corev1.Secret) error { return markWritten(ctx, hub, cluster, secret) })
}

// eachSecret does something to those of the Secrets that cluster refers to which registrations made.
func eachSecret(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, do func(*corev1.Secret) error) error {
	for _, ref := range []*clusterv1alpha1.LocalSecretReference{cluster.Spec.SecretRef, cluster.Spec.ImpersonatorSecretRef} {
		if ref == nil {
			continue
		}
		secret := &corev1.Secret{}
		err := hub.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("read Secret %s/%s: %w", ref.Namespace, ref.Name, err)
		}
		if err != nil || secret.Labels[clusterv1alpha1.SystemLabel] != "true" {
			continue
		}
		if err := do(secret); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("write Secret %s/%s: %w", ref.Namespace, ref.Name, err)
		}
	}
	return nil
}

// markWritten lets a Secret go with cluster that the same run of a registration wrote.
func markWritten(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, secret *corev1.Secret) error {
	attempt := cluster.Annotations[attemptAnnotation]
	if attempt == "" || secret.Annotations[attemptAnnotation] != attempt || Marked(secret) != "" || cluster.UID == "" {
		return nil
	}
	Mark(secret, cluster)
	// Whoever changed it since, or the registration itself, makes this a conflict.
	return hub.Update(ctx, secret, client.FieldOwner(kube.FieldManager))
}
