package charts

import (
	"cmp"
	"fmt"
	"strings"
)

// row is the result for one chart in one mode. An empty field was not reached.
type row struct {
	chart, version, mode string

	objects, hooks, upgrade, uninstall, revisions, remainder string

	notes []string
}

// table has the results in Markdown.
type table struct{ rows strings.Builder }

// add adds the result of a comparison that has ended.
func (t *table) add(c *comparison) {
	if c.Failed() {
		c.row.notes = append([]string{"FAILED"}, c.row.notes...)
	}
	r := c.row
	cells := []string{
		r.chart, r.version, r.mode, r.objects, r.hooks, r.upgrade, r.uninstall, r.revisions, r.remainder, strings.Join(r.notes, "; "),
	}
	for i, cell := range cells {
		cells[i] = cmp.Or(cell, "-")
	}
	line := fmt.Sprintf("| %s |\n", strings.Join(cells, " | "))
	c.Log(line) // a table that is never printed loses nothing
	t.rows.WriteString(line)
}

func (t *table) String() string {
	const header = "| chart | version | mode | objects equal | hooks equal | upgrade | uninstall | revisions | remainder | notes |\n" +
		"|---|---|---|---|---|---|---|---|---|---|\n"
	return header + t.rows.String()
}
