package clusterstatus

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/ptr"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// observation is a health result, a number of seconds after noon.
type observation struct {
	after   int
	healthy bool
}

func TestThresholdsDelayReady(t *testing.T) {
	t.Parallel()
	limits := thresholds{success: 30 * time.Second, failure: 30 * time.Second}
	const yes, no, unknown = metav1.ConditionTrue, metav1.ConditionFalse, metav1.ConditionUnknown
	for name, c := range map[string]struct {
		old     metav1.ConditionStatus
		results []observation
		want    []metav1.ConditionStatus
	}{
		"nothing known, healthy":       {"", []observation{{0, true}}, []metav1.ConditionStatus{yes}},
		"nothing known, unhealthy":     {"", []observation{{0, false}}, []metav1.ConditionStatus{no}},
		"unknown, healthy":             {unknown, []observation{{0, true}}, []metav1.ConditionStatus{yes}},
		"unknown, unhealthy":           {unknown, []observation{{0, false}}, []metav1.ConditionStatus{no}},
		"first result, healthy":        {no, []observation{{0, true}}, []metav1.ConditionStatus{yes}},
		"first result, unhealthy":      {yes, []observation{{0, false}, {29, false}, {30, false}}, []metav1.ConditionStatus{yes, yes, no}},
		"a failure that passes":        {yes, []observation{{0, true}, {10, false}, {30, false}, {35, true}, {45, false}}, []metav1.ConditionStatus{yes, yes, yes, yes, yes}},
		"a failure that lasts":         {yes, []observation{{0, true}, {10, false}, {20, false}, {39, false}, {40, false}}, []metav1.ConditionStatus{yes, yes, yes, yes, no}},
		"a success that passes":        {no, []observation{{0, false}, {10, true}, {35, true}, {36, false}, {45, true}}, []metav1.ConditionStatus{no, no, no, no, no}},
		"a success that lasts":         {no, []observation{{0, false}, {10, true}, {39, true}, {40, true}}, []metav1.ConditionStatus{no, no, no, yes}},
		"two failures far apart, once": {yes, []observation{{0, true}, {100, false}, {110, true}, {200, false}}, []metav1.ConditionStatus{yes, yes, yes, yes}},
	} {
		var old *metav1.Condition
		if c.old != "" {
			old = &metav1.Condition{Status: c.old}
		}
		var run streak
		var got []metav1.ConditionStatus
		for _, result := range c.results {
			at := noon.Add(time.Duration(result.after) * time.Second)
			found := metav1.Condition{Status: map[bool]metav1.ConditionStatus{true: yes, false: no}[result.healthy]}
			run = run.extend(result.healthy, at)
			condition := applyThresholds(old, found, run, at, limits)
			got, old = append(got, condition.Status), &condition
		}
		if diff := cmp.Diff(got, c.want); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
	}
}

func TestReadyCondition(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code int
		body string
		err  error
		want string
	}{
		"healthy":   {200, "ok", nil, "True/ClusterReady: cluster is healthy"},
		"unhealthy": {500, "", nil, "False/ClusterNotReady: cluster is reachable, and not ready: /readyz answers 500 Internal Server Error"},
		"failing":   {500, "[+]ping ok\n[-]etcd failed: reason withheld\n[-]poststarthook/x failed: reason withheld\nreadyz check failed\n", nil, "False/ClusterNotReady: cluster is reachable, and not ready: /readyz answers 500 Internal Server Error, failing: etcd, poststarthook/x"},
		"moved":     {302, "", nil, "False/ClusterNotReady: cluster is reachable, and not ready: /readyz answers 302 Found"},
		"unknown":   {599, "", nil, "False/ClusterNotReady: cluster is reachable, and not ready: /readyz answers 599"},
		"denied":    {401, "", nil, "False/ClusterNotReady: cluster is reachable, but denies the health request: /readyz answers 401 Unauthorized"},
		"no reply":  {0, "", errors.New("connection refused"), "False/ClusterNotReachable: cluster is not reachable: connection refused"},
	} {
		got := readyCondition("readyz", c.code, c.body, c.err)
		if text := fmt.Sprintf("%s/%s: %s", got.Status, got.Reason, got.Message); text != c.want {
			t.Errorf("%s: got %q, want %q", name, text, c.want)
		}
	}
}

