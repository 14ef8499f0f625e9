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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// DeregisterWait is how long a deregistration is followed unless the request says otherwise.
	DeregisterWait = time.Minute
	// forcedWait is how long the hub may take, at least, to let go of a cluster by force: it waits 30 s for withdrawals and 30 s for the agent
	// of a member that answers, and for requests to one that does not.
	forcedWait = 2 * time.Minute
	// takenUpWait is how long a hub may take to begin with that: another one takes over within 15 s, and asks the member for 10 s first.
	takenUpWait = 30 * time.Second
	// departurePoll is the time between two looks at a cluster that is leaving and cannot be watched.
	departurePoll = 300 * time.Millisecond
	// WaitingPrefix begins the failureMessage of a cluster that is being deregistered; what it waits for follows.
	WaitingPrefix = "deregistering: waiting for "
)

// ErrNotRegistered says that there is nothing of that cluster on the hub.
var ErrNotRegistered = errors.New("the cluster is not registered")

// ErrGoesOn says that a deregistration was not over in time, and that the hub finishes it.
var ErrGoesOn = errors.New("the deregistration goes on by itself")

// DeregisterRequest asks to take a cluster out of the fleet.
type DeregisterRequest struct {
	Request
	// KeepAddons leaves what is deployed on the cluster, as it is and without our marks.
	KeepAddons bool
	// Force leaves behind what cannot be reached, or does not go within 30 s more, when Wait is over; at once, if the cluster is known to be
	// out of reach.
	Force bool
	// Wait is how long the hub may take. Zero means DeregisterWait; less than zero, not to wait at all.
	Wait time.Duration
	// Progress is told what the hub waits for, whenever that changes; it may be nil.
	Progress func(string)
}

// Departure is what a deregistration did.
type Departure struct {
	// Deleted are the objects that are gone from the hub, in the order in which they go.
	Deleted []kube.Ref
	// Left are, for people, the things that stay on the member, one each: because it was asked to keep them, or was not reached, or did not
	// let go in time. Of the last two it is what was last known to be there.
	Left []string
	// Forced says that it was done by force.
	Forced bool
}

// Deregister takes a cluster out of the fleet, in either mode. The hub does the work: it withdraws what it deployed, has a pull agent remove
// itself, and takes back identity and credentials; this follows it. Where no hub looks after the cluster, it takes back the registration
// itself. It can be interrupted and run again at any time. It returns an error that wraps ErrNotRegistered if there is nothing of the
// cluster, and one that says what is waited for if the hub is not through in time; the hub goes on then.
func Deregister(ctx context.Context, hub *rest.Config, r DeregisterRequest) (Departure, error) {
	if err := r.Validate(); err != nil {
		return Departure{}, err
	}
	hubClient, err := newHubClient(hub)
	if err != nil {
		return Departure{}, err
	}
	d := &departure{hubClient: hubClient, request: r}
	if err := d.run(ctx); err != nil {
		return d.done, fmt.Errorf("deregister cluster %s: %w", r.key(), err)
	}
	if len(d.done.Deleted) == 0 {
		return d.done, fmt.Errorf("deregister cluster %s: %w", r.key(), ErrNotRegistered)
	}
	return d.done, nil
}

// departure is one deregistration.
type departure struct {
	hubClient client.WithWatch
	request   DeregisterRequest
	done      Departure
	// deployed is what the member was known to have at first.
	deployed []string
	// held says that a hub looked after the cluster, which tells what it leaves behind.
	held bool
	// told is what progress was told last.
	told string
}

func (d *departure) run(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	if !found {
		return d.cleanUp(ctx)
	}
	before, err := (&retraction{hub: d.hubClient, cluster: cluster, request: d.request.Request}).present(ctx)
	if err != nil {
		return err
	}
	if d.deployed, err = deployedOn(ctx, d.hubClient, d.request.Request); err != nil {
		return err
	}
	d.held = controllerutil.ContainsFinalizer(cluster, kube.FinalizerCluster)
	if err := d.ask(ctx, cluster); err != nil {
		return err
	}
	if err := d.follow(ctx, cluster); err != nil {
		return err
	}
	return d.conclude(ctx, cluster, before)
}

