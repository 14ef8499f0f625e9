package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// withdrawLimit is how long a deregistration waits for the hub to be through with the cluster.
const withdrawLimit = 2 * time.Minute

// ErrNotRegistered says that there is nothing of that cluster on the hub.
var ErrNotRegistered = errors.New("the cluster is not registered")

// Deregister takes a cluster out of the fleet, in either mode, and returns the objects that it deleted, in that order. The SveltosCluster
// goes first, so that the hub stops, or withdraws what it deployed, while the cluster can still be reached; credentials go when the hub
// is through with it. What is deployed, and a pull agent itself, stay on the member unless the hub withdrew them before. After a failure
// or an interruption it can be run again.
func Deregister(ctx context.Context, hub *rest.Config, r Request) ([]kube.Ref, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	hubClient, err := newHubClient(hub)
	if err != nil {
		return nil, err
	}
	d := &departure{hubClient: hubClient, request: r}
	if err := d.run(ctx); err != nil {
		return d.deleted, fmt.Errorf("deregister cluster %s: %w", r.key(), err)
	}
	if len(d.deleted) == 0 {
		return nil, fmt.Errorf("deregister cluster %s: %w", r.key(), ErrNotRegistered)
	}
	return d.deleted, nil
}

// departure is one deregistration.
type departure struct {
	hubClient client.Client
	request   Request
	deleted   []kube.Ref
}

func (d *departure) run(ctx context.Context) error {
	r := d.request
	cluster, found, err := findCluster(ctx, d.hubClient, r)
	if err != nil {
		return err
	}
	delivery := deliveryNamespace(cluster)
	if !found {
		if delivery, err = d.rememberedDelivery(ctx); err != nil {
			return err
		}
	}
	remains, err := d.present(ctx, delivery)
	if err != nil {
		return err
	}
	if found {
		reachable := d.reachable(ctx, cluster, delivery)
		if err := d.hubClient.Delete(ctx, cluster, client.Preconditions{UID: &cluster.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete SveltosCluster %s: %w", r.key(), err)
		}
		if err := d.awaitHub(ctx, reachable); err != nil {
			return err
		}
		d.note(cluster)
	}
	for _, obj := range remains {
		if err := d.remove(ctx, obj); err != nil {
			return err
		}
	}
	return d.leaveDelivery(ctx, delivery)
}

// remains are the objects to delete after the SveltosCluster. The ServiceAccount is last: it remembers the
// delivery namespace.
func (d *departure) remains(delivery string) []client.Object {
	r := d.request
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: named(r.Namespace, KubeconfigSecret(r.Name))},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, sharedBinding(r))},
	}
	if delivery != r.Namespace {
		objects = append(objects,
			&rbacv1.RoleBinding{ObjectMeta: named(delivery, r.Name)},
			&rbacv1.Role{ObjectMeta: named(delivery, r.Name)})
	}
	return append(objects,
		&rbacv1.RoleBinding{ObjectMeta: named(r.Namespace, r.Name)},
		&rbacv1.Role{ObjectMeta: named(r.Namespace, r.Name)},
		&coordinationv1.Lease{ObjectMeta: named(delivery, r.Name)},
		&corev1.ServiceAccount{ObjectMeta: named(r.Namespace, r.Name)})
}

// rememberedDelivery finds the cluster's delivery namespace when a first attempt has deleted the SveltosCluster.
func (d *departure) rememberedDelivery(ctx context.Context) (string, error) {
	account := &corev1.ServiceAccount{}
	err := d.hubClient.Get(ctx, client.ObjectKey{Namespace: d.request.Namespace, Name: d.request.Name}, account)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read ServiceAccount %s: %w", d.request.key(), err)
	}
	if namespace := account.Annotations[kube.AnnotationDeliveryNS]; namespace != "" {
		return namespace, nil
	}
	// The ServiceAccount is gone with the SveltosCluster: look whose the namespace is that was made for the cluster, if any.
	namespace := &corev1.Namespace{}
	err = d.hubClient.Get(ctx, client.ObjectKey{Name: derivedNamespace(d.request)}, namespace)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read namespace %s: %w", derivedNamespace(d.request), err)
	}
	if namespace.Annotations[kube.AnnotationDeliveryHolder] == d.request.key() {
		return namespace.Name, nil
	}
	return d.request.Namespace, nil
}

