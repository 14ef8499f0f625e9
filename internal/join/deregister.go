package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/status"
)

const (
	// DeregisterWait is the default of DeregisterRequest.Wait.
	DeregisterWait = time.Minute
	// WaitingPrefix begins the failureMessage of a cluster that is being deregistered. The reason for the wait follows.
	WaitingPrefix = "deregistering: waiting for "
	// forcedTimeout limits the wait after the request for a forced deregistration. The hub tests for 10 s whether the
	// member answers, waits 20 s for withdrawals and 10 s for the agent.
	forcedTimeout = 45 * time.Second
)

// ErrNotRegistered is returned if the hub has no object of the cluster's registration.
var ErrNotRegistered = errors.New("the cluster is not registered")

// ErrStillDeregistering is returned if the hub has not completed a deregistration in time. The hub continues.
var ErrStillDeregistering = errors.New("the deregistration continues")

// DeregisterRequest is a request to remove a cluster from the fleet.
type DeregisterRequest struct {
	Request
	// KeepAddons orphans the deployed objects: they stay on the cluster without ownership labels.
	KeepAddons bool
	// Force completes the deregistration after Wait, even if objects stay on the member. If the member then responds to
	// the hub, the hub waits 30 s more for the deletion of the objects.
	Force bool
	// Wait limits the wait for the hub. Default: DeregisterWait. With a negative value, Deregister does not wait.
	Wait time.Duration
	// Progress is called with the reason for the wait when the reason changes. It may be nil.
	Progress func(string)
}

// DeregisterResult is the result of Deregister.
type DeregisterResult struct {
	// Deleted are the objects that were deleted on the hub, in order.
	Deleted []kube.Ref
	// Left describes the releases and objects that stay on the member, because of KeepAddons, or because the member was
	// not reached or did not delete them in time. If the member was not reached, they are the last known ones.
	Left []string
	// Kept are the objects that stay on the hub because Towline did not create them.
	Kept []Kept
	// Forced is true if the cluster is deregistered by force (kube.DeregisterForce).
	Forced bool
}

// Deregister removes a cluster from the fleet, in either mode. It deletes the SveltosCluster and waits for the hub. The
// hub withdraws its deployments, waits until a pull-mode agent has removed itself, and deletes the identity and the
// credentials. If no hub reconciles the cluster, Deregister deletes the objects of the registration itself. It can be
// interrupted and called again. It returns ErrNotRegistered, or ErrStillDeregistering with the reason.
func Deregister(ctx context.Context, hub *rest.Config, r DeregisterRequest) (DeregisterResult, error) {
	if err := r.Validate(); err != nil {
		return DeregisterResult{}, err
	}
	hubClient, resources, err := NewClient(hub, 0)
	if err != nil {
		return DeregisterResult{}, fmt.Errorf("connect to the hub: %w", err)
	}
	d := &deregistration{hubClient: hubClient, resources: resources, request: r}
	if err := d.run(ctx); err != nil {
		return d.result, fmt.Errorf("deregister cluster %s: %w", r.key(), err)
	}
	if len(d.result.Deleted) == 0 {
		return d.result, fmt.Errorf("deregister cluster %s: %w", r.key(), ErrNotRegistered)
	}
	return d.result, nil
}

// deregistration is one run of Deregister.
type deregistration struct {
	hubClient client.WithWatch
	resources foreign.Resources
	request   DeregisterRequest
	result    DeregisterResult
	// deployed describes the releases and objects that were on the member before the deletion.
	deployed []string
	// hadFinalizer is true if a hub had set its finalizer. Then the status of the SveltosCluster lists the objects that
	// stay on the member.
	hadFinalizer bool
	// reported is the argument of the last call of Progress, without its prefix.
	reported string
}

func (d *deregistration) run(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	if !found {
		// An earlier deregistration may have ended after the deletion of the SveltosCluster.
		cluster.Namespace, cluster.Name, cluster.Spec.PullMode = d.request.Namespace, d.request.Name, true
		return d.deleteHubObjects(ctx, cluster)
	}
	claimed, err := claimedNamespaces(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	before, _, err := newHubCleanup(d.hubClient, d.resources, cluster).readObjects(ctx, claimed)
	if err != nil {
		return err
	}
	if d.deployed, err = readDeployed(ctx, d.hubClient, d.request.Request); err != nil {
		return err
	}
	d.hadFinalizer = controllerutil.ContainsFinalizer(cluster, kube.FinalizerCluster)
	if err := d.requestDeletion(ctx, cluster); err != nil {
		return err
	}
	if err := d.awaitDeletion(ctx, cluster); err != nil {
		return err
	}
	return d.finish(ctx, cluster, before)
}

// requestDeletion writes the options of the deregistration to the SveltosCluster, and deletes it.
func (d *deregistration) requestDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	var options []string
	if d.request.KeepAddons {
		options = append(options, kube.DeregisterKeep)
	}
	if !cluster.DeletionTimestamp.IsZero() {
		return fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, options...)
	}
	// The hub must read the options before the deletion. The dry run is first: a caller who may not delete the object must
	// not leave options for a later deletion on it.
	if err := d.deleteCluster(ctx, cluster, client.DryRunAll); err != nil {
		return err
	}
	if err := fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, options...); err != nil {
		return err
	}
	return d.deleteCluster(ctx, cluster)
}

