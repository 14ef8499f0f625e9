package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

const (
	// unregisteringAnnotation on the Secret is the uid of the Cluster that is being unregistered. The agent loses its
	// access when the Cluster is deleted, so a later run with its kubeconfig gets Forbidden. The annotation then shows
	// that the Cluster was deleted.
	unregisteringAnnotation = "towline.dev/unregistering"
	// uninstallingAnnotation on the Secret is written by an agent that uninstalls itself.
	uninstallingAnnotation = "towline.dev/departing"
)

// UnregisterRequest is a request to unregister a pull-mode cluster.
type UnregisterRequest struct {
	// Member and Hub are the configurations for the cluster and the control plane. Without Hub, the agent's kubeconfig is
	// used.
	Member, Hub *rest.Config
	// ClusterName is the name of the Cluster.
	ClusterName string
	// Namespace and AgentDeployment are the namespace and the name of the agent's Deployment. Defaults: DefaultNamespace,
	// DefaultAgentDeployment.
	Namespace, AgentDeployment string
	// ClusterNamespace is the namespace of the agent's inventory on the cluster. A flag in the agent's Deployment takes
	// precedence. Default: fleet.DefaultClusterNamespace.
	ClusterNamespace string
	// Timeout limits all requests to the control plane, and the wait for the deletion of the Cluster. It must be positive.
	Timeout time.Duration
	// DryRun only runs the checks. Orphan keeps the propagated objects on the cluster. It needs Hub, since an agent may
	// not request it.
	DryRun, Orphan bool
	// Progress is called with a line for each step. It is required.
	Progress func(line string)
}

func (r UnregisterRequest) withDefaults() (UnregisterRequest, error) {
	r.Namespace = cmp.Or(r.Namespace, DefaultNamespace)
	r.AgentDeployment = cmp.Or(r.AgentDeployment, DefaultAgentDeployment)
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	return r, errors.Join(karmada.ValidateName(r.ClusterName), checkNamespace("--namespace", r.Namespace), checkNamespace("--cluster-namespace", r.ClusterNamespace))
}

// Unregister deletes the Cluster on the control plane, which withdraws the propagated objects, and then deletes the
// registration on the cluster. It deletes nothing on the cluster while the control plane may have the Cluster. It
// returns an error if the Cluster does not exist, unless the cluster has objects of its registration. It can be
// interrupted and repeated.
func Unregister(ctx context.Context, request UnregisterRequest) error {
	request, err := request.withDefaults()
	if err != nil {
		return err
	}
	m, err := newMemberClient(ctx, request.Member)
	if err != nil {
		return err
	}
	u := &unregistration{request: request, member: m}
	waitCtx, cancel := context.WithTimeoutCause(ctx, request.Timeout, fmt.Errorf("it took longer than %s", request.Timeout))
	defer cancel()
	// deleteCluster also sets u.objects and u.request. In a dry run it only checks.
	if err := withCause(waitCtx, u.deleteCluster(waitCtx)); err != nil || request.DryRun {
		return err
	}
	ctx, cancel = context.WithTimeoutCause(ctx, memberCleanupTimeout, fmt.Errorf("it took longer than %s to clean the cluster", memberCleanupTimeout))
	defer cancel()
	c := cleanup{member: m, objects: u.objects, cluster: request.ClusterName, inventoryNamespace: u.request.ClusterNamespace, progress: request.Progress}
	if u.objects.isEmpty() {
		return nil // the cluster has no registration to clean up
	}
	if err := c.run(ctx); err != nil {
		return withCause(ctx, err)
	}
	request.Progress(fmt.Sprintf("Successfully unregister cluster (%s) from control plane.", request.ClusterName))
	return nil
}

// withCause adds the reason why ctx ended to err.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// unregistration is one run of Unregister.
type unregistration struct {
	request UnregisterRequest
	member  memberClient
	objects agentObjects
}

// errNeedsHubKubeconfig is returned if the agent's kubeconfig cannot be used for the request.
var errNeedsHubKubeconfig = errors.New("pass --karmada-config")

