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

	corev1 "k8s.io/api/core/v1"
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
	"github.com/towline/towline/internal/kube"
)

const (
	// systemNamespace is where the Karmada surface has its own components.
	systemNamespace = "karmada-system"
	// requestQPS is enough for the two dozen requests of one registration not to wait for each other.
	requestQPS = 100
	// requestLimit is how long one request may take, unless the configuration says otherwise.
	requestLimit = 30 * time.Second
	// hubWait is how long a hub may take to let go of a Cluster that is taken back.
	hubWait = 20 * time.Second
)

// JoinRequest asks to register a cluster that the hub dials.
type JoinRequest struct {
	// Hub and Member are how the operator reaches them.
	Hub, Member *rest.Config
	// Name of the cluster; ClusterNamespace is where its credentials are, on the hub and on the cluster.
	Name, ClusterNamespace string
	// Provider, Region and Zones are for people and for selectors.
	Provider, Region string
	Zones            []string
	// DryRun reads both sides, and refuses what would be refused, but writes nothing.
	DryRun bool
	// Progress is told what people should know; it may be nil.
	Progress func(string)
}

// Join registers a cluster in push mode: it makes an account for the hub on it, and keeps the account's token on the
// hub, beside a Cluster. When it fails, or when ctx ends, what it made is taken back, on both sides. It returns an
// error that is ErrTaken if the cluster, or the name, is registered already.
func Join(ctx context.Context, r JoinRequest) error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	if r.ClusterNamespace == "" {
		r.ClusterNamespace = fleet.DefaultClusterNamespace
	}
	if r.ClusterNamespace == systemNamespace {
		tell(r.Progress, "warning: --cluster-namespace="+systemNamespace+" is the namespace of the control plane itself; it is never deleted with a cluster")
	}
	j, err := newJoining(r)
	if err != nil {
		return err
	}
	if err := j.look(ctx); err != nil || r.DryRun {
		return err
	}
	if err := j.run(ctx); err != nil {
		return errors.Join(err, j.rollBack(ctx))
	}
	return nil
}

// joining is one run of Join.
type joining struct {
	request JoinRequest
	hub     client.Client
	vault   *vault
	member  *settlement
	cluster *clusterv1alpha1.Cluster
	// former is the Cluster of a run that was killed, which this one goes on with; nil if there is none.
	former *clusterv1alpha1.Cluster
}

func newJoining(r JoinRequest) (*joining, error) {
	hub, err := newClient(r.Hub)
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	member, err := newClient(r.Member)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	attempt := string(uuid.NewUUID())
	return &joining{
		request: r, hub: hub,
		vault:  &vault{hub: hub, namespace: r.ClusterNamespace, cluster: r.Name, attempt: attempt},
		member: &settlement{footprint: footprint{member: member, cluster: r.Name, namespace: r.ClusterNamespace}, attempt: attempt},
	}, nil
}

func newClient(config *rest.Config) (client.Client, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = requestQPS, requestQPS
	if config.Timeout == 0 {
		config.Timeout = requestLimit
	}
	return client.New(config, client.Options{Scheme: kube.Scheme()})
}

// look finds out who the two sides are, and whether anything is in the way.
func (j *joining) look(ctx context.Context) error {
	// The clients list the kinds of their clusters first, for which they take no context.
	if err := ctx.Err(); err != nil {
		return err
	}
	id, err := memberID(ctx, j.member.member)
	if err != nil {
		return err
	}
	hubID, err := HubID(ctx, j.hub)
	if err != nil {
		return err
	}
	j.member.hubID = hubID
	clusters := &clusterv1alpha1.ClusterList{}
	err = j.hub.List(ctx, clusters)
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return join.ErrNotInstalled
	}
	if err != nil {
		return fmt.Errorf("list the clusters of the control plane: %w", err)
	}
	for i := range clusters.Items {
		if clusters.Items[i].Name != j.request.Name && clusters.Items[i].Spec.ID != id {
			continue
		}
		if !j.resumable(&clusters.Items[i], id) {
			return Taken{ID: id, Name: j.request.Name}
		}
		j.former = &clusters.Items[i]
	}
	if j.former != nil {
		if abandoned, err := j.abandoned(ctx, j.former); err != nil || !abandoned {
			return cmp.Or[error](err, Taken{ID: id, Name: j.request.Name})
		}
	}
	if j.cluster, err = j.desired(id); err != nil {
		return err
	}
	return j.member.check(ctx)
}

