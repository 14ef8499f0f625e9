package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// ApplyRequest is a request to register a cluster in pull mode, and to start its agent on it.
type ApplyRequest struct {
	PullRequest
	// Member is the caller's configuration for the cluster. Neither the hub nor the agent gets it.
	Member *rest.Config
	// Wait limits the wait until a former agent is removed, and then the wait until the cluster is ready. With 0,
	// RegisterAndApply does not wait.
	Wait time.Duration
	// Progress is called with the reason for a wait when the reason changes. It may be nil.
	Progress func(string)
}

// ErrNotReady is returned if a cluster is registered and its agent applied, but the cluster was not ready in time.
var ErrNotReady = errors.New("the cluster is registered and its agent is applied, but it is not ready")

// RegisterAndApply registers a cluster in pull mode, applies the manifest to the member, and writes lines to out as
// `kubectl apply` does. Then it waits until the cluster is ready, and returns the member's Kubernetes version. If it
// fails, or ctx ends, before the wait, it rolls both sides back. If the wait fails, it returns ErrNotReady and rolls
// nothing back.
func RegisterAndApply(ctx context.Context, hub *rest.Config, request ApplyRequest, out io.Writer) (version string, err error) {
	if err := request.Validate(); err != nil {
		return "", err
	}
	// Check this before the registration, which may revoke tokens: that cannot be rolled back.
	if err := checkAccess(ctx, request.Member); err != nil {
		return "", fmt.Errorf("check the access to the cluster: %w", err)
	}
	r, err := newRegistration(hub, request.Request)
	if err != nil {
		return "", err
	}
	member, resources, err := NewClient(request.Member, accessTimeout)
	if err != nil {
		return "", fmt.Errorf("connect to the cluster: %w", err)
	}
	a := &agentApplier{hub: r.hub, member: member, resources: resources, request: request, writer: rollback.New(member, string(uuid.NewUUID()))}
	if err := a.checkNameUnused(ctx); err != nil {
		return "", err
	}
	if err := a.checkNoOtherAgent(ctx); err != nil {
		return "", err
	}
	r.writer.AddUndo(a.writer.RollBack)
	apply := func(manifest []byte) error {
		// awaitReady needs a later heartbeat: an earlier agent may have sent this one.
		var err error
		if _, a.heartbeat, err = a.readClusterAndHeartbeat(ctx); err != nil {
			return err
		}
		return a.applyManifest(ctx, manifest, out)
	}
	err = r.run(ctx, func() error { return r.registerPull(ctx, hub, request.PullRequest, apply) })
	if err != nil || request.Wait <= 0 {
		return "", err
	}
	return a.awaitReady(ctx)
}

// agentApplier applies the agent's manifest to a member.
type agentApplier struct {
	hub       client.Client
	member    client.Client
	resources foreign.Resources
	request   ApplyRequest
	writer    *rollback.Writer
	// heartbeat is the last heartbeat before the manifest was applied, nil for none.
	heartbeat *metav1.MicroTime
	// reported is the last argument of Progress.
	reported string
}

func (a *agentApplier) applyManifest(ctx context.Context, manifest []byte, out io.Writer) error {
	objects, err := kube.DecodeManifest(manifest)
	if err != nil {
		return fmt.Errorf("read the agent's manifest: %w", err)
	}
	if err := a.awaitUninstallation(ctx, objects); err != nil {
		return err
	}
	var lines bytes.Buffer
	for _, obj := range objects {
		result, err := a.applyObject(ctx, obj)
		if err != nil {
			return fmt.Errorf("apply to the cluster: %w", err)
		}
		fmt.Fprintf(&lines, "%s %s\n", kubectlName(obj), result)
	}
	if _, err := out.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("print what was applied: %w", err)
	}
	return nil
}

// awaitUninstallation waits until a former agent is removed from the cluster. A deregistration can succeed before that,
// since an agent reports to the hub first and removes itself then. Only an agent that removes itself makes its
// ClusterRole the owner of its objects. role has no UID, so FindUninstalling returns each object with that owner.
func (a *agentApplier) awaitUninstallation(ctx context.Context, objects []*unstructured.Unstructured) error {
	var refs []kube.Ref
	for _, obj := range objects {
		refs = append(refs, kube.RefOf(obj))
	}
	role := &rbacv1.ClusterRole{ObjectMeta: objectMeta("", agentRole)}
	find := func(ctx context.Context) (string, error) { return FindUninstalling(ctx, a.member, role, refs) }
	return AwaitUninstallation(ctx, a.request.Wait, find, func(object string) {
		a.report("a former agent is still being removed from it: " + object)
	})
}

