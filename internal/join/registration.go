package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// registrationLabel marks the objects that a registration created; its value is the cluster's name.
	registrationLabel = "towline.dev/registration"
	// deletionTimeout limits the wait of a rollback until the hub has removed its finalizer from the SveltosCluster.
	deletionTimeout = 20 * time.Second
	// namespaceTimeout limits the wait for the deletion of an earlier namespace with the same name.
	namespaceTimeout = 30 * time.Second
	// registrationQPS lets the dozen requests of a registration run without client-side throttling.
	registrationQPS = 100
)

// ErrNotInstalled is returned if the hub does not serve the APIs of Towline.
var ErrNotInstalled = errors.New("the hub does not know SveltosClusters; install Towline there first: towline hub --install-crds")

// ErrForeign is returned if an object that a registration needs exists and belongs to another party.
var ErrForeign = errors.New("exists and was not made by a registration: choose another cluster name")

// registration creates the objects of one cluster on the hub.
type registration struct {
	hub client.Client
	// cache reads Leases, and the metadata of namespaces. It may be stale. Default: hub.
	cache     client.Reader
	resources foreign.Resources
	request   Request
	// writer rolls back the namespace, the kubeconfig and the SveltosCluster. The SveltosCluster owns the other objects.
	writer *rollback.Writer
	// isRevoked is true after the revocation of tokens, which cannot be rolled back.
	isRevoked bool
	// mayHaveRepaired is true if objects of an existing cluster may have been repaired, which is not rolled back.
	mayHaveRepaired bool
	// isNew is true for a cluster without objects: apply creates them without a read.
	isNew bool
	// callerRetries is true in the hub, whose workers must not block: ensureNamespace returns an error instead of waiting.
	callerRetries bool
}

func newRegistration(hub *rest.Config, r Request) (*registration, error) {
	hubClient, resources, err := NewClient(hub, 0)
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	writer := rollback.New(hubClient, string(uuid.NewUUID()))
	return &registration{hub: hubClient, cache: hubClient, resources: resources, request: r, writer: writer}, nil
}

// registrationOf returns the registration of an existing cluster. Its writes are repeated, and never rolled back.
func registrationOf(hub client.Client, cluster client.Object) *registration {
	request := Request{Namespace: cluster.GetNamespace(), Name: cluster.GetName()}
	return &registration{hub: hub, cache: hub, request: request, writer: rollback.New(hub, ""), callerRetries: true}
}

// NewClient returns a client for the requests of one registration, and the discovery client of the cluster. timeout
// limits each request and watch, unless the configuration has a timeout. With 0, only discovery has a limit: the
// default of client-go.
func NewClient(cluster *rest.Config, timeout time.Duration) (client.WithWatch, foreign.Resources, error) {
	config := rest.CopyConfig(cluster)
	config.Timeout = cmp.Or(config.Timeout, timeout)
	config.QPS, config.Burst = registrationQPS, registrationQPS
	clusterClient, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, nil, err
	}
	resources, err := discovery.NewDiscoveryClientForConfig(config)
	return clusterClient, resources, err
}

// run calls register, and rolls back if it fails.
func (r *registration) run(ctx context.Context, register func() error) error {
	err := register()
	if err == nil {
		return nil
	}
	if failure := r.writer.RollBack(ctx); failure != nil || ctx.Err() == nil || r.isRevoked {
		return errors.Join(fmt.Errorf("register cluster %s: %w", r.request.key(), err), failure)
	}
	step := InterruptedStep(fmt.Errorf("registering cluster %s: %w", r.request.key(), err))
	return &interruption{step: step, isRepaired: r.mayHaveRepaired, cause: ctx.Err()}
}

// interruption is the error of a registration that was interrupted and rolled back.
type interruption struct {
	step       string
	isRepaired bool
	cause      error
}

// Error returns the interrupted step, without the error of the aborted request.
func (i *interruption) Error() string {
	if i.isRepaired {
		return "interrupted while " + i.step + "; the changes were taken back, but repairs of the agent's identity on the hub stay"
	}
	return "interrupted while " + i.step + "; everything was taken back"
}

func (i *interruption) Unwrap() error { return i.cause }