func (d *deregistration) deleteCluster(ctx context.Context, cluster *libv1beta1.SveltosCluster, options ...client.DeleteOption) error {
	options = append(options, client.Preconditions{UID: &cluster.UID})
	if err := d.hubClient.Delete(ctx, cluster.DeepCopy(), options...); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// awaitDeletion waits until the SveltosCluster is deleted or replaced. With Force, it requests a forced deregistration
// after Wait, and waits for forcedTimeout.
func (d *deregistration) awaitDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	isDeleted, err := d.watchUntilDeleted(ctx, cluster, max(cmp.Or(d.request.Wait, DeregisterWait), 0))
	if err == nil && !isDeleted && d.request.Force {
		d.result.Forced = true
		if err := fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, kube.DeregisterForce); client.IgnoreNotFound(err) != nil {
			return err
		}
		isDeleted, err = d.watchUntilDeleted(ctx, cluster, forcedTimeout)
	}
	if err != nil || isDeleted {
		return err
	}
	message, isWaiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	switch {
	case !isWaiting:
		shard := cmp.Or(fleet.FromSveltosCluster(cluster).Shard, "default")
		return fmt.Errorf("no hub has started it: %w when the hub of the shard %s runs", ErrStillDeregistering, shard)
	case d.result.Forced:
		return fmt.Errorf("still waiting for %s; %w if the hub is running", message, ErrStillDeregistering)
	}
	return fmt.Errorf("still waiting for %s; %w when the cluster answers; "+
		"to leave the objects on the cluster, run the command again with --force", message, ErrStillDeregistering)
}

// watchUntilDeleted watches the SveltosCluster until it is deleted, at most for limit. It copies each change to
// cluster, which then has the last status before the deletion.
func (d *deregistration) watchUntilDeleted(ctx context.Context, cluster *libv1beta1.SveltosCluster, limit time.Duration) (isDeleted bool, err error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	d.reportProgress(cluster)
	watcher := &cache.ListWatch{WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		return d.hubClient.Watch(ctx, &libv1beta1.SveltosClusterList{}, &client.ListOptions{Raw: &options},
			client.InNamespace(cluster.Namespace), client.MatchingFields{metav1.ObjectNameField: cluster.Name})
	}}
	_, err = watchtools.Until(limited, cluster.ResourceVersion, watcher, func(change watch.Event) (bool, error) {
		live, isCluster := change.Object.(*libv1beta1.SveltosCluster)
		if !isCluster {
			return false, fmt.Errorf("watch the SveltosCluster: %w", apierrors.FromObject(change.Object))
		}
		if live.UID == cluster.UID {
			live.DeepCopyInto(cluster)
			d.reportProgress(cluster)
		}
		return change.Type == watch.Deleted, nil
	})
	if err == nil || ctx.Err() != nil || limited.Err() == nil {
		return err == nil, err
	}
	live, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if found && live.UID == cluster.UID {
		live.DeepCopyInto(cluster)
		d.reportProgress(cluster)
		return false, err
	}
	return err == nil, err
}

func (d *deregistration) reportProgress(cluster *libv1beta1.SveltosCluster) {
	message, isWaiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if isWaiting && d.request.Progress != nil && message != d.reported {
		d.reported = message
		d.request.Progress("waiting for " + message)
	}
}

// finish sets the result. It deletes the remaining objects of the registration, unless the cluster has been registered
// again. before are the objects of the registration before the deletion of the SveltosCluster.
func (d *deregistration) finish(ctx context.Context, cluster *libv1beta1.SveltosCluster, before []client.Object) error {
	d.result.Deleted = append(d.result.Deleted, kube.RefIn(d.hubClient.Scheme(), cluster))
	for _, obj := range before {
		d.result.Deleted = append(d.result.Deleted, kube.RefIn(d.hubClient.Scheme(), obj))
	}
	if d.request.KeepAddons || !d.hadFinalizer {
		d.result.Left = d.deployed
	}
	for _, left := range fleet.ListLeftBehind(cluster) {
		if !slices.Contains(d.result.Left, left) {
			d.result.Left = append(d.result.Left, left)
		}
	}
	if !d.hadFinalizer && cluster.Status.AgentLastReportTime != nil {
		d.result.Left = append(d.result.Left, fleet.LeftBehindAgent)
	}
	_, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || found {
		return err
	}
	return d.deleteHubObjects(ctx, cluster)
}

func (d *deregistration) deleteHubObjects(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	cleanup, err := DeleteHubObjects(ctx, d.hubClient, d.resources, cluster)
	d.result.Kept = cleanup.Kept
	for _, ref := range cleanup.Deleted {
		if !slices.Contains(d.result.Deleted, ref) {
			d.result.Deleted = append(d.result.Deleted, ref)
		}
	}
	return err
}

// readDeployed returns descriptions of the releases and objects that are deployed on a cluster.
func readDeployed(ctx context.Context, hub client.Client, r Request) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: "sveltos--" + r.Name}, inventory)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", r.key(), err)
	}
	return status.ListDeployed(inventory.Status, func(string, string, libv1beta1.FeatureID, libv1beta1.DeploymentType) bool { return true }), nil
}
