package executionnamespaces_test

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// repeatChange calls change 100 times within at least 5 s, and expects 2 to 50 requests of the controller.
func repeatChange(t *testing.T, requests *atomic.Int32, change func(i int) error) {
	t.Helper()
	const changes = 100
	before := requests.Load()
	for i := range changes {
		if err := change(i); err != nil {
			t.Fatal(err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	if made := requests.Load() - before; made < 2 || made > changes/2 {
		t.Errorf("%d changes caused %d requests", changes, made)
	}
}

// An agent continuously changes all fields that it may write: the status of its Cluster, the finalizers of its Works,
// and its Lease.
func TestChangesOfAnAgentAreLimited(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	// The removal must wait for the agent during the whole test, so this shard uses a real clock.
	const shard = "flips"
	if err := w.startController(shard, clock.RealClock{}); err != nil {
		t.Fatal(err)
	}
	c := &clusterv1alpha1.Cluster{ObjectMeta: named("flips"), Spec: clusterv1alpha1.ClusterSpec{ID: "flips", SyncMode: clusterv1alpha1.Pull}}
	c.Annotations = map[string]string{libv1beta1.ShardAnnotation: shard}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(t, c.Name)
	const space = "karmada-es-flips"
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: c.Name}}
	eventually(t, "the agent has its Lease", func() bool { return w.exists(t, w.hubClient, lease) })
	w.renewLease(t, c.Name)
	work := w.createWork(t, c.Name)
	patch := func(obj client.Object, text string) error {
		return w.hubClient.Patch(t.Context(), obj, client.RawPatch(types.MergePatchType, []byte(text)))
	}

	repeatChange(t, w.requestCounter(http.MethodGet, "/api/v1/namespaces/karmada-cluster/configmaps/cluster-id-flips"), func(i int) error {
		w.setReady(t, c.Name, []metav1.ConditionStatus{metav1.ConditionFalse, metav1.ConditionTrue}[i%2])
		return nil
	})

	works := "/apis/" + workv1alpha1.GroupVersion.String() + "/namespaces/" + space + "/works"
	repeatChange(t, w.requestCounter(http.MethodPatch, works+"/"+work.Name), func(int) error {
		return patch(work.DeepCopy(), `{"metadata":{"finalizers":null}}`)
	})
	eventually(t, "the Work has its finalizer", func() bool {
		return w.exists(t, w.hubClient, work) && controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer)
	})

	if err := w.hubClient.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	repeatChange(t, w.requestCounter(http.MethodGet, works), func(i int) error {
		return patch(lease, fmt.Sprintf(`{"metadata":{"annotations":{"attack":"%d"}},"spec":{"renewTime":%q}}`, i, time.Now().UTC().Format(metav1.RFC3339Micro)))
	})
	if _, err := w.withdrawWork(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent is ordered to remove itself", func() bool {
		return w.exists(t, w.hubClient, c) && c.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
	})
	if err := patch(lease, fmt.Sprintf(`{"metadata":{"annotations":{%q:"removed"}}}`, kube.AnnotationAgentRequest)); err != nil {
		t.Fatal(err)
	}
	w.wantDeleted(t, c.Name)
}
