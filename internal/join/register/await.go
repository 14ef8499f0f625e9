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
	// maxRestarts is how often an agent may end before it counts as one that does not start.
	maxRestarts = 4
	// imagePatience is the most, and imageShare the part of the time to wait, for which an image that cannot be pulled is
	// waited for: the kubelet has tried twice then, 10 s apart.
	imagePatience = 30 * time.Second
	imageShare    = 10
	// longestReason is how many bytes of a reason are shown: the end of a log may fill screens.
	longestReason = 500
)

// vigil waits until the agent works and the control plane says so.
type vigil struct {
	g *registration
	// told is what was last said of each thing.
	told map[string]string
	// imageless is since when each pod has had no image.
	imageless map[string]time.Time
	// rolledOut says that the Deployment is; last is what is missing.
	rolledOut bool
	last      string
}

// awaitReady waits until the agent runs and its Cluster is ready. It does not wait for what cannot come: an agent that
// does not start, and a Cluster that the control plane does not accept.
func (g *registration) awaitReady(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, g.request.DiscoveryTimeout)
	defer cancel()
	v := &vigil{g: g, told: map[string]string{}, imageless: map[string]time.Time{}, last: "nothing is known of it yet"}
	err := wait.PollUntilContextCancel(limited, pollPause, true, func(context.Context) (bool, error) {
		// Not limited by the wait, so that the last look shows what there is and not that time is up.
		ready, err := v.look(ctx)
		return ready, cmp.Or(ctx.Err(), err)
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("wait for the agent: %w: %s", ctx.Err(), v.last)
	case !errors.Is(err, context.DeadlineExceeded):
		return err
	case !v.rolledOut:
		return fmt.Errorf("wait for Deployment(%s/%s) rollout: %w: %s", g.request.Namespace, DefaultAgentName, err, v.last)
	}
	return fmt.Errorf("wait for cluster(%s) to be ready: %w: %s", g.request.ClusterName, err, v.last)
}

// look looks at both sides. What cannot be read is said and looked at again, since either may be away for a moment; an
// error is for good.
func (v *vigil) look(ctx context.Context) (bool, error) {
	if err := v.lookAtPods(ctx); err != nil {
		return false, err
	}
	if !v.rolledOut {
		return false, nil
	}
	return v.lookAtCluster(ctx)
}

func (v *vigil) lookAtPods(ctx context.Context) error {
	namespace := v.g.request.Namespace
	deployment := &appsv1.Deployment{}
	if err := v.g.member.Get(ctx, client.ObjectKey{Namespace: namespace, Name: DefaultAgentName}, deployment); err != nil {
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("the Deployment %s/%s has been deleted on the cluster meanwhile", namespace, DefaultAgentName)
		}
		v.miss("cluster", err.Error())
		return nil
	}
	pods := &corev1.PodList{}
	if err := v.g.member.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{agentLabel: agentValue}); err != nil {
		v.miss("cluster", err.Error())
		return nil
	}
	v.rolledOut, v.last = rollout(deployment)
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for i := range pods.Items {
		pod := &pods.Items[i]
		// Those of an earlier certificate are going.
		if pod.DeletionTimestamp != nil || pod.Annotations[certificateAnnotation] != v.g.identity.request {
			continue
		}
		ready, status := podState(pod)
		if ready {
			v.tell(pod.Name, fmt.Sprintf("pod: %s is ready. status: %s", pod.Name, status))
			continue
		}
		v.miss(pod.Name, fmt.Sprintf("pod: %s not ready. status: %s", pod.Name, status))
		if reason := cmp.Or(hopeless(pod), v.pulling(pod)); reason != "" {
			return fmt.Errorf("the agent does not start: pod %s: %s", pod.Name, reason)
		}
	}
	return nil
}

