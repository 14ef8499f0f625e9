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

// currentLine is the line of the top-level action of a template that is being executed. It completes the error of a
// template that is stopped, for which text/template reports no line. Inside of a range it is the line of the range, so
// that the message is always the same.
type currentLine struct{ number atomic.Int64 }

// functions returns lineFunction, which sets the line.
func (l *currentLine) functions() template.FuncMap {
	return template.FuncMap{lineFunction: func(number int) string {
		l.number.Store(int64(number))
		return ""
	}}
}

// addLineCalls inserts calls of lineFunction before the top-level actions of a template. text is the text of the
// template.
func (l *currentLine) addLineCalls(parsed *template.Template, text string) error {
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

// addLine adds the line to errTooLarge, for which text/template reports none.
func (l *currentLine) addLine(err error) error {
	if !errors.Is(err, errTooLarge) {
		return err
	}
	return fmt.Errorf("line %d: %w", l.number.Load(), err)
}
