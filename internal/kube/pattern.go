package kube

import (
	"fmt"
	"regexp"
	"regexp/syntax"
)

// maxPatternSize is the maximum size of a regular expression of a user, in characters and operators after repetitions
// are written out. Each of them takes about 256 bytes of memory to compile, and package regexp allows 3 million.
const maxPatternSize = 10_000

// CompilePattern compiles a regular expression of a user, which matches whole texts only. It returns an error for one
// that is invalid, or that takes too much memory, such as the repetition of a long text.
func CompilePattern(text string) (*regexp.Regexp, error) {
	parsed, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return nil, err
	}
	if size := patternSize(parsed); size > maxPatternSize {
		return nil, fmt.Errorf("the regular expression has %d characters with its repetitions written out, at most %d are allowed", size, maxPatternSize)
	}
	return regexp.Compile("^(?:" + text + ")$")
}

func patternSize(re *syntax.Regexp) int {
	size := 1
	for _, sub := range re.Sub {
		size += patternSize(sub)
	}
	switch re.Op { //nolint:exhaustive // each other operator is one instruction
	case syntax.OpLiteral:
		return len(re.Rune)
	case syntax.OpRepeat:
		return size * max(re.Min, re.Max, 1)
	}
	return size
}
