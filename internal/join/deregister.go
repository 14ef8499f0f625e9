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
	// WaitingPrefix is the prefix of the failureMessage of a cluster that is being deregistered, before the reason for
	// the wait.
	WaitingPrefix = "deregistering: waiting for "
	// forcedTimeout is the time for a deregistration by force: the hub waits 20 s for withdrawals and 10 s for the
	// agent, and tests for 10 s before that whether the member answers.
	forcedTimeout = 45 * time.Second
)

// ErrNotRegistered is returned if the hub has no object of the cluster.
var ErrNotRegistered = errors.New("the cluster is not registered")

// ErrStillDeregistering is returned if the hub has not completed a deregistration in time. The hub continues.
var ErrStillDeregistering = errors.New("the deregistration continues")

// DeregisterRequest is a request to remove a cluster from the fleet.
type DeregisterRequest struct {
	Request
	// KeepAddons keeps the deployed objects on the cluster, and removes their ownership labels.
	KeepAddons bool
	// Force abandons the objects on the member that are not deleted within Wait. A member that answers then gets 30 s
	// more.
	Force bool
	// Wait limits the wait for the hub. Default: DeregisterWait. With a negative value, Deregister does not wait.
	Wait time.Duration
	// Progress is called with the reason for which the hub waits, whenever that changes; it may be nil.
	Progress func(string)
}

// DeregisterResult is the result of a deregistration.
type DeregisterResult struct {
	// Deleted are the objects that were deleted on the hub, in order.
	Deleted []kube.Ref
	// Left describes the releases and objects that stay on the member. If the member was not reached, or did not delete
	// them in time, they are the last known ones. Otherwise the request keeps them.
	Left []string
	// Kept are the objects that stay on the hub, since Towline did not create them.
	Kept []Kept
	// Forced is true if the cluster is deregistered by force (kube.DeregisterForce).
	Forced bool
}

// Deregister removes a cluster from the fleet, in either mode. It deletes the SveltosCluster and waits for the hub,
// which withdraws its deployments, lets a pull agent remove itself, and deletes identity and credentials. If no hub
// reconciles the cluster, Deregister deletes the registration itself. It can be interrupted and called again at any
// time. It returns ErrNotRegistered if the hub has no object of the cluster, and ErrStillDeregistering, with the
// reason, if the hub has not finished in time; the hub continues then.
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
		return d.done, fmt.Errorf("deregister cluster %s: %w", r.key(), err)
	}
	if len(d.done.Deleted) == 0 {
		return d.done, fmt.Errorf("deregister cluster %s: %w", r.key(), ErrNotRegistered)
	}
	return d.done, nil
}

// deregistration is one run of Deregister.
type deregistration struct {
	hubClient client.WithWatch
	resources foreign.Resources
	request   DeregisterRequest
	done      DeregisterResult
	// deployed describes the releases and objects that were deployed on the member before the deregistration.
	deployed []string
	// hadHub is true if a hub reconciled the cluster, which then records the objects that it leaves on the member.
	hadHub bool
	// progress is the argument of the last call of Progress.
	progress string
}

func (d *deregistration) run(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	if !found {
		// The SveltosCluster was deleted before the other objects.
		cluster.Namespace, cluster.Name, cluster.Spec.PullMode = d.request.Namespace, d.request.Name, true
		return d.retract(ctx, cluster)
	}
	claimed, err := claimedNamespaces(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	before, _, err := newRetraction(d.hubClient, d.resources, cluster).readObjects(ctx, claimed)
	if err != nil {
		return err
	}
	if d.deployed, err = readDeployed(ctx, d.hubClient, d.request.Request); err != nil {
		return err
	}
	d.hadHub = controllerutil.ContainsFinalizer(cluster, kube.FinalizerCluster)
	if err := d.requestDeletion(ctx, cluster); err != nil {
		return err
	}
	if err := d.awaitDeletion(ctx, cluster); err != nil {
		return err
	}
	return d.finish(ctx, cluster, before)
}

// requestDeletion deletes the SveltosCluster, with the options of the deregistration for the hub.
func (d *deregistration) requestDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	var options []string
	if d.request.KeepAddons {
		options = append(options, kube.DeregisterKeep)
	}
	if !cluster.DeletionTimestamp.IsZero() {
		return fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, options...)
	}
	// The options must be set before the deletion. The dry run comes first: a caller who may not delete the object must
	// not leave options for a later deletion by others.
	if err := d.deleteCluster(ctx, cluster, client.DryRunAll); err != nil {
		return err
	}
	if err := fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, options...); err != nil {
		return err
	}
	return d.deleteCluster(ctx, cluster)
}

