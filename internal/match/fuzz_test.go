package match_test

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzSelection selects members by the selectors and the references of profiles, and by the labels of clusters. A
// Profile selects only members in its namespace, nothing selects a member that is being deleted, and an empty selector
// selects none.
func FuzzSelection(f *testing.F) {
	const noLabels, labels = `{}`, `{"env":"prod","a/b":""}`
	for _, selector := range []string{
		`{}`, `{"matchLabels":{"env":"prod"}}`, `{"matchExpressions":[{"key":"env","operator":"NotIn","values":["test"]},{"key":"a/b","operator":"Exists"}]}`,
		`{"matchExpressions":[{"key":"env","operator":"Near"}]}`, `{"matchExpressions":[{"key":"env","operator":"In"}]}`, `{"matchExpressions":[{"key":"gone","operator":"DoesNotExist"}]}`,
		`{"matchLabels":{"a b\n":"c"}}`, `{"matchLabels":{"env":"` + strings.Repeat("x", 64) + `"}}`, `{"matchLabels":{"":""}}`, "{\"matchLabels\":{\"\xff\":\"\xfe\"}}", `{"matchExpressions":[null]}`,
		`{"matchExpressions":[` + strings.Repeat(`{"key":"env","operator":"Exists"},`, 5000) + `{}]}`, `{"matchExpressions":[{"key":"env","operator":"In","values":["` + strings.Repeat(`prod","`, 5000) + `"]}]}`,
	} {
		f.Add(selector, "", labels, `[]`)
		f.Add(selector, "eu", noLabels, `[{"name":"eu-1"}]`)
	}
	f.Add(`{}`, "us", labels, `[{"kind":"SveltosCluster","namespace":"eu","name":"eu-1"},{"apiVersion":"a/b/c","kind":"Cluster","name":"eu-1"},null]`)
	f.Add(`{}`, "", `null`, strings.Repeat("[", 20_000))
	f.Fuzz(func(t *testing.T, selector, namespace, labels, refs string) {
		var spec configv1beta1.ProfileSpec
		m := fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "eu-1", Ready: true}
		if json.Unmarshal([]byte(selector), &spec.ClusterSelector) != nil || json.Unmarshal([]byte(refs), &spec.ClusterRefs) != nil || json.Unmarshal([]byte(labels), &m.Labels) != nil {
			t.Skip("the API server does not return it")
		}
		var selection match.Selection
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(selector)+len(labels)+len(refs))*20_000, func() {
			if selection, err = match.NewSelection(&spec, namespace); err == nil {
				selection.Selects(m)
			}
		})
		if err != nil {
			fuzzing.OneLine(t, err)
			if !strings.HasPrefix(err.Error(), "spec.clusterSelector: ") {
				t.Errorf("the error does not name the field: %v", err)
			}
			return
		}
		checkSelection(t, selection, spec, namespace, m)
	})
}

func checkSelection(t *testing.T, selection match.Selection, spec configv1beta1.ProfileSpec, namespace string, m fleet.Member) {
	t.Helper()
	isSelected := selection.Selects(m)
	isEmpty := len(spec.ClusterSelector.MatchLabels) == 0 && len(spec.ClusterSelector.MatchExpressions) == 0
	if isSelected && (namespace != "" && namespace != m.Namespace || isEmpty && len(spec.ClusterRefs) == 0) {
		t.Errorf("%+v in namespace %q selects %s", spec.ClusterSelector, namespace, m.Key())
	}
	if !isSelected && namespace == "" {
		spec.ClusterRefs = append(spec.ClusterRefs, corev1.ObjectReference{Namespace: m.Namespace, Name: m.Name})
		if referred, err := match.NewSelection(&spec, namespace); err != nil || !referred.Selects(m) {
			t.Errorf("a reference does not select the member, error %v", err)
		}
	}
	m.Deleting = true
	if selection.Selects(m) {
		t.Error("a member that is being deleted is selected")
	}
}
