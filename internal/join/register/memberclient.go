package register

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/towline/towline/internal/kube"
)

const (
	// requestTimeout limits one request to the cluster or to the control plane.
	requestTimeout = 10 * time.Second
	// requestQPS is enough for the requests of one run not to wait for each other.
	requestQPS = 100
	// pollInterval is the time between two reads of an object that is expected to change.
	pollInterval = 250 * time.Millisecond
)

// newClient returns a client with the limits of withRequestLimits.
func newClient(ctx context.Context, config *rest.Config) (client.Client, error) {
	return client.New(withRequestLimits(ctx, config), client.Options{Scheme: kube.Scheme()})
}

// withRequestLimits returns config with a timeout and a higher request rate. Reads end when ctx ends, see
// Interruptible.
func withRequestLimits(ctx context.Context, config *rest.Config) *rest.Config {
	config = Interruptible(ctx, config)
	config.QPS, config.Burst, config.Timeout = requestQPS, requestQPS, requestTimeout
	return config
}

// memberClient is a client for the cluster that is registered. resources is its discovery client, which logs no
// warnings.
type memberClient struct {
	client.Client
	resources discovery.ServerResourcesInterface
}

func newMemberClient(ctx context.Context, config *rest.Config) (memberClient, error) {
	base, err := newClient(ctx, config)
	if err != nil {
		return memberClient{}, fmt.Errorf("connect to the cluster: %w", err)
	}
	quiet := withRequestLimits(ctx, config)
	quiet.WarningHandler, quiet.WarningHandlerWithContext = rest.NoWarnings{}, nil
	resources, err := discovery.NewDiscoveryClientForConfig(quiet)
	if err != nil {
		return memberClient{}, fmt.Errorf("connect to the cluster: %w", err)
	}
	return memberClient{base, resources}, nil
}

// clusterID returns the id of the cluster: the uid of its namespace kube-system.
func (m memberClient) clusterID(ctx context.Context) (string, error) {
	system := &corev1.Namespace{}
	if err := m.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, system); err != nil {
		return "", fmt.Errorf("read the id of the cluster: %w", err)
	}
	return string(system.UID), nil
}

// get reads an object into obj and returns whether it exists.
func (m memberClient) get(ctx context.Context, key client.ObjectKey, obj client.Object) (bool, error) {
	err := m.Get(ctx, key, obj)
	if client.IgnoreNotFound(err) != nil {
		ref := kube.Ref{Namespace: key.Namespace, Name: key.Name}
		if gvk, err := apiutil.GVKForObject(obj, m.Scheme()); err == nil {
			ref.Group, ref.Kind = gvk.Group, gvk.Kind
		}
		return false, fmt.Errorf("read %s on the cluster: %w", ref, err)
	}
	return !apierrors.IsNotFound(err), nil
}

// findObjectBeingUninstalled returns the kind and the key of an agent's object in the namespace that an uninstallation
// is deleting, or "". An agent that uninstalls itself sets an owner on its objects, and deletes the owner last. An
// object with an existing owner is not returned: the agent may roll back the uninstallation.
func (m memberClient) findObjectBeingUninstalled(ctx context.Context, namespace string) (string, error) {
	for _, object := range []struct {
		kind string
		key  client.ObjectKey
		obj  client.Object
	}{
		{"ClusterRole", client.ObjectKey{Name: AgentClusterRole}, &rbacv1.ClusterRole{}},
		{"ServiceAccount", client.ObjectKey{Namespace: namespace, Name: AgentServiceAccount}, &corev1.ServiceAccount{}},
		{"Namespace", client.ObjectKey{Name: namespace}, &corev1.Namespace{}},
		{"ClusterRoleBinding", client.ObjectKey{Name: AgentClusterRole}, &rbacv1.ClusterRoleBinding{}},
		{"Secret", client.ObjectKey{Namespace: namespace, Name: KubeconfigSecret}, &corev1.Secret{}},
		{"Deployment", client.ObjectKey{Namespace: namespace, Name: DefaultAgentDeployment}, &appsv1.Deployment{}},
	} {
		found, err := m.get(ctx, object.key, object.obj)
		if err != nil {
			return "", err
		}
		if !found {
			continue
		}
		isDeleted := object.obj.GetDeletionTimestamp() != nil
		if !isDeleted {
			if isDeleted, err = m.hasDeletedOwner(ctx, namespace, object.obj); err != nil {
				return "", err
			}
		}
		if isDeleted {
			return object.kind + " " + object.key.String(), nil
		}
	}
	return "", nil
}

// hasDeletedOwner returns whether an agent in the namespace that uninstalls itself has deleted an owner of obj. The
// agents of earlier versions used their ClusterRole or ServiceAccount as the owner.
func (m memberClient) hasDeletedOwner(ctx context.Context, namespace string, obj client.Object) (bool, error) {
	for _, ownerRef := range obj.GetOwnerReferences() {
		var owner client.Object
		key := client.ObjectKey{Name: ownerRef.Name}
		switch {
		case ownerRef.Kind == "ClusterRole" && (ownerRef.Name == AgentClusterRole || strings.HasPrefix(ownerRef.Name, uninstallClusterRolePrefix)):
			owner = &rbacv1.ClusterRole{}
		case ownerRef.Kind == rbacv1.ServiceAccountKind && ownerRef.Name == AgentServiceAccount:
			owner, key.Namespace = &corev1.ServiceAccount{}, namespace
		default:
			continue
		}
		found, err := m.get(ctx, key, owner)
		if err != nil || !found || owner.GetUID() != ownerRef.UID || owner.GetDeletionTimestamp() != nil {
			return err == nil, err
		}
	}
	return false, nil
}

// awaitUninstallation waits until no agent is being uninstalled from the namespace.
func (m memberClient) awaitUninstallation(ctx context.Context, namespace string, timeout time.Duration, progress func(string)) error {
	reported := ""
	err := wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, func(context.Context) (bool, error) {
		// Not limited by the timeout, so that the objects are read at least once.
		object, err := m.findObjectBeingUninstalled(ctx, namespace)
		if object != "" && object != reported {
			progress("waiting for a former agent to be gone from the cluster: " + object)
			reported = object
		}
		return object == "", err
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case wait.Interrupted(err):
		return fmt.Errorf("a former agent is still being removed from the cluster: %s; try again when it is gone", reported)
	}
	return err
}