func (v *vigil) lookAtCluster(ctx context.Context) (bool, error) {
	cluster, err := v.g.cluster(ctx)
	if apierrors.IsNotFound(err) {
		return false, fmt.Errorf("the Cluster %s has been deleted on the control plane meanwhile", v.g.request.ClusterName)
	}
	if err != nil {
		v.miss("hub", "the agent runs; the control plane: "+err.Error())
		return false, nil //nolint:nilerr // it may answer later
	}
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	switch {
	case !cluster.DeletionTimestamp.IsZero():
		return false, fmt.Errorf("the Cluster %s is being deleted on the control plane", cluster.Name)
	case ready == nil:
		v.miss("hub", "the agent runs, and has not reported to the control plane yet")
		return false, nil
	case ready.Reason == fleet.ReasonTaken:
		return false, errors.New(ready.Message)
	case ready.Status == metav1.ConditionTrue:
		return true, nil
	}
	v.miss("hub", "the agent runs, and the cluster is not ready yet: "+oneLine(ready.Message))
	return false, nil
}

// miss says what is missing.
func (v *vigil) miss(about, text string) {
	v.last = text
	v.tell(about, text)
}

// tell says something once.
func (v *vigil) tell(about, text string) {
	if v.told[about] != text {
		v.g.request.Progress(text)
	}
	v.told[about] = text
}

// pulling says why a pod does not get its image, when that has been so for a while; "" if it may still.
func (v *vigil) pulling(pod *corev1.Pod) string {
	for _, container := range pod.Status.ContainerStatuses {
		waiting := container.State.Waiting
		if waiting == nil || !slices.Contains(unpullable(), waiting.Reason) {
			continue
		}
		since, known := v.imageless[pod.Name]
		if !known {
			since = time.Now()
			v.imageless[pod.Name] = since
		}
		if waiting.Reason != invalidImage && time.Since(since) < min(imagePatience, v.g.request.DiscoveryTimeout/imageShare) {
			return ""
		}
		return fmt.Sprintf("the image %s cannot be had (%s); name one that the cluster can pull with --karmada-agent-image",
			v.g.request.Image, oneLine(strings.Join(nonEmpty(waiting.Reason, waiting.Message), ": ")))
	}
	delete(v.imageless, pod.Name)
	return ""
}

// invalidImage is the reason of a container whose image has a name that no image can have.
const invalidImage = "InvalidImageName"

// unpullable are the reasons of the kubelet for which a container has no image.
func unpullable() []string {
	return []string{"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", invalidImage}
}

// rollout says whether the Deployment runs as it was written, or what keeps it.
func rollout(d *appsv1.Deployment) (done bool, missing string) {
	status, want := d.Status, int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	for _, condition := range status.Conditions {
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
			return false, "it has no pod: " + oneLine(condition.Message)
		}
	}
	if status.ObservedGeneration < d.Generation {
		return false, "the cluster has not looked at it yet"
	}
	// Of several agents the one is ready that works; the others wait for it to end.
	done = status.UpdatedReplicas >= want && status.Replicas == status.UpdatedReplicas && status.AvailableReplicas > 0
	return done, fmt.Sprintf("of %d pods, %d are up to date and %d are available", want, status.UpdatedReplicas, status.AvailableReplicas)
}

// podState says whether a pod is ready, and in one or two words how it is.
func podState(pod *corev1.Pod) (ready bool, status string) {
	for _, container := range pod.Status.ContainerStatuses {
		switch {
		case container.State.Waiting != nil:
			return false, oneLine(strings.Join(nonEmpty(container.State.Waiting.Reason, container.State.Waiting.Message), ": "))
		case container.State.Terminated != nil:
			return false, ended(container.State.Terminated)
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

// hopeless says why an agent ends again and again; "" if it does not.
func hopeless(pod *corev1.Pod) string {
	for _, container := range pod.Status.ContainerStatuses {
		last := container.LastTerminationState.Terminated
		if container.RestartCount >= maxRestarts && last != nil && container.State.Running == nil {
			return fmt.Sprintf("it was started %d times and %s", container.RestartCount, ended(last))
		}
	}
	return ""
}

func ended(state *corev1.ContainerStateTerminated) string {
	return fmt.Sprintf("ended with exit code %d: %s", state.ExitCode, oneLine(strings.Join(nonEmpty(state.Reason, state.Message), ": ")))
}

func nonEmpty(words ...string) []string {
	return slices.DeleteFunc(words, func(word string) bool { return word == "" })
}

// oneLine makes a reason fit into a line. The end of a log says more than its beginning.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > longestReason {
		text = "..." + strings.ToValidUTF8(text[len(text)-longestReason:], "")
	}
	return text
}