func TestStableMessage(t *testing.T) {
	t.Parallel()
	expired := x509.CertificateInvalidError{Cert: &x509.Certificate{NotBefore: noon, NotAfter: noon.Add(time.Hour)}, Reason: x509.Expired, Detail: "current time is another one each time"}
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"slow":    {&url.Error{Op: "Get", URL: "https://x/readyz", Err: context.DeadlineExceeded}, "it does not answer within 5s"},
		"reset":   {&url.Error{Op: "Get", URL: "https://x/readyz", Err: errors.New("read tcp 10.0.0.9:51312->10.0.0.1:443: connection reset by peer")}, "read tcp 10.0.0.1:443: connection reset by peer"},
		"reset 6": {errors.New("read tcp [::1]:51312->[::1]:443: connection reset by peer"), "read tcp [::1]:443: connection reset by peer"},
		"unknown": {&url.Error{Err: &net.DNSError{Err: "no such host", Name: "x", Server: "10.0.0.2:53"}}, "lookup x: no such host"},
		"expired": {fmt.Errorf("tls: %w", expired), "its certificate is valid from 2026-01-02T12:00:00Z to 2026-01-02T13:00:00Z only"},
	} {
		if got := StableMessage(c.err); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestUnavailableAPIsAreKept(t *testing.T) {
	t.Parallel()
	api := func(names ...string) []clusterv1alpha1.APIEnablement {
		var all []clusterv1alpha1.APIEnablement
		for _, name := range names {
			all = append(all, clusterv1alpha1.APIEnablement{GroupVersion: name})
		}
		return all
	}
	partial := &discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{
		{Group: "metrics", Version: "v1"}: errors.New("stale"), {Group: "custom", Version: "v2"}: errors.New("stale"),
	}}
	for name, c := range map[string]struct {
		old, away, found []clusterv1alpha1.APIEnablement
		want, wantAway   []clusterv1alpha1.APIEnablement
		err              error
		condition        string
	}{
		"all": {
			old: api("a/v1", "gone/v1"), away: api("gone/v1"), found: api("a/v1", "b/v1"), want: api("a/v1", "b/v1"),
			condition: "True/Complete: all APIs are known",
		},
		"some": {
			old: api("a/v1", "gone/v1", "metrics/v1"), found: api("a/v1", "new/v1"),
			want: api("a/v1", "metrics/v1", "new/v1"), wantAway: api("metrics/v1"),
			err: partial, condition: "False/Partial: these APIs do not answer: custom/v2, metrics/v1",
		},
		"some, and the status was lost": {
			away: api("metrics/v1"), found: api("a/v1"), want: api("a/v1", "metrics/v1"), wantAway: api("metrics/v1"),
			err: partial, condition: "False/Partial: these APIs do not answer: custom/v2, metrics/v1",
		},
		"some, for long": {
			old: api("a/v1", "metrics/v1"), away: api("metrics/v1"), found: api("a/v1"), want: api("a/v1", "metrics/v1"), wantAway: api("metrics/v1"),
			err: partial, condition: "False/Partial: these APIs do not answer: custom/v2, metrics/v1",
		},
		"some first": {
			found: api("a/v1"), want: api("a/v1"), err: partial, condition: "False/Partial: these APIs do not answer: custom/v2, metrics/v1",
		},
		"none": {
			old: api("a/v1"), away: api("metrics/v1"), want: api("a/v1"), wantAway: api("metrics/v1"),
			err: errors.New("no"), condition: "False/Empty: the APIs cannot be listed: no",
		},
		"no list": {old: api("a/v1"), want: api("a/v1"), condition: "False/Empty: the cluster lists no API"},
	} {
		merged, away := mergeAPIs(c.old, c.away, discoveryResult{c.found, c.err})
		if diff := cmp.Diff(merged, c.want); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
		if diff := cmp.Diff(away, c.wantAway); diff != "" {
			t.Errorf("%s: those that do not answer: got -, want +\n%s", name, diff)
		}
		got := completenessCondition(c.found, c.err)
		if text := fmt.Sprintf("%s/%s: %s", got.Status, got.Reason, got.Message); text != c.condition {
			t.Errorf("%s: got %q, want %q", name, text, c.condition)
		}
	}
}

