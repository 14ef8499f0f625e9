package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// printTable prints a table with borders. The first line is the header, whose cells are centered.
func printTable(out io.Writer, lines [][]string) error {
	widths := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, cell := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var text strings.Builder
	border := func() {
		for _, width := range widths {
			text.WriteString("+" + strings.Repeat("-", width+2))
		}
		text.WriteString("+\n")
	}
	border()
	for i, line := range lines {
		for column, cell := range line {
			padding := widths[column] - utf8.RuneCountInString(cell)
			left := 0
			if i == 0 {
				left = padding / 2
			}
			fmt.Fprintf(&text, "| %s%s%s ", strings.Repeat(" ", left), cell, strings.Repeat(" ", padding-left))
		}
		text.WriteString("|\n")
		if i == 0 {
			border()
		}
	}
	border()
	if _, err := io.WriteString(out, text.String()); err != nil {
		return fmt.Errorf("print table: %w", err)
	}
	return nil
}