// InterruptedStep returns the first line of err without the error of an aborted request: "read Secret a/b" for "read
// Secret a/b: Get ...: context canceled".
func InterruptedStep(err error) string {
	return regexp.MustCompile(`(?s)(: ((Get|Post|Put|Patch|Delete) "|client rate limiter|context canceled|context deadline)|\n).*`).ReplaceAllString(err.Error(), "")
}

// findCluster reads the SveltosCluster of r. If it does not exist, cluster is empty, not nil.
func findCluster(ctx context.Context, hub client.Reader, r Request) (cluster *libv1beta1.SveltosCluster, found bool, err error) {
	cluster = &libv1beta1.SveltosCluster{}
	// The first request of a client does API discovery, which ignores ctx.
	if err := ctx.Err(); err != nil {
		return cluster, false, err
	}
	found, err = read(ctx, hub, cluster, client.ObjectKey{Namespace: r.Namespace, Name: r.Name})
	if meta.IsNoMatchError(err) {
		err = ErrNotInstalled
	}
	return cluster, found, err
}

// read reads an object, and returns whether it exists.
func read(ctx context.Context, c client.Reader, obj client.Object, key client.ObjectKey) (found bool, err error) {
	if err := c.Get(ctx, key, obj); err != nil {
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		kind := cmp.Or(obj.GetObjectKind().GroupVersionKind().Kind, reflect.TypeOf(obj).Elem().Name())
		return false, fmt.Errorf("read %s %s: %w", kind, strings.TrimPrefix(key.String(), "/"), err)
	}
	return true, nil
}

// applyOwn applies obj with the registration label. It returns ErrForeign for an existing object without that label.
func (r *registration) applyOwn(ctx context.Context, obj client.Object) error {
	return r.apply(ctx, withRegistrationLabel(obj, r.request.Name), r.checkOwn)
}

// apply applies obj, and writes the result to it. For check, see rollback.Writer.Apply.
func (r *registration) apply(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) error {
	write := r.writer.Apply
	if r.isNew {
		write = r.writer.Create
	}
	live, _, err := write(ctx, obj, check)
	if err != nil {
		return err
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, obj)
}

// newPartialMetadata returns an empty object to read the metadata of a kind in the core group.
func newPartialMetadata(kind string) *metav1.PartialObjectMetadata {
	obj := &metav1.PartialObjectMetadata{}
	obj.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	return obj
}

// withRegistrationLabel replaces the labels of obj and returns it.
func withRegistrationLabel[T client.Object](obj T, cluster string) T {
	obj.SetLabels(map[string]string{registrationLabel: cluster})
	return obj
}

// checkOwn returns ErrForeign unless a registration of the cluster created the object.
func (r *registration) checkOwn(live *unstructured.Unstructured) error {
	if live.GetLabels()[registrationLabel] != r.request.Name {
		return fmt.Errorf("%s %w", kube.RefOf(live), ErrForeign)
	}
	return nil
}

// applyCluster applies the SveltosCluster. live is the existing one, or empty. If this run creates the SveltosCluster,
// the rollback deletes it and then calls deleteDependents.
func (r *registration) applyCluster(ctx context.Context, live, desired *libv1beta1.SveltosCluster) error {
	if live.UID == "" {
		r.writer.AddUndo(func(ctx context.Context) error { return r.deleteDependents(ctx, desired) })
	}
	return r.apply(ctx, desired, nil)
}

// deleteDependents deletes the objects of a pull-mode cluster after the rollback has deleted its SveltosCluster: it
// waits until the hub has removed its finalizer. It keeps the objects if the cluster has been registered again. In push
// mode the writer rolls back all objects.
func (r *registration) deleteDependents(ctx context.Context, created *libv1beta1.SveltosCluster) error {
	if created.UID == "" || !created.Spec.PullMode {
		return nil
	}
	isForeign := false
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, deletionTimeout, true, func(ctx context.Context) (bool, error) {
		live, found, err := findCluster(ctx, r.hub, r.request)
		isForeign = found && !r.writer.IsLastWriter(live)
		return !found || isForeign, err
	})
	if err != nil {
		return fmt.Errorf("roll back SveltosCluster %s: the hub has not released it: %w", r.request.key(), err)
	}
	if isForeign {
		return nil
	}
	return newHubCleanup(r.hub, r.resources, created).run(ctx)
}

