package join

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

const (
	// DeregisterWait is the default of DeregisterRequest.Wait.
	DeregisterWait = time.Minute
	// WaitingPrefix is the prefix of the failureMessage of a cluster that is being deregistered, before the reason for
	// the wait.
	WaitingPrefix = "deregistering: waiting for "
)

// ErrNotRegistered is returned if the hub has no object of the cluster.
var ErrNotRegistered = errors.New("the cluster is not registered")

// ErrStillDeregistering is returned if the hub has not completed a deregistration in time. The hub continues.
var ErrStillDeregistering = errors.New("the deregistration goes on by itself")

// DeregisterRequest is a request to remove a cluster from the fleet.
type DeregisterRequest struct {
	Request
	// KeepAddons keeps the deployed objects on the cluster, and removes their ownership labels.
	KeepAddons bool
	// Force abandons the objects on the member that are not deleted within Wait and 30 s more; at once, if the cluster is
	// known to be unreachable.
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
	// Left describes the releases and objects that stay on the member, because the request keeps them, or the member was
	// not reached or did not delete them in time. In the last two cases they are the last known ones.
	Left []string
	// Kept are objects of other parties on the hub that have the names of a registration's objects.
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
	hubClient, resources, err := newClient(hub)
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
	// hasHubChange is true if a hub has changed the cluster since.
	hasHubChange bool
}

func (d *deregistration) run(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	if !found {
		return d.cleanUp(ctx)
	}
	before, err := d.listObjects(ctx, cluster)
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

// listObjects reads the objects that the deregistration will delete, in the order of their deletion.
func (d *deregistration) listObjects(ctx context.Context, cluster *libv1beta1.SveltosCluster) ([]client.Object, error) {
	r := newRetraction(d.hubClient, d.resources, cluster)
	foreign, _, err := r.foreignObjects(ctx)
	if err != nil {
		return nil, err
	}
	own, err := r.ownObjects(ctx)
	return append(foreign, own...), err
}

// requestDeletion deletes the SveltosCluster, with the options of the deregistration for the hub.
func (d *deregistration) requestDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	var options []string
	if d.request.KeepAddons {
		options = append(options, kube.DeregisterKeep)
	}
	away, err := d.isUnreachable(ctx, cluster)
	if err != nil {
		return err
	}
	if d.request.Force && away {
		options = append(options, kube.DeregisterForce)
		d.done.Forced = true
	}
	if !cluster.DeletionTimestamp.IsZero() {
		return AddDeregisterOptions(ctx, d.hubClient, cluster, options...)
	}
	// The options must be set before the deletion. The dry run comes first: a caller who may not delete the object must
	// not leave options for a later deletion by others.
	if err := d.deleteCluster(ctx, cluster, client.DryRunAll); err != nil {
		return err
	}
	before := cluster.DeepCopy()
	err = AddDeregisterOptions(ctx, d.hubClient, cluster, options...)
	if err == nil {
		err = d.deleteCluster(ctx, cluster)
	}
	if err != nil {
		return errors.Join(err, d.restoreAnnotation(ctx, before))
	}
	return nil
}

// deleteCluster deletes the SveltosCluster that was read.
func (d *deregistration) deleteCluster(ctx context.Context, cluster *libv1beta1.SveltosCluster, options ...client.DeleteOption) error {
	options = append(options, client.Preconditions{UID: &cluster.UID})
	if err := d.hubClient.Delete(ctx, cluster.DeepCopy(), options...); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// restoreAnnotation restores kube.AnnotationDeregister of a cluster that is not being deleted. It also works after ctx
// was cancelled.
func (d *deregistration) restoreAnnotation(ctx context.Context, before *libv1beta1.SveltosCluster) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), accessTimeout)
	defer cancel()
	now, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || !found || now.UID != before.UID || !now.DeletionTimestamp.IsZero() {
		return err
	}
	former, had := before.Annotations[kube.AnnotationDeregister]
	if now.Annotations[kube.AnnotationDeregister] == former {
		return nil
	}
	changed := now.DeepCopy()
	changed.Annotations[kube.AnnotationDeregister] = former
	if !had {
		delete(changed.Annotations, kube.AnnotationDeregister)
	}
	if err := d.hubClient.Patch(ctx, changed, client.MergeFrom(now), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("take back the annotation of SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// AddDeregisterOptions adds options, values of kube.AnnotationDeregister, to those that cluster has. hub must read from
// the API server.
func AddDeregisterOptions(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster, options ...string) error {
	have := strings.FieldsFunc(cluster.Annotations[kube.AnnotationDeregister], func(r rune) bool { return r == ',' })
	want := slices.Clone(have)
	for _, option := range options {
		if !slices.Contains(want, option) {
			want = append(want, option)
		}
	}
	if len(want) == len(have) {
		return nil
	}
	before := cluster.DeepCopy()
	if cluster.Annotations == nil {
		cluster.Annotations = map[string]string{}
	}
	cluster.Annotations[kube.AnnotationDeregister] = strings.Join(want, ",")
	if err := hub.Patch(ctx, cluster, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate SveltosCluster %s: %w", client.ObjectKeyFromObject(cluster), err)
	}
	return nil
}

// isUnreachable returns whether the hub cannot reach the member: it is Down, or its agent has never connected. A
// pull-mode member whose liveness checks fail is also Down, but its agent is reachable.
func (d *deregistration) isUnreachable(ctx context.Context, cluster *libv1beta1.SveltosCluster) (bool, error) {
	status := cluster.Status
	down := status.ConnectionStatus == libv1beta1.ConnectionDown
	if !cluster.Spec.PullMode {
		return down, nil
	}
	// The message of a deleted cluster is about its deregistration.
	if down && (status.FailureMessage == libv1beta1.AgentReportTooOld || status.AgentCheckFailures == 0) {
		return true, nil
	}
	lease := &coordinationv1.Lease{}
	err := d.hubClient.Get(ctx, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}, lease)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read Lease of the agent: %w", err)
	}
	return lease.Spec.RenewTime == nil, nil
}

