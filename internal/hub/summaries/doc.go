// Package summaries brings what one profile wants to one cluster: render, deliver, fold the report.
package summaries