// EnsureNamespace creates a namespace if it does not exist. If a namespace with this name is being deleted, it waits
// for the end of the deletion. It does not change an existing namespace.
func EnsureNamespace(ctx context.Context, c client.Client, namespace *corev1.Namespace) error {
	err := wait.PollUntilContextTimeout(ctx, time.Second/4, namespaceTimeout, true, func(context.Context) (bool, error) {
		live := &corev1.Namespace{}
		exists, err := read(ctx, c, live, client.ObjectKeyFromObject(namespace))
		if exists || err != nil {
			return exists && live.DeletionTimestamp == nil, err
		}
		err = c.Create(ctx, namespace, client.FieldOwner(kube.FieldManager))
		if client.IgnoreAlreadyExists(err) != nil {
			return false, fmt.Errorf("create namespace %s: %w", namespace.Name, err)
		}
		return true, nil
	})
	if wait.Interrupted(err) && ctx.Err() == nil {
		return fmt.Errorf("namespace %s is still being deleted after %s", namespace.Name, namespaceTimeout)
	}
	return err
}

// ensureNamespaceWithRollback is EnsureNamespace with a rollback: it deletes a namespace that this run created, unless
// the namespace contains foreign objects.
func ensureNamespaceWithRollback(ctx context.Context, c client.Client, writer *rollback.Writer, resources foreign.Resources, namespace *corev1.Namespace) error {
	key := client.ObjectKeyFromObject(namespace)
	writer.AddUndo(func(ctx context.Context) error {
		live := &corev1.Namespace{}
		found, err := read(ctx, c, live, key)
		if err != nil || !found || !writer.IsLastWriter(live) {
			return err
		}
		_, err = foreign.DeleteNamespace(ctx, c, resources, live, isDependentOfAgent)
		return err
	})
	if writer.Attempt() != "" {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, rollback.AttemptAnnotation, writer.Attempt())
	}
	return EnsureNamespace(ctx, c, namespace)
}

func (r *registration) ensureNamespace(ctx context.Context, namespace *corev1.Namespace) error {
	if r.callerRetries {
		live := &corev1.Namespace{}
		if exists, err := read(ctx, r.hub, live, client.ObjectKeyFromObject(namespace)); err != nil || exists && live.DeletionTimestamp != nil {
			return cmp.Or(err, fmt.Errorf("namespace %s is being deleted", namespace.Name))
		}
	}
	return ensureNamespaceWithRollback(ctx, r.hub, r.writer, r.resources, namespace)
}

// isDependentOfAgent returns whether a controller created the object for the agent's Deployment or Service, with which
// the garbage collector deletes it.
func isDependentOfAgent(item *metav1.PartialObjectMetadata) bool {
	return item.Labels[agentNameLabel] == agentName && metav1.GetControllerOf(item) != nil
}

// Request has the fields of a registration that are the same in push and in pull mode.
type Request struct {
	// Namespace and Name identify the SveltosCluster. Both are DNS labels.
	Namespace string
	Name      string
	// Labels are added to the labels of the SveltosCluster.
	Labels map[string]string
	// Shard is the shard key of the hub that reconciles the cluster. Default: the shard of an existing SveltosCluster, or
	// the default shard.
	Shard string
}

// Validate returns an error for invalid fields, without a connection. The error names the flag and its value.
func (r Request) Validate() error {
	if err := validateLabel("--namespace", r.Namespace); err != nil {
		return err
	}
	if err := validateLabel("--cluster", r.Name); err != nil {
		return err
	}
	if problems := validation.IsValidLabelValue(r.Shard); len(problems) > 0 {
		return fmt.Errorf("--shard: %q is not a key: %s", r.Shard, problems[0])
	}
	for key, value := range r.Labels {
		problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...)
		if len(problems) > 0 {
			return fmt.Errorf("--labels: %q is not a label: %s", key+"="+value, problems[0])
		}
	}
	return nil
}

func validateLabel(flag, value string) error {
	if value == "" {
		return fmt.Errorf("%s is required", flag)
	}
	if problems := validation.IsDNS1123Label(value); len(problems) > 0 {
		return fmt.Errorf("%s: %q is not a DNS label: %s", flag, value, problems[0])
	}
	return nil
}

func (r Request) key() string { return r.Namespace + "/" + r.Name }
