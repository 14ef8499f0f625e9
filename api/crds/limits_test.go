package crds_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// The agent of a member writes these fields: large values must not fill the memory of the hub. Values of honest agents
// are far below the limits.
func TestLimitsOfStatus(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	names := func(n int) any { return slices.Repeat([]any{"apps/v1/Deployment"}, n) }
	sveltos, cluster := libv1beta1.GroupVersion.String(), clusterv1alpha1.GroupVersion.String()
	for name, test := range map[string]struct {
		apiVersion, kind, field string
		spec                    map[string]any
		valid, invalid          any
	}{
		"version":         {sveltos, "SveltosCluster", "version", nil, "v1.34.0", strings.Repeat("1", 257)},
		"apis":            {sveltos, "SveltosCluster", "apiVersions", nil, names(5000), names(20_001)},
		"api":             {sveltos, "SveltosCluster", "apiVersions", nil, []any{"v1"}, []any{strings.Repeat("a", 513)}},
		"message":         {sveltos, "SveltosCluster", "failureMessage", nil, strings.Repeat("a", 8<<10), strings.Repeat("a", 33<<10)},
		"check":           {sveltos, "SveltosCluster", "agentCheckMessage", nil, "no", strings.Repeat("a", 33<<10)},
		"group-message":   {sveltos, "ConfigurationGroup", "failureMessage", nil, strings.Repeat("a", 8<<10), strings.Repeat("a", 33<<10)},
		"group-kinds":     {sveltos, "ConfigurationGroup", "deployedGroupVersionKind", nil, names(1000), names(20_001)},
		"cluster-version": {cluster, "Cluster", "kubernetesVersion", map[string]any{"syncMode": "Pull"}, "v1.34.0", strings.Repeat("1", 257)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			obj := &unstructured.Unstructured{Object: map[string]any{"apiVersion": test.apiVersion, "kind": test.kind}}
			if test.spec != nil {
				obj.Object["spec"] = test.spec
			}
			obj.SetName("limit-" + name)
			stored, err := h.create(t, obj)
			if err != nil {
				t.Fatal(err)
			}
			write := func(value any) error {
				if err := unstructured.SetNestedField(stored.Object, value, "status", test.field); err != nil {
					return err
				}
				written, err := h.resource(t, obj).UpdateStatus(t.Context(), stored, metav1.UpdateOptions{})
				if err == nil {
					stored = written
				}
				return err
			}
			if err := write(test.valid); err != nil {
				t.Errorf("a valid value: %.200v", err)
			}
			if err := write(test.invalid); !apierrors.IsInvalid(err) {
				t.Errorf("a value that is too large: got error %.200v", err)
			}
		})
	}
}

// TestScriptsHaveALimit: a script is stored in the profile, and read by each reconcile.
func TestScriptsHaveALimit(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	for length, isValid := range map[int]bool{262_144: true, 262_145: false} {
		profile := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": configv1beta1.GroupVersion.String(), "kind": "ClusterProfile",
			"spec": map[string]any{"validateHealths": []any{map[string]any{
				"name": "long", "featureID": "Resources", "group": "", "version": "v1", "kind": "Pod", "script": strings.Repeat("a", length),
			}}},
		}}
		profile.SetName(fmt.Sprintf("script-%d", length))
		if _, err := h.create(t, profile); (err == nil) != isValid || err != nil && !apierrors.IsInvalid(err) {
			t.Errorf("a script of %d characters: got error %.200v", length, err)
		}
	}
}
