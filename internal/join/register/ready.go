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
	"github.com/towline/towline/internal/kube"
)

const (
	// maxRestarts is the number of restarts of a container after which a registration fails.
	maxRestarts = 4
	// imageTimeout is the time after which a registration fails if an image cannot be pulled. By then the kubelet has
	// tried twice. The limit is DiscoveryTimeout/imageTimeoutDivisor if that is shorter.
	imageTimeout        = 30 * time.Second
	imageTimeoutDivisor = 10
)

// readinessCheck is one wait for the agent and its Cluster.
type readinessCheck struct {
	*registration
	// reported is the last progress line by subject: the name of a pod, "cluster" or "hub".
	reported map[string]string
	// imageErrorSince is the time of the first image error, by pod/container.
	imageErrorSince map[string]time.Time
	// waitsFor is the condition that is missing, problem the reason why.
	waitsFor, problem string
}

// awaitReady waits until the agent runs and its Cluster is ready. It returns early if the agent cannot start or the
// control plane rejects the Cluster.
func (g *registration) awaitReady(ctx context.Context) error {
	r := &readinessCheck{registration: g, reported: map[string]string{}, imageErrorSince: map[string]time.Time{}}
	err := wait.PollUntilContextTimeout(ctx, pollInterval, g.request.DiscoveryTimeout, true, func(context.Context) (bool, error) {
		// The requests use ctx without the timeout, so that problem describes the agent and not the timeout.
		isReady, err := r.checkAgent(ctx)
		if isReady && err == nil {
			isReady, err = r.checkCluster(ctx)
		}
		return isReady, cmp.Or(ctx.Err(), err)
	})
	if wait.Interrupted(err) {
		return fmt.Errorf("wait for %s: %w: %s", r.waitsFor, err, r.problem)
	}
	return err
}

// checkAgent returns whether the rollout of the Deployment is complete and one pod is available: only the leader
// becomes ready. It returns only errors that end the wait.
func (r *readinessCheck) checkAgent(ctx context.Context) (isReady bool, err error) {
	namespace := r.request.Namespace
	r.waitsFor = fmt.Sprintf("Deployment(%s/%s) rollout", namespace, DefaultAgentDeployment)
	deployment, pods := &appsv1.Deployment{}, &corev1.PodList{}
	err = r.member.Get(ctx, client.ObjectKey{Namespace: namespace, Name: DefaultAgentDeployment}, deployment)
	if apierrors.IsNotFound(err) {
		return false, fmt.Errorf("the Deployment %s/%s has been deleted on the cluster meanwhile", namespace, DefaultAgentDeployment)
	}
	if err == nil {
		err = r.member.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{appLabel: appLabelValue})
	}
	if err != nil {
		r.reportNotReady("cluster", err.Error())
		return false, nil
	}
	status, desired := deployment.Status, *deployment.Spec.Replicas
	r.problem = fmt.Sprintf("of %d pods, %d are up to date and %d are available", desired, status.UpdatedReplicas, status.AvailableReplicas)
	for _, condition := range status.Conditions {
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
			r.problem = "it has no pod: " + kube.OneLine(condition.Message)
		}
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for i := range pods.Items {
		pod := &pods.Items[i]
		// Pods with an earlier certificate are being replaced.
		if pod.DeletionTimestamp != nil || pod.Annotations[certificateAnnotation] != r.csr {
			continue
		}
		if err := r.checkPod(pod); err != nil {
			return false, fmt.Errorf("the agent does not start: pod %s: %w", pod.Name, err)
		}
	}
	return status.ObservedGeneration >= deployment.Generation && status.UpdatedReplicas >= desired &&
		status.Replicas == status.UpdatedReplicas && status.AvailableReplicas > 0, nil
}

// checkPod reports the status of a pod. It returns an error after maxRestarts restarts of a container, or if an image
// cannot be pulled for imageTimeout.
func (r *readinessCheck) checkPod(pod *corev1.Pod) error {
	ready, status := kube.PodStatus(pod)
	if ready {
		r.report(pod.Name, fmt.Sprintf("pod: %s is ready. status: %s", pod.Name, status))
		return nil
	}
	r.reportNotReady(pod.Name, fmt.Sprintf("pod: %s not ready. status: %s", pod.Name, status))
	for _, container := range pod.Status.ContainerStatuses {
		waiting, last, name := container.State.Waiting, container.LastTerminationState.Terminated, pod.Name+"/"+container.Name
		switch {
		case container.RestartCount >= maxRestarts && last != nil && container.State.Running == nil:
			return fmt.Errorf("it was restarted %d times and %s", container.RestartCount, kube.TerminationText(last))
		case waiting == nil || !strings.Contains(waiting.Reason, "Image"):
			delete(r.imageErrorSince, name)
		case r.imageErrorSince[name].IsZero():
			r.imageErrorSince[name] = time.Now()
		case time.Since(r.imageErrorSince[name]) >= min(imageTimeout, r.request.DiscoveryTimeout/imageTimeoutDivisor):
			return fmt.Errorf("the image %s cannot be pulled (%s): pass --karmada-agent-image with an image that the cluster can pull",
				container.Image, kube.ReasonText(waiting.Reason, waiting.Message))
		}
	}
	return nil
}

// checkCluster returns whether the Cluster is ready. It returns only errors that end the wait.
func (r *readinessCheck) checkCluster(ctx context.Context) (bool, error) {
	r.waitsFor = fmt.Sprintf("cluster(%s) to be ready", r.request.ClusterName)
	cluster, err := r.readCluster(ctx)
	if apierrors.IsNotFound(err) || err == nil && !cluster.DeletionTimestamp.IsZero() {
		return false, fmt.Errorf("the Cluster %s has been deleted on the control plane meanwhile", r.request.ClusterName)
	}
	if err != nil {
		r.reportNotReady("hub", "the agent runs; the control plane: "+err.Error())
		return false, nil //nolint:nilerr // the next request may be answered
	}
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	switch {
	case ready == nil:
		r.reportNotReady("hub", "the agent runs, and has not reported to the control plane yet")
	case ready.Reason == fleet.ReasonIDTaken:
		return false, errors.New(ready.Message)
	case ready.Status == metav1.ConditionTrue:
		return true, nil
	default:
		r.reportNotReady("hub", "the agent runs, and the cluster is not ready yet: "+kube.OneLine(ready.Message))
	}
	return false, nil
}

func (r *readinessCheck) reportNotReady(subject, line string) {
	r.problem = line
	r.report(subject, line)
}

// report calls Progress with a line about subject, unless the last line about it was the same.
func (r *readinessCheck) report(subject, line string) {
	if r.reported[subject] != line {
		r.request.Progress(line)
	}
	r.reported[subject] = line
}
