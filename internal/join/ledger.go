package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// registrationLabel marks the objects that a registration made; its value is the cluster's name.
	registrationLabel = "towline.dev/registration"
	// attemptAnnotation says which run of a registration wrote an object last.
	attemptAnnotation = "towline.dev/registration-attempt"
	// undoLimit is how long undoing may take after a failure or an interruption: about fifteen requests, and the hub's
	// part.
	undoLimit = 40 * time.Second
	// goneLimit is how long a hub may take to let go of a SveltosCluster that is taken back.
	goneLimit = 20 * time.Second
	// registrationQPS is enough for the dozen requests of one registration not to wait for each other.
	registrationQPS = 100
)

// ErrNotInstalled says that the hub does not know the kinds of Towline.
var ErrNotInstalled = errors.New("the hub does not know SveltosClusters; install Towline there first: towline hub --install-crds")

// ErrForeign says that an object which a registration would make exists and belongs to someone else.
var ErrForeign = errors.New("exists and was not made by a registration: choose another cluster name")

func newHubClient(hub *rest.Config) (client.WithWatch, error) {
	config := rest.CopyConfig(hub)
	config.QPS, config.Burst = registrationQPS, registrationQPS
	hubClient, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	return hubClient, nil
}

// ledger applies the objects of one registration and remembers how to undo it. Its objects carry its attempt, a number
// that no other registration has, so that undoing leaves alone what another registration of the same cluster wrote
// later. A hub that makes or repairs the objects has no attempt and undoes nothing.
type ledger struct {
	hubClient client.Client
	// kinds tells, when a namespace is taken back, what can be in it.
	kinds   Kinds
	request Request
	attempt string
	undo    []func(context.Context) error
	// undoCluster takes back the SveltosCluster, if the registration made it.
	undoCluster func(context.Context) error
}

func newLedger(hub *rest.Config, r Request) (*ledger, error) {
	hubClient, err := newHubClient(hub)
	if err != nil {
		return nil, err
	}
	kinds, err := discovery.NewDiscoveryClientForConfig(hub)
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	return &ledger{hubClient: hubClient, kinds: kinds, request: r, attempt: string(uuid.NewUUID())}, nil
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

// own applies an object that belongs to registrations, and returns it as it is then. It refuses one that exists and was
// not made by a registration of the cluster.
func (l *ledger) own(ctx context.Context, obj client.Object) (*unstructured.Unstructured, error) {
	labels := obj.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[registrationLabel] = l.request.Name
	obj.SetLabels(labels)
	return l.write(ctx, obj, l.checkOwn)
}

// checkOwn refuses an object that no registration of the cluster made.
func (l *ledger) checkOwn(live *unstructured.Unstructured) error {
	if live.GetLabels()[registrationLabel] != l.request.Name {
		return fmt.Errorf("%s %w", describe(live), ErrForeign)
	}
	return nil
}

// apply applies an object that others may have made before, and returns it as it is then.
func (l *ledger) apply(ctx context.Context, obj client.Object) (*unstructured.Unstructured, error) {
	return l.write(ctx, obj, func(*unstructured.Unstructured) error { return nil })
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

// write creates obj, or changes the one that is there if check allows that. A registration that fails undoes either.
// Without an attempt, it changes only what is not as it should be.
func (l *ledger) write(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) (*unstructured.Unstructured, error) {
	desired, err := toUnstructured(l.hubClient.Scheme(), obj)
	if err != nil {
		return nil, err
	}
	before, found, err := l.live(ctx, obj)
	if err != nil {
		return nil, err
	}
	if !found {
		made, err := l.create(ctx, l.signed(desired, ""))
		if !apierrors.IsAlreadyExists(err) {
			return made, err
		}
		// Another registration of the cluster was faster.
		if before, _, err = l.live(ctx, obj); err != nil {
			return nil, err
		}
	}
	if err := check(before); err != nil {
		return nil, err
	}
	desired = l.signed(desired, before.GetAnnotations()[attemptAnnotation])
	if l.attempt == "" && contains(before.Object, desired.Object) {
		return before, nil
	}
	l.noteWrite(desired, before)
	made := desired.DeepCopy()
	if err := l.hubClient.Apply(ctx, client.ApplyConfigurationFromUnstructured(made), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
		return nil, fmt.Errorf("write %s: %w", describe(desired), err)
	}
	return made, nil
}

// create creates desired. The undoing is noted before the request, since a request that was cut off may have done its
// work.
func (l *ledger) create(ctx context.Context, desired *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	forget := l.noteWrite(desired, nil)
	made := desired.DeepCopy()
	if err := l.hubClient.Create(ctx, made, client.FieldOwner(kube.FieldManager)); err != nil {
		if apierrors.IsAlreadyExists(err) {
			forget()
		}
		return nil, fmt.Errorf("write %s: %w", describe(desired), err)
	}
	return made, nil
}

// signed returns desired with the ledger's attempt on it, or with that of last if the ledger has none.
func (l *ledger) signed(desired *unstructured.Unstructured, last string) *unstructured.Unstructured {
	attempt := cmp.Or(l.attempt, last)
	if attempt == "" {
		return desired
	}
	annotations := desired.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[attemptAnnotation] = attempt
	desired.SetAnnotations(annotations)
	return desired
}

// noteWrite remembers how to undo the writing of desired, and returns how to forget that. A new SveltosCluster is the
// first to go: what a hub made for it meanwhile, the hub takes back then.
func (l *ledger) noteWrite(desired, before *unstructured.Unstructured) (forget func()) {
	if before == nil && desired.GetKind() == "SveltosCluster" {
		l.undoCluster = func(ctx context.Context) error {
			return errors.Join(l.takeBack(ctx, desired, nil), l.awaitGone(ctx, desired))
		}
		return func() { l.undoCluster = nil }
	}
	noted := len(l.undo)
	l.undo = append(l.undo, func(ctx context.Context) error { return l.takeBack(ctx, desired, before) })
	return func() { l.undo = l.undo[:noted] }
}

// awaitGone waits until the SveltosCluster that this registration made is gone.
func (l *ledger) awaitGone(ctx context.Context, obj *unstructured.Unstructured) error {
	limited, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	err := wait.PollUntilContextCancel(limited, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		now := &unstructured.Unstructured{}
		now.SetGroupVersionKind(obj.GroupVersionKind())
		if err := l.hubClient.Get(ctx, client.ObjectKeyFromObject(obj), now); err != nil {
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		}
		return now.GetAnnotations()[attemptAnnotation] != l.attempt, nil
	})
	if err != nil {
		return fmt.Errorf("take back %s: the hub is not through with it: %w", describe(obj), err)
	}
	return nil
}

// takeBack makes an object what it was before this registration wrote it, nil being nothing. It leaves alone one that
// another registration has written since.
func (l *ledger) takeBack(ctx context.Context, obj, before *unstructured.Unstructured) error {
	err := kube.RetryOnConflict(ctx, func() error {
		now := &unstructured.Unstructured{}
		now.SetGroupVersionKind(obj.GroupVersionKind())
		if err := l.hubClient.Get(ctx, client.ObjectKeyFromObject(obj), now); err != nil {
			return client.IgnoreNotFound(err)
		}
		if now.GetAnnotations()[attemptAnnotation] != l.attempt {
			return nil
		}
		if before == nil {
			uid, version := now.GetUID(), now.GetResourceVersion()
			return client.IgnoreNotFound(l.hubClient.Delete(ctx, now, client.Preconditions{UID: &uid, ResourceVersion: &version}))
		}
		return client.IgnoreNotFound(l.putBack(ctx, now, obj, before))
	})
	if err != nil {
		return fmt.Errorf("take back %s: %w", describe(obj), err)
	}
	return nil
}

// putBack gives the fields that this registration wrote the values that they had before. Everything else stays as it is
// now.
func (l *ledger) putBack(ctx context.Context, now, written, before *unstructured.Unstructured) error {
	if now.GetUID() != before.GetUID() {
		return nil
	}
	restore(now.Object, written.Object, before.Object)
	// Who wrote which field is the API server's to find out.
	now.SetManagedFields(nil)
	return l.hubClient.Update(ctx, now, client.FieldOwner(kube.FieldManager))
}

// rollBack takes back what the registration made: a SveltosCluster first, then the rest, newest first. It also works
// after ctx was cancelled.
func (l *ledger) rollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var errs []error
	if l.undoCluster != nil {
		errs = append(errs, l.undoCluster(ctx))
	}
	for i := len(l.undo) - 1; i >= 0; i-- {
		errs = append(errs, l.undo[i](ctx))
	}
	return errors.Join(errs...)
}

