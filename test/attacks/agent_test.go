package attacks

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// TestAgentDrivesTheHub: an agent changes its status all the time, so that the hub renders its content all the time. It
// also writes large values, which fill the memory of the hub.
func TestAgentDrivesTheHub(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	cluster := w.pullCluster(tenant, "edge")
	w.must(tenant.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content", Annotations: map[string]string{libv1beta1.TemplateAnnotation: "ok"}},
		Data: map[string]string{"a": `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "default"},
			"data": {"cluster": "{{ .Cluster.status.version }}-{{ get .Cluster.status ` + "`apiVersions`" + ` }}"}}`},
	}))
	w.profile(tenant, "content", func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}}
	})
	groups := &libv1beta1.ConfigurationGroupList{}
	w.eventually("the content is delivered", func() error {
		if err := w.List(t.Context(), groups, client.InNamespace(w.ns)); err != nil || len(groups.Items) == 1 {
			return err
		}
		return fmt.Errorf("%d groups", len(groups.Items))
	})
	agent := w.agentOf(fleet.FromSveltosCluster(cluster))

	written := w.countWrites()
	group := &groups.Items[0]
	const reports = 150
	for i := range reports {
		before := group.DeepCopy()
		group.Status = libv1beta1.ConfigurationGroupStatus{
			DeploymentStatus: libv1beta1.FeatureStatusFailed, FailureMessage: fmt.Sprintf("attack %d", i),
			ObservedGeneration: group.Generation, ObservedRequestorHash: group.Spec.RequestorHash,
		}
		w.must(agent.Status().Patch(t.Context(), group, client.MergeFrom(before)))
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	last := fmt.Sprintf("attack %d", reports-1)
	w.failure("content", func(message string) bool { return strings.Contains(message, last) })
	// A reconcile writes the status. The attack takes 8 s or more: the burst of 20, and one in each 6 s.
	if n := written.Load(); n > reports/2 {
		t.Errorf("%d reports caused %d reconciles", reports, n)
	}

	generation := func() int64 {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(group), group))
		return group.Generation
	}
	first := generation()
	for i := range reports {
		before := cluster.DeepCopy()
		cluster.Status.Version, cluster.Status.APIVersions = fmt.Sprintf("v1.34.%d", i), []string{fmt.Sprintf("attack%d/v1", i)}
		w.must(agent.Status().Patch(t.Context(), cluster, client.MergeFrom(before)))
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	want := fmt.Sprintf("v1.34.%d-[attack%[1]d/v1]", reports-1)
	w.eventually("the content is rendered with the last version", func() error {
		var rendered strings.Builder
		for _, content := range w.content(w.ns) {
			frame, err := zstd.NewReader(bytes.NewReader(content.Spec.Payload))
			w.must(err)
			_, err = frame.WriteTo(&rendered)
			frame.Close()
			w.must(err)
		}
		return wantText(rendered.String(), want)
	})
	// Each rendering with another version changes the group.
	if n := generation() - first; n < 2 || n > reports/2 {
		t.Errorf("%d changes of the version caused %d renderings", reports, n)
	}

	before := cluster.DeepCopy()
	cluster.Status.Version = strings.Repeat("1", 1<<20)
	if err := agent.Status().Patch(t.Context(), cluster, client.MergeFrom(before)); !apierrors.IsInvalid(err) {
		t.Errorf("a version of a megabyte: %.200v", err)
	}
}

// TestAgentDrivesItsRegistration: an agent changes between Down and Healthy all the time, so that the hub checks the
// objects of its registration all the time. It also changes its status all the time while it is deregistered.
func TestAgentDrivesItsRegistration(t *testing.T) {
	w := newWorld(t)
	cluster := w.pullCluster(w.tenant(), "edge")
	agent := w.agentOf(fleet.FromSveltosCluster(cluster))
	report := func(status string) {
		t.Helper()
		w.must(agent.Status().Patch(t.Context(), cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(status))))
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	role := "/apis/rbac.authorization.k8s.io/v1/namespaces/" + w.ns + "/roles/edge"
	checks := func() int { return hubRequests.count(http.MethodGet, role) }
	first := checks()
	const changes = 150
	for i := range changes {
		connection := []libv1beta1.ConnectionStatus{libv1beta1.ConnectionDown, libv1beta1.ConnectionHealthy}[i%2]
		report(fmt.Sprintf(`{"status":{"ready":%t,"connectionStatus":%q,"failureMessage":"registering: %d"}}`, i%2 == 1, connection, i))
	}
	// The attack takes 8 s or more: the burst of 20, and one in each 6 s.
	if n := checks() - first; n < 2 || n > changes/2 {
		t.Errorf("%d changes caused %d checks of the registration", changes, n)
	}
	w.eventually("the cluster is healthy", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if s := cluster.Status; !s.Ready || s.ConnectionStatus != libv1beta1.ConnectionHealthy || s.FailureMessage != "" {
			return fmt.Errorf("its status is %+v", s)
		}
		return nil
	})

	w.must(w.Delete(t.Context(), cluster))
	reads := func() int {
		return hubRequests.count(http.MethodGet, "/apis/"+libv1beta1.GroupVersion.String()+"/namespaces/"+w.ns+"/sveltosclusters/edge")
	}
	first = reads()
	for i := range changes {
		report(fmt.Sprintf(`{"status":{"failureMessage":"attack %d"}}`, i))
	}
	if n := reads() - first; n < 2 || n > changes/2 {
		t.Errorf("%d changes during the deregistration caused %d reads of the cluster", changes, n)
	}
	report(fmt.Sprintf(`{"status":{"agentRemovedAt":%q}}`, time.Now().UTC().Format(time.RFC3339)))
	w.eventually("the cluster is deregistered", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); !apierrors.IsNotFound(err) {
			return fmt.Errorf("its status is %+v: %w", cluster.Status, err)
		}
		return nil
	})
}

// countWrites counts the changes of the ClusterSummaries in the namespace of the test.
func (w *world) countWrites() *atomic.Int32 {
	w.Helper()
	watching, err := client.NewWithWatch(w.hub.Config, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	events, err := watching.Watch(w.Context(), &configv1beta1.ClusterSummaryList{}, client.InNamespace(w.ns))
	w.must(err)
	w.Cleanup(events.Stop)
	count := &atomic.Int32{}
	go func() {
		for e := range events.ResultChan() {
			if e.Type == watch.Modified {
				count.Add(1)
			}
		}
	}()
	return count
}
