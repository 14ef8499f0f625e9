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
	// unfinishedAnnotation on a Cluster says that the run of a registration which made it is not through with it.
	unfinishedAnnotation = "towline.dev/registration-unfinished"
	// finishWait is how long such a run is given: many times what it takes from there on. One that was killed is not
	// waited for any longer.
	finishWait = 3 * time.Second
)

// resumable says whether a run of Join made cluster for the same name and the same member, and did not come to its end.
func (j *joining) resumable(cluster *clusterv1alpha1.Cluster, id string) bool {
	return cluster.Name == j.request.Name && cluster.Spec.ID == id && cluster.Spec.SyncMode == clusterv1alpha1.Push &&
		cluster.DeletionTimestamp.IsZero() && cluster.Annotations[unfinishedAnnotation] != ""
}

// abandoned waits whether the run comes to its end that made cluster, and says whether it does not: this run goes on
// with it then.
func (j *joining) abandoned(ctx context.Context, cluster *clusterv1alpha1.Cluster) (bool, error) {
	err := wait.PollUntilContextTimeout(ctx, deletePoll, finishWait, true, func(context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		if err := j.hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); err != nil {
			return false, err
		}
		return live.UID != cluster.UID || !j.resumable(live, cluster.Spec.ID) || live.Annotations[attemptAnnotation] != cluster.Annotations[attemptAnnotation], nil
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

// resume makes the Cluster of a run that was killed this run's own. Of several who want that, the last one does.
func (j *joining) resume(ctx context.Context) error {
	err := insist(ctx, func() error {
		live := &clusterv1alpha1.Cluster{}
		if err := j.hub.Get(ctx, client.ObjectKeyFromObject(j.former), live); err != nil {
			return err
		}
		if live.UID != j.former.UID || !j.resumable(live, j.former.Spec.ID) || live.Annotations[attemptAnnotation] != j.former.Annotations[attemptAnnotation] {
			return Taken{ID: j.cluster.Spec.ID, Name: j.cluster.Name}
		}
		for key, value := range j.cluster.Annotations {
			metav1.SetMetaDataAnnotation(&live.ObjectMeta, key, value)
		}
		now, want := &live.Spec, j.cluster.Spec
		now.APIEndpoint, now.ProxyURL, now.InsecureSkipTLSVerification = want.APIEndpoint, want.ProxyURL, want.InsecureSkipTLSVerification
		now.SecretRef, now.ImpersonatorSecretRef = want.SecretRef, want.ImpersonatorSecretRef
		now.Provider, now.Region, now.Zones = want.Provider, want.Region, want.Zones
		if err := j.hub.Update(ctx, live, client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
		j.cluster = live
		return nil
	})
	if err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("go on with cluster(%s): %w", j.request.Name, err)
	}
	if err != nil {
		return err
	}
	return Claim(ctx, j.hub, j.cluster)
}

// finish says that this run is through with its Cluster, if that is still there and still its own.
func (j *joining) finish(ctx context.Context) error {
	err := insist(ctx, func() error {
		live := &clusterv1alpha1.Cluster{}
		err := j.hub.Get(ctx, client.ObjectKeyFromObject(j.cluster), live)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err != nil || live.UID != j.cluster.UID || !live.DeletionTimestamp.IsZero() {
			return errors.New("it was deleted meanwhile")
		}
		if live.Annotations[attemptAnnotation] != j.vault.attempt {
			return Taken{ID: j.cluster.Spec.ID, Name: j.cluster.Name}
		}
		delete(live.Annotations, unfinishedAnnotation)
		return j.hub.Update(ctx, live, client.FieldOwner(kube.FieldManager))
	})
	if err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("finish cluster(%s): %w", j.request.Name, err)
	}
	return err
}
