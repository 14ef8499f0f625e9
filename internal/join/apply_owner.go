package join

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// checkName returns an error if an agent on another cluster is alive under this name: the two agents would compete.
func (a *application) checkName(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil || !found {
		return err
	}
	lease := &coordinationv1.Lease{}
	if _, err := read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}); err != nil {
		return err
	}
	// The hub has decided whether the agent is silent: the clock of the agent may be wrong. A cluster whose checks fail
	// is Down too, and its agent is alive.
	status := cluster.Status
	isSilent := status.ConnectionStatus == libv1beta1.ConnectionDown && status.FailureMessage == libv1beta1.AgentReportTooOld
	if lease.Annotations[kube.AnnotationMember] == "" || lease.Spec.RenewTime == nil || isSilent {
		return nil
	}
	uid, err := memberUID(ctx, a.member)
	if err != nil {
		return err
	}
	return checkSameMember(a.request.Request, uid, lease.Annotations[kube.AnnotationMember])
}

// memberUID returns the uid of the member's kube-system namespace, which identifies it; "" if that may not be read.
func memberUID(ctx context.Context, member client.Reader) (string, error) {
	uid, err := HubUID(ctx, member)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("ask the cluster which one it is: %w", err)
	}
	return uid, nil
}

// checkSameMember returns an error if both uids are known and differ.
func checkSameMember(r Request, uid, registered string) error {
	if uid == "" || registered == "" || uid == registered {
		return nil
	}
	return fmt.Errorf("cluster %s is another cluster (the uid of its namespace kube-system is %s, here it is %s): "+
		"deregister it first or choose another name", r.key(), registered, uid)
}

// checkAgent returns an error if the member has the agent of another cluster, which the manifest would replace. An
// agent that is being removed has an owner, see awaitUninstallation.
func (a *application) checkAgent(ctx context.Context) error {
	deployment := &appsv1.Deployment{}
	found, err := read(ctx, a.member, deployment, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment})
	if err != nil || !found || deployment.DeletionTimestamp != nil || len(deployment.OwnerReferences) > 0 {
		return err
	}
	owner := Argument(deployment, "--cluster-namespace=") + "/" + Argument(deployment, "--cluster-name=")
	if owner == "/" || owner == a.request.key() {
		return nil
	}
	return fmt.Errorf("the agent of %s runs on this cluster already: deregister %s first; if no hub has it registered, remove its agent from this cluster: %s",
		owner, owner, strings.Join(RemoveAgent(), "; "))
}

// Argument returns the value of a flag, such as "--v=", on the command line of an agent; "" without the flag.
func Argument(agent *appsv1.Deployment, flag string) string {
	for _, container := range agent.Spec.Template.Spec.Containers {
		for _, word := range slices.Concat(container.Command, container.Args) {
			if value, ok := strings.CutPrefix(word, flag); ok {
				return value
			}
		}
	}
	return ""
}

// RemoveAgent returns the commands that remove an agent from its cluster; to be run there.
func RemoveAgent() []string {
	label := agentNameLabel + "=" + agentName
	return []string{
		"kubectl delete clusterroles,clusterrolebindings -l " + label,
		"kubectl delete deployments,services,serviceaccounts,secrets -n " + kube.AgentNamespace + " -l " + label,
	}
}