// deleteCluster reads the agent's objects into u, and completes u.request from them. Then it deletes the Cluster, and
// waits for the deletion. After a nil error, the caller must clean up the cluster, except in a dry run.
func (u *unregistration) deleteCluster(ctx context.Context) error {
	r := u.request
	if err := u.readObjects(ctx); err != nil {
		return err
	}
	hub, err := u.newHubClient(ctx)
	if err != nil {
		return err
	}
	cluster, err := u.readCluster(ctx, hub)
	if err != nil {
		return err
	}
	if cluster == nil {
		missing := fmt.Errorf("no cluster object %s found in karmada control Plane", r.ClusterName)
		if u.objects.isEmpty() {
			return missing
		}
		deleting := "deleting"
		if r.DryRun {
			deleting = "without --dry-run, unregister deletes"
		}
		r.Progress(missing.Error() + "; " + deleting + " the remaining objects of its registration on the cluster")
		return nil
	}
	id, err := join.ClusterUID(ctx, u.member)
	if err != nil {
		return fmt.Errorf("read the id of the cluster: %w", err)
	}
	if cluster.Spec.ID != "" && cluster.Spec.ID != id {
		return fmt.Errorf("the Cluster %s has the ID %s, and the cluster of --cluster-kubeconfig has the ID %s", cluster.Name, cluster.Spec.ID, id)
	}
	if r.DryRun {
		return nil
	}
	if err := u.annotateSecret(ctx, cluster); err != nil {
		return err
	}
	err = karmada.DeleteCluster(ctx, hub, r.ClusterName, clusterv1alpha1.Pull, karmada.DeleteOptions{Orphan: r.Orphan, Timeout: r.Timeout, Progress: r.Progress})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w; the control plane goes on with it, and the command can be run again", err)
	case err != nil && !errors.Is(err, karmada.ErrNoCluster): // another client may have deleted it
		return err
	}
	r.Progress(fmt.Sprintf("Successfully delete cluster object (%s) from control plane.", r.ClusterName))
	return nil
}

// readObjects reads the objects of the agent. With Hub, it ignores an agent of another Cluster.
func (u *unregistration) readObjects(ctx context.Context) error {
	r := u.request
	objects, err := u.member.readAgentObjects(ctx, r.Namespace, r.AgentDeployment)
	if err != nil {
		// An error without a reason is not from the API server.
		if apierrors.ReasonForError(err) == metav1.StatusReasonUnknown && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%w; if the cluster does not exist any more, delete its Cluster on the control plane: `kubectl delete cluster %s`", err, r.ClusterName)
		}
		return err
	}
	if name := objects.cluster(); name != "" && name != r.ClusterName {
		if r.Hub == nil {
			return fmt.Errorf("namespace %s of the cluster has the agent of Cluster %s, not of %s", r.Namespace, name, r.ClusterName)
		}
		objects = agentObjects{namespace: r.Namespace}
	}
	u.objects = objects
	u.request.ClusterNamespace = cmp.Or(objects.flagValue(inventoryNamespaceFlag), r.ClusterNamespace)
	return nil
}

// newHubClient connects to the control plane with Hub, or else with the agent's kubeconfig.
func (u *unregistration) newHubClient(ctx context.Context) (client.Client, error) {
	config := u.request.Hub
	if config == nil {
		secret := u.objects.secret
		if secret == nil {
			return nil, fmt.Errorf("there is no Secret %s with a kubeconfig for the control plane on the cluster: %w", u.objects.secretKey(), errNeedsHubKubeconfig)
		}
		if u.request.Orphan {
			return nil, fmt.Errorf("the agent itself may not ask for --orphan: %w", errNeedsHubKubeconfig)
		}
		var err error
		if config, err = fleet.ParseKubeconfig(secret.Data[KubeconfigKey]); err != nil {
			return nil, fmt.Errorf("the kubeconfig in Secret %s on the cluster cannot be used (%w): %w", u.objects.secretKey(), err, errNeedsHubKubeconfig)
		}
	}
	hub, _, err := join.NewClient(kube.Interruptible(ctx, config), requestTimeout)
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	return hub, nil
}

// readCluster returns the Cluster. It returns nil if the Cluster does not exist, or if the agent has lost its access
// because an earlier run deleted the Cluster.
func (u *unregistration) readCluster(ctx context.Context, hub client.Client) (*clusterv1alpha1.Cluster, error) {
	name := u.request.ClusterName
	cluster := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	asAgent := u.request.Hub == nil
	switch {
	case err == nil:
		return cluster, nil
	case apierrors.IsNotFound(err), asAgent && apierrors.IsForbidden(err) && u.isUnregistering():
		return nil, nil //nolint:nilnil // nil is the documented result for a missing Cluster
	case asAgent && (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)):
		return nil, fmt.Errorf("the control plane denies access to the agent of cluster %s (%w): %w", name, err, errNeedsHubKubeconfig)
	}
	return nil, fmt.Errorf("read Cluster %s on the control plane: %w", name, err)
}

// isUnregistering returns whether the Secret, which must exist, shows that the Cluster is being deleted.
func (u *unregistration) isUnregistering() bool {
	annotations := u.objects.secret.Annotations
	return annotations[unregisteringAnnotation] != "" || annotations[uninstallingAnnotation] != ""
}

func (u *unregistration) annotateSecret(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	if u.objects.secret == nil {
		return nil
	}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, unregisteringAnnotation, cluster.UID))
	err := u.member.Patch(ctx, u.objects.secret.DeepCopy(), patch, client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("annotate the agent's Secret on the cluster: %w", err)
	}
	return nil
}

const (
	// podTerminationTimeout limits the wait for the termination of the agent's pods.
	podTerminationTimeout = 12 * time.Second
	// collectorTimeout limits the wait for the garbage collector of the cluster.
	collectorTimeout = 10 * time.Second
)

