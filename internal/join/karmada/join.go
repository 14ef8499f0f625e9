package karmada

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// systemNamespace is the namespace of Karmada's own components.
	systemNamespace = "karmada-system"
	// requestTimeout limits one request of a client whose configuration has no timeout.
	requestTimeout = 30 * time.Second
	// hubTimeout limits the wait for the hub to complete the deletion of a Cluster in a rollback.
	hubTimeout = 20 * time.Second
	// memberRollbackTimeout limits the rollback on the member.
	memberRollbackTimeout = 20 * time.Second
	// unfinishedAnnotation on a Cluster marks a registration that is not finished.
	unfinishedAnnotation = "towline.dev/registration-unfinished"
)

// errForeignSecret is returned for a Secret that no registration created.
var errForeignSecret = errors.New("it exists and was not made by a registration; choose another cluster name or --cluster-namespace")

// JoinRequest is a request to register a cluster in push mode.
type JoinRequest struct {
	// Hub and Member are the caller's configurations for the hub and for the cluster. Both are required.
	Hub, Member *rest.Config
	// Name is the name of the Cluster. ClusterNamespace is the namespace of its Secrets on the hub, and of the hub's
	// ServiceAccount on the cluster. Default: fleet.DefaultClusterNamespace.
	Name, ClusterNamespace string
	// Provider, Region and Zones are optional fields of the Cluster.
	Provider, Region string
	Zones            []string
	// DryRun runs all checks on both sides, and writes nothing.
	DryRun bool
	// Progress is called with warnings. It is required.
	Progress func(string)
}

// Join registers a cluster in push mode, see the package comment. If it fails, or ctx ends, it rolls back its writes on
// both sides. If it is killed, a repeated call completes the registration. It returns an ErrAlreadyRegistered if the
// cluster or the name is registered.
func Join(ctx context.Context, r JoinRequest) error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	if r.ClusterNamespace == systemNamespace {
		r.Progress("warning: --cluster-namespace=" + systemNamespace + " is the namespace of the control plane itself; it is never deleted with a cluster")
	}
	hub, _, err := join.NewClient(r.Hub, requestTimeout)
	if err != nil {
		return fmt.Errorf("connect to the control plane: %w", err)
	}
	attempt := string(uuid.NewUUID())
	member, err := newMemberRegistration(r.Member, r.Name, r.ClusterNamespace, attempt)
	if err != nil {
		return err
	}
	j := &registration{request: r, hub: hub, writer: rollback.New(hub, attempt), secretWriter: rollback.New(hub, attempt), member: member}
	if err := j.validate(ctx); err != nil || r.DryRun {
		return err
	}
	if err := j.run(ctx); err != nil {
		// The Secrets are rolled back after the Cluster: the hub needs its credentials to complete the deletion of the
		// Cluster.
		return errors.Join(err, j.writer.RollBack(ctx), j.secretWriter.RollBack(ctx), j.rollBackMember(ctx))
	}
	return nil
}

// registration is one run of Join.
type registration struct {
	request JoinRequest
	hub     client.Client
	// writer writes the Cluster, secretWriter its Secrets: they are rolled back at different times.
	writer, secretWriter *rollback.Writer
	member               *memberRegistration
	cluster              *clusterv1alpha1.Cluster
}

// validate reads both sides, sets the desired Cluster, and returns an error if the registration is not possible.
func (j *registration) validate(ctx context.Context) error {
	// API discovery, the first request of a client, ignores ctx.
	if err := ctx.Err(); err != nil {
		return err
	}
	id, err := join.ClusterUID(ctx, j.member.client)
	if err != nil {
		return fmt.Errorf("identify the cluster: %w", err)
	}
	if j.member.hubID, err = join.ClusterUID(ctx, j.hub); err != nil {
		return err
	}
	if j.cluster, err = j.desiredCluster(id); err != nil {
		return err
	}
	clusters := &clusterv1alpha1.ClusterList{}
	err = j.hub.List(ctx, clusters)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return join.ErrNotInstalled
	}
	if err != nil {
		return fmt.Errorf("list the clusters of the control plane: %w", err)
	}
	for i := range clusters.Items {
		if live := &clusters.Items[i]; (live.Name == j.request.Name || live.Spec.ID == id) && !j.isUnfinished(live) {
			return AlreadyRegisteredError{ID: id, Name: j.request.Name}
		}
	}
	_, _, err = j.member.getRole(ctx)
	return err
}

// isUnfinished returns whether live is from a run of Join, for the same cluster, that was killed.
func (j *registration) isUnfinished(live *clusterv1alpha1.Cluster) bool {
	return IsRegistering(live) && live.DeletionTimestamp.IsZero() && live.Name == j.request.Name && live.Spec.ID == j.cluster.Spec.ID
}

// IsRegistering returns whether a run of Join created cluster and has not finished, so that its Secrets may not exist
// yet. The Cluster may be in deletion.
func IsRegistering(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Spec.SyncMode == clusterv1alpha1.Push && cluster.Annotations[unfinishedAnnotation] != ""
}