// desired is the Cluster as it is to be.
func (j *joining) desired(id string) (*clusterv1alpha1.Cluster, error) {
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
			attemptAnnotation: j.vault.attempt, unfinishedAnnotation: "true",
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

// proxyOf returns the URL of the proxy that config itself names, "" if it names none.
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

// run does both sides. The credentials are on the hub before the Cluster is, so that a hub dials it at once; and they
// are written again when the Cluster is ours, since another registration of the name may have written its own until
// then.
func (j *joining) run(ctx context.Context) error {
	account, impersonation, err := j.member.settle(ctx)
	if err != nil {
		return err
	}
	authority, err := j.authority(account.authority)
	if err != nil {
		return err
	}
	secrets := []contents{
		{impersonatorSecret(j.request.Name), map[string][]byte{clusterv1alpha1.SecretTokenKey: impersonation.token}},
		{j.request.Name, map[string][]byte{clusterv1alpha1.SecretTokenKey: account.token, clusterv1alpha1.SecretCABundleKey: authority}},
	}
	if err := makeSystemNamespace(ctx, j.hub, j.request.ClusterNamespace, j.vault.attempt); err != nil {
		return err
	}
	if err := j.enroll(ctx, secrets); err != nil {
		return err
	}
	for _, secret := range secrets {
		if err := j.vault.own(ctx, secret, j.cluster); err != nil {
			return err
		}
	}
	return j.finish(ctx)
}

// enroll makes the Cluster, or goes on with that of a run that was killed, whose credentials are there, or come as soon
// as it is ours.
func (j *joining) enroll(ctx context.Context, secrets []contents) error {
	if j.former != nil {
		return j.resume(ctx)
	}
	for _, secret := range secrets {
		if err := j.vault.keep(ctx, secret); err != nil {
			return err
		}
	}
	return Enroll(ctx, j.hub, j.cluster)
}

// authority returns the certificates that may vouch for the cluster: its own, and those by which the operator knows it,
// which may be those of something before it.
func (j *joining) authority(own []byte) ([]byte, error) {
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

// rollBack takes back what this run made: the Cluster first, with which a hub takes back what it made for it. It also
// works after ctx ended.
func (j *joining) rollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	err := takeBackCluster(ctx, j.hub, j.request.Name, j.vault.attempt)
	if err == nil {
		err = j.awaitGone(ctx)
	}
	err = errors.Join(err, j.vault.rollBack(ctx), j.clear(ctx), j.unsettle(ctx), j.dropNamespace(ctx, j.request.ClusterNamespace))
	if j.request.ClusterNamespace != fleet.DefaultClusterNamespace {
		// The claim is there.
		err = errors.Join(err, j.dropNamespace(ctx, fleet.DefaultClusterNamespace))
	}
	return err
}

// unsettle takes back what this run made on the cluster. With the Cluster of a run that was killed also goes what that
// had made, on both sides.
func (j *joining) unsettle(ctx context.Context) error {
	err := j.member.rollBack(ctx)
	if j.former == nil {
		return err
	}
	if found := j.hub.Get(ctx, client.ObjectKeyFromObject(j.former), &clusterv1alpha1.Cluster{}); !apierrors.IsNotFound(found) {
		return errors.Join(err, found)
	}
	remains := allowed(removeRemains(ctx, j.hub, j.former))
	_, removed := RemoveMember(ctx, j.member.member, j.request.Name, j.request.ClusterNamespace, j.member.hubID)
	return errors.Join(err, remains, removed)
}

// clear deletes what else the control plane has of the Cluster that this run took back, if no hub has done that, and
// this one may.
func (j *joining) clear(ctx context.Context) error {
	live := &clusterv1alpha1.Cluster{}
	err := j.hub.Get(ctx, client.ObjectKeyFromObject(j.cluster), live)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read cluster(%s): %w", j.cluster.Name, err)
	}
	if err == nil && live.UID == j.cluster.UID {
		return nil // another run goes on with it
	}
	return allowed(removeRemains(ctx, j.hub, j.cluster))
}

// awaitGone waits until the Cluster that this run made is gone.
func (j *joining) awaitGone(ctx context.Context) error {
	err := wait.PollUntilContextTimeout(ctx, deletePoll, hubWait, true, func(context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		err := j.hub.Get(ctx, client.ObjectKey{Name: j.request.Name}, live)
		return apierrors.IsNotFound(err) || err == nil && live.Annotations[attemptAnnotation] != j.vault.attempt, client.IgnoreNotFound(err)
	})
	if err != nil {
		return fmt.Errorf("take back cluster(%s): the hub is not through with it: %w", j.request.Name, err)
	}
	return nil
}

func impersonatorSecret(cluster string) string { return cluster + "-impersonator" }

// systemSecret is a Secret of a registration on the hub.
func systemSecret(namespace, name string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: system(namespace, name)}
}
