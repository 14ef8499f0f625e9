package karmada

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// unfinishedAnnotation marks a Cluster whose registration is not finished.
const unfinishedAnnotation = "towline.dev/registration-unfinished"

// IsRegistering returns whether cluster was created by a run of Join that has not finished. Its Secrets may not exist
// yet. It also returns true if cluster is being deleted.
func IsRegistering(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Spec.SyncMode == clusterv1alpha1.Push && cluster.Annotations[unfinishedAnnotation] != ""
}

// isUnfinished returns whether a run can resume the registration: it has not finished, and cluster is not being
// deleted.
func isUnfinished(cluster *clusterv1alpha1.Cluster) bool {
	return IsRegistering(cluster) && cluster.DeletionTimestamp.IsZero()
}

// resume makes the Cluster of an earlier run the Cluster of this run. If the earlier run was not killed, its next check
// of the attempt fails. resume returns an ErrAlreadyRegistered if another run has resumed the Cluster first.
func (j *registration) resume(ctx context.Context) error {
	desired := j.cluster
	err := j.update(ctx, j.unfinished, func(live *clusterv1alpha1.Cluster) {
		for key, value := range desired.Annotations {
			metav1.SetMetaDataAnnotation(&live.ObjectMeta, key, value)
		}
		// Other fields keep their values: users may have set them.
		spec, want := &live.Spec, desired.Spec
		spec.APIEndpoint, spec.ProxyURL, spec.InsecureSkipTLSVerification = want.APIEndpoint, want.ProxyURL, want.InsecureSkipTLSVerification
		spec.SecretRef, spec.ImpersonatorSecretRef = want.SecretRef, want.ImpersonatorSecretRef
		spec.Provider, spec.Region, spec.Zones = want.Provider, want.Region, want.Zones
	})
	if err != nil {
		return err
	}
	return ReserveID(ctx, j.hub, j.cluster)
}

// finish marks the registration as finished, if the Cluster still belongs to this run.
func (j *registration) finish(ctx context.Context) error {
	return j.update(ctx, j.cluster, func(live *clusterv1alpha1.Cluster) { delete(live.Annotations, unfinishedAnnotation) })
}

// update calls change for the live Cluster and writes it. It fails unless the UID and the attempt are those of
// expected.
func (j *registration) update(ctx context.Context, expected *clusterv1alpha1.Cluster, change func(live *clusterv1alpha1.Cluster)) error {
	err := retryStale(ctx, func() error {
		live, err := j.read(ctx, expected)
		if err != nil {
			return err
		}
		change(live)
		if err := j.hub.Update(ctx, live, client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
		j.cluster = live
		return nil
	})
	if err != nil && !errors.Is(err, ErrAlreadyRegistered) {
		return fmt.Errorf("update cluster(%s): %w", expected.Name, err)
	}
	return err
}

// read reads the Cluster. It returns an ErrAlreadyRegistered if the attempt is not that of expected, or the
// registration has finished.
func (j *registration) read(ctx context.Context, expected *clusterv1alpha1.Cluster) (*clusterv1alpha1.Cluster, error) {
	live := &clusterv1alpha1.Cluster{}
	err := j.hub.Get(ctx, client.ObjectKeyFromObject(expected), live)
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	if err != nil || live.UID != expected.UID || !live.DeletionTimestamp.IsZero() {
		return nil, errors.New("it was deleted meanwhile")
	}
	if !isUnfinished(live) || live.Annotations[attemptAnnotation] != expected.Annotations[attemptAnnotation] {
		return nil, AlreadyRegisteredError{ID: expected.Spec.ID, Name: expected.Name}
	}
	return live, nil
}

// checkAttempt returns an error if the Cluster no longer belongs to this run.
func (j *registration) checkAttempt(ctx context.Context) error {
	_, err := j.read(ctx, j.cluster)
	if err != nil && !errors.Is(err, ErrAlreadyRegistered) {
		return fmt.Errorf("read cluster(%s): %w", j.cluster.Name, err)
	}
	return err
}
