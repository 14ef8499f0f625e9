package sveltosclusters_test

import (
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

func TestDeregisteringMemberThatAnswersIsReady(t *testing.T) {
	t.Parallel()
	for name, pull := range map[string]bool{"push": false, "pull": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: pull})
			// Its checks fail, which has no effect while it is being deregistered.
			w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ReadinessChecks = w.exists("nothing") })
			w.must(w.Create(t.Context(), &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}, Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: start}},
			}))
			w.must(w.Delete(t.Context(), w.cluster))
			w.want(true, healthy, 0, "")
			w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`))))
			w.want(true, healthy, 0, "")
			if pull {
				w.clock.Step(heartbeats.SveltosLimit)
				w.want(true, down, 3, "")
			}
		})
	}
}