func TestAPIsAreSortedAndWithoutSubresources(t *testing.T) {
	t.Parallel()
	got := toAPIEnablements([]*metav1.APIResourceList{
		{GroupVersion: "b/v1", APIResources: []metav1.APIResource{{Name: "y", Kind: "Y"}, {Name: "x/status", Kind: "X"}, {Name: "x", Kind: "X"}}},
		{GroupVersion: "a/v1"},
	})
	want := []clusterv1alpha1.APIEnablement{{GroupVersion: "a/v1"}, {GroupVersion: "b/v1", Resources: []clusterv1alpha1.APIResource{{Name: "x", Kind: "X"}, {Name: "y", Kind: "Y"}}}}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("got -, want +\n%s", diff)
	}
}

// TestCheckFitsStatus has as many APIs as the status of a Cluster can have, and one more.
func TestCheckFitsStatus(t *testing.T) {
	t.Parallel()
	versions := func(n int) []clusterv1alpha1.APIEnablement { return make([]clusterv1alpha1.APIEnablement, n) }
	// A resource has 23 bytes of JSON besides its name.
	resources := func(n, length int) []clusterv1alpha1.APIEnablement {
		one := clusterv1alpha1.APIResource{Name: strings.Repeat("x", length), Kind: "K"}
		return []clusterv1alpha1.APIEnablement{{Resources: slices.Repeat([]clusterv1alpha1.APIResource{one}, n)}}
	}
	for name, test := range map[string]struct {
		apis []clusterv1alpha1.APIEnablement
		want string
	}{
		"versions":           {versions(5000), ""},
		"too many versions":  {versions(5001), "the cluster serves more than 5000 API versions"},
		"resources":          {resources(5000, 1), ""},
		"too many resources": {resources(5001, 1), "the cluster serves more than 5000 resources in "},
		"text":               {resources(4000, 230), ""},
		"too much text":      {resources(4000, 240), "the cluster serves APIs of more than 1 MiB"},
	} {
		got := ""
		if err := checkFitsStatus(test.apis); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

func requests(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

func container(pairs ...string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: requests(pairs...)}}
}

func TestPodsAskForTheMostThatTheyNeedAtOnce(t *testing.T) {
	t.Parallel()
	helper := container("cpu", "100m")
	helper.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	for name, c := range map[string]struct {
		spec corev1.PodSpec
		want corev1.ResourceList
	}{
		"nothing":    {corev1.PodSpec{Containers: []corev1.Container{{}}}, requests()},
		"containers": {corev1.PodSpec{Containers: []corev1.Container{container("cpu", "1", "memory", "1Gi"), container("cpu", "500m", "ephemeral-storage", "2Gi")}}, requests("cpu", "1500m", "memory", "1Gi", "ephemeral-storage", "2Gi")},
		"init containers": {
			corev1.PodSpec{InitContainers: []corev1.Container{container("cpu", "3"), container("memory", "1Gi")}, Containers: []corev1.Container{container("cpu", "1", "memory", "2Gi")}},
			requests("cpu", "3", "memory", "2Gi"),
		},
		"sidecars": {
			corev1.PodSpec{InitContainers: []corev1.Container{container("cpu", "1"), helper, container("cpu", "1")}, Containers: []corev1.Container{container("cpu", "1")}},
			requests("cpu", "1100m"),
		},
		"overhead": {corev1.PodSpec{Overhead: requests("memory", "10Mi"), Containers: []corev1.Container{container("cpu", "1")}}, requests("cpu", "1", "memory", "10Mi")},
		"others":   {corev1.PodSpec{Containers: []corev1.Container{container("example.com/gpu", "1"), container("example.com/gpu", "2", "hugepages-2Mi", "4Mi")}}, requests("example.com/gpu", "3", "hugepages-2Mi", "4Mi")},
		"pod-level requests": {
			corev1.PodSpec{Resources: &corev1.ResourceRequirements{Requests: requests("cpu", "4")}, Containers: []corev1.Container{container("cpu", "1", "memory", "1Gi")}},
			requests("cpu", "4", "memory", "1Gi"),
		},
	} {
		if diff := cmp.Diff(podRequests(&c.spec).toResourceList(0), c.want); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
	}
}

func testPod(uid, node string, phase corev1.PodPhase, pairs ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid), Name: uid}, Status: corev1.PodStatus{Phase: phase},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{container(pairs...)}},
	}
}

