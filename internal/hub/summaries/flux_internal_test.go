package summaries

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/source"
)

// fluxCase are the inputs of a bundle with content of a source of Flux.
type fluxCase struct {
	object  *unstructured.Unstructured
	err     error
	path    string
	cluster *libv1beta1.SveltosCluster
}

func (f *fluxCase) setStatus(fields ...string) {
	for i := 0; i < len(fields); i += 2 {
		_ = unstructured.SetNestedField(f.object.Object, fields[i+1], "status", "artifact", fields[i])
	}
}

func (f *fluxCase) inputs(t *testing.T) string {
	t.Helper()
	c := &Controller{Composer: &Composer{CodeVersion: "v1"}, fluxObject: func(context.Context, source.Reference) (*unstructured.Unstructured, error) {
		return f.object, f.err
	}}
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "web-one"}}
	summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceGitRepository, Namespace: "flux", Name: "app", Path: f.path}}
	s := newState(summary, f.cluster, fleet.FromSveltosCluster(f.cluster))
	s.member.Mode = fleet.Pull
	inputs, err := c.inputsOf(t.Context(), s, ComposeRequest{Summary: summary, TemplateContext: templateContextOfCluster(f.cluster, nil)}, libv1beta1.FeatureResources)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := inputs.digestFor(Composition{})
	if err != nil {
		t.Fatal(err)
	}
	return digest
}

func TestArtifactIsAnInputOfTheBundle(t *testing.T) {
	t.Parallel()
	label := func(f *fluxCase) { f.cluster.Labels = map[string]string{"env": "prod"} }
	for name, test := range map[string]struct {
		prepare, change func(*fluxCase)
		want            string // same, other or none
	}{
		"nothing":            {want: "same"},
		"another revision":   {change: func(f *fluxCase) { f.setStatus("digest", "sha256:b") }, want: "other"},
		"another status":     {change: func(f *fluxCase) { f.object.SetResourceVersion("7"); f.setStatus("lastUpdateTime", "now") }, want: "same"},
		"another object":     {change: func(f *fluxCase) { f.object.SetUID("other") }, want: "other"},
		"a label":            {change: label, want: "same"},
		"a label, a path":    {prepare: func(f *fluxCase) { f.path = "{{ .ClusterName }}" }, change: label, want: "other"},
		"a label, templates": {prepare: func(f *fluxCase) { f.object.SetAnnotations(map[string]string{libv1beta1.TemplateAnnotation: ""}) }, change: label, want: "other"},
		"deleted":            {change: func(f *fluxCase) { f.err = apierrors.NewNotFound(schema.GroupResource{}, "app") }, want: "none"},
		"not known":          {change: func(f *fluxCase) { f.err = errors.New("not listed yet") }, want: "none"},
		"no artifact":        {change: func(f *fluxCase) { f.setStatus("url", "") }, want: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fluxCase{
				object:  &unstructured.Unstructured{Object: map[string]any{}},
				cluster: &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}},
			}
			f.object.SetUID("one")
			f.setStatus("url", "http://127.0.0.1/one.tar.gz", "digest", "sha256:a")
			if test.prepare != nil {
				test.prepare(f)
			}
			before := f.inputs(t)
			if test.change != nil {
				test.change(f)
			}
			after := f.inputs(t)
			got := "other"
			switch after {
			case before:
				got = "same"
			case "":
				got = "none"
			}
			if before == "" || got != test.want {
				t.Errorf("got %s (%q, before %q), want %s", got, after, before, test.want)
			}
		})
	}
}
