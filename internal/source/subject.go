package source

import (
	"errors"
	"fmt"
	"strings"
	"text/template"

	"github.com/towline/towline/internal/phase"
)

// maxExpanded limits the size of an expanded template in bytes. It is larger than any single object may be.
const maxExpanded = 64 << 20

// Subject is the cluster for which templates in names, chart fields and content are expanded. They have the fields
// .Cluster (the whole object, as in YAML), .ClusterNamespace and .ClusterName.
type Subject struct {
	// Cluster returns the object as in YAML, nil if there is none. It is called only for a text with a template.
	Cluster   func() (map[string]any, error)
	Namespace string
	Name      string
	// Confined is the only hub namespace that may be read for a Profile. It is empty for a ClusterProfile, which may read
	// every namespace.
	Confined string
}

// Expand expands the templates in text. Errors are phase.Invalid and begin with description. A field that does not
// exist is an error, and so is a function whose result differs between calls (now, randAlphaNum, genCA, env, ...),
// since the result would be deployed again and again.
func (s Subject) Expand(description, text string) (string, error) {
	if !strings.Contains(text, "{{") {
		return text, nil
	}
	parsed, err := template.New(templateName).Option("missingkey=error").Funcs(functions()).Parse(text)
	if err != nil {
		return "", phase.Invalidf("parse %s: %s", description, templateMessage(err))
	}
	var cluster map[string]any
	if s.Cluster != nil {
		if cluster, err = s.Cluster(); err != nil {
			return "", fmt.Errorf("expand %s: %w", description, err)
		}
	}
	out := &boundedBuilder{left: maxExpanded}
	data := map[string]any{"Cluster": cluster, "ClusterNamespace": s.Namespace, "ClusterName": s.Name}
	if err := parsed.Execute(out, data); err != nil {
		return "", phase.Invalidf("expand %s: %s", description, templateMessage(err))
	}
	return out.String(), nil
}

// templateName is the name of all templates in errors of text/template. templateMessage removes it.
const templateName = "text"

// templateMessage returns the message of a template error, beginning with the line and the column.
func templateMessage(err error) string {
	return strings.NewReplacer("template: "+templateName+":", "line ", `executing "`+templateName+`" at`, "at").Replace(err.Error())
}

// boundedBuilder is a strings.Builder with a limit: left is the number of bytes that can be added.
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
