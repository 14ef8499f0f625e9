package join

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// longestReason is how many bytes of a reason are shown: a kubelet's may fill screens.
const longestReason = 300

// agentState describes the agent on the member, and returns whether the applied Deployment is rolled out.
func agentState(ctx context.Context, member client.Client) (state string, isRolledOut bool, err error) {
	deployment := &appsv1.Deployment{}
	if err := member.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment}, deployment); err != nil {
		return "", false, fmt.Errorf("read the agent's Deployment: %w", err)
	}
	pods := &corev1.PodList{}
	if err := member.List(ctx, pods, client.InNamespace(kube.AgentNamespace), client.MatchingLabels{controlPlaneLabel: agentName}); err != nil {
		return "", false, fmt.Errorf("list the agent's pods: %w", err)
	}
	return oneLine(agentText(deployment, pods.Items)), rolledOut(deployment), nil
}

func rolledOut(deployment *appsv1.Deployment) bool {
	status := deployment.Status
	return status.ObservedGeneration >= deployment.Generation && status.UpdatedReplicas > 0 && status.Replicas == status.UpdatedReplicas
}

// agentText says how far the agent is, by its youngest pod.
func agentText(deployment *appsv1.Deployment, pods []corev1.Pod) string {
	for _, condition := range deployment.Status.Conditions {
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
			return fmt.Sprintf("Deployment %s has no pod: %s", deployment.Name, condition.Message)
		}
	}
	pods = slices.DeleteFunc(pods, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil })
	if len(pods) == 0 {
		return fmt.Sprintf("Deployment %s has no pod yet", deployment.Name)
	}
	youngest := slices.MaxFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return fmt.Sprintf("pod %s %s", youngest.Name, podText(&youngest))
}

func podText(pod *corev1.Pod) string {
	for _, container := range pod.Status.ContainerStatuses {
		if text := containerText(container); text != "" {
			return text
		}
	}
	ready := false
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return "cannot be scheduled: " + condition.Message
		}
		ready = ready || (condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue)
	}
	switch {
	case ready:
		return "runs"
	case pod.Status.Phase == corev1.PodRunning:
		return "runs and is not ready yet"
	case pod.Status.Message != "":
		return fmt.Sprintf("is %s: %s", pod.Status.Phase, pod.Status.Message)
	}
	return fmt.Sprintf("is %s", cmp.Or(pod.Status.Phase, corev1.PodPending))
}

// containerText says what keeps a container from running; "" if nothing does.
func containerText(status corev1.ContainerStatus) string {
	reason := func(name, message string) string {
		if message == "" {
			return name
		}
		return name + ": " + message
	}
	ended := func(state *corev1.ContainerStateTerminated) string {
		return fmt.Sprintf("ended with exit code %d: %s", state.ExitCode, reason(state.Reason, state.Message))
	}
	switch {
	case status.State.Terminated != nil:
		return ended(status.State.Terminated)
	case status.State.Waiting == nil:
		return ""
	case status.LastTerminationState.Terminated != nil:
		return fmt.Sprintf("waits (%s) and %s", status.State.Waiting.Reason, ended(status.LastTerminationState.Terminated))
	}
	return "waits: " + reason(status.State.Waiting.Reason, status.State.Waiting.Message)
}

// oneLine makes text fit into a line of progress.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > longestReason {
		text = strings.ToValidUTF8(text[:longestReason], "") + "..."
	}
	return text
}
