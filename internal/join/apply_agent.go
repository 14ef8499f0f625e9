package join

import (
	"context"
	"fmt"
	"slices"
	"strings"

	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

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
