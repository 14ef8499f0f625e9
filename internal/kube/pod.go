package kube

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// maxReasonBytes limits the bytes of a reason in the status of a pod: the end of a log may be long.
const maxReasonBytes = 500

// PodStatus returns whether a pod is ready, and its status in a few words.
func PodStatus(pod *corev1.Pod) (ready bool, status string) {
	for _, container := range pod.Status.ContainerStatuses {
		switch {
		case container.State.Waiting != nil:
			return false, ReasonText(container.State.Waiting.Reason, container.State.Waiting.Message)
		case container.State.Terminated != nil:
			return false, TerminationText(container.State.Terminated)
		}
	}
	for _, condition := range pod.Status.Conditions {
		switch {
		case condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse:
			return false, "cannot be scheduled: " + ReasonText("", condition.Message)
		case condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue:
			ready = true
		}
	}
	return ready, string(cmp.Or(pod.Status.Phase, corev1.PodPending))
}

// TerminationText describes the end of a container.
func TerminationText(state *corev1.ContainerStateTerminated) string {
	return fmt.Sprintf("ended with exit code %d: %s", state.ExitCode, ReasonText(state.Reason, state.Message))
}

// ReasonText returns "reason: message" on one line. It keeps the end of a long text: the end of a log has the reason.
func ReasonText(reason, message string) string {
	text := OneLine(strings.Trim(reason+": "+message, ": "))
	if len(text) > maxReasonBytes {
		text = "..." + strings.ToValidUTF8(text[len(text)-maxReasonBytes:], "")
	}
	return text
}
