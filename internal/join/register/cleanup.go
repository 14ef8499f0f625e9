package register

import (
	"context"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/foreign"
)

const (
	// podTerminationTimeout limits the wait for the termination of the agent's pods.
	podTerminationTimeout = 12 * time.Second
	// collectorTimeout limits the wait for the garbage collector of the cluster.
	collectorTimeout = 10 * time.Second
)

// cleanup deletes the objects of one registration from the cluster. Each of them may be deleted already: an agent that
// uninstalls itself does the same.
type cleanup struct {
	member  memberClient
	objects agentObjects
	cluster string
	// inventoryNamespace is the namespace of the agent's inventory.
	inventoryNamespace string
	progress           func(line string)
}

// run deletes the objects, the ClusterRole last: another run needs it to continue.
func (c cleanup) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{c.deleteDeployment, c.deleteLease, c.deleteNamespace, c.deleteInventoryNamespace, c.deleteRole} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// delete deletes exactly the object that was read.
func (c cleanup) delete(ctx context.Context, kind string, existing client.Object) error {
	uid := existing.GetUID()
	err := c.member.Delete(ctx, existing.DeepCopyObject().(client.Object), client.Preconditions{UID: &uid}, client.PropagationPolicy("Background"))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case err != nil:
		return fmt.Errorf("delete %s %s/%s on the cluster: %w", kind, existing.GetNamespace(), existing.GetName(), err)
	}
	c.progress(fmt.Sprintf("Successfully delete %s (%s/%s) from the cluster.", kind, existing.GetNamespace(), existing.GetName()))
	return nil
}

// deleteDeployment deletes the Deployment, and waits until the agent's pods are deleted: they need the other objects
// until then. After podTerminationTimeout the cluster continues with the deletion of the pods.
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

// deleteLease deletes the Lease for the leader election of the agents.
func (c cleanup) deleteLease(ctx context.Context) error {
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = c.objects.namespace, DefaultAgentDeployment+"-"+c.cluster
	if err := c.member.Delete(ctx, lease); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Lease %s/%s on the cluster: %w", lease.Namespace, lease.Name, err)
	}
	return nil
}

// deleteRole deletes the ClusterRole, and waits until the garbage collector has deleted its dependents. After
// collectorTimeout the cluster continues with their deletion.
func (c cleanup) deleteRole(ctx context.Context) error {
	role := c.objects.role
	// A role without the cluster's label is not of this registration: other agents can need it.
	if role == nil || !isManaged(role) || role.GetLabels()[RegistrationLabel] != c.cluster {
		return nil
	}
	if err := c.delete(ctx, "ClusterRole", role); err != nil {
		return err
	}
	err := wait.PollUntilContextTimeout(ctx, pollInterval, collectorTimeout, true, func(ctx context.Context) (bool, error) {
		object, err := c.member.findObjectBeingUninstalled(ctx, c.objects.namespace)
		return err == nil && (object == "" || strings.HasPrefix(object, "Namespace ")), nil
	})
	if err != nil && ctx.Err() == nil {
		c.progress("the cluster has not yet deleted all objects of the agent")
	}
	return nil
}

// isManaged returns whether a registration created obj. Karmada uses the same label.
func isManaged(obj client.Object) bool { return obj.GetLabels()[clusterv1alpha1.SystemLabel] == "true" }

// deleteNamespace deletes the agent's namespace if a registration of the cluster made it.
func (c cleanup) deleteNamespace(ctx context.Context) error {
	return c.deleteNamespaceIfUnused(ctx, c.objects.namespace, func(n *corev1.Namespace) bool { return n.Labels[RegistrationLabel] == c.cluster })
}

// deleteInventoryNamespace deletes the namespace of the agent's inventory.
func (c cleanup) deleteInventoryNamespace(ctx context.Context) error {
	return c.deleteNamespaceIfUnused(ctx, c.inventoryNamespace, func(*corev1.Namespace) bool { return true })
}

// deleteNamespaceIfUnused deletes a namespace that a registration or an agent made and for which isOwn returns true,
// unless it has objects of others.
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

// isAgentObject returns whether an object is the Lease of the agents, or an object of their Deployment or registration.
func isAgentObject(item *metav1.PartialObjectMetadata) bool {
	return item.Kind == "Lease" && strings.HasPrefix(item.Name, DefaultAgentDeployment+"-") ||
		item.Labels[appLabel] == appLabelValue || item.Labels[RegistrationLabel] != "" && isManaged(item)
}