// applyObject applies one object of the manifest. The rollback deletes a namespace only if it has no foreign objects.
func (a *agentApplier) applyObject(ctx context.Context, obj *unstructured.Unstructured) (rollback.Result, error) {
	namespace := &corev1.Namespace{}
	if obj.GetKind() == "Namespace" {
		found, err := read(ctx, a.member, namespace, client.ObjectKey{Name: obj.GetName()})
		if err != nil {
			return "", err
		}
		if !found {
			namespace.Name, namespace.Labels, namespace.Annotations = obj.GetName(), obj.GetLabels(), obj.GetAnnotations()
			return rollback.Created, ensureNamespaceWithRollback(ctx, a.member, a.writer, a.resources, namespace)
		}
	}
	_, result, err := a.writer.Apply(ctx, obj, nil)
	return result, err
}

// kubectlName returns kind.group/name in lower case.
func kubectlName(obj *unstructured.Unstructured) string {
	gvk := obj.GroupVersionKind()
	name := strings.ToLower(gvk.Kind)
	if gvk.Group != "" {
		name += "." + gvk.Group
	}
	return name + "/" + obj.GetName()
}

// checkNameUnused returns an error if another member is registered with this name, and its agent is alive.
func (a *agentApplier) checkNameUnused(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil || !found {
		return err
	}
	lease := &coordinationv1.Lease{}
	if _, err := read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}); err != nil {
		return err
	}
	// The status shows whether the agent is silent: the time in the Lease is from the agent's clock, which may be wrong. A
	// cluster whose checks fail is Down too, but its agent is alive.
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

// memberUID is ClusterUID for a member. It returns "" if the namespace may not be read.
func memberUID(ctx context.Context, member client.Reader) (string, error) {
	uid, err := ClusterUID(ctx, member)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the identity of the cluster: %w", err)
	}
	return uid, nil
}

// checkSameMember returns an error if both uids are known and differ. registered is the recorded uid of the cluster.
func checkSameMember(r Request, uid, registered string) error {
	if uid == "" || registered == "" || uid == registered {
		return nil
	}
	return fmt.Errorf("cluster %s is another cluster (the uid of its namespace kube-system is %s, here it is %s): "+
		"deregister it first or choose another name", r.key(), registered, uid)
}

// checkNoOtherAgent returns an error if the member has the agent of another cluster, which the manifest would replace.
// It ignores an agent that is being removed, see awaitUninstallation.
func (a *agentApplier) checkNoOtherAgent(ctx context.Context) error {
	deployment := &appsv1.Deployment{}
	found, err := read(ctx, a.member, deployment, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment})
	if err != nil || !found || deployment.DeletionTimestamp != nil || len(deployment.OwnerReferences) > 0 {
		return err
	}
	owner := FlagValue(deployment, "--cluster-namespace=") + "/" + FlagValue(deployment, "--cluster-name=")
	if owner == "/" || owner == a.request.key() {
		return nil
	}
	return fmt.Errorf("the agent of %s runs on this cluster already: deregister %s first; if no hub has it registered, remove its agent from this cluster: %s",
		owner, owner, strings.Join(RemoveAgentCommands(), "; "))
}

// FlagValue returns the value of a flag, such as "--v=", on the command line of an agent; "" without the flag.
func FlagValue(agent *appsv1.Deployment, flag string) string {
	for _, container := range agent.Spec.Template.Spec.Containers {
		for _, word := range slices.Concat(container.Command, container.Args) {
			if value, ok := strings.CutPrefix(word, flag); ok {
				return value
			}
		}
	}
	return ""
}

// RemoveAgentCommands returns the kubectl commands that remove an agent from its cluster.
func RemoveAgentCommands() []string {
	label := agentNameLabel + "=" + agentName
	return []string{
		"kubectl delete clusterroles,clusterrolebindings -l " + label,
		"kubectl delete deployments,services,serviceaccounts,secrets -n " + kube.AgentNamespace + " -l " + label,
	}
}

