package crds_test

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
)

func TestNamesAndScopes(t *testing.T) {
	t.Parallel()
	got := map[string]string{}
	for _, d := range definitions(t) {
		names := d.typed.Spec.Names
		version := d.typed.Spec.Versions[0]
		got[d.typed.Name] = strings.Join([]string{version.Name, names.Kind, names.Singular, string(d.typed.Spec.Scope)}, " ")
		hasStatus := version.Subresources != nil && version.Subresources.Status != nil
		if len(d.typed.Spec.Versions) != 1 || !hasStatus {
			t.Errorf("%s: want one version with a status subresource", d.file)
		}
	}
	want := map[string]string{
		"clusterprofiles.config.projectsveltos.io":       "v1beta1 ClusterProfile clusterprofile Cluster",
		"profiles.config.projectsveltos.io":              "v1beta1 Profile profile Namespaced",
		"clustersummaries.config.projectsveltos.io":      "v1beta1 ClusterSummary clustersummary Namespaced",
		"clusterconfigurations.config.projectsveltos.io": "v1beta1 ClusterConfiguration clusterconfiguration Namespaced",
		"sveltosclusters.lib.projectsveltos.io":          "v1beta1 SveltosCluster sveltoscluster Namespaced",
		"configurationgroups.lib.projectsveltos.io":      "v1beta1 ConfigurationGroup configurationgroup Namespaced",
		"configurationbundles.lib.projectsveltos.io":     "v1beta1 ConfigurationBundle configurationbundle Namespaced",
		"rolerequests.lib.projectsveltos.io":             "v1beta1 RoleRequest rolerequest Cluster",
		"clusters.cluster.karmada.io":                    "v1alpha1 Cluster cluster Cluster",
		"works.work.karmada.io":                          "v1alpha1 Work work Namespaced",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("definitions (-want +got):\n%s", diff)
	}
}

// TestEveryKindHasAType checks that the schemes and the definitions hold the same kinds.
func TestEveryKindHasAType(t *testing.T) {
	t.Parallel()
	s := scheme(t)
	for _, d := range definitions(t) {
		for _, kind := range []string{d.typed.Spec.Names.Kind, d.typed.Spec.Names.ListKind} {
			if gvk := d.groupVersion().WithKind(kind); !s.Recognizes(gvk) {
				t.Errorf("%s has no Go type", gvk)
			}
		}
	}
}

// TestEveryFieldIsDescribed checks that `kubectl explain` has something to say about every field of ours.
func TestEveryFieldIsDescribed(t *testing.T) {
	t.Parallel()
	for _, d := range definitions(t) {
		for name, prop := range d.typed.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties {
			if name != "metadata" {
				checkDescribed(t, d.file+": "+name, prop)
			}
		}
	}
}

func checkDescribed(t *testing.T, path string, prop apiextensionsv1.JSONSchemaProps) {
	t.Helper()
	if prop.Description == "" {
		t.Errorf("%s has no description", path)
	}
	if prop.Items != nil && prop.Items.Schema != nil {
		prop = *prop.Items.Schema
	}
	for name, child := range prop.Properties {
		checkDescribed(t, path+"."+name, child)
	}
}

// TestValidManifests checks that every manifest of testdata/valid is accepted and that writing it back through the Go
// types loses and changes nothing, in spec and in status.
func TestValidManifests(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	s := scheme(t)
	for name, file := range files(t, "valid") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, doc := range manifests(t, file) {
				stored, err := h.create(t, doc)
				if err != nil {
					t.Errorf("create %s %s: %v", doc.GetKind(), doc.GetName(), err)
					continue
				}
				back := throughGo(t, s, stored)
				got, err := h.resource(t, doc).Update(t.Context(), back, metav1.UpdateOptions{DryRun: []string{"All"}, FieldValidation: "Strict"})
				if err != nil {
					t.Errorf("write %s %s back: %v", doc.GetKind(), doc.GetName(), err)
					continue
				}
				// Through Go once more, for the one way in which it writes durations and empty strings.
				if diff := cmp.Diff(back.Object["spec"], throughGo(t, s, got).Object["spec"]); diff != "" {
					t.Errorf("spec of %s %s after writing it back (-want +got):\n%s", doc.GetKind(), doc.GetName(), diff)
				}
				checkStatus(t, h, doc, stored)
			}
		})
	}
}

