package source

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"text/template"
	"time"

	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
)

// maxExpanded limits an expanded template in bytes. A template can have many objects.
const maxExpanded = 64 << 20

// maxExpansionsSize limits the texts in TemplateContext.Expansions in bytes.
const maxExpansionsSize = 8 << 20

// resourcesField is the name of the template field that holds TemplateContext.Resources.
const resourcesField = "MgmtResources"

// TemplateContext is the cluster for which templates in names, chart fields and content are expanded. Templates have
// the fields .Cluster (the whole object, as in YAML), .ClusterNamespace, .ClusterName and .MgmtResources (whole objects
// of the hub, by identifier).
type TemplateContext struct {
	// Cluster returns the object as in YAML, nil if there is none. It is called only for a text with a template.
	Cluster   func() (map[string]any, error)
	Namespace string
	Name      string
	// Profile identifies the profile with the template. A sandbox.LimitError blocks a template for one profile only: the
	// clusters of the profile can be the reason why the template is slow.
	Profile string
	// RestrictedNamespace is the only hub namespace that a Profile may read. It is empty for a ClusterProfile, which may
	// read every namespace. It is also the Scope of all sandbox calls: scopes do not share results.
	RestrictedNamespace string
	// Resources are the objects of the hub that templates and scripts can read.
	Resources Resources
	// Sandbox expands templates in child processes with SandboxFunctions. If it is nil, they are expanded in this process,
	// without a time limit.
	Sandbox *sandbox.Pool
	// Expansions caches the results of templates that read nothing of the template context, see NewExpansions. Nil means
	// no cache.
	Expansions *cache.Cache[string]
	// Memory counts the memory of the content that is rendered for the template context. Nil means no limit.
	Memory *kube.ContentReservation
}

// NewExpansions returns an empty cache for TemplateContext.Expansions. All template contexts can share it.
func NewExpansions() *cache.Cache[string] { return cache.New[string](maxExpansionsSize) }

// expandFunction and scriptFunction are keys of SandboxFunctions. expandLimit limits the time of one template or
// script.
const (
	expandFunction = "expand"
	scriptFunction = "script"
	expandLimit    = 10 * time.Second
	// lineReportLead is how long before expandLimit a child reports the current line of its template.
	lineReportLead = 2 * time.Second
)

// expansion is the input of expandFunction and scriptFunction.
type expansion struct {
	Description, Text string
	Cluster           json.RawMessage
	Namespace, Name   string
	Resources         Resources
}

// SandboxFunctions returns the functions, by name, that the child processes of TemplateContext.Sandbox must offer.
func SandboxFunctions() map[string]sandbox.Function {
	functions := map[string]sandbox.Function{substituteFunction: substituteInSandbox}
	for name, function := range expansionFunctions() {
		functions[name] = func(input json.RawMessage, callBack func(any) (json.RawMessage, error)) (any, error) {
			var e expansion
			if err := json.Unmarshal(input, &e); err != nil {
				return nil, err
			}
			line := &currentLine{}
			// The parent adds the line to the error of a template that exceeds the limit.
			report := time.AfterFunc(expandLimit-lineReportLead, func() { _, _ = callBack(line.number.Load()) })
			defer report.Stop()
			return function(e, line)
		}
	}
	return functions
}

func expansionFunctions() map[string]func(expansion, *currentLine) (Expanded, error) {
	return map[string]func(expansion, *currentLine) (Expanded, error){expandFunction: expansion.expand, scriptFunction: expansion.runScript}
}

// Expand expands the templates in text. Errors are phase.TerminalError and begin with description. A missing field is
// an error, and so is a function whose result differs between calls (now, randAlphaNum, genCA, env, ...), since each
// new result would be deployed. The error is a sandbox.LimitError if the template takes too much time or memory.
func (c TemplateContext) Expand(description, text string) (string, error) {
	expanded, err := c.ExpandTracked(description, text)
	return expanded.Text, err
}

// Expanded is the result of TemplateContext.ExpandTracked and TemplateContext.RunScript.
type Expanded struct {
	Text string
	// IsShared is true if the templates read nothing of the template context. Then all template contexts have the same
	// result or error.
	IsShared bool
	// OnlyResources is true if the templates or the script read only the Resources of the template context. Then all
	// template contexts with the same Resources.Digest have the same result.
	OnlyResources bool
}

// ExpandTracked is Expand that also returns whether the result depends on the template context. It uses the cache
// Expansions.
func (c TemplateContext) ExpandTracked(description, text string) (Expanded, error) {
	if !strings.Contains(text, "{{") {
		return Expanded{Text: text, IsShared: true}, nil
	}
	if c.Expansions == nil {
		return c.expandTemplate(description, text)
	}
	// Template functions are deterministic (see functions), so the text determines a shared result. A compromised child
	// can return any result and IsShared, so the key has the scope. Errors contain the description and are not cached.
	key := fmt.Sprintf("%x %s", sha256.Sum256([]byte(text)), c.RestrictedNamespace)
	if known, ok := c.Expansions.Get(key); ok {
		return Expanded{Text: known, IsShared: true}, nil
	}
	expanded, err := c.expandTemplate(description, text)
	if err == nil && expanded.IsShared {
		c.Expansions.Put(key, expanded.Text, cache.MinSize+len(expanded.Text))
	}
	return expanded, err
}