// deleteCluster deletes the SveltosCluster that was read.
func (d *deregistration) deleteCluster(ctx context.Context, cluster *libv1beta1.SveltosCluster, options ...client.DeleteOption) error {
	options = append(options, client.Preconditions{UID: &cluster.UID})
	if err := d.hubClient.Delete(ctx, cluster.DeepCopy(), options...); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// awaitDeletion waits until the SveltosCluster is deleted or replaced. After the time limit it forces the deletion, if
// the request has Force, and waits for that.
func (d *deregistration) awaitDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	isDeleted, err := d.await(ctx, cluster, max(cmp.Or(d.request.Wait, DeregisterWait), 0))
	if err == nil && !isDeleted && d.request.Force {
		d.done.Forced = true
		if err := fleet.AddDeregisterOptions(ctx, d.hubClient, cluster, kube.DeregisterForce); client.IgnoreNotFound(err) != nil {
			return err
		}
		isDeleted, err = d.await(ctx, cluster, forcedTimeout)
	}
	if err != nil || isDeleted {
		return err
	}
	message, isWaiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	switch {
	case !isWaiting:
		shard := cmp.Or(fleet.FromSveltosCluster(cluster).Shard, "default")
		return fmt.Errorf("no hub has started it: %w when the hub of the shard %s runs", ErrStillDeregistering, shard)
	case d.done.Forced:
		return fmt.Errorf("still waiting for %s; %w if the hub is running", message, ErrStillDeregistering)
	}
	return fmt.Errorf("still waiting for %s; %w when the cluster answers; "+
		"to leave the objects on the cluster, run the command again with --force", message, ErrStillDeregistering)
}

// await watches the SveltosCluster until it is deleted, but no longer than limit. It updates cluster with each change,
// so that the last status is not missed.
func (d *deregistration) await(ctx context.Context, cluster *libv1beta1.SveltosCluster, limit time.Duration) (isDeleted bool, err error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	d.reportProgress(cluster)
	watcher := &cache.ListWatch{WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		return d.hubClient.Watch(ctx, &libv1beta1.SveltosClusterList{}, &client.ListOptions{Raw: &options},
			client.InNamespace(cluster.Namespace), client.MatchingFields{metav1.ObjectNameField: cluster.Name})
	}}
	_, err = watchtools.Until(limited, cluster.ResourceVersion, watcher, func(change watch.Event) (bool, error) {
		now, isCluster := change.Object.(*libv1beta1.SveltosCluster)
		if !isCluster {
			return false, fmt.Errorf("watch the SveltosCluster: %w", apierrors.FromObject(change.Object))
		}
		if now.UID == cluster.UID {
			now.DeepCopyInto(cluster)
			d.reportProgress(cluster)
		}
		return change.Type == watch.Deleted, nil
	})
	if err == nil || ctx.Err() != nil || limited.Err() == nil {
		return err == nil, err
	}
	now, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if found && now.UID == cluster.UID {
		now.DeepCopyInto(cluster)
		d.reportProgress(cluster)
		return false, err
	}
	return err == nil, err
}

func (d *deregistration) reportProgress(cluster *libv1beta1.SveltosCluster) {
	message, isWaiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if isWaiting && d.request.Progress != nil && message != d.progress {
		d.progress = message
		d.request.Progress("waiting for " + message)
	}
}

// finish deletes the objects that no hub has deleted, unless the cluster has been registered again, and sets the
// result: the SveltosCluster, the objects that the hub deleted, and the objects that this call deleted.
func (d *deregistration) finish(ctx context.Context, cluster *libv1beta1.SveltosCluster, before []client.Object) error {
	d.done.Deleted = append(d.done.Deleted, kube.RefIn(d.hubClient.Scheme(), cluster))
	for _, obj := range before {
		d.done.Deleted = append(d.done.Deleted, kube.RefIn(d.hubClient.Scheme(), obj))
	}
	if d.request.KeepAddons || !d.hadHub {
		d.done.Left = d.deployed
	}
	for _, left := range fleet.ListLeftBehind(cluster) {
		if !slices.Contains(d.done.Left, left) {
			d.done.Left = append(d.done.Left, left)
		}
	}
	if !d.hadHub && cluster.Status.AgentLastReportTime != nil {
		d.done.Left = append(d.done.Left, fleet.AgentLeft)
	}
	_, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || found {
		return err
	}
	return d.retract(ctx, cluster)
}

// retract deletes the remaining objects of the registration.
func (d *deregistration) retract(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	retracted, err := Retract(ctx, d.hubClient, d.resources, cluster)
	d.done.Kept = retracted.Kept
	for _, ref := range retracted.Deleted {
		if !slices.Contains(d.done.Deleted, ref) {
			d.done.Deleted = append(d.done.Deleted, ref)
		}
	}
	return err
}

// readDeployed describes the releases and objects that are deployed for a cluster.
func readDeployed(ctx context.Context, hub client.Client, r Request) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: "sveltos--" + r.Name}, inventory)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", r.key(), err)
	}
	return status.ListDeployed(inventory.Status, func(string, string, libv1beta1.FeatureID, libv1beta1.DeploymentType) bool { return true }), nil
}
