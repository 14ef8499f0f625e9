package check

import (
	"strings"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/pm"
)

const (
	// patternLimit is how long a pattern may be, in bytes.
	patternLimit = 1024
	// effortLimit bounds the steps of one pattern match, which the interpreter cannot be stopped in: one takes some ten nanoseconds.
	effortLimit = 5e7
	// findingsLimit bounds the memory that all places take where a pattern matches, in bytes; one takes about findingSize, and captureSize
	// for each capture.
	findingsLimit, findingSize, captureSize = 32 << 20, 96, 16
	// copyLimit bounds how many bytes are copied to replace matches: each replacement copies the whole text.
	copyLimit = 4e9
)

// limitMatch refuses a pattern that might take for ever over its text.
func limitMatch(state *lua.LState) {
	subject, pattern := state.CheckString(1), state.CheckString(2)
	if len(pattern) > patternLimit {
		state.RaiseError("the pattern is longer than %d bytes", patternLimit)
	}
	if effort(subject, pattern) > effortLimit {
		state.RaiseError("the pattern %q may take too long over a text of %d bytes", pattern, len(subject))
	}
}

// limitMatches refuses a pattern that might match at too many places.
func limitMatches(state *lua.LState) {
	limitMatch(state)
	subject, pattern := state.CheckString(1), state.CheckString(2)
	if (len(subject)+1)*(findingSize+captureSize*strings.Count(pattern, "(")) > findingsLimit {
		state.RaiseError("the pattern %q may match too often in a text of %d bytes", pattern, len(subject))
	}
}

// limitReplacing refuses to replace so much in so long a text that copying it would take for ever.
func limitReplacing(state *lua.LState) {
	limitMatches(state)
	subject, replacement := float64(len(state.CheckString(1))), float64(len(state.CheckString(3)))
	matches := subject + 1
	if most := state.OptInt(4, -1); most >= 0 {
		matches = min(matches, float64(most))
	}
	// A capture in the replacement is at most all of the text.
	if matches*(subject+(matches+subject)*replacement) > copyLimit {
		state.RaiseError("replacing %q may take too long in a text of %d bytes", state.CheckString(2), len(state.CheckString(1)))
	}
}

// effort returns how many steps a match may take at most. Each place to start at multiplies them, and each repetition by the ways to end it,
// of which there are no more than the longest run of what it repeats; each step may look at the whole pattern.
func effort(subject, pattern string) float64 {
	steps := float64(len(pattern) + 1)
	rest, anchored := strings.CutPrefix(pattern, "^")
	if !anchored {
		steps *= float64(len(subject) + 1)
	}
	scans, previous := false, "" // what the next sign of repetition would repeat
	for rest != "" {
		if previous != "" && strings.IndexByte("*+-?", rest[0]) >= 0 {
			steps *= ways(subject, previous, rest[0])
			previous, rest = "", rest[1:]
			continue
		}
		length, scan := partLength(rest)
		if previous = rest[:length]; scan || previous == "(" || previous == ")" {
			previous = ""
		}
		scans, rest = scans || scan, rest[length:]
	}
	if scans {
		steps *= float64(len(subject) + 1)
	}
	return steps
}

// ways is how many ends the repetition of item by sign can have.
func ways(subject, item string, sign byte) float64 {
	if sign == '?' {
		return 2
	}
	return float64(longestRun(subject, item) + 1)
}

// partLength is the length of what pattern begins with. A scan is no item: it looks at any part of the text, for balanced text, or for a
// capture once more.
func partLength(pattern string) (length int, scan bool) {
	if pattern[0] == '%' && len(pattern) > 1 {
		switch next := pattern[1]; {
		case next == 'b':
			return min(4, len(pattern)), true
		case '0' <= next && next <= '9':
			return 2, true
		}
	}
	return itemLength(pattern), false
}

// itemLength is the length of what pattern begins with and what matches one byte.
func itemLength(pattern string) int {
	switch pattern[0] {
	case '%':
		return min(2, len(pattern))
	case '[':
	default:
		return 1
	}
	at, members := 1, 0
	if at < len(pattern) && pattern[at] == '^' {
		at++
	}
	for at < len(pattern) {
		switch {
		case pattern[at] == ']' && members > 0:
			return at + 1
		case pattern[at] == '%':
			at++
		}
		at++
		members++
	}
	return len(pattern)
}

// longestRun is the longest part of subject that consists of what item matches.
func longestRun(subject, item string) int {
	var matches [256]bool
	switch {
	case item == ".":
		return len(subject)
	case len(item) == 1:
		matches[item[0]] = true
	default:
		every := make([]byte, len(matches))
		for i := range every {
			every[i] = byte(i)
		}
		found, err := pm.Find(item, every, 0, len(every))
		if err != nil {
			return len(subject)
		}
		for _, match := range found {
			matches[match.Capture(0)] = true
		}
	}
	longest, run := 0, 0
	for i := range len(subject) {
		run++
		if !matches[subject[i]] {
			run = 0
		}
		longest = max(longest, run)
	}
	return longest
}
