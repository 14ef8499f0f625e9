package karmada

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/foreign"
)

const (
	// systemNamespace is the namespace of Karmada's own components.
	systemNamespace = "karmada-system"
	// requestQPS is high enough that the client does not throttle the requests of one registration.
	requestQPS = 100
	// requestTimeout limits one request, unless the configuration has a timeout.
	requestTimeout = 30 * time.Second
	// hubTimeout limits the wait for the hub to complete the deletion of a Cluster in a rollback.
	hubTimeout = 20 * time.Second
)

// JoinRequest is a request to register a cluster in push mode.
type JoinRequest struct {
	// Hub and Member are the caller's configurations for the hub and for the cluster. Both are required.
	Hub, Member *rest.Config
	// Name is the name of the Cluster. ClusterNamespace is the namespace of its Secrets on the hub, and of the hub's
	// ServiceAccount on the cluster. Default: fleet.DefaultClusterNamespace.
	Name, ClusterNamespace string
	// Provider, Region and Zones are written to the fields of the same names in the Cluster. They may be empty.
	Provider, Region string
	Zones            []string
	// DryRun runs all checks on both sides, and writes nothing.
	DryRun bool
	// Progress is called with warnings. It may be nil.
	Progress func(string)
}

// Join registers a cluster in push mode. It creates a Cluster on the hub, an account for the hub on the cluster, and a
// Secret with the account's token on the hub. If it fails, or if ctx ends, it deletes its objects on both sides. If it
// is killed, a repeated call resumes it. It returns an ErrAlreadyRegistered if the cluster or the name is registered
// already.
func Join(ctx context.Context, r JoinRequest) error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	if r.ClusterNamespace == "" {
		r.ClusterNamespace = fleet.DefaultClusterNamespace
	}
	if r.ClusterNamespace == systemNamespace {
		report(r.Progress, "warning: --cluster-namespace="+systemNamespace+" is the namespace of the control plane itself; it is never deleted with a cluster")
	}
	j, err := newRegistration(r)
	if err != nil {
		return err
	}
	if err := j.validate(ctx); err != nil || r.DryRun {
		return err
	}
	if err := j.run(ctx); err != nil {
		return errors.Join(err, j.rollBack(ctx))
	}
	return nil
}

// registration is one run of Join. attempt is the random ID of the run.
type registration struct {
	request   JoinRequest
	attempt   string
	hub       client.Client
	resources foreign.Resources
	member    *memberRegistration
	cluster   *clusterv1alpha1.Cluster
	// unfinished is the Cluster of a killed run that this run resumes; nil if there is none.
	unfinished *clusterv1alpha1.Cluster
}

func newRegistration(r JoinRequest) (*registration, error) {
	hub, resources, err := newClients(r.Hub)
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	member, err := newMemberObjects(r.Member, r.Name, r.ClusterNamespace, "")
	if err != nil {
		return nil, err
	}
	return &registration{request: r, attempt: string(uuid.NewUUID()), hub: hub, resources: resources, member: member}, nil
}

// validate reads both sides, and returns an error if the registration is not possible.
func (j *registration) validate(ctx context.Context) error {
	// API discovery, the first request of a client, ignores ctx.
	if err := ctx.Err(); err != nil {
		return err
	}
	id, err := memberID(ctx, j.member.client)
	if err != nil {
		return err
	}
	if j.member.hubID, err = HubID(ctx, j.hub); err != nil {
		return err
	}
	if err := j.findUnfinished(ctx, id); err != nil {
		return err
	}
	if j.cluster, err = j.desired(id); err != nil {
		return err
	}
	owner := cmp.Or(j.unfinished, j.cluster)
	for _, ref := range []*clusterv1alpha1.LocalSecretReference{j.cluster.Spec.SecretRef, j.cluster.Spec.ImpersonatorSecretRef} {
		if _, err := getSecret(ctx, j.hub, owner, *ref); err != nil {
			return fmt.Errorf("write Secret %s/%s on the control plane: %w", ref.Namespace, ref.Name, err)
		}
	}
	return j.member.validate(ctx)
}

// findUnfinished sets unfinished to the Cluster of an earlier run that was killed, if there is one. It returns an
// ErrAlreadyRegistered if another Cluster has the name or the ID.
func (j *registration) findUnfinished(ctx context.Context, id string) error {
	clusters := &clusterv1alpha1.ClusterList{}
	err := j.hub.List(ctx, clusters)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return join.ErrNotInstalled
	}
	if err != nil {
		return fmt.Errorf("list the clusters of the control plane: %w", err)
	}
	for i := range clusters.Items {
		cluster := &clusters.Items[i]
		if cluster.Name != j.request.Name && cluster.Spec.ID != id {
			continue
		}
		if cluster.Name != j.request.Name || cluster.Spec.ID != id || !isUnfinished(cluster) {
			return AlreadyRegisteredError{ID: id, Name: j.request.Name}
		}
		j.unfinished = cluster
	}
	return nil
}

// desired returns the Cluster to be created.
func (j *registration) desired(id string) (*clusterv1alpha1.Cluster, error) {
	r := j.request
	endpoint := strings.TrimSuffix(r.Member.Host, "/")
	if !strings.Contains(endpoint, "://") {
		endpoint = "https://" + endpoint
	}
	proxy, err := proxyOf(r.Member, endpoint)
	if err != nil {
		return nil, err
	}
	return &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name, Annotations: map[string]string{
			attemptAnnotation: j.attempt, unfinishedAnnotation: "true",
		}},
		Spec: clusterv1alpha1.ClusterSpec{
			ID: id, SyncMode: clusterv1alpha1.Push, APIEndpoint: endpoint, ProxyURL: proxy,
			InsecureSkipTLSVerification: r.Member.Insecure,
			SecretRef:                   &clusterv1alpha1.LocalSecretReference{Namespace: r.ClusterNamespace, Name: r.Name},
			ImpersonatorSecretRef:       &clusterv1alpha1.LocalSecretReference{Namespace: r.ClusterNamespace, Name: impersonatorSecret(r.Name)},
			Provider:                    r.Provider, Region: r.Region, Zones: r.Zones,
		},
	}, nil
}

