package karmada

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// undoLimit is how long undoing may take after a failure or an interruption.
const undoLimit = 40 * time.Second

// Enroll creates cluster, which gets its uid, if neither its id nor its name is another one's: the API server decides
// that, so that of several at once one wins. Others get an error that is ErrTaken. Whoever fails, or whose ctx ends,
// has taken back what he made, and nothing else. cluster must have an id. hub must read from the API server.
func Enroll(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	if err := ValidateName(cluster.Name); err != nil {
		return err
	}
	if cluster.Spec.ID == "" {
		return fmt.Errorf("cluster %s has no id", cluster.Name)
	}
	hubID, err := HubID(ctx, hub)
	if err != nil {
		return err
	}
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationHub, hubID)
	if cluster.Annotations[attemptAnnotation] == "" {
		metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, attemptAnnotation, string(uuid.NewUUID()))
	}
	e := enrolment{hub: hub, cluster: cluster, claimant: claimant{
		hub: hub, id: cluster.Spec.ID, name: cluster.Name, attempt: cluster.Annotations[attemptAnnotation],
	}}
	if err := e.run(ctx); err != nil {
		return e.failed(ctx, err)
	}
	return nil
}

// enrolment is one run of Enroll.
type enrolment struct {
	hub      client.Client
	cluster  *clusterv1alpha1.Cluster
	claimant claimant
}

func (e enrolment) run(ctx context.Context) error {
	// A name that is taken needs no claim to find that out.
	err := e.hub.Get(ctx, client.ObjectKeyFromObject(e.cluster), &clusterv1alpha1.Cluster{})
	if err == nil {
		return e.claimant.taken()
	}
	if !apierrors.IsNotFound(err) {
		return fmt.Errorf("read cluster(%s): %w", e.cluster.Name, err)
	}
	if err := e.claimant.take(ctx); err != nil {
		return err
	}
	err = e.hub.Create(ctx, e.cluster, client.FieldOwner(kube.FieldManager))
	if apierrors.IsAlreadyExists(err) {
		return e.claimant.taken()
	}
	if err != nil {
		return fmt.Errorf("failed to create cluster(%s) object. error: %w", e.cluster.Name, err)
	}
	return Claim(ctx, e.hub, e.cluster)
}

// failed undoes what this run did, however far a request got that was cut off, and returns why it failed.
func (e enrolment) failed(ctx context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	return errors.Join(why, takeBackCluster(ctx, e.hub, e.cluster.Name, e.claimant.attempt), e.giveBack(ctx))
}

func (e enrolment) giveBack(ctx context.Context) error {
	if err := e.claimant.giveBack(ctx); err != nil {
		return fmt.Errorf("take back the claim of the cluster ID %s: %w", e.claimant.id, err)
	}
	return nil
}

// takeBackCluster deletes the Cluster that a run of a registration made.
func takeBackCluster(ctx context.Context, hub client.Client, name, attempt string) error {
	live := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, live)
	if err == nil && live.Annotations[attemptAnnotation] == attempt {
		err = hub.Delete(ctx, live, client.Preconditions{UID: &live.UID})
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back cluster(%s): %w", name, err)
	}
	return nil
}