// checkStatus writes doc's status through the Go types and expects it to arrive whole.
func checkStatus(t *testing.T, h hub, doc, stored *unstructured.Unstructured) {
	t.Helper()
	want, found := doc.Object["status"]
	if !found {
		return
	}
	if status, found := stored.Object["status"]; found && doc.GetKind() != clusterv1alpha1.ClusterKind {
		t.Errorf("creating %s set its status to %v", doc.GetName(), status)
	}
	stored.Object["status"] = want
	typed := throughGo(t, scheme(t), stored)
	got, err := h.resource(t, doc).UpdateStatus(t.Context(), typed, metav1.UpdateOptions{FieldValidation: "Strict"})
	if err != nil {
		t.Errorf("write status of %s: %v", doc.GetName(), err)
		return
	}
	if doc.GetKind() == configv1beta1.ClusterConfigurationKind {
		features(t, doc, "profileResources")[0].(map[string]any)["resources"].([]any)[0].(map[string]any)["deploymentType"] = "Remote"
	}
	if diff := cmp.Diff(want, got.Object["status"]); diff != "" {
		t.Errorf("status of %s (-want +got):\n%s", doc.GetName(), diff)
	}
}

// features returns the list under the key Features of the first profile in list.
func features(t *testing.T, doc *unstructured.Unstructured, list string) []any {
	t.Helper()
	profiles, found, err := unstructured.NestedFieldNoCopy(doc.Object, "status", list)
	if err != nil || !found {
		t.Fatalf("%s: found %v, %v", list, found, err)
	}
	return profiles.([]any)[0].(map[string]any)["Features"].([]any)
}

