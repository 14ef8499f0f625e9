package works_test

import (
	"context"
	"errors"
	"net/url"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/works"
)

// TestLastStatusStays executes a Work of a cluster that does not respond: the objects keep the status that was read
// last, since consumers add up the numbers in it, and their health is unknown.
func TestLastStatusStays(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]works.ClusterState{"known as unreachable": {}, "connection lost": reachable} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{
				Namespace: "karmada-es-one", Name: "web", Finalizers: []string{workv1alpha1.ExecutionFinalizer},
			}}
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{{RawExtension: runtime.RawExtension{
				Raw: []byte(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","namespace":"default"}}`),
			}}}
			work.Status.ManifestStatuses = []workv1alpha1.ManifestStatus{{
				Identifier: workv1alpha1.ResourceIdentifier{
					Group: "apps", Version: "v1", Kind: "Deployment", Resource: "deployments", Namespace: "default", Name: "web",
				},
				Status: &runtime.RawExtension{Raw: []byte(`{"readyReplicas":3}`)}, Health: workv1alpha1.ResourceHealthy,
			}}
			hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithStatusSubresource(work).WithObjects(work).Build()
			if err := hub.Get(t.Context(), client.ObjectKeyFromObject(work), work); err != nil {
				t.Fatal(err)
			}
			want := work.Status.DeepCopy().ManifestStatuses
			want[0].Health = workv1alpha1.ResourceUnknown
			executor := &works.Executor{Hub: hub, Engine: lostConnection{}, Clock: clock.RealClock{}}
			if err := executor.Execute(t.Context(), work, state); (err != nil) != state.Reachable {
				t.Errorf("got error %v", err)
			}
			if err := hub.Get(t.Context(), client.ObjectKeyFromObject(work), work); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(work.Status.ManifestStatuses, want); diff != "" {
				t.Errorf("statuses (-got +want):\n%s", diff)
			}
		})
	}
}

// lostConnection is an engine of a cluster to which all connections fail.
type lostConnection struct{ works.Engine }

func (lostConnection) Converge(context.Context, bundle.Bundle) (bundle.Report, error) {
	return bundle.Report{}, &url.Error{Op: "Get", URL: "https://one.example.com", Err: errors.New("connection refused")}
}
