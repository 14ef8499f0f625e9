package clusterstatus_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/clusterstatus"
	"github.com/towline/towline/internal/localkube"
)

const (
	noNodes = `nodes cannot be counted: nodes is forbidden: User "towline" cannot list resource "nodes"`
	noPods  = `pods cannot be counted: pods is forbidden: User "towline" cannot list resource "pods"`
)

// observeUntil observes until the status is as wanted.
func observeUntil(t *testing.T, o *clusterstatus.Observer, status clusterv1alpha1.ClusterStatus, want func(clusterv1alpha1.ClusterStatus) bool) clusterv1alpha1.ClusterStatus {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 40*time.Second, true, func(ctx context.Context) (bool, error) {
		status = o.Observe(ctx, status, nil)
		return want(status), nil
	})
	if err != nil {
		t.Fatalf("%v: Ready is %q, %+v", err, condition(status, clusterv1alpha1.ClusterConditionReady), status.ResourceSummary)
	}
	return status
}

func hasMessage(text string) func(clusterv1alpha1.ClusterStatus) bool {
	return func(status clusterv1alpha1.ClusterStatus) bool {
		return condition(status, clusterv1alpha1.ClusterConditionReady) == "True/ClusterReady cluster is healthy"+text+" @ 0s"
	}
}

func TestNodesAreCountedWithoutPods(t *testing.T) {
	t.Parallel()
	old := newOldCluster(t)
	old.forbidden.Store("pods")
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, &rest.Config{Host: old.URL}, clock)
	status := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	wantReady(t, status, "True/ClusterReady cluster is healthy @ 0s")
	if diff := cmp.Diff(status.NodeSummary, &clusterv1alpha1.NodeSummary{TotalNum: 1}); diff != "" {
		t.Errorf("node summary: got -, want +\n%s", diff)
	}
	clock.SetTime(noon.Add(time.Minute))
	status = o.Observe(t.Context(), status, nil)
	wantReady(t, status, "True/ClusterReady cluster is healthy; "+noPods+" @ 0s")
	if status.ResourceSummary == nil || status.ResourceSummary.Allocated != nil || status.ResourceSummary.AllocatableModelings != nil {
		t.Errorf("resource summary is %+v, want only the counters of nodes", status.ResourceSummary)
	}
	if diff := cmp.Diff(status, o.Observe(t.Context(), status, nil)); diff != "" {
		t.Errorf("the next observation differs: -, +\n%s", diff)
	}
}

func TestStaleCountersAreRemoved(t *testing.T) {
	t.Parallel()
	for forbidden, c := range map[string]struct {
		says  string
		nodes *clusterv1alpha1.NodeSummary
		pods  bool
	}{
		"pods":  {"; " + noPods, &clusterv1alpha1.NodeSummary{TotalNum: 1}, false},
		"nodes": {"; " + noNodes, nil, true},
		"all":   {"; " + noNodes + "; " + noPods, nil, false},
	} {
		t.Run(forbidden, func(t *testing.T) {
			t.Parallel()
			old := newOldCluster(t)
			clock := clocktesting.NewFakePassiveClock(noon)
			o := observe(t, &rest.Config{Host: old.URL}, clock)
			first := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
			old.forbidden.Store(forbidden)
			old.CloseClientConnections()
			looks := 0
			status := observeUntil(t, o, first, func(status clusterv1alpha1.ClusterStatus) bool {
				looks++
				clock.SetTime(noon.Add(time.Duration(looks) * time.Second))
				return hasMessage(c.says)(status)
			})
			// The last known counters stay for a minute.
			if looks <= 60 {
				t.Errorf("the message appears after %d seconds", looks)
			}
			if diff := cmp.Diff(status.NodeSummary, c.nodes); diff != "" {
				t.Errorf("node summary: got -, want +\n%s", diff)
			}
			switch sums := status.ResourceSummary; {
			case forbidden == "all" && sums != nil, forbidden != "all" && sums == nil:
				t.Errorf("resource summary is %+v", sums)
			case sums != nil && ((ptr.To(sums.Allocated[corev1.ResourcePods]).Value() == 600) != c.pods || sums.AllocatableModelings != nil):
				t.Errorf("resource summary is %+v, with pods: %t", sums, c.pods)
			}
			old.forbidden.Store("")
			status = observeUntil(t, o, status, hasMessage(""))
			if diff := cmp.Diff(first, status); diff != "" {
				t.Errorf("after the rights are granted again: before -, now +\n%s", diff)
			}
		})
	}
}

func TestOutageIsNotTakenForMissingRights(t *testing.T) {
	t.Parallel()
	old := newOldCluster(t)
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, &rest.Config{Host: old.URL}, clock)
	first := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	old.forbidden.Store("all")
	old.isUnhealthy.Store(true)
	old.CloseClientConnections()
	status := observeUntil(t, o, first, func(status clusterv1alpha1.ClusterStatus) bool {
		clock.SetTime(clock.Now().Add(time.Second))
		return strings.HasPrefix(condition(status, clusterv1alpha1.ClusterConditionReady), "False/") && clock.Now().After(noon.Add(5*time.Minute))
	})
	old.isUnhealthy.Store(false)
	status = o.Observe(t.Context(), status, nil)
	if diff := cmp.Diff(first.ResourceSummary, status.ResourceSummary); diff != "" {
		t.Errorf("what was known is lost: before -, now +\n%s", diff)
	}
}

// TestRightsOfAServiceAccountDecide uses a real API server, whose messages for a denied list and a denied watch differ.
func TestRightsOfAServiceAccountDecide(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	rbac := kubernetes.NewForConfigOrDie(plane.Config).RbacV1()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "nodes-only"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"list", "watch"}}, {NonResourceURLs: []string{"*"}, Verbs: []string{"get"}},
	}}
	if _, err := rbac.ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "nodes-only"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "nodes-only"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "limited"}},
	}
	if _, err := rbac.ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config := rest.CopyConfig(plane.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "limited"}
	clock := clocktesting.NewFakePassiveClock(noon)
	o := observe(t, config, clock)
	status := o.Observe(t.Context(), clusterv1alpha1.ClusterStatus{}, nil)
	clock.SetTime(noon.Add(time.Minute))
	status = observeUntil(t, o, status, hasMessage(`; pods cannot be counted: pods is forbidden: User "limited" cannot list resource "pods" in API group "" at the cluster scope`))
	if status.NodeSummary == nil || status.NodeSummary.TotalNum != 1 {
		t.Errorf("node summary is %+v", status.NodeSummary)
	}
	wantSums(t, status.ResourceSummary.Allocatable, map[corev1.ResourceName]string{"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "10k"})
}
