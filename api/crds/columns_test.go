package crds_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// age is how kubectl prints the age of something new.
var age = regexp.MustCompile(`\b\d+s\b`)

// table makes kubectl's output comparable: single blanks, "AGE" instead of an age.
func table(out string) []string {
	var rows []string
	for line := range strings.Lines(out) {
		rows = append(rows, age.ReplaceAllString(strings.Join(strings.Fields(line), " "), "AGE"))
	}
	return rows
}

// TestColumns checks what people see with kubectl: columns and their order, with and without -o wide, by plural and singular name.
func TestColumns(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": libv1beta1.GroupVersion.String(), "kind": "SveltosCluster",
		"metadata": map[string]any{"name": "cluster01", "annotations": map[string]any{libv1beta1.ShardAnnotation: "shard1"}},
		"spec":     map[string]any{"pullMode": true},
		"status":   map[string]any{"ready": true, "version": "v1.32.5", "connectionStatus": "Healthy"},
	}})
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": libv1beta1.GroupVersion.String(), "kind": "SveltosCluster",
		"metadata": map[string]any{"name": "cluster02"}, "spec": map[string]any{},
	}})
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": configv1beta1.GroupVersion.String(), "kind": "ClusterSummary",
		"metadata": map[string]any{"name": "nginx-sveltos-cluster01"},
		"spec":     map[string]any{"clusterNamespace": "a", "clusterName": "cluster01", "clusterType": "Sveltos"},
		"status": map[string]any{"featureSummaries": []any{
			map[string]any{"featureID": "Helm", "status": "Provisioning"},
			map[string]any{"featureID": "Resources", "status": "Provisioned"},
			map[string]any{"featureID": "Kustomize", "status": "Failed"},
		}},
	}})
	for _, kind := range []string{"ConfigurationGroup", "ConfigurationBundle"} {
		h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": libv1beta1.GroupVersion.String(), "kind": kind,
			"metadata": map[string]any{"name": "config-0gdr5cqfqeb2ch6vnd9i"}, "spec": map[string]any{},
		}})
	}
	short := []string{"NAME AGE", "config-0gdr5cqfqeb2ch6vnd9i AGE"}
	cases := map[string][]string{
		"sveltoscluster":          {"NAME READY VERSION AGE", "cluster01 true v1.32.5 AGE", "cluster02 AGE"},
		"sveltosclusters -o wide": {"NAME READY CONNECTIONSTATUS VERSION AGE SHARD", "cluster01 true Healthy v1.32.5 AGE shard1", "cluster02 AGE"},
		"clustersummary":          {"NAME AGE", "nginx-sveltos-cluster01 AGE"},
		"clustersummaries.config.projectsveltos.io -o wide": {
			"NAME AGE HELMCHARTS KUSTOMIZEREFS POLICYREFS", "nginx-sveltos-cluster01 AGE Provisioning Failed Provisioned",
		},
		"configurationbundle":         short,
		"configurationbundles -owide": short,
		"configurationgroup":          short,
	}
	for args, want := range cases {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			got := table(h.kubectl(t, append([]string{"get"}, strings.Fields(args)...)...))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("kubectl get %s (-want +got):\n%s", args, diff)
			}
		})
	}
}

// createWithStatus creates obj and then writes its status, if it has one.
func (h hub) createWithStatus(t *testing.T, obj *unstructured.Unstructured) {
	t.Helper()
	stored, err := h.create(t, obj)
	if err != nil {
		t.Fatal(err)
	}
	status, found := obj.Object["status"]
	if !found {
		return
	}
	stored.Object["status"] = status
	if _, err := h.resource(t, obj).UpdateStatus(t.Context(), stored, metav1.UpdateOptions{FieldValidation: "Strict"}); err != nil {
		t.Fatal(err)
	}
}
