package script

import (
	"strings"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/pm"
)

const (
	// maxPatternLength is the maximum length of a pattern in bytes.
	maxPatternLength = 1024
	// maxMatchCost limits the matchCost of a pattern. A unit takes about ten nanoseconds.
	maxMatchCost = 5e7
	// maxMatchMemory limits the bytes of all matches of one call. A match takes about matchSize bytes, and captureSize
	// bytes for each capture.
	maxMatchMemory, matchSize, captureSize = 32 << 20, 96, 16
	// maxCopiedBytes limits the bytes that string.gsub copies. It copies the whole text for each match.
	maxCopiedBytes = 4e9
)

// checkMatch raises an error if matching the text (argument 1) with the pattern (argument 2) could take too long.
func checkMatch(state *lua.LState) {
	subject, pattern := state.CheckString(1), state.CheckString(2)
	if len(pattern) > maxPatternLength {
		state.RaiseError("the pattern is longer than %d bytes", maxPatternLength)
	}
	if matchCost(subject, pattern) > maxMatchCost {
		state.RaiseError("the pattern %q may take too long over a text of %d bytes", pattern, len(subject))
	}
}

// checkMatches is checkMatch for all matches of a text. It also raises an error if they could take too much memory.
func checkMatches(state *lua.LState) {
	checkMatch(state)
	subject, pattern := state.CheckString(1), state.CheckString(2)
	if (len(subject)+1)*(matchSize+captureSize*strings.Count(pattern, "(")) > maxMatchMemory {
		state.RaiseError("the pattern %q may match too often in a text of %d bytes", pattern, len(subject))
	}
}

// checkReplace is checkMatches for string.gsub with a text as the replacement (argument 3). It also raises an error if
// the call could copy too many bytes.
func checkReplace(state *lua.LState) {
	checkMatches(state)
	subject, replacement := float64(len(state.CheckString(1))), float64(len(state.CheckString(3)))
	matches := subject + 1
	if limit := state.OptInt(4, -1); limit >= 0 {
		matches = min(matches, float64(limit))
	}
	// Each capture in the replacement, such as %1, is at most as long as the whole text.
	if matches*(subject+(matches+subject)*replacement) > maxCopiedBytes {
		state.RaiseError("replacing %q may take too long in a text of %d bytes", state.CheckString(2), len(state.CheckString(1)))
	}
}

// replaceMatches is string.gsub with a table or a function as the replacement. It accounts for each replacement, and
// copies the text once.
func (s *Script) replaceMatches(state *lua.LState) int {
	checkMatches(state)
	subject := state.CheckString(1)
	matches, err := pm.Find(state.CheckString(2), []byte(subject), 0, state.OptInt(4, -1))
	if err != nil {
		state.RaiseError("%s", err)
	}
	var out strings.Builder
	end := 0
	for _, match := range matches {
		replacement := s.replacementOf(state, match, subject)
		s.accountText(state, match.Capture(0)-end+len(replacement))
		out.WriteString(subject[end:match.Capture(0)])
		out.WriteString(replacement)
		end = match.Capture(1)
	}
	s.accountText(state, len(subject)-end)
	out.WriteString(subject[end:])
	state.Push(lua.LString(out.String()))
	state.Push(lua.LNumber(len(matches)))
	return 2
}

// replacementOf returns the replacement of a match: the value for the first capture in a table, or the result of a
// function that gets all captures. If it is nil or false, the matched text stays. Without captures in the pattern, the
// matched text is the only capture.
func (s *Script) replacementOf(state *lua.LState, match *pm.MatchData, subject string) string {
	captures := []lua.LValue{lua.LString(subject[match.Capture(0):match.Capture(1)])}
	matched := captures[0].String()
	if match.CaptureLength() > 2 {
		captures = nil
	}
	for i := 2; i < match.CaptureLength(); i += 2 {
		if match.IsPosCapture(i) {
			captures = append(captures, lua.LNumber(match.Capture(i)))
		} else {
			captures = append(captures, lua.LString(subject[match.Capture(i):match.Capture(i+1)]))
		}
	}
	var value lua.LValue
	if table, ok := state.Get(3).(*lua.LTable); ok {
		value = state.GetTable(table, captures[0])
	} else {
		state.Push(state.Get(3))
		for _, capture := range captures {
			state.Push(capture)
		}
		state.Call(len(captures), 1)
		value = state.Get(-1)
		state.Pop(1)
	}
	if lua.LVIsFalse(value) {
		return matched
	}
	if !lua.LVCanConvToString(value) {
		state.RaiseError("invalid replacement value (a %s)", value.Type())
	}
	return value.String()
}

// matchCost returns the maximum cost of a match: the product of the length of the pattern, the number of start
// positions, the number of possible ends of each repetition, and the length of the subject if the pattern has a scan.
func matchCost(subject, pattern string) float64 {
	cost := float64(len(pattern) + 1)
	rest, anchored := strings.CutPrefix(pattern, "^")
	if !anchored {
		cost *= float64(len(subject) + 1)
	}
	hasScan, previous := false, "" // previous is the item that the next repetition sign applies to
	for rest != "" {
		if previous != "" && strings.IndexByte("*+-?", rest[0]) >= 0 {
			cost *= repetitionEnds(subject, previous, rest[0])
			previous, rest = "", rest[1:]
			continue
		}
		length, isScan := partLength(rest)
		if previous = rest[:length]; isScan || previous == "(" || previous == ")" {
			previous = ""
		}
		hasScan, rest = hasScan || isScan, rest[length:]
	}
	if hasScan {
		cost *= float64(len(subject) + 1)
	}
	return cost
}

// repetitionEnds returns the maximum number of possible ends of an item with the repetition sign *, +, - or ?.
func repetitionEnds(subject, item string, sign byte) float64 {
	if sign == '?' {
		return 2
	}
	return float64(longestRun(subject, item) + 1)
}

// partLength returns the length of the first part of pattern. A part is an item or a scan, which matches a text of any
// length and cannot be repeated: balanced text (%b) and back references (%1).
func partLength(pattern string) (length int, isScan bool) {
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

// itemLength returns the length of the first item of pattern.
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

// longestRun returns the length of the longest part of subject whose bytes all match item.
func longestRun(subject, item string) int {
	var matches [256]bool
	switch {
	case item == ".":
		return len(subject)
	case len(item) == 1:
		matches[item[0]] = true
	default:
		allBytes := make([]byte, len(matches))
		for i := range allBytes {
			allBytes[i] = byte(i)
		}
		found, err := pm.Find(item, allBytes, 0, len(allBytes))
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
