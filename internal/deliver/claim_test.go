package deliver

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// wantNoContent checks that a namespace has no groups and no bundles.
func (h *hub) wantNoContent(namespace string) {
	h.t.Helper()
	groups, bundles := &libv1beta1.ConfigurationGroupList{}, &libv1beta1.ConfigurationBundleList{}
	for _, list := range []client.ObjectList{groups, bundles} {
		if err := h.admin.List(h.t.Context(), list, client.InNamespace(namespace)); err != nil {
			h.t.Fatal(err)
		}
	}
	if len(groups.Items)+len(bundles.Items) > 0 {
		h.t.Errorf("in the namespace of another cluster: %d groups and %d bundles", len(groups.Items), len(bundles.Items))
	}
}

func TestDeliveryNeedsClaimOfNamespace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		other string // the claim on the namespace of the second cluster
		lost  bool   // the namespace of the first cluster has lost its claim
	}{
		"another cluster has the namespace": {other: "mine"},
		"only the other claim":              {other: "mine", lost: true},
		"no claim":                          {lost: true},
		"the claim of a third cluster":      {other: "elsewhere/two", lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := sharedHub(t)
			first := h.createMember("one")
			// The cluster has lost the annotation that names its delivery namespace.
			second := fleet.Member{
				Type: fleet.TypeSveltos, Namespace: first.Namespace, Name: "two", Mode: fleet.Pull, DeliveryNamespace: first.Namespace,
			}
			derived := fleet.DerivedNamespace(second.Namespace, second.Name)
			h.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: derived}})
			misplaced := test.other == "mine"
			if misplaced {
				test.other = second.Key()
			}
			h.claim(derived, test.other)
			if test.lost {
				h.claim(first.Namespace, "")
			}
			b := testBundle(objects("a", "1"))
			if report, err := h.pull.Deliver(t.Context(), second, b); err == nil || report.State != bundle.StatePending {
				t.Errorf("deliver: got %s, %v; want an error", report.State, err)
			}
			h.wantNoContent(first.Namespace)
			if !misplaced {
				return
			}
			if _, _, err := h.pull.FindDeployed(t.Context(), second, b.ID); err == nil {
				t.Error("find deployed: got no error")
			}
			if _, err := h.pull.ListDeployed(t.Context(), second); err == nil {
				t.Error("list deployed: got no error")
			}
			if done, err := h.pull.Withdraw(t.Context(), second, bundle.Withdrawal{ID: b.ID}); done || err == nil {
				t.Errorf("withdraw: got %t, %v; want an error", done, err)
			}
			h.wantNoContent(first.Namespace)
			second.DeliveryNamespace = derived
			if _, err := h.pull.Deliver(t.Context(), second, b); err != nil {
				t.Errorf("deliver with the restored annotation: %v", err)
			}
		})
	}
}