// readyPoll is the time between two reads of a cluster that is not ready yet.
const readyPoll = 500 * time.Millisecond

// readClusterAndHeartbeat reads the SveltosCluster and the renew time of the agent's Lease; both may be empty.
func (a *agentApplier) readClusterAndHeartbeat(ctx context.Context) (*libv1beta1.SveltosCluster, *metav1.MicroTime, error) {
	cluster, _, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil {
		return nil, nil, err
	}
	lease := &coordinationv1.Lease{}
	_, err = read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: a.request.Name})
	return cluster, lease.Spec.RenewTime, err
}

// awaitReady waits until the cluster is ready, and the agent that was applied has sent a heartbeat.
func (a *agentApplier) awaitReady(ctx context.Context) (version string, err error) {
	limited, cancel := context.WithTimeout(ctx, a.request.Wait)
	defer cancel()
	state := ""
	err = wait.PollUntilContextCancel(limited, readyPoll, true, func(context.Context) (bool, error) {
		// The requests use ctx without the limit, so that state describes the cluster and not the timeout.
		var isReady bool
		state, version, isReady = a.readState(ctx)
		if err := ctx.Err(); err != nil {
			return false, err
		}
		a.report(state)
		return isReady, nil
	})
	switch {
	case err == nil:
		return version, nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("%w yet: %s; to continue waiting, run the same command again: %w", ErrNotReady, state, ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return "", fmt.Errorf("%w after %s: %s; correct the reason, then run the same command again", ErrNotReady, a.request.Wait, state)
	}
	return "", err
}

func (a *agentApplier) report(state string) {
	if a.request.Progress != nil && state != a.reported {
		a.request.Progress(state)
	}
	a.reported = state
}

// readState returns a description of the agent and the hub for Progress. The description includes errors, since either
// side may be unavailable for a moment.
func (a *agentApplier) readState(ctx context.Context) (state, version string, isReady bool) {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	agent, isAvailable, err := agentState(ctx, a.member)
	if err != nil {
		agent = err.Error()
	}
	cluster, heartbeat, err := a.readClusterAndHeartbeat(ctx)
	if err != nil {
		return "agent: " + agent + "; hub: " + err.Error(), "", false
	}
	status, isConnected := cluster.Status, heartbeat != nil && !heartbeat.Equal(a.heartbeat)
	hub := "the cluster is ready"
	switch {
	case !isConnected:
		hub = "the agent has not connected yet"
	case status.FailureMessage != "":
		hub = status.FailureMessage
	case !status.Ready || status.ConnectionStatus != libv1beta1.ConnectionHealthy:
		hub = "the agent is connected, and the cluster is not ready yet: is the hub running?"
	default:
		isReady = isAvailable
	}
	return "agent: " + agent + "; hub: " + hub, status.Version, isReady
}

// agentState returns a description of the agent on the member, and whether the rollout of its Deployment is complete.
func agentState(ctx context.Context, member client.Client) (state string, isAvailable bool, err error) {
	deployment := &unstructured.Unstructured{}
	deployment.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("Deployment"))
	if err := member.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment}, deployment); err != nil {
		return "", false, fmt.Errorf("read the agent's Deployment: %w", err)
	}
	result, err := kstatus.Compute(deployment)
	if err != nil {
		return "", false, fmt.Errorf("compute the status of the agent's Deployment: %w", err)
	}
	pods := &corev1.PodList{}
	if err := member.List(ctx, pods, client.InNamespace(kube.AgentNamespace), client.MatchingLabels{controlPlaneLabel: agentName}); err != nil {
		return "", false, fmt.Errorf("list the agent's pods: %w", err)
	}
	state = kube.OneLine(result.Message)
	if len(pods.Items) > 0 {
		youngest := slices.MaxFunc(pods.Items, func(a, b corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
		if isReady, status := kube.PodStatus(&youngest); !isReady {
			state += "; pod " + youngest.Name + ": " + status
		}
	}
	return state, result.Status == kstatus.CurrentStatus, nil
}
