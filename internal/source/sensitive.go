package source

import (
	"errors"
	"regexp"

	"github.com/towline/towline/internal/phase"
)

// position matches positions in a text. The first match in a message is before all quoted text.
var position = regexp.MustCompile(`(document \d+, )?line \d+(:\d+)?`)

// HideDetails returns an error about private text, for example of a Secret, without the details: messages of YAML,
// templates and patches have parts of the text, and more users can read the status of a summary than Secrets. The
// result contains only description and the position. An error that is not phase.TerminalError has no such parts and is
// returned unchanged.
func HideDetails(description string, err error) error {
	if _, isInvalid := errors.AsType[phase.TerminalError](err); !isInvalid {
		return err
	}
	if found := position.FindString(err.Error()); found != "" {
		description += ", " + found
	}
	return phase.TerminalErrorf("%s: it is invalid (details are not shown, because they can have text of a Secret, or of a source that needs one)", description)
}

// WithSensitivityOf returns c, with Sensitive set also if its templates or scripts can read a Secret in
// tmplCtx.Resources.
func (c Content) WithSensitivityOf(tmplCtx TemplateContext) Content {
	c.Sensitive = c.Sensitive || tmplCtx.Resources.HasSecret && (c.Template || c.Lua)
	return c
}
