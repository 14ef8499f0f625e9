package karmada

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// unfinishedAnnotation marks a Cluster whose registration is not finished.
	unfinishedAnnotation = "towline.dev/registration-unfinished"
	// finishTimeout is the time after which an unfinished registration that no run has written counts as abandoned. A
	// run needs a fraction of it.
	finishTimeout = 3 * time.Second
)

// isUnfinished returns whether a run of Join created cluster and has not finished.
func isUnfinished(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Spec.SyncMode == clusterv1alpha1.Push && cluster.DeletionTimestamp.IsZero() && cluster.Annotations[unfinishedAnnotation] != ""
}

// isAbandoned waits until the run that created cluster finishes or another run resumes it. It returns true if neither
// happens within finishTimeout.
func (j *joining) isAbandoned(ctx context.Context, cluster *clusterv1alpha1.Cluster) (bool, error) {
	err := wait.PollUntilContextTimeout(ctx, deletePoll, finishTimeout, true, func(context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		if err := j.hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); err != nil {
			return false, err
		}
		return !isSameAttempt(live, cluster), nil
	})
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case wait.Interrupted(err):
		return true, nil
	case client.IgnoreNotFound(err) != nil:
		return false, fmt.Errorf("read cluster(%s): %w", cluster.Name, err)
	}
	return false, nil
}

// isSameAttempt returns whether live is cluster, unfinished, and of the same run.
func isSameAttempt(live, cluster *clusterv1alpha1.Cluster) bool {
	return live.UID == cluster.UID && isUnfinished(live) && live.Annotations[attemptAnnotation] == cluster.Annotations[attemptAnnotation]
}

// resume makes the Cluster of a killed run the Cluster of this run. It returns an ErrTaken if another run was faster.
func (j *joining) resume(ctx context.Context) error {
	desired := j.cluster
	err := j.update(ctx, j.former, func(live *clusterv1alpha1.Cluster) {
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
func (j *joining) finish(ctx context.Context) error {
	return j.update(ctx, j.cluster, func(live *clusterv1alpha1.Cluster) { delete(live.Annotations, unfinishedAnnotation) })
}

// update changes the Cluster, which must be of the same run as expected.
func (j *joining) update(ctx context.Context, expected *clusterv1alpha1.Cluster, change func(live *clusterv1alpha1.Cluster)) error {
	err := retryStale(ctx, func() error {
		live := &clusterv1alpha1.Cluster{}
		err := j.hub.Get(ctx, client.ObjectKeyFromObject(expected), live)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err != nil || live.UID != expected.UID || !live.DeletionTimestamp.IsZero() {
			return errors.New("it was deleted meanwhile")
		}
		if !isSameAttempt(live, expected) {
			return Taken{ID: expected.Spec.ID, Name: expected.Name}
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
