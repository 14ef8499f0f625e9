package clusterstatus_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/clusterstatus"
	"github.com/towline/towline/internal/localkube"
)

// noon is the start time of the tests.
var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// observe returns an Observer that runs until the test ends.
func observe(t *testing.T, cfg *rest.Config, clock *clocktesting.FakePassiveClock) *clusterstatus.Observer {
	t.Helper()
	o, err := clusterstatus.NewObserver(cfg, clusterstatus.Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- o.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return o
}

// condition returns a condition as text: status/reason message @ seconds after noon.
func condition(status clusterv1alpha1.ClusterStatus, kind string) string {
	c := meta.FindStatusCondition(status.Conditions, kind)
	if c == nil {
		return ""
	}
	return string(c.Status) + "/" + c.Reason + " " + c.Message + " @ " + c.LastTransitionTime.Sub(noon).String()
}

func wantReady(t *testing.T, status clusterv1alpha1.ClusterStatus, want string) {
	t.Helper()
	if got := condition(status, clusterv1alpha1.ClusterConditionReady); got != want {
		t.Errorf("Ready is %q, want %q", got, want)
	}
}

func TestObserveCluster(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, plane.Config, clock)
	first := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	wantReady(t, first, "True/ClusterReady cluster is healthy @ 0s")
	if got := condition(first, clusterv1alpha1.ClusterConditionCompleteAPIEnablements); got != "True/Complete all APIs are known @ 0s" {
		t.Errorf("CompleteAPIEnablements is %q", got)
	}
	if first.KubernetesVersion != "v1.36.3" {
		t.Errorf("the version is %q", first.KubernetesVersion)
	}
	wantAPI(t, first, "v1", clusterv1alpha1.APIResource{Name: "pods", Kind: "Pod"})
	wantAPI(t, first, "apps/v1", clusterv1alpha1.APIResource{Name: "deployments", Kind: "Deployment"})
	if diff := cmp.Diff(first.NodeSummary, &clusterv1alpha1.NodeSummary{TotalNum: 1, ReadyNum: 1}); diff != "" {
		t.Errorf("node summary: got -, want +\n%s", diff)
	}
	wantSums(t, first.ResourceSummary.Allocatable, map[corev1.ResourceName]string{"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "10k"})
	wantSums(t, first.ResourceSummary.Allocated, nil)
	// Of the default grades, 64 CPUs are of the eighth, and 256 GiB of the seventh.
	for _, grade := range first.ResourceSummary.AllocatableModelings {
		if want := map[uint]int{6: 1}[grade.Grade]; grade.Count != want {
			t.Errorf("%d nodes are of grade %d, want %d", grade.Count, grade.Grade, want)
		}
	}
	clock.SetTime(noon.Add(10 * time.Second))
	if diff := cmp.Diff(first, o.Observe(t.Context(), first, nil)); diff != "" {
		t.Errorf("the second observation differs: first -, second +\n%s", diff)
	}
	checkPodCounters(t, plane.Config, o, first)
}

// checkPodCounters creates and deletes pods, and checks the counters.
func checkPodCounters(t *testing.T, cfg *rest.Config, o *clusterstatus.Observer, status clusterv1alpha1.ClusterStatus) {
	t.Helper()
	pods := kubernetes.NewForConfigOrDie(cfg).CoreV1().Pods("default")
	for name, node := range map[string]string{"bound": "", "waits": "none-such"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "example.com/main:1",
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("250m"), "memory": resource.MustParse("1Gi")}},
		}}}}
		if node != "" {
			pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
		}
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		status = o.Observe(ctx, status, nil)
		allocated, allocating := status.ResourceSummary.Allocated[corev1.ResourcePods], status.ResourceSummary.Allocating[corev1.ResourcePods]
		return allocated.Value() == 1 && allocating.Value() == 1, nil
	})
	if err != nil {
		t.Fatalf("%v: %+v", err, status.ResourceSummary)
	}
	want := map[corev1.ResourceName]string{"cpu": "250m", "memory": "1Gi", "pods": "1"}
	wantSums(t, status.ResourceSummary.Allocated, want)
	wantSums(t, status.ResourceSummary.Allocating, want)
	if err := errors.Join(pods.Delete(t.Context(), "bound", metav1.DeleteOptions{}), pods.Delete(t.Context(), "waits", metav1.DeleteOptions{})); err != nil {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		status = o.Observe(ctx, status, nil)
		return len(status.ResourceSummary.Allocated)+len(status.ResourceSummary.Allocating) == 0, nil
	})
	if err != nil {
		t.Fatalf("%v: %+v", err, status.ResourceSummary)
	}
}

func wantAPI(t *testing.T, status clusterv1alpha1.ClusterStatus, version string, want clusterv1alpha1.APIResource) {
	t.Helper()
	for _, api := range status.APIEnablements {
		for _, got := range api.Resources {
			if api.GroupVersion == version && got == want {
				return
			}
		}
	}
	t.Errorf("%+v of %s is not among the APIs", want, version)
}

func wantSums(t *testing.T, got corev1.ResourceList, want map[corev1.ResourceName]string) {
	t.Helper()
	have := map[corev1.ResourceName]string{}
	for name, quantity := range got {
		have[name] = quantity.String()
	}
	if want == nil {
		want = map[corev1.ResourceName]string{}
	}
	if diff := cmp.Diff(have, want); diff != "" {
		t.Errorf("sums: got -, want +\n%s", diff)
	}
}
