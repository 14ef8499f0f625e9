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
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// attemptAnnotation contains the attempt of the run that wrote an object on the hub, and the runKey on the member.
	attemptAnnotation = rollback.AttemptAnnotation
	// reservationPrefix begins the names of the ConfigMaps that reserve an ID for one Cluster.
	reservationPrefix = "cluster-id-"
	// reservedForKey and reservedIDKey are the keys of such a ConfigMap.
	reservedForKey = "cluster"
	reservedIDKey  = "id"
	// rollbackTimeout limits the rollback after a failure or an interruption.
	rollbackTimeout = 40 * time.Second
)

// ErrAlreadyRegistered is the error for an ID or a name that another Cluster has.
var ErrAlreadyRegistered = errors.New("the cluster has been registered")

// AlreadyRegisteredError is an ErrAlreadyRegistered with the ID and the name, and with Karmada's error text.
type AlreadyRegisteredError struct{ ID, Name string }

// Error returns the message.
func (t AlreadyRegisteredError) Error() string {
	return fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", t.ID, t.Name)
}

// Is returns true for ErrAlreadyRegistered.
func (t AlreadyRegisteredError) Is(target error) bool { return target == ErrAlreadyRegistered }

// CreateCluster creates cluster and reserves its ID. Of several concurrent calls with the same name or the same ID,
// only one succeeds, and the others return an ErrAlreadyRegistered. If CreateCluster fails, or if ctx ends, it deletes
// the objects that it has created. cluster must have an ID. hub must read from the API server.
func CreateCluster(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
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
	err = hub.Create(ctx, cluster, client.FieldOwner(kube.FieldManager))
	switch {
	case apierrors.IsAlreadyExists(err):
		return AlreadyRegisteredError{ID: cluster.Spec.ID, Name: cluster.Name}
	case err != nil:
		err = fmt.Errorf("failed to create cluster(%s) object. error: %w", cluster.Name, err)
	default:
		if err = ReserveID(ctx, hub, cluster); err == nil {
			return nil
		}
	}
	return errors.Join(err, rollBackCluster(ctx, hub, cluster))
}

// rollBackCluster deletes the Cluster of this attempt and its reservation. A request that failed may have created it.
func rollBackCluster(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	live := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), live)
	if apierrors.IsNotFound(err) || err == nil && live.Annotations[attemptAnnotation] != cluster.Annotations[attemptAnnotation] {
		return nil
	}
	if err == nil {
		err = client.IgnoreNotFound(hub.Delete(ctx, live.DeepCopy(), client.Preconditions{UID: &live.UID}))
	}
	if err == nil {
		err = deleteOwned(ctx, hub, live, []*metav1.PartialObjectMetadata{reservationOf(live)})
	}
	if err != nil {
		return fmt.Errorf("roll back cluster(%s): %w", cluster.Name, err)
	}
	return nil
}

// ReserveID reserves the ID of an existing Cluster for it. It returns an ErrAlreadyRegistered if another Cluster has
// the ID. A Cluster without an ID reserves nothing. hub must read from the API server. It can be repeated.
func ReserveID(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	if cluster.Spec.ID == "" {
		return nil
	}
	err := retryStale(ctx, func() error { return reserveID(ctx, hub, cluster) })
	if err != nil && !errors.Is(err, ErrAlreadyRegistered) {
		return fmt.Errorf("reserve the cluster ID %s: %w", cluster.Spec.ID, err)
	}
	return err
}

func reserveID(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	reservation := &corev1.ConfigMap{}
	key := client.ObjectKey{Namespace: fleet.DefaultClusterNamespace, Name: reservationName(cluster.Spec.ID)}
	err := hub.Get(ctx, key, reservation)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	exists := err == nil
	if exists && OwnerUID(reservation) == cluster.UID {
		return nil
	}
	if exists {
		holder := &clusterv1alpha1.Cluster{}
		err := hub.Get(ctx, client.ObjectKey{Name: reservation.Data[reservedForKey]}, holder)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		// The UID in the reservation is ignored: a Cluster gets a new UID when it is restored from a backup.
		if err == nil && holder.Spec.ID == cluster.Spec.ID && holder.UID != cluster.UID {
			return AlreadyRegisteredError{ID: cluster.Spec.ID, Name: cluster.Name}
		}
	}
	reservation.Namespace, reservation.Name = key.Namespace, key.Name
	reservation.Data = map[string]string{reservedForKey: cluster.Name, reservedIDKey: cluster.Spec.ID}
	SetOwnerLabels(reservation, cluster)
	if exists {
		return hub.Update(ctx, reservation, client.FieldOwner(kube.FieldManager))
	}
	err = hub.Create(ctx, reservation.DeepCopy(), client.FieldOwner(kube.FieldManager))
	if !apierrors.IsNotFound(err) {
		return err
	}
	if err := ensureNamespace(ctx, hub, key.Namespace, ""); err != nil {
		return err
	}
	return hub.Create(ctx, reservation, client.FieldOwner(kube.FieldManager))
}

// reservationName returns the name of the ConfigMap that reserves id.
func reservationName(id string) string {
	if name := reservationPrefix + id; len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(id))
	return reservationPrefix + hex.EncodeToString(sum[:])
}
