package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// registrationLabel marks the objects that a registration made; its value is the cluster's name.
	registrationLabel = "towline.dev/registration"
	// undoLimit is how long undoing may take after a failure or an interruption: about ten requests.
	undoLimit = 20 * time.Second
	// registrationQPS is enough for the dozen requests of one registration not to wait for each other.
	registrationQPS = 100
)

// ErrNotInstalled says that the hub does not know the kinds of Towline.
var ErrNotInstalled = errors.New("the hub does not know SveltosClusters; install Towline there first: towline hub --install-crds")

// errForeign says that an object which a registration would make exists and belongs to someone else.
var errForeign = errors.New("exists and was not made by a registration: choose another cluster name")

func newHubClient(hub *rest.Config) (client.Client, error) {
	config := rest.CopyConfig(hub)
	config.QPS, config.Burst = registrationQPS, registrationQPS
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	return hubClient, nil
}

// ledger applies the objects of one registration and remembers how to take back what was not there before.
type ledger struct {
	hubClient client.Client
	cluster   string
	undo      []func(context.Context) error
}

// findCluster reads the SveltosCluster that r names; it is empty if there is none.
func findCluster(ctx context.Context, hubClient client.Client, r Request) (cluster *libv1beta1.SveltosCluster, found bool, err error) {
	cluster = &libv1beta1.SveltosCluster{}
	// The client lists the hub's kinds first, for which it takes no context.
	if err := ctx.Err(); err != nil {
		return cluster, false, err
	}
	err = hubClient.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: r.Name}, cluster)
	switch {
	case meta.IsNoMatchError(err):
		return cluster, false, ErrNotInstalled
	case apierrors.IsNotFound(err):
		return cluster, false, nil
	case err != nil:
		return cluster, false, fmt.Errorf("read SveltosCluster %s: %w", r.key(), err)
	}
	return cluster, true, nil
}

// own applies an object that belongs to registrations: it refuses one that exists and was not made by a registration.
func (l *ledger) own(ctx context.Context, obj client.Object) error {
	labels := obj.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[registrationLabel] = l.cluster
	obj.SetLabels(labels)
	live, found, err := l.live(ctx, obj)
	if err != nil {
		return err
	}
	if found && live.GetLabels()[registrationLabel] == "" {
		return fmt.Errorf("%s %w", describe(live), errForeign)
	}
	return l.write(ctx, obj, found)
}

// apply applies an object that others may have made before.
func (l *ledger) apply(ctx context.Context, obj client.Object) error {
	_, found, err := l.live(ctx, obj)
	if err != nil {
		return err
	}
	return l.write(ctx, obj, found)
}

// live returns the object as it is on the hub.
func (l *ledger) live(ctx context.Context, obj client.Object) (live *unstructured.Unstructured, found bool, err error) {
	gvk, err := apiutil.GVKForObject(obj, l.hubClient.Scheme())
	if err != nil {
		return nil, false, fmt.Errorf("prepare registration: %w", err)
	}
	live = &unstructured.Unstructured{}
	live.SetGroupVersionKind(gvk)
	if err := l.hubClient.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if apierrors.IsNotFound(err) {
			return live, false, nil
		}
		return live, false, fmt.Errorf("read %s %s: %w", gvk.Kind, client.ObjectKeyFromObject(obj), err)
	}
	return live, true, nil
}

// write applies obj. What was not there before is taken back if the registration fails.
func (l *ledger) write(ctx context.Context, obj client.Object, found bool) error {
	desired, err := toUnstructured(l.hubClient.Scheme(), obj)
	if err != nil {
		return err
	}
	name := describe(desired)
	if !found {
		// Noted before the request, since a request that was cut off may have done its work.
		l.undo = append(l.undo, func(ctx context.Context) error { return l.takeBack(ctx, desired) })
	}
	err = l.hubClient.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func (l *ledger) takeBack(ctx context.Context, obj *unstructured.Unstructured) error {
	gone := &unstructured.Unstructured{}
	gone.SetGroupVersionKind(obj.GroupVersionKind())
	gone.SetNamespace(obj.GetNamespace())
	gone.SetName(obj.GetName())
	if err := l.hubClient.Delete(ctx, gone); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back %s: %w", describe(obj), err)
	}
	return nil
}

// rollBack takes back what the registration made, newest first. It also works after ctx was cancelled.
func (l *ledger) rollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var errs []error
	for i := len(l.undo) - 1; i >= 0; i-- {
		errs = append(errs, l.undo[i](ctx))
	}
	return errors.Join(errs...)
}

// makeNamespace creates the namespace if it is missing. Undoing deletes it only if no other registration has moved in.
func (l *ledger) makeNamespace(ctx context.Context, name string, annotations map[string]string) (created bool, err error) {
	namespace := &corev1.Namespace{}
	namespace.Name, namespace.Annotations = name, annotations
	if len(annotations) > 0 {
		namespace.Labels = map[string]string{registrationLabel: l.cluster}
	}
	err = l.hubClient.Create(ctx, namespace, client.FieldOwner(kube.FieldManager))
	if apierrors.IsAlreadyExists(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("create namespace %s: %w", name, err)
	}
	l.undo = append(l.undo, func(ctx context.Context) error {
		clusters := &libv1beta1.SveltosClusterList{}
		if err := l.hubClient.List(ctx, clusters, client.InNamespace(name)); err != nil {
			return fmt.Errorf("take back namespace %s: %w", name, err)
		}
		if len(clusters.Items) > 0 {
			return nil
		}
		if err := l.hubClient.Delete(ctx, namespace, client.Preconditions{UID: &namespace.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("take back namespace %s: %w", name, err)
		}
		return nil
	})
	return true, nil
}

func toUnstructured(scheme *runtime.Scheme, obj client.Object) (*unstructured.Unstructured, error) {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return nil, fmt.Errorf("prepare registration: %w", err)
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, fmt.Errorf("prepare %s %s: %w", gvk.Kind, obj.GetName(), err)
	}
	out := &unstructured.Unstructured{Object: fields}
	out.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(out.Object, "status")
	unstructured.RemoveNestedField(out.Object, "metadata", "creationTimestamp")
	return out, nil
}

func describe(obj *unstructured.Unstructured) string { return kube.RefOf(obj).String() }
