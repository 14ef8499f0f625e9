package source

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/template"
	"time"

	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
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
	// Profile identifies the profile with the template. After a sandbox.LimitError, other profiles with the same text are
	// expanded: a slow template can be slow because of the clusters of one profile.
	Profile string
	// Confined is the only hub namespace that may be read for a Profile. It is empty for a ClusterProfile, which may read
	// every namespace.
	Confined string
	// Sandbox expands the templates in child processes that call ExpandFunction. Without it, they are expanded in this
	// process, and one that does not end is not stopped.
	Sandbox *sandbox.Pool
}

// expandFunction is the name of ExpandFunction in the sandbox. expandLimit is the time limit of one template.
const (
	expandFunction = "expand"
	expandLimit    = 10 * time.Second
)

// expansion is the input of ExpandFunction.
type expansion struct {
	Description, Text string
	Cluster           json.RawMessage
	Namespace, Name   string
}

// ExpandFunctions returns the functions of this package for the children of the sandbox.
func ExpandFunctions() map[string]sandbox.Function {
	return map[string]sandbox.Function{expandFunction: func(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
		var e expansion
		if err := json.Unmarshal(input, &e); err != nil {
			return nil, err
		}
		var cluster map[string]any
		if err := kubejson.Unmarshal(e.Cluster, &cluster); err != nil { // integers stay integers
			return nil, err
		}
		return Subject{Namespace: e.Namespace, Name: e.Name}.expandHere(e.Description, e.Text, cluster)
	}}
}

// Expand expands the templates in text. Errors are phase.Invalid and begin with description. A field that does not
// exist is an error, and so is a function whose result differs between calls (now, randAlphaNum, genCA, env, ...),
// since the result would be deployed again and again. It returns a sandbox.LimitError for a template that takes too
// much time or memory.
func (s Subject) Expand(description, text string) (string, error) {
	expanded, err := s.ExpandText(description, text)
	return expanded.Text, err
}

// Expanded is the result of Subject.ExpandText.
type Expanded struct {
	Text string
	// IsShared is true if the templates read nothing of the subject, so that the result, also an error, is the same for
	// all subjects.
	IsShared bool
}

// ExpandText is like Expand and returns whether the result is the same for all subjects.
func (s Subject) ExpandText(description, text string) (Expanded, error) {
	if !strings.Contains(text, "{{") {
		return Expanded{Text: text, IsShared: true}, nil
	}
	var cluster map[string]any
	if s.Cluster != nil {
		var err error
		if cluster, err = s.Cluster(); err != nil {
			return Expanded{}, fmt.Errorf("expand %s: %w", description, err)
		}
	}
	if s.Sandbox == nil {
		return s.expandHere(description, text, cluster)
	}
	encoded, err := json.Marshal(cluster)
	if err != nil {
		return Expanded{}, phase.Invalidf("expand %s: %w", description, err)
	}
	var expanded Expanded
	err = s.Sandbox.Call(sandbox.Call{
		Function: expandFunction, Key: fmt.Sprintf("%s %s %x", expandFunction, s.Profile, sha256.Sum256([]byte(text))),
		Member: s.Namespace + "/" + s.Name, Limit: expandLimit,
		Input: expansion{Description: description, Text: text, Cluster: encoded, Namespace: s.Namespace, Name: s.Name}, Output: &expanded,
	})
	if limit, ok := errors.AsType[*sandbox.LimitError](err); ok {
		return Expanded{}, fmt.Errorf("expand %s: %w", description, limit)
	}
	return expanded, err
}

// expandHere expands a template in this process.
func (s Subject) expandHere(description, text string, cluster map[string]any) (Expanded, error) {
	parsed, err := template.New(templateName).Option("missingkey=error").Funcs(functions()).Parse(text)
	if err != nil {
		return Expanded{IsShared: true}, phase.Invalidf("parse %s: %s", description, templateMessage(err))
	}
	isShared := !slices.ContainsFunc(parsed.Templates(), func(t *template.Template) bool { return t.Tree != nil && readsData(t.Root) })
	out := &boundedBuilder{left: maxExpanded}
	data := map[string]any{"Cluster": cluster, "ClusterNamespace": s.Namespace, "ClusterName": s.Name}
	if err := parsed.Execute(out, data); err != nil {
		return Expanded{IsShared: isShared}, phase.Invalidf("expand %s: %s", description, templateMessage(err))
	}
	return Expanded{Text: out.String(), IsShared: isShared}, nil
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
