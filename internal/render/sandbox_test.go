package render_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// Templates that would end or stop this process are stopped in the sandbox.
func TestTemplatesAreLimited(t *testing.T) {
	t.Parallel()
	nested := `{{ $d := dict }}{{ $_ := set $d "a" $d }}{{ $d }}`
	for name, test := range map[string]struct{ template, want string }{
		"memory": {`{{ range until 10000000000 }}{{ end }}`, "more than 1024 MiB of memory"},
		"output": {`{{ range 10000000000 }}{{ "some text without end" }}{{ end }}`, "it took"},
		"stack":  {nested, "it nests without end"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := render.NewCharts(pool).Render(t.Context(), request(t, withTemplate(test.template)))
			if _, ok := errors.AsType[*sandbox.LimitError](err); !ok || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "render chart hello") {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
	rendered, err := render.NewCharts(pool).Render(t.Context(), request(t, examples.Chart{}))
	if err != nil || rendered.Documents == nil {
		t.Errorf("got documents %v, error %v", rendered.Documents, err)
	}
	cluster := func() (map[string]any, error) {
		return map[string]any{"spec": map[string]any{"number": int64(12345678)}}, nil
	}
	tmplCtx := source.TemplateContext{Sandbox: pool, Cluster: cluster, Namespace: "ns", Name: "one"}
	if got, err := tmplCtx.Expand("text", `{{ .Cluster.spec.number }} {{ kindOf .Cluster.spec.number }} {{ .ClusterNamespace }}/{{ .ClusterName }}`); err != nil || got != "12345678 int64 ns/one" {
		t.Errorf("got %q, error %v", got, err)
	}
	for text, want := range map[string]bool{`{{ .ClusterName }}`: false, `{{ upper "text" }}`: true} {
		if got, err := tmplCtx.ExpandTracked("text", text); err != nil || got.IsShared != want {
			t.Errorf("%s: got %+v, error %v", text, got, err)
		}
	}
	_, err = tmplCtx.Expand("the text", nested)
	if limit, ok := errors.AsType[*sandbox.LimitError](err); !ok || err.Error() != "expand the text: "+limit.Error() {
		t.Errorf("got %v, want an error", err)
	}
}

// TestLimitOfOneMemberIsNotRememberedForOthers renders a chart that takes too much memory only with an object of one
// member.
func TestLimitOfOneMemberIsNotRememberedForOthers(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ if lookup "v1" "ConfigMap" "site" "large" }}{{ range until 10000000000 }}{{ end }}{{ end }}`))
	charts := render.NewCharts(pool)
	renderOn := func(member string, found map[string]any) error {
		chartRequest.Owner = member
		chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) { return found, nil }
		_, err := charts.Render(t.Context(), chartRequest)
		return err
	}
	if _, ok := errors.AsType[*sandbox.LimitError](renderOn("one", map[string]any{"kind": "ConfigMap"})); !ok {
		t.Error("the rendering for the first member is not limited")
	}
	if err := renderOn("two", map[string]any{}); err != nil {
		t.Errorf("the rendering for another member: %v", err)
	}
}

// TestLimitOfOneClusterIsNotRememberedForOthers expands a template that takes too much memory with some clusters only.
func TestLimitOfOneClusterIsNotRememberedForOthers(t *testing.T) {
	t.Parallel()
	expand := func(profile, cluster string, number int64) error {
		fields := func() (map[string]any, error) { return map[string]any{"number": number}, nil }
		tmplCtx := source.TemplateContext{Sandbox: pool, Cluster: fields, Profile: profile, Namespace: "ns", Name: cluster}
		_, err := tmplCtx.Expand("text", "{{ range until (int .Cluster.number) }}{{ end }}")
		return err
	}
	isLimited := func(err error) bool {
		_, ok := errors.AsType[*sandbox.LimitError](err)
		return ok
	}
	if !isLimited(expand("a", "one", 10000000000)) || !isLimited(expand("a", "one", 1)) {
		t.Error("the first cluster is not limited")
	}
	if err := expand("a", "two", 1); err != nil {
		t.Errorf("another cluster: %v", err)
	}
	for _, cluster := range []string{"three", "four"} {
		if !isLimited(expand("a", cluster, 10000000000)) {
			t.Errorf("cluster %s is not limited", cluster)
		}
	}
	if !isLimited(expand("a", "two", 1)) {
		t.Error("a template that exceeds the limit for two clusters in succession is expanded for others")
	}
	if err := expand("b", "two", 1); err != nil {
		t.Errorf("another profile: %v", err)
	}
}
