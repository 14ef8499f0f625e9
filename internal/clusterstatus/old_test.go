package clusterstatus_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// oldCluster is an old API server: it has no /readyz, no aggregated discovery and no streamed lists, and one API may be
// unavailable.
type oldCluster struct {
	*httptest.Server
	// isUnhealthy makes it unhealthy, isMetricsDown makes the API metrics/v1 unavailable.
	isUnhealthy, isMetricsDown atomic.Bool
	// forbidden names the resource that must not be read: "nodes", "pods", "all" or "". version is its gitVersion.
	forbidden, version atomic.Value
	// discoveries counts the requests for its APIs, podPages the pages of pods.
	discoveries, podPages atomic.Int32
	// endWatches ends its watches, because a server waits for them when it stops.
	endWatches context.CancelFunc
	end        <-chan struct{}
}

func newOldCluster(t *testing.T) *oldCluster {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c := &oldCluster{endWatches: cancel, end: ctx.Done()}
	c.version.Store("v1.20.0")
	c.Server = httptest.NewServer(http.HandlerFunc(c.answer))
	t.Cleanup(c.stop)
	return c
}

// stop stops the server.
func (c *oldCluster) stop() {
	c.endWatches()
	c.Close()
}

func (c *oldCluster) answer(out http.ResponseWriter, r *http.Request) {
	list := func(version string, resources ...metav1.APIResource) any {
		return metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: version, APIResources: resources}
	}
	group := func(name string) metav1.APIGroup {
		version := metav1.GroupVersionForDiscovery{GroupVersion: name + "/v1", Version: "v1"}
		return metav1.APIGroup{Name: name, Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}
	}
	code, answer := http.StatusOK, any(nil)
	switch r.URL.Path {
	case "/healthz":
		if c.isUnhealthy.Load() {
			code = http.StatusInternalServerError
		}
	case "/version":
		answer = map[string]any{"gitVersion": c.version.Load()}
	case "/api":
		c.discoveries.Add(1)
		answer = metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}}
	case "/apis":
		answer = metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: []metav1.APIGroup{group("metrics"), group("apps")}}
	case "/api/v1":
		answer = list("v1", metav1.APIResource{Name: "pods", Kind: "Pod"}, metav1.APIResource{Name: "pods/log", Kind: "Pod"})
	case "/apis/apps/v1":
		answer = list("apps/v1", metav1.APIResource{Name: "deployments", Kind: "Deployment"})
	case "/apis/metrics/v1":
		code, answer = http.StatusServiceUnavailable, list("")
		if !c.isMetricsDown.Load() {
			code, answer = http.StatusOK, list("metrics/v1", metav1.APIResource{Name: "loads", Kind: "Load"})
		}
	case "/api/v1/nodes", "/api/v1/pods":
		code, answer = c.objects(r)
	default:
		code = http.StatusNotFound
	}
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(code)
	if answer != nil {
		_ = json.NewEncoder(out).Encode(answer)
	}
}

// objects lists one node, and the 600 pods on it in two pages. A watch stays open until the test ends.
func (c *oldCluster) objects(r *http.Request) (int, any) {
	query := r.URL.Query()
	resourceName := strings.TrimPrefix(r.URL.Path, "/api/v1/")
	switch forbidden := c.forbidden.Load(); {
	case forbidden == resourceName, forbidden == "all":
		verb := map[bool]string{true: "watch", false: "list"}[query.Has("watch")]
		return http.StatusForbidden, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden,
			Message: resourceName + ` is forbidden: User "towline" cannot ` + verb + ` resource "` + resourceName + `"`,
		}
	case query.Has("sendInitialEvents"):
		return http.StatusUnprocessableEntity, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonInvalid, Code: http.StatusUnprocessableEntity,
		}
	case query.Has("watch"):
		select {
		case <-r.Context().Done():
		case <-c.end:
		}
		return http.StatusOK, nil
	case resourceName == "nodes":
		return http.StatusOK, corev1.NodeList{
			TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"},
			Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "n"}}},
		}
	}
	c.podPages.Add(1)
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	from, to := 0, 500
	if query.Get("continue") != "" {
		from, to = 500, 600
	} else {
		list.Continue = "more"
	}
	for i := from; i < to; i++ {
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("p", i)}, Spec: corev1.PodSpec{NodeName: "n"}}
		pod.UID = types.UID(pod.Name)
		pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("10m")}}}}
		list.Items = append(list.Items, pod)
	}
	return http.StatusOK, list
}

