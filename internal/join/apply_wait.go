package join

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// readyPoll is the time between two reads of a cluster that is not ready yet.
const readyPoll = 500 * time.Millisecond

// readHub reads the cluster and the last heartbeat of its agent.
func (a *application) readHub(ctx context.Context) (*libv1beta1.SveltosCluster, *metav1.MicroTime, error) {
	cluster, _, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil {
		return nil, nil, err
	}
	lease := &coordinationv1.Lease{}
	_, err = read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: a.request.Name})
	return cluster, lease.Spec.RenewTime, err
}

// awaitReady waits until the cluster is ready and its agent is the one that was applied.
func (a *application) awaitReady(ctx context.Context) (version string, err error) {
	limited, cancel := context.WithTimeout(ctx, a.request.Wait)
	defer cancel()
	state := ""
	err = wait.PollUntilContextCancel(limited, readyPoll, true, func(context.Context) (bool, error) {
		// Not limited by the wait, so that the last state is one of the cluster and not that time is up.
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
		return "", fmt.Errorf("%w yet: %s; to wait on, run the same command again: %w", ErrNotReady, state, ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return "", fmt.Errorf("%w after %s: %s; when the reason is gone, run the same command again", ErrNotReady, a.request.Wait, state)
	}
	return "", err
}

func (a *application) report(state string) {
	if a.request.Progress != nil && state != a.progress {
		a.request.Progress(state)
	}
	a.progress = state
}

// readState reads the state of agent and hub. Errors are part of the state, since either may be unavailable for a
// moment.
func (a *application) readState(ctx context.Context) (state, version string, isReady bool) {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	agent, isAvailable, err := agentState(ctx, a.member)
	if err != nil {
		agent = err.Error()
	}
	cluster, heartbeat, err := a.readHub(ctx)
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

// agentState describes the agent on the member, and returns whether the applied Deployment is available.
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
	// The message of a container may have several lines.
	state = strings.Join(strings.Fields(result.Message+podText(pods.Items)), " ")
	return state, result.Status == kstatus.CurrentStatus, nil
}

// podText returns the reason why the youngest pod does not run, "" if none is known.
func podText(pods []corev1.Pod) string {
	if len(pods) == 0 {
		return ""
	}
	youngest := slices.MaxFunc(pods, func(a, b corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	for _, container := range youngest.Status.ContainerStatuses {
		if waiting := container.State.Waiting; waiting != nil {
			return fmt.Sprintf("; pod %s: %s: %s", youngest.Name, waiting.Reason, waiting.Message)
		}
		if ended := container.State.Terminated; ended != nil {
			return fmt.Sprintf("; pod %s ended with exit code %d: %s", youngest.Name, ended.ExitCode, ended.Message)
		}
	}
	return ""
}