// ask tells the hub, by way of the SveltosCluster, that the cluster is to go.
func (d *departure) ask(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	var options []string
	if d.request.KeepAddons {
		options = append(options, kube.DeregisterKeep)
	}
	away, err := d.outOfReach(ctx, cluster)
	if err != nil {
		return err
	}
	if d.request.Force && away {
		options = append(options, kube.DeregisterForce)
		d.done.Forced = true
	}
	if err := AnnotateDeparture(ctx, d.hubClient, cluster, options...); err != nil {
		return err
	}
	if !cluster.DeletionTimestamp.IsZero() {
		return nil
	}
	if err := d.hubClient.Delete(ctx, cluster, client.Preconditions{UID: &cluster.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// AnnotateDeparture adds options, values of kube.AnnotationDeregister, to those that cluster has. hub must read from the API server.
func AnnotateDeparture(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster, options ...string) error {
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

// outOfReach says whether the hub is known not to get through to the member: its agent never came or is silent, or it is Down.
func (d *departure) outOfReach(ctx context.Context, cluster *libv1beta1.SveltosCluster) (bool, error) {
	if !cluster.Spec.PullMode {
		return cluster.Status.ConnectionStatus == libv1beta1.ConnectionDown, nil
	}
	lease := &coordinationv1.Lease{}
	err := d.hubClient.Get(ctx, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}, lease)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read Lease of the agent: %w", err)
	}
	beat := lease.Spec.RenewTime
	return beat == nil || time.Since(beat.Time) > leaseDuration*time.Second, nil
}

// follow waits until the SveltosCluster is gone. When time is up it uses force, if that is asked for.
func (d *departure) follow(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	limit := d.request.Wait
	switch {
	case limit == 0:
		limit = DeregisterWait
	case limit < 0:
		limit = 0
	}
	gone, err := d.await(ctx, cluster, limit)
	if err != nil || gone {
		return err
	}
	if !d.request.Force {
		return d.overdue(cluster)
	}
	d.done.Forced = true
	if err := AnnotateDeparture(ctx, d.hubClient, cluster, kube.DeregisterForce); client.IgnoreNotFound(err) != nil {
		return err
	}
	for _, limit := range []time.Duration{takenUpWait, max(limit, forcedWait)} {
		gone, err = d.await(ctx, cluster, limit)
		if err != nil || gone {
			return err
		}
		if d.ignored(cluster) {
			break
		}
	}
	return d.overdue(cluster)
}

// ignored says whether no hub has taken up that the cluster is to go by force: one that runs sets itself a deadline at once.
func (d *departure) ignored(cluster *libv1beta1.SveltosCluster) bool {
	return d.done.Forced && cluster.Annotations[kube.AnnotationDeadline] == ""
}

// await looks until the SveltosCluster is gone, or another one, for no longer than limit. cluster is kept as it was seen last.
func (d *departure) await(ctx context.Context, cluster *libv1beta1.SveltosCluster, limit time.Duration) (gone bool, err error) {
	uid := cluster.UID
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		// Not limited, so that there is always one look.
		now, found, err := findCluster(ctx, d.hubClient, d.request.Request)
		if err != nil {
			return false, err
		}
		if !found || now.UID != uid {
			return true, nil
		}
		now.DeepCopyInto(cluster)
		d.tell(cluster)
		if limited.Err() == nil && d.watch(limited, cluster) {
			return true, nil
		}
		select {
		case <-limited.Done():
			return false, ctx.Err()
		case <-time.After(departurePoll):
		}
	}
}

// watch sees every change of cluster, so that what is written last is not missed. It returns true when cluster is gone, and false if it cannot
// be watched any longer, or ctx ended.
func (d *departure) watch(ctx context.Context, cluster *libv1beta1.SveltosCluster) (gone bool) {
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: cluster.ResourceVersion}}
	changes, err := d.hubClient.Watch(ctx, &libv1beta1.SveltosClusterList{}, from,
		client.InNamespace(cluster.Namespace), client.MatchingFields{metav1.ObjectNameField: cluster.Name})
	if err != nil {
		return false
	}
	defer changes.Stop()
	for change := range changes.ResultChan() {
		now, ok := change.Object.(*libv1beta1.SveltosCluster)
		if !ok || now.UID != cluster.UID {
			return false
		}
		now.DeepCopyInto(cluster)
		if change.Type == watch.Deleted {
			return true
		}
		d.tell(cluster)
	}
	return false
}

