package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// reservationPrefix is the prefix of the names of reservations: ConfigMaps that reserve an ID for one Cluster.
	reservationPrefix = "cluster-id-"
	// reservedForKey and reservedIDKey are the keys in a reservation.
	reservedForKey = "cluster"
	reservedIDKey  = "id"
)

// ErrAlreadyRegistered is returned for an ID or a name that another Cluster has.
var ErrAlreadyRegistered = errors.New("the cluster has been registered")

// AlreadyRegisteredError is an ErrAlreadyRegistered with Karmada's error text.
type AlreadyRegisteredError struct{ ID, Name string }

func (t AlreadyRegisteredError) Error() string {
	return fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", t.ID, t.Name)
}

// Is makes errors.Is true for ErrAlreadyRegistered.
func (t AlreadyRegisteredError) Is(target error) bool { return target == ErrAlreadyRegistered }

// CreateCluster creates cluster, which must have an ID, and reserves the ID. Of several calls with the same name or the
// same ID, only one succeeds, and the others return an ErrAlreadyRegistered. If it fails, or ctx ends, it deletes the
// objects that it has created. hub must read from the API server.
func CreateCluster(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	writer := rollback.New(hub, string(uuid.NewUUID()))
	err := applyCluster(ctx, hub, writer, cluster, func(*unstructured.Unstructured) error {
		return AlreadyRegisteredError{ID: cluster.Spec.ID, Name: cluster.Name}
	})
	if err != nil {
		return errors.Join(err, writer.RollBack(ctx))
	}
	return nil
}

// applyCluster creates cluster, or applies it to an existing Cluster for which check returns nil, and reserves its ID.
func applyCluster(
	ctx context.Context, hub client.Client, writer *rollback.Writer, cluster *clusterv1alpha1.Cluster, check func(live *unstructured.Unstructured) error,
) error {
	if err := ValidateName(cluster.Name); err != nil {
		return err
	}
	if cluster.Spec.ID == "" {
		return fmt.Errorf("cluster %s has no id", cluster.Name)
	}
	hubID, err := join.ClusterUID(ctx, hub)
	if err != nil {
		return err
	}
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationHub, hubID)
	live, result, err := writer.Apply(ctx, cluster, check)
	if errors.Is(err, ErrAlreadyRegistered) {
		return err
	}
	if err != nil {
		return fmt.Errorf("failed to create cluster(%s) object. error: %w", cluster.Name, err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, cluster); err != nil {
		return fmt.Errorf("failed to create cluster(%s) object. error: %w", cluster.Name, err)
	}
	if result == rollback.Created {
		writer.AddUndo(func(ctx context.Context) error {
			return deleteOwned(ctx, hub, cluster.Name, []*metav1.PartialObjectMetadata{reservationOf(cluster)}, apierrors.IsNotFound)
		})
	}
	return ReserveID(ctx, hub, cluster)
}

// ReserveID reserves the ID of an existing Cluster. It returns an ErrAlreadyRegistered if another Cluster has the ID.
// It does nothing for a Cluster without an ID. It can be repeated. hub must read from the API server.
func ReserveID(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	if cluster.Spec.ID == "" {
		return nil
	}
	err := kube.RetryOn(ctx, kube.IsStaleWrite, func() error { return reserveID(ctx, hub, cluster) })
	if err != nil && !errors.Is(err, ErrAlreadyRegistered) {
		return fmt.Errorf("reserve the cluster ID %s: %w", cluster.Spec.ID, err)
	}
	return err
}

func reserveID(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	desired := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: fleet.DefaultClusterNamespace, Name: reservationName(cluster.Spec.ID)},
		Data:       map[string]string{reservedForKey: cluster.Name, reservedIDKey: cluster.Spec.ID},
	}
	SetOwnerLabels(desired, cluster.Name)
	reservation := &corev1.ConfigMap{}
	err := hub.Get(ctx, client.ObjectKeyFromObject(desired), reservation)
	if apierrors.IsNotFound(err) {
		namespace := &corev1.Namespace{ObjectMeta: systemMeta("", desired.Namespace)}
		if err := join.EnsureNamespace(ctx, hub, namespace); err != nil {
			return err
		}
		return hub.Create(ctx, desired, client.FieldOwner(kube.FieldManager))
	}
	if err != nil || reservation.Data[reservedForKey] == cluster.Name {
		return err
	}
	holder := &clusterv1alpha1.Cluster{}
	err = hub.Get(ctx, client.ObjectKey{Name: reservation.Data[reservedForKey]}, holder)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err == nil && holder.Spec.ID == cluster.Spec.ID {
		return AlreadyRegisteredError{ID: cluster.Spec.ID, Name: cluster.Name}
	}
	// The holder was deleted, or has another ID. If another Cluster has reserved the ID since, the update is a conflict.
	desired.ResourceVersion = reservation.ResourceVersion
	return hub.Update(ctx, desired, client.FieldOwner(kube.FieldManager))
}

// reservationName returns the name of the reservation of id. It contains a hash if id is not valid in a name.
func reservationName(id string) string {
	if name := reservationPrefix + id; len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(id))
	return reservationPrefix + hex.EncodeToString(sum[:])
}

// reservedName is rejected: agents of Karmada had an identity with this name and all permissions.
const reservedName = "rbac-generator"

// ValidateName returns an error for an invalid cluster name, with Karmada's error text.
func ValidateName(name string) error {
	var reasons []string
	switch {
	case name == "":
		reasons = []string{"must be not empty"}
	case len(name) > clusterv1alpha1.MaxClusterName:
		reasons = []string{fmt.Sprintf("must be no more than %d characters", clusterv1alpha1.MaxClusterName)}
	case name == reservedName:
		reasons = []string{"is reserved"}
	default:
		reasons = validation.IsDNS1123Label(name)
	}
	if len(reasons) > 0 {
		return fmt.Errorf("invalid cluster name(%s): %s", name, strings.Join(reasons, ";"))
	}
	return nil
}