// finish deletes the objects that no hub has deleted, and sets the result: the SveltosCluster, the objects that the hub
// deleted, and the objects that this call deleted.
func (d *deregistration) finish(ctx context.Context, cluster *libv1beta1.SveltosCluster, before []client.Object) error {
	rest, err := d.retract(ctx, cluster)
	if err != nil {
		return err
	}
	d.done.Kept = rest.Kept
	d.done.Deleted = append(d.done.Deleted, refOf(d.hubClient, cluster))
	for _, obj := range before {
		ref := refOf(d.hubClient, obj)
		if !slices.ContainsFunc(rest.Kept, func(k Kept) bool { return k.Ref == ref }) {
			d.done.Deleted = append(d.done.Deleted, ref)
		}
	}
	if err := d.recordNamespace(ctx, cluster); err != nil {
		return err
	}
	for _, ref := range rest.Deleted {
		if !slices.Contains(d.done.Deleted, ref) {
			d.done.Deleted = append(d.done.Deleted, ref)
		}
	}
	d.done.Left = d.listLeftOnMember(cluster)
	return nil
}

// listLeftOnMember describes the releases and objects that stay on the member: those that the hub has recorded and, if
// the request keeps them or no hub reconciled the cluster, all that were deployed.
func (d *deregistration) listLeftOnMember(cluster *libv1beta1.SveltosCluster) []string {
	var kept []string
	if d.request.KeepAddons || !d.hadHub {
		kept = d.deployed
	}
	left := union(kept, ListLeftBehind(cluster))
	came := cluster.Status.Ready || cluster.Status.AgentLastReportTime != nil
	if !d.hadHub && cluster.Spec.PullMode && came && cluster.Status.AgentRemovedAt == nil {
		left = union(left, []string{AgentLeft})
	}
	return left
}

// recordNamespace adds the delivery namespace to the result if it was created for the cluster and is deleted.
func (d *deregistration) recordNamespace(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	namespace := &corev1.Namespace{ObjectMeta: named("", deliveryNamespace(cluster))}
	if !cluster.Spec.PullMode || namespace.Name == cluster.Namespace {
		return nil
	}
	err := d.hubClient.Get(ctx, client.ObjectKeyFromObject(namespace), namespace)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read namespace %s: %w", namespace.Name, err)
	}
	if err != nil || !namespace.DeletionTimestamp.IsZero() {
		d.done.Deleted = append(d.done.Deleted, refOf(d.hubClient, namespace))
	}
	return nil
}

// retract deletes the objects of the registration unless the cluster has been registered again.
func (d *deregistration) retract(ctx context.Context, cluster *libv1beta1.SveltosCluster) (Retracted, error) {
	_, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || found {
		return Retracted{}, err
	}
	return Retract(ctx, d.hubClient, d.resources, cluster)
}

// cleanUp deletes the remaining objects of a cluster whose SveltosCluster does not exist.
func (d *deregistration) cleanUp(ctx context.Context) error {
	delivery, err := findDelivery(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: named(d.request.Namespace, d.request.Name)}
	cluster.Annotations = map[string]string{kube.AnnotationDeliveryNS: delivery}
	cluster.Spec.PullMode = true
	rest, err := Retract(ctx, d.hubClient, d.resources, cluster)
	d.done.Deleted, d.done.Kept = rest.Deleted, rest.Kept
	return err
}

// findDelivery returns the delivery namespace of a cluster whose SveltosCluster does not exist.
func findDelivery(ctx context.Context, hub client.Client, r Request) (string, error) {
	account := &corev1.ServiceAccount{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: r.Name}, account)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read ServiceAccount %s: %w", r.key(), err)
	}
	if namespace := account.Annotations[kube.AnnotationDeliveryNS]; namespace != "" && account.Labels[registrationLabel] == r.Name {
		return namespace, nil
	}
	// The ServiceAccount was deleted with the SveltosCluster. The holder of the derived namespace still identifies it.
	namespace := &corev1.Namespace{}
	err = hub.Get(ctx, client.ObjectKey{Name: derivedNamespace(r)}, namespace)
	if err == nil && namespace.Annotations[kube.AnnotationDeliveryHolder] == r.key() {
		return namespace.Name, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return "", fmt.Errorf("read namespace %s: %w", derivedNamespace(r), err)
	}
	return r.Namespace, nil
}
