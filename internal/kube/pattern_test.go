package kube_test

import (
	"strings"
	"testing"

	"github.com/towline/towline/internal/kube"
)

func TestCompilePattern(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 2000)
	for _, pattern := range []string{"", "web-.*", "(?i)deployment|statefulset", "[a-z]{1,63}", "a{1000}", `\p{L}+`, long} {
		if _, err := kube.CompilePattern(pattern); err != nil {
			t.Errorf("%.20s: %v", pattern, err)
		}
	}
	if pattern, err := kube.CompilePattern("a|b"); err != nil || !pattern.MatchString("b") || pattern.MatchString("ab") {
		t.Errorf("a|b: %v, %v", pattern, err)
	}
	for pattern, want := range map[string]string{
		"(":                       "missing closing )",
		"(" + long + "){1000}":    "at most 10000 are allowed",
		"(" + long + "){6,}":      "at most 10000 are allowed",
		"((abcdefgh){10}b){0,90}": "",
		"((abcdefghijk){10}){99}": "at most 10000 are allowed",
	} {
		_, err := kube.CompilePattern(pattern)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.20s: got %v, want %q", pattern, err, want)
		}
	}
}
