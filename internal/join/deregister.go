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
	// DeregisterWait is how long a deregistration is followed unless the request says otherwise.
	DeregisterWait = time.Minute
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
	// Force leaves behind what cannot be reached, or does not go within 30 s more, when Wait is over; at once, if the
	// cluster is known to be out of reach.
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
	// Left are, for people, the things that stay on the member, one each: because it was asked to keep them, or was not
	// reached, or did not let go in time. Of the last two it is what was last known to be there.
	Left []string
	// Kept are the objects that stay on the hub although their names are those of a registration: others made them.
	Kept []Kept
	// Forced says that it was done by force.
	Forced bool
}

// Deregister takes a cluster out of the fleet, in either mode. The hub does the work: it withdraws what it deployed,
// has a pull agent remove itself, and takes back identity and credentials; this follows it. Where no hub looks after
// the cluster, it takes back the registration itself. It can be interrupted and run again at any time. It returns an
// error that wraps ErrNotRegistered if there is nothing of the cluster, and one that says what is waited for if the hub
// is not through in time; the hub goes on then.
func Deregister(ctx context.Context, hub *rest.Config, r DeregisterRequest) (Departure, error) {
	if err := r.Validate(); err != nil {
		return Departure{}, err
	}
	hubClient, resources, err := newClient(hub)
	if err != nil {
		return Departure{}, fmt.Errorf("connect to the hub: %w", err)
	}
	d := &departure{hubClient: hubClient, resources: resources, request: r}
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
	resources foreign.Resources
	request   DeregisterRequest
	done      Departure
	// deployed is what the member was known to have at first.
	deployed []string
	// held says that a hub looked after the cluster, which tells what it leaves behind.
	held bool
	// told is what progress was told last.
	told string
	// moved says that a hub has done something to the cluster since.
	moved bool
}

func (d *departure) run(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil {
		return err
	}
	if !found {
		return d.cleanUp(ctx)
	}
	before, err := d.present(ctx, cluster)
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

// present reads what is there that is to be deleted, in the order in which it goes.
func (d *departure) present(ctx context.Context, cluster *libv1beta1.SveltosCluster) ([]client.Object, error) {
	r := newRetraction(d.hubClient, d.resources, cluster)
	foreign, _, err := r.foreign(ctx)
	if err != nil {
		return nil, err
	}
	own, err := r.ownObjects(ctx)
	return append(foreign, own...), err
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
	if !cluster.DeletionTimestamp.IsZero() {
		return AnnotateDeparture(ctx, d.hubClient, cluster, options...)
	}
	// The hub must know how before it knows that. Whoever may not delete must not leave behind how, for others who delete
	// it later.
	if err := d.remove(ctx, cluster, client.DryRunAll); err != nil {
		return err
	}
	before := cluster.DeepCopy()
	err = AnnotateDeparture(ctx, d.hubClient, cluster, options...)
	if err == nil {
		err = d.remove(ctx, cluster)
	}
	if err != nil {
		return errors.Join(err, d.unannotate(ctx, before))
	}
	return nil
}

// remove deletes the SveltosCluster, if it is still the same.
func (d *departure) remove(ctx context.Context, cluster *libv1beta1.SveltosCluster, options ...client.DeleteOption) error {
	options = append(options, client.Preconditions{UID: &cluster.UID})
	if err := d.hubClient.Delete(ctx, cluster.DeepCopy(), options...); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete SveltosCluster %s: %w", d.request.key(), err)
	}
	return nil
}

// unannotate makes what a cluster that is not deleted says of its deregistration what it was before. It also works
// after ctx was cancelled.
func (d *departure) unannotate(ctx context.Context, before *libv1beta1.SveltosCluster) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reachLimit)
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

// AnnotateDeparture adds options, values of kube.AnnotationDeregister, to those that cluster has. hub must read from
// the API server.
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

// outOfReach returns true if the hub does not reach the member: it is Down, or its agent has never connected. A pull
// member whose checks fail is Down too, and its agent is at work.
func (d *departure) outOfReach(ctx context.Context, cluster *libv1beta1.SveltosCluster) (bool, error) {
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

// conclude takes back what no hub did, and says what is gone: the SveltosCluster, what the hub deleted, and what this
// deleted.
func (d *departure) conclude(ctx context.Context, cluster *libv1beta1.SveltosCluster, before []client.Object) error {
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
	if err := d.noteNamespace(ctx, cluster); err != nil {
		return err
	}
	for _, ref := range rest.Deleted {
		if !slices.Contains(d.done.Deleted, ref) {
			d.done.Deleted = append(d.done.Deleted, ref)
		}
	}
	d.done.Left = d.left(cluster)
	return nil
}

// left lists what stays on the member: what the hub says that it left, and what was to be kept. Where no hub looked
// after the cluster, nobody took anything away.
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
func (d *departure) retract(ctx context.Context, cluster *libv1beta1.SveltosCluster) (Retracted, error) {
	_, found, err := findCluster(ctx, d.hubClient, d.request.Request)
	if err != nil || found {
		return Retracted{}, err
	}
	return Retract(ctx, d.hubClient, d.resources, cluster)
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
	rest, err := Retract(ctx, d.hubClient, d.resources, cluster)
	d.done.Deleted, d.done.Kept = rest.Deleted, rest.Kept
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
	// The ServiceAccount is gone with the SveltosCluster: look whose the namespace is that was made for the cluster, if
	// any.
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