// cleanup deletes the objects of one registration from the cluster. Each may be deleted already: an agent that
// uninstalls itself deletes the same objects.
type cleanup struct {
	member  memberClient
	objects agentObjects
	cluster string
	// inventoryNamespace is the namespace of the agent's inventory.
	inventoryNamespace string
	progress           func(line string)
}

// run deletes the ClusterRole last: a later run needs it to continue.
func (c cleanup) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{c.deleteDeployment, c.deleteLease, c.deleteNamespaces, c.deleteRole} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// delete deletes existing, but not an object that was created with its name since the read.
func (c cleanup) delete(ctx context.Context, kind string, existing client.Object) error {
	uid, key := existing.GetUID(), strings.TrimPrefix(client.ObjectKeyFromObject(existing).String(), "/")
	err := c.member.Delete(ctx, existing.DeepCopyObject().(client.Object), client.Preconditions{UID: &uid}, client.PropagationPolicy("Background"))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case err != nil:
		return fmt.Errorf("delete %s %s on the cluster: %w", kind, key, err)
	}
	c.progress(fmt.Sprintf("Successfully delete %s (%s) from the cluster.", kind, key))
	return nil
}

// deleteDeployment deletes the Deployment, and waits for its pods: they need the other objects until they end.
func (c cleanup) deleteDeployment(ctx context.Context) error {
	if c.objects.deployment == nil {
		return nil
	}
	if err := c.delete(ctx, "Deployment", c.objects.deployment); err != nil {
		return err
	}
	err := wait.PollUntilContextTimeout(ctx, pollInterval, podTerminationTimeout, true, func(ctx context.Context) (bool, error) {
		pods := &corev1.PodList{}
		err := c.member.List(ctx, pods, client.InNamespace(c.objects.namespace), client.MatchingLabels{appLabel: appLabelValue})
		return err == nil && len(pods.Items) == 0, nil
	})
	if err != nil && ctx.Err() == nil {
		c.progress("the agent's pods are still there; the cluster removes them")
	}
	return nil
}

// deleteLease deletes the Lease of the leader election.
func (c cleanup) deleteLease(ctx context.Context) error {
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = c.objects.namespace, DefaultAgentDeployment+"-"+c.cluster
	if err := c.member.Delete(ctx, lease); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Lease %s/%s on the cluster: %w", lease.Namespace, lease.Name, err)
	}
	return nil
}

// deleteRole deletes the ClusterRole, and waits for the garbage collector.
func (c cleanup) deleteRole(ctx context.Context) error {
	role := c.objects.role
	// A ClusterRole without this label may be Karmada's own, and other agents may use it.
	if role == nil || !isManaged(role) || role.GetLabels()[RegistrationLabel] != c.cluster {
		return nil
	}
	if err := c.delete(ctx, "ClusterRole", role); err != nil {
		return err
	}
	err := wait.PollUntilContextTimeout(ctx, pollInterval, collectorTimeout, true, func(ctx context.Context) (bool, error) {
		object, err := c.member.findTerminatingObject(ctx, c.objects.namespace)
		// If only the Namespace is left, the next Register waits for it.
		return err == nil && (object == "" || strings.HasPrefix(object, "Namespace ")), nil
	})
	if err != nil && ctx.Err() == nil {
		c.progress("the cluster has not yet deleted all objects of the agent")
	}
	return nil
}

// isManaged returns whether a registration of Towline or of Karmada created obj.
func isManaged(obj client.Object) bool { return obj.GetLabels()[clusterv1alpha1.SystemLabel] == "true" }

// deleteNamespaces deletes the agent's namespace if a registration of this Cluster created it, and the namespace of the
// agent's inventory.
func (c cleanup) deleteNamespaces(ctx context.Context) error {
	err := c.deleteNamespaceIfUnused(ctx, c.objects.namespace, func(n *corev1.Namespace) bool { return n.Labels[RegistrationLabel] == c.cluster })
	if err != nil {
		return err
	}
	return c.deleteNamespaceIfUnused(ctx, c.inventoryNamespace, func(*corev1.Namespace) bool { return true })
}

// deleteNamespaceIfUnused deletes a namespace if a registration or an agent created it, isOwn returns true, and it has
// no foreign objects.
func (c cleanup) deleteNamespaceIfUnused(ctx context.Context, name string, isOwn func(*corev1.Namespace) bool) error {
	namespace := &corev1.Namespace{}
	exists, err := c.member.get(ctx, client.ObjectKey{Name: name}, namespace)
	if err != nil || !exists || !isManaged(namespace) || !isOwn(namespace) || !namespace.DeletionTimestamp.IsZero() {
		return err
	}
	if _, err := foreign.DeleteNamespace(ctx, c.member, c.member.resources, namespace, isAgentObject); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	return nil
}

// isAgentObject returns whether item is a Lease of the agents, or an object of their Deployment or registration.
func isAgentObject(item *metav1.PartialObjectMetadata) bool {
	return item.Kind == "Lease" && strings.HasPrefix(item.Name, DefaultAgentDeployment+"-") ||
		item.Labels[appLabel] == appLabelValue || item.Labels[RegistrationLabel] != "" && isManaged(item)
}
