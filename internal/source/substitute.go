package source

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"text/template"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
)

// substituteFunction is the key of substituteInSandbox in SandboxFunctions.
const substituteFunction = "substitute"

// Text is a template with its description for errors.
type Text struct{ Description, Text string }

// substitution is the input of substituteFunction.
type substitution struct {
	Texts  []Text
	Values map[string]string
}

// Substitute expands texts with values as their data: {{ .key }} is the value of a key. A missing key is an error. The
// functions, the limits and the errors are the same as in Expand. The result has the order of texts.
func (c TemplateContext) Substitute(texts []Text, values map[string]string) ([]string, error) {
	input := substitution{Texts: texts, Values: values}
	if c.Sandbox == nil {
		return input.expand()
	}
	raw, err := json.Marshal(texts)
	if err != nil {
		return nil, phase.TerminalError{Err: err}
	}
	var expanded []string
	err = c.Sandbox.Call(sandbox.Call{
		Function: substituteFunction, Scope: c.RestrictedNamespace, Key: fmt.Sprintf("%s %s %x", substituteFunction, c.Profile, sha256.Sum256(raw)),
		Member: c.Namespace + "/" + c.Name, Limit: expandLimit, Input: input, Output: &expanded, Memory: c.Memory,
	})
	if err == nil && len(expanded) != len(texts) {
		err = fmt.Errorf("the sandbox returned %d of %d texts", len(expanded), len(texts))
	}
	return expanded, err
}

func substituteInSandbox(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
	var s substitution
	if err := json.Unmarshal(input, &s); err != nil {
		return nil, err
	}
	return s.expand()
}

func (s substitution) expand() ([]string, error) {
	expanded := make([]string, 0, len(s.Texts))
	left := maxExpanded
	for _, text := range s.Texts {
		parsed, err := template.New(templateName).Option("missingkey=error").Funcs(functions()).Parse(text.Text)
		if err != nil {
			return nil, phase.TerminalErrorf("parse %s: %s", text.Description, templateMessage(err))
		}
		out := &boundedBuilder{left: left}
		if err := parsed.Execute(out, s.Values); err != nil {
			return nil, phase.TerminalErrorf("expand %s: %s", text.Description, withoutValues(templateMessage(err)))
		}
		left = out.left
		expanded = append(expanded, out.String())
	}
	return expanded, nil
}