// proxyOf returns the URL of the proxy that config uses for endpoint, "" if it uses none.
func proxyOf(config *rest.Config, endpoint string) (string, error) {
	if config.Proxy == nil {
		return "", nil
	}
	target, err := url.Parse(endpoint)
	if err != nil {
		return "", fmt.Errorf("the server of the cluster's kubeconfig: %w", err)
	}
	proxy, err := config.Proxy(&http.Request{URL: target})
	if err != nil {
		return "", fmt.Errorf("the proxy of the cluster's kubeconfig: %w", err)
	}
	if proxy == nil {
		return "", nil
	}
	return proxy.String(), nil
}

// run creates the Cluster first: of several concurrent runs, only one succeeds in creating it. It writes the Secret
// with the hub's token last, because the hub connects to the cluster as soon as the Secret exists.
func (j *registration) run(ctx context.Context) error {
	if err := ensureNamespace(ctx, j.hub, j.request.ClusterNamespace, j.attempt); err != nil {
		return err
	}
	create := j.create
	if j.unfinished != nil {
		create = j.resume
	}
	if err := create(ctx); err != nil {
		return err
	}
	j.member.runKey = string(j.cluster.UID) + "/" + j.attempt
	if err := j.checkAttempt(ctx); err != nil {
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
	return j.finish(ctx)
}

func (j *registration) create(ctx context.Context) error { return CreateCluster(ctx, j.hub, j.cluster) }

// writeSecret writes a Secret of the Cluster, if the Cluster still belongs to this run.
func (j *registration) writeSecret(ctx context.Context, ref clusterv1alpha1.LocalSecretReference, data map[string][]byte) error {
	if err := j.checkAttempt(ctx); err != nil {
		return err
	}
	return writeSecret(ctx, j.hub, j.cluster, ref, data)
}

// caBundle returns the certificate authorities of the member's API server (own) and of the operator's kubeconfig. The
// latter may belong to a proxy.
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

// rollBack deletes the Cluster of this run, and then the objects of the registration on both sides. If another run has
// resumed the Cluster, all objects belong to that run and stay. If the Cluster cannot be deleted, another run may have
// resumed it: rollBack then deletes only the objects and Secrets that this run wrote. It works after ctx has ended.
func (j *registration) rollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	isDeleted, err := j.deleteCluster(ctx)
	if err == nil && !isDeleted {
		return nil
	}
	errs := []error{err, j.rollBackMember(ctx, isDeleted)}
	switch {
	case j.cluster.UID == "":
	case isDeleted:
		errs = append(errs, ignoreForbidden(retryStale(ctx, func() error { return DeleteHubObjects(ctx, j.hub, j.cluster) })))
	default:
		errs = append(errs, removeSecrets(ctx, j.hub, j.cluster, j.attempt))
	}
	return errors.Join(append(errs, deleteNamespace(ctx, j.hub, j.resources, j.request.ClusterNamespace, j.attempt))...)
}

// rollBackMember rolls back the objects on the member. If the Cluster is deleted, it deletes the objects that any run
// for the Cluster wrote, otherwise only those that this run wrote. Without a runKey, this run wrote nothing.
func (j *registration) rollBackMember(ctx context.Context, isDeleted bool) error {
	m := j.member
	if m.runKey == "" && (j.unfinished == nil || !isDeleted) {
		return nil
	}
	m.removedRunPrefix = m.runKey
	if isDeleted {
		m.removedRunPrefix = string(cmp.Or(j.unfinished, j.cluster).UID) + "/"
	}
	if _, err := m.remove(ctx); err != nil {
		names := make([]string, 0, len(m.own()))
		for _, obj := range m.own() {
			names = append(names, m.ref(obj).String())
		}
		return fmt.Errorf("%w; these objects may stay on it: %s", err, strings.Join(names, ", "))
	}
	return nil
}

// deleteCluster deletes the Cluster of this run, and waits until the hub has completed the deletion. isDeleted is false
// if the Cluster with that name belongs to another run.
func (j *registration) deleteCluster(ctx context.Context) (isDeleted bool, err error) {
	isDeleted = true
	// hubTimeout is shorter than rollbackTimeout: if the hub does not respond, there must be time to delete the objects.
	err = wait.PollUntilContextTimeout(ctx, deletePollInterval, hubTimeout, true, func(ctx context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		err := j.hub.Get(ctx, client.ObjectKey{Name: j.request.Name}, live)
		if err != nil {
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		}
		if live.Annotations[attemptAnnotation] != j.attempt {
			isDeleted = false
			return true, nil
		}
		j.cluster = live
		if !live.DeletionTimestamp.IsZero() {
			return false, nil
		}
		// Another run that has resumed the Cluster has changed it, so the API server returns a conflict.
		err = deleteIfUnchanged(ctx, j.hub, live.DeepCopy())
		if apierrors.IsConflict(err) {
			err = nil
		}
		return false, err
	})
	if err != nil {
		return false, fmt.Errorf("roll back cluster(%s): it may stay on the control plane: %w", j.request.Name, err)
	}
	return isDeleted, nil
}

func impersonatorSecret(cluster string) string { return cluster + "-impersonator" }
