package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// attemptAnnotation says which run of a registration wrote an object last.
	attemptAnnotation = "towline.dev/registration-attempt"
	// claimPrefix begins the names of the ConfigMaps that give an id to one Cluster.
	claimPrefix = "cluster-id-"
	// claimClusterKey and claimIDKey are the keys of such a ConfigMap.
	claimClusterKey = "cluster"
	claimIDKey      = "id"
	// claimLife is how long a claim counts whose Cluster does not exist yet: many times what creating it takes.
	claimLife = 30 * time.Second
	// claimTries bounds how often a claim is tried again that others change at the same time.
	claimTries = 20
)

// ErrTaken says that another Cluster has the id or the name.
var ErrTaken = errors.New("the cluster has been registered")

// Taken is the ErrTaken of one cluster, in the words of the Karmada surface.
type Taken struct{ ID, Name string }

// Error returns the sentence.
func (t Taken) Error() string {
	return fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", t.ID, t.Name)
}

// Is says that a Taken is an ErrTaken.
func (t Taken) Is(target error) bool { return target == ErrTaken }

// Claim gives the id of a Cluster that exists to it alone. It returns an error that is ErrTaken if another Cluster has
// it. A Cluster without an id claims nothing. hub must read from the API server. It can be repeated.
func Claim(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	if cluster.Spec.ID == "" {
		return nil
	}
	return claimant{hub: hub, id: cluster.Spec.ID, name: cluster.Name, owner: cluster}.take(ctx)
}

// claimant wants an id: for a Cluster that exists, or for one that a registration is about to create.
type claimant struct {
	hub      client.Client
	id, name string
	// attempt is that of the registration, "" if there is none.
	attempt string
	// owner is the Cluster, nil until it exists.
	owner *clusterv1alpha1.Cluster
}

// claimName returns the name of the ConfigMap that stands for id. Creating it is what decides who has the id.
func claimName(id string) string {
	if name := claimPrefix + id; len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(id))
	return claimPrefix + hex.EncodeToString(sum[:])
}

func (c claimant) taken() error { return Taken{ID: c.id, Name: c.name} }

// take makes the claim, or makes one its own that nobody else can have a right to.
func (c claimant) take(ctx context.Context) error {
	for range claimTries {
		err := c.try(ctx)
		switch {
		case err == nil, errors.Is(err, ErrTaken):
			return err
		case !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err):
			return fmt.Errorf("claim the cluster ID %s: %w", c.id, err)
		}
		// Somebody else was faster; what he did decides.
		if ctx.Err() != nil {
			return fmt.Errorf("claim the cluster ID %s: %w", c.id, ctx.Err())
		}
	}
	return c.taken()
}

// try looks once at who has the id.
func (c claimant) try(ctx context.Context) error {
	live := &corev1.ConfigMap{}
	err := c.hub.Get(ctx, client.ObjectKey{Namespace: fleet.DefaultClusterNamespace, Name: claimName(c.id)}, live)
	if apierrors.IsNotFound(err) {
		return c.make(ctx)
	}
	if err != nil {
		return err
	}
	if c.owner != nil && Marked(live) == c.owner.UID {
		return nil
	}
	held, err := c.held(ctx, live)
	if err != nil {
		return err
	}
	if held {
		return c.taken()
	}
	c.fill(live)
	return c.hub.Update(ctx, live, client.FieldOwner(kube.FieldManager))
}

// held says whether another one has a right to the id by live: a Cluster of that id, or a registration that is still at
// work.
func (c claimant) held(ctx context.Context, live *corev1.ConfigMap) (bool, error) {
	owner, holder := Marked(live), &clusterv1alpha1.Cluster{}
	err := c.hub.Get(ctx, client.ObjectKey{Name: live.Data[claimClusterKey]}, holder)
	if client.IgnoreNotFound(err) != nil {
		return false, err
	}
	// Whatever uid the claim says: a Cluster that was restored has another one than it had.
	if err == nil && holder.Spec.ID == c.id {
		return c.owner == nil || c.owner.UID != holder.UID, nil
	}
	if owner != "" || live.Data[claimClusterKey] == c.name {
		return false, nil
	}
	now, err := serverTime(ctx, c.hub)
	if err != nil {
		return false, err
	}
	return now.Sub(live.CreationTimestamp.Time) < claimLife, nil
}

// serverTime asks the API server what it would write on an object that is created now: the clocks of people's machines
// are not to be trusted.
func serverTime(ctx context.Context, hub client.Client) (time.Time, error) {
	probe := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.DefaultClusterNamespace, GenerateName: claimPrefix}}
	if err := hub.Create(ctx, probe, client.DryRunAll); err != nil {
		return time.Time{}, fmt.Errorf("ask for the time: %w", err)
	}
	return probe.CreationTimestamp.Time, nil
}

func (c claimant) make(ctx context.Context) error {
	claim := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.DefaultClusterNamespace, Name: claimName(c.id)}}
	c.fill(claim)
	err := c.hub.Create(ctx, claim.DeepCopy(), client.FieldOwner(kube.FieldManager))
	if !apierrors.IsNotFound(err) {
		return err
	}
	if err := makeSystemNamespace(ctx, c.hub, fleet.DefaultClusterNamespace, c.attempt); err != nil {
		return err
	}
	return c.hub.Create(ctx, claim, client.FieldOwner(kube.FieldManager))
}

// fill writes into claim whose it is.
func (c claimant) fill(claim *corev1.ConfigMap) {
	claim.Data = map[string]string{claimClusterKey: c.name, claimIDKey: c.id}
	unmark(claim)
	if c.owner != nil {
		Mark(claim, c.owner)
	}
	if c.attempt != "" {
		metav1.SetMetaDataAnnotation(&claim.ObjectMeta, attemptAnnotation, c.attempt)
	}
}

// giveBack deletes the claim that this registration made, unless a Cluster has it.
func (c claimant) giveBack(ctx context.Context) error {
	live := &corev1.ConfigMap{}
	err := c.hub.Get(ctx, client.ObjectKey{Namespace: fleet.DefaultClusterNamespace, Name: claimName(c.id)}, live)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	if live.Annotations[attemptAnnotation] != c.attempt {
		return nil
	}
	holder := &clusterv1alpha1.Cluster{}
	err = c.hub.Get(ctx, client.ObjectKey{Name: live.Data[claimClusterKey]}, holder)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err == nil && holder.Spec.ID == c.id {
		return nil // the claim is that Cluster's, and goes with it
	}
	err = deleteClaim(ctx, c.hub, live)
	if apierrors.IsConflict(err) {
		return nil // another one has it now
	}
	return err
}

// deleteClaim deletes a claim as it was read.
func deleteClaim(ctx context.Context, hub client.Client, live *corev1.ConfigMap) error {
	return client.IgnoreNotFound(hub.Delete(ctx, live, client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}))
}
