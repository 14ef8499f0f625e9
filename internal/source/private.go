package source

import (
	"errors"
	"regexp"

	"github.com/towline/towline/internal/phase"
)

// place matches the parts of a message that have a position in a text. They come before all other parts.
var place = regexp.MustCompile(`(document \d+, )?line \d+(:\d+)?`)

// HideDetails returns an error about private text, for example of a Secret, without the details: messages of YAML,
// templates and patches have parts of the text, and more users can read the status of a summary than Secrets. The
// result names only description and the place. Other errors than phase.Invalid have no such parts, and are returned.
func HideDetails(description string, err error) error {
	if _, isInvalid := errors.AsType[phase.Invalid](err); !isInvalid {
		return err
	}
	if found := place.FindString(err.Error()); found != "" {
		description += ", " + found
	}
	return phase.Invalidf("%s: it is invalid (details are not shown, because they can have text of a Secret, or of a source that needs one)", description)
}

// WithResultsOf returns c with Sensitive set if the results of its templates or scripts can have text of a Secret: if
// subject reads one.
func (c Content) WithResultsOf(subject Subject) Content {
	c.Sensitive = c.Sensitive || subject.Resources.HasSecret && (c.Template || c.Lua)
	return c
}
