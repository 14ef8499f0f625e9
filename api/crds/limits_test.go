package crds_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
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
	// allocated is a resourceSummary with n resources, with a suffix of each name and with a quantity.
	allocated := func(n int, suffix string, quantity any) any {
		resources := map[string]any{"cpu": "100m", "memory": int64(1 << 40)}
		for i := range n {
			resources[fmt.Sprint("example.com/device-", i, suffix)] = quantity
		}
		return map[string]any{"allocatable": resources, "allocating": resources, "allocated": resources}
	}
	pull := map[string]any{"syncMode": "Pull"}
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
		"cluster-version": {cluster, "Cluster", "kubernetesVersion", pull, "v1.34.0", strings.Repeat("1", 257)},
		"resources":       {cluster, "Cluster", "resourceSummary", pull, allocated(500, "", "12345678901234567890Ki"), allocated(1000, "", "1")},
		"resource-name":   {cluster, "Cluster", "resourceSummary", pull, allocated(1, strings.Repeat("a", 317), int64(1)), allocated(1, strings.Repeat("a", 600), "1")},
		"quantity":        {cluster, "Cluster", "resourceSummary", pull, allocated(1, "", "1.5e3"), allocated(1, "", strings.Repeat("1", 129))},
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

// TestLimitOfZones: the agent of a Cluster also writes its zones.
func TestLimitOfZones(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	for number, isValid := range map[int]bool{500: true, 1001: false} {
		cluster := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": clusterv1alpha1.GroupVersion.String(), "kind": "Cluster",
			"spec": map[string]any{"syncMode": "Pull", "zones": slices.Repeat([]any{"eu-1"}, number)},
		}}
		cluster.SetName(fmt.Sprint("zones-", number))
		if _, err := h.create(t, cluster); (err == nil) != isValid || err != nil && !apierrors.IsInvalid(err) {
			t.Errorf("a cluster with %d zones: got error %.200v", number, err)
		}
	}
}

// TestFieldsOfAgentsHaveLimits walks through the schemas of all fields that agents write.
func TestFieldsOfAgentsHaveLimits(t *testing.T) {
	t.Parallel()
	written := map[string][]string{
		"SveltosCluster": {"status"}, "ConfigurationGroup": {"status"}, "Work": {"status"},
		"Cluster": {"status", "spec.apiEndpoint", "spec.proxyURL", "spec.provider", "spec.region", "spec.zones"},
	}
	for _, d := range definitions(t) {
		for _, path := range written[d.typed.Spec.Names.Kind] {
			schema := *d.typed.Spec.Versions[0].Schema.OpenAPIV3Schema
			for name := range strings.SplitSeq(path, ".") {
				schema = schema.Properties[name]
			}
			if schema.Type == "" {
				t.Errorf("%s has no field %s", d.file, path)
			}
			for _, field := range withoutLimit(path, schema) {
				t.Errorf("%s: %s has no maximum size", d.file, field)
			}
		}
		delete(written, d.typed.Spec.Names.Kind)
	}
	if len(written) > 0 {
		t.Errorf("there are no definitions of %v", written)
	}
}

// withoutLimit returns the fields of a schema whose values can have any size. A map needs a rule for its keys, which
// also limits quantities.
func withoutLimit(path string, s apiextensionsv1.JSONSchemaProps) []string {
	var fields []string
	isUnlimited := false
	switch {
	case path == "status.manifestStatuses[].status":
		// The status of an object of any kind. The hub drops what is too large: see internal/hub/cache.go.
	case s.XPreserveUnknownFields != nil:
		isUnlimited = true
	case s.Type == "string":
		isUnlimited = s.MaxLength == nil && len(s.Enum) == 0 && s.Format != "date-time"
	case s.Type == "array":
		isUnlimited = s.MaxItems == nil
		fields = withoutLimit(path+"[]", *s.Items.Schema)
	case s.AdditionalProperties != nil:
		isUnlimited = s.MaxProperties == nil || len(s.XValidations) == 0
		if values := s.AdditionalProperties.Schema; !values.XIntOrString {
			fields = withoutLimit(path+"{}", *values)
		}
	default:
		isUnlimited = !slices.Contains([]string{"object", "integer", "boolean"}, s.Type)
	}
	for name, property := range s.Properties {
		fields = append(fields, withoutLimit(path+"."+name, property)...)
	}
	if isUnlimited {
		fields = append(fields, path)
	}
	return fields
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
