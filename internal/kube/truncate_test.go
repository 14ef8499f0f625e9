package kube_test

import (
	"strings"
	"testing"

	"github.com/towline/towline/internal/kube"
)

func TestTruncate(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                      "",
		"ten bytes.":            "ten bytes.",
		"eleven bytes":          "eleven …",
		strings.Repeat("é", 10): "ééé…",
	} {
		if got := kube.Truncate(text, 10); got != want || len(got) > 10 {
			t.Errorf("Truncate(%q) = %q, want %q", text, got, want)
		}
	}
}