// makeNamespace creates the namespace if it is missing. Undoing deletes it only if no other registration has moved in.
func (l *ledger) makeNamespace(ctx context.Context, name string, annotations map[string]string) (created bool, err error) {
	// Noted before the request, since a request that was cut off may have done its work.
	l.undo = append(l.undo, func(ctx context.Context) error {
		if err := l.takeBackNamespace(ctx, name); err != nil {
			return fmt.Errorf("take back namespace %s: %w", name, err)
		}
		return nil
	})
	return l.createNamespace(ctx, name, annotations)
}

// createNamespace creates the namespace unless it is there already.
func (l *ledger) createNamespace(ctx context.Context, name string, annotations map[string]string) (created bool, err error) {
	err = l.hubClient.Get(ctx, client.ObjectKey{Name: name}, &corev1.Namespace{})
	if err == nil {
		return false, nil
	}
	if !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("read namespace %s: %w", name, err)
	}
	namespace := &corev1.Namespace{}
	namespace.Name, namespace.Annotations = name, maps.Clone(annotations)
	if len(annotations) > 0 {
		namespace.Labels = map[string]string{registrationLabel: l.request.Name}
	}
	if l.attempt != "" {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, attemptAnnotation, l.attempt)
	}
	err = l.hubClient.Create(ctx, namespace, client.FieldOwner(kube.FieldManager))
	if apierrors.IsAlreadyExists(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("create namespace %s: %w", name, err)
	}
	return true, nil
}

// takeBackNamespace deletes a namespace that this registration made unless somebody else has put anything into it or,
// if it was made for deliveries, another registration of the same cluster relies on it. A namespace for deliveries that
// stays is given back.
func (l *ledger) takeBackNamespace(ctx context.Context, name string) error {
	namespace := &corev1.Namespace{}
	if err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
		return client.IgnoreNotFound(err)
	}
	if namespace.Annotations[attemptAnnotation] != l.attempt {
		return nil
	}
	if namespace.Labels[registrationLabel] != "" {
		if relied, err := l.reliedOn(ctx); relied || err != nil {
			return err
		}
	}
	stranger, err := tenants{hub: l.hubClient, kinds: l.kinds, request: l.request}.stranger(ctx, name)
	if err != nil {
		return err
	}
	if stranger != "" {
		return releaseClaim(ctx, l.hubClient, name, l.request.key())
	}
	return client.IgnoreNotFound(l.hubClient.Delete(ctx, namespace, client.Preconditions{UID: &namespace.UID}))
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