// reachable says whether the hub may still get through to the member. A pull agent that never came or fell silent does not count.
func (d *departure) reachable(ctx context.Context, cluster *libv1beta1.SveltosCluster, delivery string) bool {
	if !cluster.Spec.PullMode {
		return cluster.Status.ConnectionStatus != libv1beta1.ConnectionDown
	}
	lease := &coordinationv1.Lease{}
	if err := d.hubClient.Get(ctx, client.ObjectKey{Namespace: delivery, Name: cluster.Name}, lease); err != nil || lease.Spec.RenewTime == nil {
		return false
	}
	return time.Since(lease.Spec.RenewTime.Time) < leaseDuration*time.Second
}

// awaitHub waits until the SveltosCluster is gone and, if the member can be reached, its ClusterSummaries too.
func (d *departure) awaitHub(ctx context.Context, reachable bool) error {
	limited, cancel := context.WithTimeout(ctx, withdrawLimit)
	defer cancel()
	left := ""
	err := wait.PollUntilContextCancel(limited, time.Second/2, true, func(ctx context.Context) (bool, error) {
		_, found, err := findCluster(ctx, d.hubClient, d.request)
		if err != nil {
			return false, err
		}
		if found {
			left = "its SveltosCluster"
			return false, nil
		}
		summaries := &configv1beta1.ClusterSummaryList{}
		err = d.hubClient.List(ctx, summaries, client.InNamespace(d.request.Namespace),
			client.MatchingLabels{libv1beta1.ClusterNameLabel: d.request.Name, libv1beta1.ClusterTypeLabel: "Sveltos"})
		if err != nil || len(summaries.Items) == 0 || !reachable {
			return err == nil, err
		}
		left = "ClusterSummary " + summaries.Items[0].Name
		return false, nil
	})
	if err != nil && left != "" && ctx.Err() == nil {
		return fmt.Errorf("%s is still there after %s; is the hub running? run deregister again: %w", left, withdrawLimit, err)
	}
	return err
}

// present reads the objects that a registration made. One of that name that someone else made does not count; the kubeconfig Secret goes by
// its name.
func (d *departure) present(ctx context.Context, delivery string) ([]client.Object, error) {
	var present []client.Object
	for _, obj := range d.remains(delivery) {
		if err := d.hubClient.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
			if apierrors.IsNotFound(err) {
				continue
			}
			return nil, fmt.Errorf("read %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
		}
		_, byName := obj.(*corev1.Secret)
		if byName || obj.GetLabels()[registrationLabel] == d.request.Name {
			present = append(present, obj)
		}
	}
	return present, nil
}

// remove deletes an object, which may have gone already with the SveltosCluster that it belongs to.
func (d *departure) remove(ctx context.Context, obj client.Object) error {
	uid := obj.GetUID()
	err := d.hubClient.Delete(ctx, obj, client.Preconditions{UID: &uid})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %T %s: %w", obj, client.ObjectKeyFromObject(obj), err)
	}
	d.note(obj)
	return nil
}

// leaveDelivery gives a shared namespace back and deletes one that was made for this cluster alone.
func (d *departure) leaveDelivery(ctx context.Context, delivery string) error {
	r := d.request
	if delivery == r.Namespace {
		return releaseClaim(ctx, d.hubClient, delivery, r.Name)
	}
	namespace := &corev1.Namespace{}
	if err := d.hubClient.Get(ctx, client.ObjectKey{Name: delivery}, namespace); err != nil {
		return client.IgnoreNotFound(err)
	}
	if namespace.Annotations[kube.AnnotationDeliveryHolder] != r.key() {
		return nil
	}
	if namespace.Labels[registrationLabel] != r.Name {
		return releaseClaim(ctx, d.hubClient, delivery, r.key())
	}
	if err := d.hubClient.Delete(ctx, namespace, client.Preconditions{UID: &namespace.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete namespace %s: %w", delivery, err)
	}
	d.note(namespace)
	return nil
}

func (d *departure) note(obj client.Object) {
	ref := kube.Ref{Namespace: obj.GetNamespace(), Name: obj.GetName()}
	// Every kind here is in the scheme, or the request before this would have failed.
	if gvk, err := apiutil.GVKForObject(obj, d.hubClient.Scheme()); err == nil {
		ref.Group, ref.Version, ref.Kind = gvk.Group, gvk.Version, gvk.Kind
	}
	d.deleted = append(d.deleted, ref)
}
