package register

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// pollPause is the time between two looks at something that is to change.
	pollPause = 250 * time.Millisecond
	// podsLimit is how long an agent may take to end.
	podsLimit = 12 * time.Second
)

// place is an object at which a former agent may still be going.
type place struct {
	kind string
	key  client.ObjectKey
	obj  client.Object
}

// going names what is going away with a former agent in the namespace; "" if nothing is. An agent that leaves hands its
// objects to the garbage collector, as dependents of its ClusterRole or ServiceAccount: they go at any moment once that
// is gone, and new ones must not be among them.
func (m member) going(ctx context.Context, namespace string) (string, error) {
	role, account := &rbacv1.ClusterRole{}, &corev1.ServiceAccount{}
	places := []place{
		{"ClusterRole", client.ObjectKey{Name: AgentRole}, role},
		{"ServiceAccount", client.ObjectKey{Namespace: namespace, Name: AgentAccount}, account},
		{"Namespace", client.ObjectKey{Name: namespace}, &corev1.Namespace{}},
		{"ClusterRoleBinding", client.ObjectKey{Name: AgentRole}, &rbacv1.ClusterRoleBinding{}},
		{"Secret", client.ObjectKey{Namespace: namespace, Name: KubeconfigSecret}, &corev1.Secret{}},
		{"Deployment", client.ObjectKey{Namespace: namespace, Name: DefaultAgentName}, &appsv1.Deployment{}},
	}
	for _, p := range places {
		found, err := m.find(ctx, p.key, p.obj)
		if err != nil {
			return "", err
		}
		if found && (p.obj.GetDeletionTimestamp() != nil || dangles(p.obj, role.UID, account.UID)) {
			return p.kind + " " + p.key.String(), nil
		}
	}
	return "", nil
}

// dangles says whether obj belongs to a ClusterRole or ServiceAccount of an agent that is gone; the uids are those of
// the present ones.
func dangles(obj client.Object, role, account types.UID) bool {
	return slices.ContainsFunc(obj.GetOwnerReferences(), func(owner metav1.OwnerReference) bool {
		return owner.Kind == "ClusterRole" && owner.Name == AgentRole && owner.UID != role ||
			owner.Kind == rbacv1.ServiceAccountKind && owner.Name == AgentAccount && owner.UID != account
	})
}

// awaitGone waits until nothing is going away any more in the namespace.
func (m member) awaitGone(ctx context.Context, namespace string, limit time.Duration, progress func(string)) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	told := ""
	err := wait.PollUntilContextCancel(limited, pollPause, true, func(context.Context) (bool, error) {
		// Not limited by the wait, so that there is always one look.
		what, err := m.going(ctx, namespace)
		if err != nil || what == "" {
			return err == nil, err
		}
		if what != told {
			progress("waiting for a former agent to be gone from the cluster: " + what)
		}
		told = what
		return false, nil
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case wait.Interrupted(err):
		return fmt.Errorf("a former agent is still being removed from the cluster: %s; try again when it is gone", told)
	}
	return err
}

// awaitPods waits until the agent's pods are gone, and says whether they are. Those that hang are left to the cluster.
func (m member) awaitPods(ctx context.Context, namespace string) bool {
	ctx, cancel := context.WithTimeout(ctx, podsLimit)
	defer cancel()
	err := wait.PollUntilContextCancel(ctx, pollPause, true, func(ctx context.Context) (bool, error) {
		pods := &corev1.PodList{}
		err := m.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{agentLabel: agentValue})
		return err == nil && len(pods.Items) == 0, nil
	})
	return err == nil
}

// removeLease deletes the Lease by which the agents of a cluster elect one.
func (m member) removeLease(ctx context.Context, namespace, cluster string) error {
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = namespace, DefaultAgentName+"-"+cluster
	if err := m.Delete(ctx, lease); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Lease %s/%s on the cluster: %w", namespace, lease.Name, err)
	}
	return nil
}
