package source

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"text/template"
	templateparse "text/template/parse"
)

// lineFunction is the name of the template function that currentLine adds.
const lineFunction = "towlineLine"

// currentLine is the line of the part of a template that is being executed. The error of a template that is stopped
// needs it, since text/template returns no line then. A part is an action outside all others, so that the line of a
// range is always the same.
type currentLine struct{ number atomic.Int64 }

// functions returns the function that sets the line.
func (l *currentLine) functions() template.FuncMap {
	return template.FuncMap{lineFunction: func(number int) string {
		l.number.Store(int64(number))
		return ""
	}}
}

// follow adds calls of lineFunction to a template with this text.
func (l *currentLine) follow(parsed *template.Template, text string) error {
	if parsed.Tree == nil || parsed.Root == nil {
		return nil // the text is a comment, or defines other templates only
	}
	var nodes []templateparse.Node
	line, end := 1, 0
	for i, node := range parsed.Root.Nodes {
		start := int(node.Position())
		passed := strings.Count(text[end:max(start, end)], "\n")
		line, end = line+passed, max(start, end)
		if i == 0 || passed > 0 {
			call, err := template.New("").Funcs(l.functions()).Parse(fmt.Sprintf("{{%s %d}}", lineFunction, line))
			if err != nil {
				return fmt.Errorf("follow the line of a template: %w", err)
			}
			nodes = append(nodes, call.Root.Nodes...)
		}
		nodes = append(nodes, node)
	}
	parsed.Root.Nodes = nodes
	return nil
}

// wrap adds the line to an error of text/template without a place.
func (l *currentLine) wrap(err error) error {
	if !errors.Is(err, errTooLarge) {
		return err
	}
	return fmt.Errorf("line %d: %w", l.number.Load(), err)
}
