package summaries

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// TestChangeRaisesTheSummariesOfItsProfile restarts a hub whose queue has unchanged summaries before those of a profile
// whose content was changed while no hub ran.
func TestChangeRaisesTheSummariesOfItsProfile(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		isChanged bool
		want      []string
	}{
		"changed":   {true, []string{"web-two", "other-one", "other-two"}},
		"unchanged": {false, []string{"other-one", "other-two", "web-two"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRestarts(t)
			isController := true
			for _, summary := range []struct{ name, profile string }{{"web-two", "p"}, {"other-one", "q"}, {"other-two", "q"}} {
				r.must(r.hub.Create(t.Context(), &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{
					Namespace: "fleet", Name: summary.name,
					OwnerReferences: []metav1.OwnerReference{{
						APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, UID: types.UID(summary.profile), Controller: &isController,
					}},
				}}))
			}
			for _, waiting := range []string{"other-one", "other-two", "web-two"} {
				request := reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "fleet", Name: waiting}}
				r.queue.AddWithOpts(priorityqueue.AddOpts{Priority: ptr.To(handler.LowPriority)}, request)
			}
			if test.isChanged {
				c := content("content", "")
				r.update(c, func() { c.Data = content("content", "2").Data })
			}
			r.reconcile()
			for _, want := range test.want {
				if got, priority, _ := r.queue.GetWithPriority(); got.Name != want {
					t.Errorf("got %s with priority %d, want %s", got.Name, priority, want)
				}
			}
		})
	}
}
