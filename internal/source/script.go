package source

import (
	"context"
	"errors"

	lua "github.com/yuin/gopher-lua"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/script"
)

// RunScript runs a script in Lua. The script defines a function evaluate. Its argument, which is also the global
// variable resources, is a table of the template context's Resources by identifier. It returns a table whose field
// resources is the text of the manifests. Errors are phase.TerminalError and begin with description, or are a
// sandbox.LimitError.
func (c TemplateContext) RunScript(description, text string) (Expanded, error) {
	return c.run(scriptFunction, expansion{Description: description, Text: text})
}

// runScript runs a script in this process.
func (e expansion) runScript(*currentLine) (Expanded, error) {
	expanded := Expanded{OnlyResources: true}
	objects, err := e.Resources.decode()
	if err != nil {
		return expanded, err
	}
	running, err := script.NewForContent(context.Background(), e.Text) // it has a time limit
	if err != nil {
		return expanded, e.scriptError(err)
	}
	defer running.Close()
	result, err := running.Evaluate("resources", running.ToLua(objects))
	if err != nil {
		return expanded, e.scriptError(err)
	}
	text, ok := result.RawGetString("resources").(lua.LString)
	if !ok {
		return expanded, phase.TerminalErrorf("run %s: the field resources of the table that evaluate returns is not a text", e.Description)
	}
	expanded.Text = string(text)
	return expanded, nil
}

// scriptError returns the error of a script, without its message if the script can write data of a Secret into it.
func (e expansion) scriptError(err error) error {
	if e.Resources.HasSecret && errors.Is(err, script.ErrInvalid) {
		return phase.TerminalErrorf("run %s: the script failed (details are not shown, because the script can read a Secret)", e.Description)
	}
	return phase.TerminalErrorf("run %s: %w", e.Description, err)
}
