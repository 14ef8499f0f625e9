package kube

import "strings"

// Truncate returns text with at most limit bytes. A shortened text ends in "…", and is cut at a whole character.
func Truncate(text string, limit int) string {
	const mark = "…"
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len(mark)], "") + mark
}
