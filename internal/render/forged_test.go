package render_test

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/utils/clock"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// forging returns a sandbox whose children send these messages, whatever they are called for.
func forging(messages ...string) *sandbox.Pool {
	var script strings.Builder
	for _, message := range messages {
		fmt.Fprintf(&script, "read -r call; echo '%s'; ", message)
	}
	return sandbox.NewPool([]string{"/bin/sh", "-c", script.String() + "read -r call"}, clock.RealClock{})
}

// TestForgedMessages: a child that executes code of an attacker sends messages that no function sends. Each must be an
// error, and must not end this process.
func TestForgedMessages(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, examples.Chart{})
	renderChart := func(lookup render.LookupFunc) func(*sandbox.Pool) error {
		return func(pool *sandbox.Pool) error {
			chartRequest := chartRequest
			chartRequest.Lookup = lookup
			_, err := render.NewCharts(pool).Render(t.Context(), chartRequest)
			return err
		}
	}
	panics := func(string, string, string, string) (map[string]any, error) { panic("a mistake") }
	build := func(pool *sandbox.Pool) error {
		files := []source.File{{Name: "kustomization.yaml", Data: []byte("resources: []")}}
		k := render.Kustomization{Content: source.Content{Files: files}, Values: map[string]string{"a": "b"}}
		_, _, err := render.NewKustomizationRenderer(pool).Render(k, source.TemplateContext{Sandbox: pool})
		return err
	}
	objects, err := kube.DecodeManifest([]byte(toPatch))
	if err != nil {
		t.Fatal(err)
	}
	patch := func(pool *sandbox.Pool) error {
		_, err := render.NewChanger(pool).Change(objects, kube.NewDocuments(objects), render.Changes{Patches: []render.Patch{{Text: "a: b"}}}, nil)
		return err
	}
	substitute := func(pool *sandbox.Pool) error {
		_, err := source.TemplateContext{Sandbox: pool}.Substitute([]source.Text{{Text: "{{ .a }}"}}, nil)
		return err
	}
	object := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`
	for name, test := range map[string]struct {
		call          func(*sandbox.Pool) error
		message, want string
	}{
		"lookup without a member":    {renderChart(nil), `{"callback":["v1","Secret","a","b"]}`, "data that it must not have"},
		"lookup for all members":     {renderChart(panics), `{"callback":["v1","Secret","a","b"]}`, "data that it must not have"},
		"objects that are no list":   {renderChart(nil), `{"output":{"Objects":{}}}`, "decode the objects"},
		"an object that is no map":   {renderChart(nil), `{"output":{"Objects":[1],"Paths":["a"]}}`, "no map"},
		"an object that is null":     {renderChart(nil), `{"output":{"Objects":[null],"Paths":["a"]}}`, "no map"},
		"many objects":               {renderChart(nil), `{"output":{"Objects":[` + strings.Repeat("0,", kube.MaxObjects) + `0]}}`, "more than 20000 objects"},
		"paths of no object":         {renderChart(nil), `{"output":{"Objects":[],"Paths":["a"]}}`, "1 paths of 0 objects"},
		"objects without paths":      {renderChart(nil), `{"output":{"Objects":[` + object + `]}}`, "0 paths of 1 objects"},
		"a built object, no map":     {build, `{"output":{"Objects":["a"]}}`, "no map"},
		"a template of no object":    {build, `{"output":{"Objects":[` + object + `],"Templates":{"1":"a"}}}`, "index 1 of 1 objects"},
		"a negative index":           {build, `{"output":{"Objects":[` + object + `],"Templates":{"-1":"a"}}}`, "index -1 of 1 objects"},
		"too few texts":              {substitute, `{"output":[]}`, "0 of 1 texts"},
		"too many texts":             {substitute, `{"output":["a","b"]}`, "2 of 1 texts"},
		"a patch of no object":       {patch, `{"output":{"7":` + object + `}}`, "index 7 of 3 objects"},
		"a patched object, no map":   {patch, `{"output":{"0":[]}}`, "decode a patched object"},
		"a callback without a need":  {patch, `{"callback":"a"}`, "data that it must not have"},
		"a callback of another type": {build, `{"callback":{}}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			func() {
				defer func() {
					if reason := recover(); reason != nil {
						err = fmt.Errorf("a panic: %v", reason)
						t.Error(err)
					}
				}()
				err = test.call(forging(test.message))
			}()
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
	needsMember, lookup := `{"output":{"NeedsMember":true}}`, `{"callback":["v1","Secret","a","b"]}`
	if err := renderChart(panics)(forging(needsMember, lookup)); err == nil || !strings.Contains(err.Error(), "panic: a mistake") {
		t.Errorf("got %v, want an error", err)
	}
}