func (j *registration) desiredCluster(id string) (*clusterv1alpha1.Cluster, error) {
	r := j.request
	endpoint := strings.TrimSuffix(r.Member.Host, "/")
	if !strings.Contains(endpoint, "://") {
		endpoint = "https://" + endpoint
	}
	proxy, err := join.ProxyOf(r.Member)
	if err != nil {
		return nil, err
	}
	return &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name, Annotations: map[string]string{unfinishedAnnotation: "true"}},
		Spec: clusterv1alpha1.ClusterSpec{
			ID: id, SyncMode: clusterv1alpha1.Push, APIEndpoint: endpoint, ProxyURL: proxy,
			InsecureSkipTLSVerification: r.Member.Insecure,
			SecretRef:                   &clusterv1alpha1.LocalSecretReference{Namespace: r.ClusterNamespace, Name: r.Name},
			ImpersonatorSecretRef:       &clusterv1alpha1.LocalSecretReference{Namespace: r.ClusterNamespace, Name: impersonatorSecret(r.Name)},
			Provider:                    r.Provider, Region: r.Region, Zones: r.Zones,
		},
	}, nil
}

// run creates the Cluster first: of several runs for different clusters or names, only one can create it. It writes the
// Secret with the hub's token last: the hub connects to the cluster as soon as the Secret exists.
func (j *registration) run(ctx context.Context) error {
	namespace := &corev1.Namespace{ObjectMeta: systemMeta("", j.request.ClusterNamespace)}
	if err := join.EnsureNamespace(ctx, j.hub, namespace); err != nil {
		return err
	}
	j.writer.AddUndo(j.awaitDeletion)
	err := applyCluster(ctx, j.hub, j.writer, j.cluster, func(live *unstructured.Unstructured) error {
		existing := &clusterv1alpha1.Cluster{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, existing); err != nil {
			return err
		}
		if !j.isUnfinished(existing) {
			return AlreadyRegisteredError{ID: j.cluster.Spec.ID, Name: j.request.Name}
		}
		return nil
	})
	if err != nil {
		return err
	}
	account, impersonation, err := j.member.ensure(ctx)
	if err != nil {
		return err
	}
	authority, err := j.caBundle(account.authority)
	if err != nil {
		return err
	}
	err = j.writeSecret(ctx, *j.cluster.Spec.ImpersonatorSecretRef, map[string][]byte{clusterv1alpha1.SecretTokenKey: impersonation.token})
	if err != nil {
		return err
	}
	err = j.writeSecret(ctx, *j.cluster.Spec.SecretRef, map[string][]byte{
		clusterv1alpha1.SecretTokenKey: account.token, clusterv1alpha1.SecretCABundleKey: authority,
	})
	if err != nil {
		return err
	}
	// With the UID, the patch fails if the Cluster was deleted or created again.
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q,"annotations":{%q:null}}}`, j.cluster.UID, unfinishedAnnotation)
	if err := j.hub.Patch(ctx, j.cluster, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("update cluster(%s): %w", j.request.Name, err)
	}
	return nil
}

// writeSecret writes a Secret of the Cluster on the hub. It returns an error if the Secret is foreign or of another
// Cluster.
func (j *registration) writeSecret(ctx context.Context, ref clusterv1alpha1.LocalSecretReference, data map[string][]byte) error {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name}, Data: data}
	SetOwnerLabels(secret, j.cluster.Name)
	_, _, err := j.secretWriter.Apply(ctx, secret, func(live *unstructured.Unstructured) error {
		switch owner := Owner(live); {
		case live.GetLabels()[clusterv1alpha1.SystemLabel] != "true":
			return fmt.Errorf("write Secret %s/%s: %w", ref.Namespace, ref.Name, errForeignSecret)
		case owner != "" && owner != j.cluster.Name:
			return fmt.Errorf("write Secret %s/%s: it belongs to cluster %s", ref.Namespace, ref.Name, owner)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("on the control plane: %w", err)
	}
	return nil
}

// caBundle returns own, the certificate authorities of the member's API server, together with the certificate
// authorities in the caller's kubeconfig, which may belong to a proxy.
func (j *registration) caBundle(own []byte) ([]byte, error) {
	config := rest.CopyConfig(j.request.Member)
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("read the certificate authority of the cluster's kubeconfig: %w", err)
	}
	known := bytes.TrimSpace(config.CAData)
	if config.Insecure || len(known) == 0 || bytes.Contains(own, known) {
		return own, nil
	}
	return slices.Concat(bytes.TrimSpace(own), []byte("\n"), known, []byte("\n")), nil
}

// awaitDeletion waits in a rollback until the Cluster is deleted. A Cluster that is not being deleted belongs to
// another run, and ends the wait.
func (j *registration) awaitDeletion(ctx context.Context) error {
	// hubTimeout is shorter than the time limit of the rollback, so that the other undo functions run if the hub does not
	// respond.
	err := wait.PollUntilContextTimeout(ctx, deletePollInterval, hubTimeout, true, func(ctx context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		err := j.hub.Get(ctx, client.ObjectKey{Name: j.request.Name}, live)
		return apierrors.IsNotFound(err) || err == nil && live.DeletionTimestamp.IsZero(), client.IgnoreNotFound(err)
	})
	if err != nil {
		return fmt.Errorf("roll back cluster(%s): it may stay on the control plane: %w", j.request.Name, err)
	}
	return nil
}

// rollBackMember deletes the registration on the member, unless another run has created it, or written it since.
func (j *registration) rollBackMember(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), memberRollbackTimeout)
	defer cancel()
	role, found, err := j.member.getRole(ctx)
	if err == nil && found && j.member.writer.IsLastWriter(role) && !j.member.isResumed {
		_, err = j.member.deleteObjects(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w; ClusterRole %s and its dependents may stay on it", err, j.member.roleName())
	}
	return nil
}

func impersonatorSecret(cluster string) string { return cluster + "-impersonator" }
