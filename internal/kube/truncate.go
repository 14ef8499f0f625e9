package kube

import "strings"

// MaxMessage limits a message in the status of an object, in bytes: errors can have texts of users and of servers. The
// API server accepts 32,768 characters in a condition.
const MaxMessage = 8 << 10

// Truncate returns text with at most limit bytes. A shortened text ends in "…", and is cut at a whole character. Bytes
// that are not UTF-8 are replaced as an API server does, so that a stored text is the same.
func Truncate(text string, limit int) string {
	const mark = "…"
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len(mark)], "") + mark
}

// OneLine returns text on one line: messages of libraries quote their input, which can have line breaks.
func OneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
