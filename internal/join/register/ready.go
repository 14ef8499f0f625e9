package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
)

const (
	// maxRestarts is the number of restarts after which an agent counts as one that does not start.
	maxRestarts = 4
	// An image that cannot be pulled may become available for imageTimeout, but at most for this part of the timeout of
	// the wait. The kubelet has tried twice then, 10 s apart.
	imageTimeout = 30 * time.Second
	imagePart    = 10
	// maxReasonLength limits the bytes of a reason in a message: the end of a log may be long.
	maxReasonLength = 500
	// invalidImage is the kubelet's reason for a container whose image has an invalid name.
	invalidImage = "InvalidImageName"
)

// readiness waits until the agent works and the control plane reports its Cluster as ready.
type readiness struct {
	*registration
	// reported has the last progress line of each subject.
	reported map[string]string
	// withoutImage has the time since which each pod has no image.
	withoutImage map[string]time.Time
	rolledOut    bool
	missing      string // the last line about a missing condition
}

// awaitReady waits until the agent runs and its Cluster is ready. It fails early if the agent cannot start or the
// control plane does not accept the Cluster.
func (g *registration) awaitReady(ctx context.Context) error {
	r := &readiness{registration: g, reported: map[string]string{}, withoutImage: map[string]time.Time{}, missing: "nothing is known of it yet"}
	err := wait.PollUntilContextTimeout(ctx, pollInterval, g.request.DiscoveryTimeout, true, func(context.Context) (bool, error) {
		// The requests are not limited by the timeout, so that the last line is about the agent.
		err := r.checkPods(ctx)
		if err != nil || !r.rolledOut {
			return false, cmp.Or(ctx.Err(), err)
		}
		ready, err := r.checkCluster(ctx)
		return ready, cmp.Or(ctx.Err(), err)
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("wait for the agent: %w: %s", ctx.Err(), r.missing)
	case !errors.Is(err, context.DeadlineExceeded):
		return err
	case !r.rolledOut:
		return fmt.Errorf("wait for Deployment(%s/%s) rollout: %w: %s", g.request.Namespace, DefaultAgentName, err, r.missing)
	}
	return fmt.Errorf("wait for cluster(%s) to be ready: %w: %s", g.request.ClusterName, err, r.missing)
}

// checkPods reads the Deployment and its pods. Its errors are final; it tries again if the cluster does not answer.
func (r *readiness) checkPods(ctx context.Context) error {
	namespace := r.request.Namespace
	deployment := &appsv1.Deployment{}
	err := r.member.Get(ctx, client.ObjectKey{Namespace: namespace, Name: DefaultAgentName}, deployment)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the Deployment %s/%s has been deleted on the cluster meanwhile", namespace, DefaultAgentName)
	}
	pods := &corev1.PodList{}
	if err == nil {
		err = r.member.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{agentLabel: agentValue})
	}
	if err != nil {
		r.reportMissing("cluster", err.Error())
		return nil
	}
	r.rolledOut, r.missing = isRolledOut(deployment)
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for i := range pods.Items {
		pod := &pods.Items[i]
		// Pods with an earlier certificate are being replaced.
		if pod.DeletionTimestamp != nil || pod.Annotations[certificateAnnotation] != r.csr {
			continue
		}
		ready, status := podState(pod)
		if ready {
			r.report(pod.Name, fmt.Sprintf("pod: %s is ready. status: %s", pod.Name, status))
			continue
		}
		r.reportMissing(pod.Name, fmt.Sprintf("pod: %s not ready. status: %s", pod.Name, status))
		if reason := cmp.Or(crashReason(pod), r.imageReason(pod)); reason != "" {
			return fmt.Errorf("the agent does not start: pod %s: %s", pod.Name, reason)
		}
	}
	return nil
}

