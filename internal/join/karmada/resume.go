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

// IsRegistering returns whether a run of Join created cluster, which may be deleted since, and has not finished. Its
// Secrets may not exist yet.
func IsRegistering(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Spec.SyncMode == clusterv1alpha1.Push && cluster.Annotations[unfinishedAnnotation] != ""
}

// isUnfinished returns whether a run of Join created cluster and has not finished.
func isUnfinished(cluster *clusterv1alpha1.Cluster) bool {
	return IsRegistering(cluster) && cluster.DeletionTimestamp.IsZero()
}

// resume makes the Cluster of an earlier run, which was killed, the Cluster of this run. If the earlier run still
// writes, it finds the attempt of this run and fails. resume returns an ErrTaken if another run was faster.
func (j *registration) resume(ctx context.Context) error {
	desired := j.cluster
	err := j.update(ctx, j.unfinished, func(live *clusterv1alpha1.Cluster) {
		for key, value := range desired.Annotations {
			metav1.SetMetaDataAnnotation(&live.ObjectMeta, key, value)
		}
		// People may have set other fields.
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

// update changes the Cluster, which must be of the same run as expected.
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
	if err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("update cluster(%s): %w", expected.Name, err)
	}
	return err
}

// read reads the Cluster. It returns an ErrTaken if another run has taken it over, or has finished the registration.
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
		return nil, TakenError{ID: expected.Spec.ID, Name: expected.Name}
	}
	return live, nil
}

// checkAttempt returns an error if the Cluster no longer belongs to this run.
func (j *registration) checkAttempt(ctx context.Context) error {
	_, err := j.read(ctx, j.cluster)
	if err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("read cluster(%s): %w", j.cluster.Name, err)
	}
	return err
}
