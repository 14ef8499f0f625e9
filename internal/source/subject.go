package source

import (
	"errors"
	"strings"
	"text/template"

	"github.com/towline/towline/internal/phase"
)

// maxExpanded is how many bytes one template may make: more than any API server takes in one object, with room for many objects.
const maxExpanded = 64 << 20

// Subject is the cluster that content is fetched for. Names, chart fields and marked content may be Go templates over it, with the
// fields .Cluster (the whole object, as in YAML), .ClusterNamespace and .ClusterName.
type Subject struct {
	Cluster   map[string]any
	Namespace string
	Name      string
	// Confined is the one namespace of the hub that may be read for a Profile; empty, as for a ClusterProfile, means any.
	Confined string
}

// Expand returns text with its templates filled in; what names the text in errors. A field that does not exist is an error, and so
// is a function whose result would not be the same every time (now, randAlphaNum, genCA, env, ...): such text could never be at
// rest. Errors are phase.Invalid.
func (s Subject) Expand(what, text string) (string, error) {
	if !strings.Contains(text, "{{") {
		return text, nil
	}
	parsed, err := template.New(templateName).Option("missingkey=error").Funcs(functions()).Parse(text)
	if err != nil {
		return "", phase.Invalidf("parse %s: %s", what, place(err))
	}
	out := &boundedBuilder{left: maxExpanded}
	data := map[string]any{"Cluster": s.Cluster, "ClusterNamespace": s.Namespace, "ClusterName": s.Name}
	if err := parsed.Execute(out, data); err != nil {
		return "", phase.Invalidf("expand %s: %s", what, place(err))
	}
	return out.String(), nil
}

// templateName is how text/template calls our texts in its errors; place takes it out again.
const templateName = "text"

// place returns the message of a template error with the line, and the column if there is one, first.
func place(err error) string {
	return strings.NewReplacer("template: "+templateName+":", "line ", `executing "`+templateName+`" at`, "at").Replace(err.Error())
}

// boundedBuilder is a strings.Builder that refuses to grow beyond what is left.
type boundedBuilder struct {
	strings.Builder
	left int
}

func (b *boundedBuilder) Write(p []byte) (int, error) {
	b.left -= len(p)
	if b.left < 0 {
		return 0, errors.New("the result is larger than 64 MiB")
	}
	return b.Builder.Write(p)
}