// TestInvalidManifests checks that every manifest of testdata/invalid is refused with the messages its first lines
// name.
func TestInvalidManifests(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	for name, file := range files(t, "invalid") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			_, err = h.create(t, manifests(t, file)[0])
			if err == nil {
				t.Fatal("accepted")
			}
			for line := range strings.Lines(string(text)) {
				want, found := strings.CutPrefix(strings.TrimSpace(line), "# want: ")
				if found && !strings.Contains(err.Error(), want) {
					t.Errorf("got error %q, want it to say %q", err, want)
				}
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	cases := map[string]struct {
		object, want map[string]any
	}{
		"sveltoscluster": {
			object: map[string]any{"apiVersion": libv1beta1.GroupVersion.String(), "kind": "SveltosCluster", "spec": map[string]any{}},
			want:   map[string]any{"consecutiveFailureThreshold": int64(3), "pullMode": false},
		},
		"clusterprofile": {
			object: map[string]any{"apiVersion": configv1beta1.GroupVersion.String(), "kind": "ClusterProfile", "spec": map[string]any{
				"policyRefs": []any{map[string]any{"remoteURL": map[string]any{"url": "http://localhost"}}},
				"helmCharts": []any{map[string]any{
					"repositoryURL": "bucket://a/b/c", "releaseName": "a", "releaseNamespace": "a",
					"options": map[string]any{"installOptions": map[string]any{}},
				}},
			}},
			want: map[string]any{
				"syncMode": "Continuous", "tier": int64(100), "stopMatchingBehavior": "WithdrawPolicies",
				"continueOnConflict": false, "continueOnError": false, "reloader": false,
				"policyRefs": []any{map[string]any{
					"deploymentType": "Remote", "tier": int64(100),
					"remoteURL": map[string]any{"url": "http://localhost", "interval": "5m"},
				}},
				"helmCharts": []any{map[string]any{
					"repositoryURL": "bucket://a/b/c", "releaseName": "a", "releaseNamespace": "a", "helmChartAction": "Install",
					"options": map[string]any{
						"skipCRDs": false, "skipSchemaValidation": false, "wait": false, "waitForJobs": false, "disableHooks": false,
						"disableOpenAPIValidation": false, "atomic": false, "dependencyUpdate": false, "enableClientCache": false,
						"installOptions": map[string]any{
							"createNamespace": true, "replace": true, "disableHooks": false, "takeOwnership": false,
							"recoverAfterConsecutiveFailures": int64(5),
						},
					},
				}},
			},
		},
		"configurationgroup": {
			object: map[string]any{"apiVersion": libv1beta1.GroupVersion.String(), "kind": "ConfigurationGroup", "spec": map[string]any{}},
			want: map[string]any{
				"action": "Deploy", "sourceStatus": "Active", "updatePhase": "Ready", "tier": int64(100), "dryRun": false, "reloader": false,
				"driftDetection": false, "continueOnConflict": false, "continueOnError": false, "leavePolicies": false,
			},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			obj := &unstructured.Unstructured{Object: tc.object}
			obj.SetName("defaults")
			got, err := h.create(t, obj)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(any(tc.want), got.Object["spec"]); diff != "" {
				t.Errorf("spec (-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnreportedCluster checks that a Cluster of which nobody has reported is not known to be ready, as the Cluster's
// table shows.
func TestUnreportedCluster(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	stored, err := h.create(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": clusterv1alpha1.GroupVersion.String(), "kind": "Cluster",
		"metadata": map[string]any{"name": "unreported"}, "spec": map[string]any{"syncMode": "Pull"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"conditions": []any{map[string]any{
		"type": "Ready", "status": "Unknown", "reason": "ClusterStatusNeverUpdated",
		"message": "the status of the cluster is not reported yet", "lastTransitionTime": "1970-01-01T00:00:00Z",
	}}}
	if diff := cmp.Diff(any(want), stored.Object["status"]); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
}

func TestPullModeIsImmutable(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	for name, pull := range map[string]bool{"pull": true, "push": false} {
		cluster := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": libv1beta1.GroupVersion.String(), "kind": "SveltosCluster", "spec": map[string]any{"pullMode": pull},
		}}
		cluster.SetName(name)
		stored, err := h.create(t, cluster)
		if err != nil {
			t.Fatal(err)
		}
		if err := unstructured.SetNestedField(stored.Object, !pull, "spec", "pullMode"); err != nil {
			t.Fatal(err)
		}
		_, err = h.resource(t, cluster).Update(t.Context(), stored, metav1.UpdateOptions{})
		if err == nil || !strings.Contains(err.Error(), "Value is immutable") {
			t.Errorf("%s: got error %v, want pullMode to be immutable", name, err)
		}
		// The mode must not be changed with the whole spec either.
		_, err = h.resource(t, cluster).Patch(t.Context(), name, types.MergePatchType, []byte(`{"spec": null}`), metav1.PatchOptions{})
		if isRefused := err != nil && strings.Contains(err.Error(), "spec.pullMode: Invalid value"); isRefused != pull {
			t.Errorf("%s: a patch without the spec: got error %v", name, err)
		}
	}
}

// throughGo decodes obj into its Go type, unknown fields being errors, and encodes it again.
func throughGo(t *testing.T, s *runtime.Scheme, obj *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	typed, err := s.New(obj.GroupVersionKind())
	if err != nil {
		t.Fatal(err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(obj.Object, typed, true); err != nil {
		t.Fatalf("decode %s %s: %v", obj.GetKind(), obj.GetName(), err)
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(typed.DeepCopyObject())
	if err != nil {
		t.Fatal(err)
	}
	return &unstructured.Unstructured{Object: object}
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		libv1beta1.AddToScheme, configv1beta1.AddToScheme, clusterv1alpha1.AddToScheme, workv1alpha1.AddToScheme,
	} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return s
}