// expandTemplate expands a template for this template context.
func (c TemplateContext) expandTemplate(description, text string) (Expanded, error) {
	var cluster map[string]any
	if c.Cluster != nil {
		var err error
		if cluster, err = c.Cluster(); err != nil {
			return Expanded{}, fmt.Errorf("expand %s: %w", description, err)
		}
	}
	encoded, err := json.Marshal(cluster)
	if err != nil {
		return Expanded{}, phase.TerminalErrorf("expand %s: %w", description, err)
	}
	return c.run(expandFunction, expansion{Description: description, Text: text, Cluster: encoded})
}

// run runs one of expansionFunctions in the sandbox, or in this process if there is none.
func (c TemplateContext) run(name string, e expansion) (Expanded, error) {
	e.Namespace, e.Name, e.Resources = c.Namespace, c.Name, c.Resources
	if c.Sandbox == nil {
		return expansionFunctions()[name](e, &currentLine{})
	}
	var expanded Expanded
	line := 0
	err := c.Sandbox.Call(sandbox.Call{
		Function: name, Scope: c.RestrictedNamespace, Key: fmt.Sprintf("%s %s %x", name, c.Profile, sha256.Sum256([]byte(e.Text))),
		Member: c.Namespace + "/" + c.Name, Limit: expandLimit, Input: e, Output: &expanded, Memory: c.Memory,
		Callback: func(input json.RawMessage) (any, error) { return nil, json.Unmarshal(input, &line) },
		Detail: func() string {
			if line == 0 {
				return ""
			}
			return fmt.Sprintf(" in line %d", line)
		},
	})
	if limit, ok := errors.AsType[*sandbox.LimitError](err); ok {
		return Expanded{}, fmt.Errorf("expand %s: %w", e.Description, limit)
	}
	return expanded, err
}

// expand expands a template in this process.
func (e expansion) expand(line *currentLine) (Expanded, error) {
	var cluster map[string]any
	if err := kubejson.Unmarshal(e.Cluster, &cluster); err != nil { // integers stay integers
		return Expanded{}, err
	}
	objects, err := e.Resources.decode()
	if err != nil {
		return Expanded{}, err
	}
	parsed, err := template.New(templateName).Option("missingkey=error").Funcs(functions()).Funcs(e.Resources.objectFunctions(objects)).Funcs(line.functions()).Parse(e.Text)
	if err != nil {
		return Expanded{IsShared: true}, phase.TerminalErrorf("parse %s: %s", e.Description, templateMessage(err))
	}
	var access dataAccess
	for _, defined := range parsed.Templates() {
		if defined.Tree != nil {
			access = access.or(accessFinder{isDotCounted: defined.Name() != templateName}.accessOf(defined.Root))
		}
	}
	expanded := Expanded{IsShared: access == dataAccess{}, OnlyResources: access == dataAccess{resources: true}}
	if err := line.addLineCalls(parsed, e.Text); err != nil {
		return Expanded{}, err
	}
	out := &boundedBuilder{left: maxExpanded}
	data := map[string]any{"Cluster": cluster, "ClusterNamespace": e.Namespace, "ClusterName": e.Name, resourcesField: objects}
	if err := parsed.Execute(out, data); err != nil {
		message := templateMessage(line.addLine(err))
		if access.resources && e.Resources.HasSecret {
			message = withoutValues(message)
		}
		return expanded, phase.TerminalErrorf("expand %s: %s", e.Description, message)
	}
	expanded.Text = out.String()
	return expanded, nil
}

// templateName is the name of all templates in errors of text/template. templateMessage removes it.
const templateName = "text"

// templateMessage returns the message of a template error, beginning with the line and the column.
func templateMessage(err error) string {
	return strings.NewReplacer("template: "+templateName+":", "line ", `executing "`+templateName+`" at`, "at").Replace(err.Error())
}

// withoutValues removes the parts of a template error's message that can contain a value.
func withoutValues(message string) string {
	for _, before := range []string{"error calling ", "range can't iterate over "} {
		if start := strings.Index(message, before); start >= 0 {
			name, _, _ := strings.Cut(message[start+len(before):], ":")
			if before != "error calling " {
				name = "this value"
			}
			return message[:start] + before + name + " (details are not shown, because the template can read a Secret)"
		}
	}
	return message
}

var errTooLarge = errors.New("the result is larger than 64 MiB")

// boundedBuilder is a strings.Builder that accepts at most left more bytes.
type boundedBuilder struct {
	strings.Builder
	left int
}

func (b *boundedBuilder) Write(p []byte) (int, error) {
	b.left -= len(p)
	if b.left < 0 {
		return 0, errTooLarge
	}
	return b.Builder.Write(p)
}