func testNode(name string, ready corev1.ConditionStatus, pairs ...string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: types.UID(name), Name: name}, Status: corev1.NodeStatus{
		Allocatable: requests(pairs...), Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}},
	}}
}

func TestSumsFollowNodesAndPods(t *testing.T) {
	t.Parallel()
	sums := newCounters()
	nodes, pods := sums.newStores(nil)
	do := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	want := func(nodes string, allocatable, allocated, allocating corev1.ResourceList, grades string) {
		t.Helper()
		status := clusterv1alpha1.ClusterStatus{}
		if reasons := sums.writeSummaries(&status, nil, noon); reasons != nil || status.NodeSummary == nil || status.ResourceSummary == nil {
			t.Fatalf("%+v, %q", status, reasons)
		}
		counted, resources := status.NodeSummary, status.ResourceSummary
		got := ""
		for _, modeling := range resources.AllocatableModelings {
			got += fmt.Sprint(modeling.Count)
		}
		if text := fmt.Sprintf("%d of %d", counted.ReadyNum, counted.TotalNum); text != nodes || got != grades {
			t.Errorf("%s nodes are ready, grades %s, want %s, %s", text, got, nodes, grades)
		}
		if diff := cmp.Diff([]corev1.ResourceList{resources.Allocatable, resources.Allocated, resources.Allocating}, []corev1.ResourceList{allocatable, allocated, allocating}); diff != "" {
			t.Errorf("got -, want +\n%s", diff)
		}
	}
	known := clusterv1alpha1.ClusterStatus{NodeSummary: &clusterv1alpha1.NodeSummary{TotalNum: 9}, ResourceSummary: &clusterv1alpha1.ResourceSummary{}}
	before := *known.DeepCopy()
	if reasons := sums.writeSummaries(&known, nil, noon); reasons != nil || cmp.Diff(before, known) != "" {
		t.Errorf("before the first list, the known status becomes %+v: %q", known, reasons)
	}
	gpus := []string{"cpu", "8", "memory", "32Gi", "pods", "10", "example.com/gpu", "2", "hugepages-1Gi", "0"}
	do(nodes.Replace([]any{testNode("n1", "True", gpus...), testNode("n2", "Unknown", "cpu", "2", "memory", "4Gi", "pods", "1")}, "1"))
	do(pods.Replace([]any{
		testPod("a", "n1", corev1.PodRunning, "cpu", "1", "example.com/gpu", "1"), testPod("b", "", corev1.PodPending, "memory", "1Gi"), testPod("c", "n1", corev1.PodSucceeded, "cpu", "9"),
	}, "1"))
	offered := requests("cpu", "10", "memory", "36Gi", "pods", "11", "example.com/gpu", "2")
	// n1 has 7 CPUs (grade 3) and 32 GiB (grade 3) left, n2 has 2 CPUs (grade 2) and 4 GiB (grade 1).
	want("1 of 2", offered, requests("cpu", "1", "example.com/gpu", "1", "pods", "1"), requests("memory", "1Gi", "pods", "1"), "010100000")
	// b gets a node, which has no room for another pod then.
	do(pods.Update(testPod("b", "n2", corev1.PodRunning, "memory", "1Gi")), pods.Add(testPod("d", "", corev1.PodPending)))
	want("1 of 2", offered, requests("cpu", "1", "memory", "1Gi", "example.com/gpu", "1", "pods", "2"), requests("pods", "1"), "000100000")
	do(pods.Update(testPod("b", "n2", corev1.PodFailed, "memory", "1Gi")), pods.Delete(testPod("a", "n1", corev1.PodRunning)), pods.Delete(testPod("d", "", "")))
	do(nodes.Update(testNode("n2", "True", "cpu", "2", "memory", "4Gi", "pods", "1")))
	want("2 of 2", offered, requests(), requests(), "010100000")
	do(nodes.Delete(testNode("n1", "True")), pods.Replace(nil, "2"))
	want("1 of 1", requests("cpu", "2", "memory", "4Gi", "pods", "1"), requests(), requests(), "010000000")
	if len(sums.pods) != 0 || len(sums.loadByNode) != 0 {
		t.Errorf("%d pods and %d nodes with pods are left", len(sums.pods), len(sums.loadByNode))
	}
}