func (d *departure) tell(cluster *libv1beta1.SveltosCluster) {
	message, waiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if waiting && message != d.told && d.request.Progress != nil {
		d.told = message
		d.request.Progress("waiting for " + message)
	}
}

// overdue says why the cluster is still there.
func (d *departure) overdue(cluster *libv1beta1.SveltosCluster) error {
	message, waiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if !waiting || d.ignored(cluster) {
		return fmt.Errorf("no hub has taken it up: is the hub running? %w when it is", ErrGoesOn)
	}
	if d.done.Forced {
		return fmt.Errorf("still waiting for %s; %w", message, ErrGoesOn)
	}
	return fmt.Errorf("still waiting for %s; %w when the cluster answers; "+
		"to leave behind what cannot be reached run again with --force", message, ErrGoesOn)
}

// conclude takes back what no hub did, and says what is gone: the SveltosCluster, what the hub deleted, and what this deleted.
func (d *departure) conclude(ctx context.Context, cluster *libv1beta1.SveltosCluster, before []client.Object) error {
	rest, err := d.retract(ctx, cluster)
	if err != nil {
		return err
	}
	d.done.Deleted = append(d.done.Deleted, refOf(d.hubClient, cluster))
	for _, obj := range before {
		d.done.Deleted = append(d.done.Deleted, refOf(d.hubClient, obj))
	}
	if err := d.noteNamespace(ctx, cluster); err != nil {
		return err
	}
	for _, ref := range rest {
		if !slices.Contains(d.done.Deleted, ref) {
			d.done.Deleted = append(d.done.Deleted, ref)
		}
	}
	d.done.Left = d.left(cluster)
	return nil
}

// left lists what stays on the member: what the hub says that it left, and what was to be kept. Where no hub looked after the cluster,
// nobody took anything away.
func (d *departure) left(cluster *libv1beta1.SveltosCluster) []string {
	var kept []string
	if d.request.KeepAddons || !d.held {
		kept = d.deployed
	}
	left := union(kept, LeftBehind(cluster))
	came := cluster.Status.Ready || cluster.Status.AgentLastReportTime != nil
	if !d.held && cluster.Spec.PullMode && came && cluster.Status.AgentRemovedAt == nil {
		left = union(left, []string{AgentLeft})
	}
	return left
}

// noteNamespace adds the namespace that was made for the deliveries of the cluster, if it went too.
func (d *departure) noteNamespace(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
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

// retract takes the registration back unless the cluster was registered again meanwhile.
func (d *departure) retract(ctx context.Context, cluster *libv1beta1.SveltosCluster) ([]kube.Ref, error) {
	_, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || found {
		return nil, err
	}
	return Retract(ctx, d.hubClient, cluster)
}

// cleanUp takes back what is left of a cluster whose SveltosCluster is gone.
func (d *departure) cleanUp(ctx context.Context) error {
	delivery, err := rememberedDelivery(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: named(d.request.Namespace, d.request.Name)}
	cluster.Annotations = map[string]string{kube.AnnotationDeliveryNS: delivery}
	cluster.Spec.PullMode = true
	d.done.Deleted, err = Retract(ctx, d.hubClient, cluster)
	return err
}

// rememberedDelivery finds a cluster's delivery namespace when its SveltosCluster is gone.
func rememberedDelivery(ctx context.Context, hub client.Client, r Request) (string, error) {
	account := &corev1.ServiceAccount{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: r.Name}, account)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read ServiceAccount %s: %w", r.key(), err)
	}
	if namespace := account.Annotations[kube.AnnotationDeliveryNS]; namespace != "" && account.Labels[registrationLabel] == r.Name {
		return namespace, nil
	}
	// The ServiceAccount is gone with the SveltosCluster: look whose the namespace is that was made for the cluster, if any.
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
