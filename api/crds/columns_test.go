package crds_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
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

// TestColumns checks what people see with kubectl: columns and their order, with and without -o wide, by plural and
// singular name.
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
	h.createKarmada(t)
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
		"clusters column-1 column-2":  {"NAME VERSION MODE READY AGE", "column-1 v1.32.5 Push True AGE", "column-2 Pull Unknown AGE"},
		"cluster column-1 -o wide": {
			"NAME VERSION MODE READY AGE ZONES REGION PROVIDER API-ENDPOINT PROXY-URL",
			`column-1 v1.32.5 Push True AGE ["a","b"] north own https://10.0.0.1:6443 socks5://10.0.0.2:1080`,
		},
		"works": {"NAME WORKLOAD-KIND APPLIED AGE", "nginx Deployment True AGE"},
		"wk":    {"NAME WORKLOAD-KIND APPLIED AGE", "nginx Deployment True AGE"},
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

// createKarmada creates two Clusters and a Work. Clusters have no namespace: their names are not those of other tests.
func (h hub) createKarmada(t *testing.T) {
	t.Helper()
	condition := func(kind, reason string) map[string]any {
		return map[string]any{
			"type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
		}
	}
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": clusterv1alpha1.GroupVersion.String(), "kind": "Cluster",
		"metadata": map[string]any{"name": "column-1"},
		"spec": map[string]any{
			"syncMode": "Push", "zones": []any{"a", "b"}, "region": "north", "provider": "own",
			"apiEndpoint": "https://10.0.0.1:6443", "proxyURL": "socks5://10.0.0.2:1080",
		},
		"status": map[string]any{"kubernetesVersion": "v1.32.5", "conditions": []any{condition("Ready", "ClusterReady")}},
	}})
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": clusterv1alpha1.GroupVersion.String(), "kind": "Cluster",
		"metadata": map[string]any{"name": "column-2"}, "spec": map[string]any{"syncMode": "Pull"},
	}})
	h.createWithStatus(t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": workv1alpha1.GroupVersion.String(), "kind": "Work",
		"metadata": map[string]any{"name": "nginx"},
		"spec": map[string]any{"workload": map[string]any{"manifests": []any{
			map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "nginx"}},
		}}},
		"status": map[string]any{"conditions": []any{condition("Applied", "AppliedSuccessful")}},
	}})
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