func TestNodesAreGradedByTheScarcestResource(t *testing.T) {
	t.Parallel()
	within := func(name corev1.ResourceName, low, high string) clusterv1alpha1.ResourceModelRange {
		return clusterv1alpha1.ResourceModelRange{Name: name, Min: resource.MustParse(low), Max: resource.MustParse(high)}
	}
	own := []clusterv1alpha1.ResourceModel{
		{Grade: 2, Ranges: []clusterv1alpha1.ResourceModelRange{within("cpu", "10", "100"), within("example.com/gpu", "4", "8")}},
		{Grade: 1, Ranges: []clusterv1alpha1.ResourceModelRange{within("cpu", "1", "10"), within("example.com/gpu", "1", "4")}},
	}
	for name, c := range map[string]struct {
		models []clusterv1alpha1.ResourceModel
		offer  corev1.ResourceList
		want   int
	}{
		"empty":           {nil, requests(), 0},
		"below the first": {nil, requests("cpu", "999m", "memory", "1Ti"), 0},
		"on the border":   {nil, requests("cpu", "1", "memory", "4Gi"), 1},
		"the scarcest":    {nil, requests("cpu", "128", "memory", "15Gi"), 1},
		"the largest":     {nil, requests("cpu", "128", "memory", "1Ti"), 8},
		"own":             {own, requests("cpu", "10", "example.com/gpu", "4"), 1},
		"own, scarcest":   {own, requests("cpu", "10", "example.com/gpu", "1"), 0},
		"own, none":       {own, requests("cpu", "10"), -1},
		"overcommitted":   {nil, requests("cpu", "-1", "memory", "1Gi"), -1},
	} {
		if got := sortGrades(c.models).indexOf(toAmounts(c.offer)); got != c.want {
			t.Errorf("%s: grade at %d, want %d", name, got, c.want)
		}
	}
}

func TestWatchIsLostAfterAMinute(t *testing.T) {
	t.Parallel()
	f := &watchState{hasSynced: true}
	want := func(after time.Duration, why string) {
		t.Helper()
		if got, pending := f.evaluate(noon.Add(after)); got != why || pending {
			t.Errorf("after %s: %q, pending %t, want %q", after, got, pending, why)
		}
	}
	want(0, "")
	f.setFailed(verbWatch, errors.New("no watch"), noon)
	f.setFailed(verbList, errors.New("no list"), noon.Add(30*time.Second))
	f.setFailed(verbWatch, errors.New("no watch"), noon.Add(50*time.Second))
	want(59*time.Second, "")
	want(time.Minute, "no list")
	f.setWatching()
	want(time.Hour, "")
	f.setFailed(verbWatch, errors.New("no watch"), noon.Add(time.Hour))
	want(time.Hour+59*time.Second, "")
	want(time.Hour+time.Minute, "no watch")
	if _, pending := (&watchState{}).evaluate(noon); !pending {
		t.Error("a kind that was never listed is not pending")
	}
}