// checkCluster returns whether the Cluster is ready. Its errors are final, as those of checkPods.
func (r *readiness) checkCluster(ctx context.Context) (bool, error) {
	cluster, err := r.readCluster(ctx)
	if apierrors.IsNotFound(err) {
		return false, fmt.Errorf("the Cluster %s has been deleted on the control plane meanwhile", r.request.ClusterName)
	}
	if err != nil {
		r.reportMissing("hub", "the agent runs; the control plane: "+err.Error())
		return false, nil //nolint:nilerr // the next request may be answered
	}
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	switch {
	case !cluster.DeletionTimestamp.IsZero():
		return false, fmt.Errorf("the Cluster %s is being deleted on the control plane", cluster.Name)
	case ready == nil:
		r.reportMissing("hub", "the agent runs, and has not reported to the control plane yet")
	case ready.Reason == fleet.ReasonTaken:
		return false, errors.New(ready.Message)
	case ready.Status == metav1.ConditionTrue:
		return true, nil
	default:
		r.reportMissing("hub", "the agent runs, and the cluster is not ready yet: "+oneLine(ready.Message))
	}
	return false, nil
}

func (r *readiness) reportMissing(subject, line string) {
	r.missing = line
	r.report(subject, line)
}

// report reports a line about subject once.
func (r *readiness) report(subject, line string) {
	if r.reported[subject] != line {
		r.request.Progress(line)
	}
	r.reported[subject] = line
}

// imageReason returns the reason why a pod has had no image for some time, or "".
func (r *readiness) imageReason(pod *corev1.Pod) string {
	for _, container := range pod.Status.ContainerStatuses {
		waiting := container.State.Waiting
		if waiting == nil || !slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", invalidImage}, waiting.Reason) {
			continue
		}
		if r.withoutImage[pod.Name].IsZero() {
			r.withoutImage[pod.Name] = time.Now()
		}
		if waiting.Reason != invalidImage && time.Since(r.withoutImage[pod.Name]) < min(imageTimeout, r.request.DiscoveryTimeout/imagePart) {
			return ""
		}
		return fmt.Sprintf("the image %s cannot be had (%s); name one that the cluster can pull with --karmada-agent-image",
			r.request.Image, joinReason(waiting.Reason, waiting.Message))
	}
	delete(r.withoutImage, pod.Name)
	return ""
}

// isRolledOut returns whether the Deployment runs as it was written, and the missing condition.
func isRolledOut(d *appsv1.Deployment) (done bool, missing string) {
	status, desired := d.Status, int32(1)
	if d.Spec.Replicas != nil {
		desired = *d.Spec.Replicas
	}
	for _, condition := range status.Conditions {
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
			return false, "it has no pod: " + oneLine(condition.Message)
		}
	}
	if status.ObservedGeneration < d.Generation {
		return false, "the cluster has not looked at it yet"
	}
	// Of several agents only the leader is ready.
	done = status.UpdatedReplicas >= desired && status.Replicas == status.UpdatedReplicas && status.AvailableReplicas > 0
	return done, fmt.Sprintf("of %d pods, %d are up to date and %d are available", desired, status.UpdatedReplicas, status.AvailableReplicas)
}

// podState returns whether a pod is ready, and its status in a few words.
func podState(pod *corev1.Pod) (ready bool, status string) {
	for _, container := range pod.Status.ContainerStatuses {
		switch {
		case container.State.Waiting != nil:
			return false, joinReason(container.State.Waiting.Reason, container.State.Waiting.Message)
		case container.State.Terminated != nil:
			return false, exitReason(container.State.Terminated)
		}
	}
	for _, condition := range pod.Status.Conditions {
		switch {
		case condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse:
			return false, "cannot be scheduled: " + oneLine(condition.Message)
		case condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue:
			ready = true
		}
	}
	return ready, string(cmp.Or(pod.Status.Phase, corev1.PodPending))
}

// crashReason returns the reason why an agent ends again and again, or "".
func crashReason(pod *corev1.Pod) string {
	for _, container := range pod.Status.ContainerStatuses {
		last := container.LastTerminationState.Terminated
		if container.RestartCount >= maxRestarts && last != nil && container.State.Running == nil {
			return fmt.Sprintf("it was started %d times and %s", container.RestartCount, exitReason(last))
		}
	}
	return ""
}

func exitReason(state *corev1.ContainerStateTerminated) string {
	return fmt.Sprintf("ended with exit code %d: %s", state.ExitCode, joinReason(state.Reason, state.Message))
}

func joinReason(reason, message string) string {
	return oneLine(strings.Trim(reason+": "+message, ": "))
}

// oneLine returns text on one line. It keeps the end of a long text: the end of a log has the reason.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxReasonLength {
		text = "..." + strings.ToValidUTF8(text[len(text)-maxReasonLength:], "")
	}
	return text
}