func TestObserveOldCluster(t *testing.T) {
	t.Parallel()
	old := newOldCluster(t)
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, &rest.Config{Host: old.URL}, clock)
	status := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	wantReady(t, status, "True/ClusterReady cluster is healthy @ 0s")
	if status.KubernetesVersion != "v1.20.0" {
		t.Errorf("the version is %q", status.KubernetesVersion)
	}
	if status.NodeSummary == nil || status.NodeSummary.TotalNum != 1 {
		t.Fatalf("node summary is %+v", status.NodeSummary)
	}
	wantSums(t, status.ResourceSummary.Allocated, map[corev1.ResourceName]string{"cpu": "6", "pods": "600"})
	if pages := old.podPages.Load(); pages != 2 {
		t.Errorf("%d pages were read, want 2", pages)
	}
}

// The schema of a Cluster rejects a status with a longer version.
func TestVersionsThatAreTooLongAreIgnored(t *testing.T) {
	t.Parallel()
	old := newOldCluster(t)
	old.version.Store(strings.Repeat("v", 257))
	o := observe(t, &rest.Config{Host: old.URL}, clocktesting.NewFakePassiveClock(noon))
	status := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{KubernetesVersion: "v1.19.0"}, nil)
	wantReady(t, status, "True/ClusterReady cluster is healthy @ 0s")
	if status.KubernetesVersion != "v1.19.0" {
		t.Errorf("got version %q, want the old one", status.KubernetesVersion)
	}
}

func TestHealthAndAPIsFollowTheCluster(t *testing.T) {
	t.Parallel()
	old := newOldCluster(t)
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, &rest.Config{Host: old.URL}, clock)
	first := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	observeAt := func(after time.Duration, status clusterv1alpha1.ClusterStatus) clusterv1alpha1.ClusterStatus {
		clock.SetTime(noon.Add(after))
		return o.Observe(t.Context(), status, nil)
	}
	old.isMetricsDown.Store(true)
	status := observeAt(59*time.Second, first)
	if diff := cmp.Diff(first, status); diff != "" {
		t.Errorf("it changed within the minute: first -, now +\n%s", diff)
	}
	if listed := old.discoveries.Load(); listed != 1 {
		t.Errorf("%d discoveries within a minute", listed)
	}
	status = observeAt(time.Minute, status)
	if got := condition(status, clusterv1alpha1.ClusterConditionCompleteAPIEnablements); got != "False/Partial these APIs do not answer: metrics/v1 @ 1m0s" {
		t.Errorf("CompleteAPIEnablements is %q", got)
	}
	if diff := cmp.Diff(first.APIEnablements, status.APIEnablements); diff != "" {
		t.Errorf("an API that does not answer was removed: first -, now +\n%s", diff)
	}
	old.isMetricsDown.Store(false)
	status = observeAt(2*time.Minute, status)
	if got := condition(status, clusterv1alpha1.ClusterConditionCompleteAPIEnablements); got != "True/Complete all APIs are known @ 2m0s" {
		t.Errorf("CompleteAPIEnablements is %q", got)
	}
	old.isUnhealthy.Store(true)
	status = observeAt(130*time.Second, status)
	wantReady(t, status, "True/ClusterReady cluster is healthy @ 0s")
	status = observeAt(160*time.Second, status)
	wantReady(t, status, "False/ClusterNotReady cluster is reachable, and not ready: /healthz answers 500 Internal Server Error @ 2m40s")
	old.stop()
	status = observeAt(170*time.Second, status)
	want := "False/ClusterNotReachable cluster is not reachable: dial tcp " + strings.TrimPrefix(old.URL, "http://") + ": connect: connection refused @ 2m40s"
	wantReady(t, status, want)
	if diff := cmp.Diff(first.ResourceSummary, status.ResourceSummary); diff != "" || status.KubernetesVersion == "" {
		t.Errorf("what was known is lost: first -, now +\n%s", diff)
	}
}
