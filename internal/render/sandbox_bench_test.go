package render_test

import (
	"fmt"
	"os"
	"testing"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// BenchmarkExpand expands a small template in an idle child, and in a child that is started for another namespace.
func BenchmarkExpand(b *testing.B) {
	for name, namespaces := range map[string]int{"idle": 1, "started": 1000} {
		b.Run(name, func(b *testing.B) {
			children := sandbox.NewPool([]string{os.Args[0], serve}, clock.RealClock{})
			for i := 0; b.Loop(); i++ {
				tmplCtx := source.TemplateContext{Sandbox: children, Namespace: "ns", Name: "one", RestrictedNamespace: fmt.Sprint(i % namespaces)}
				if _, err := tmplCtx.Expand("text", fmt.Sprintf("{{ upper %q }}", fmt.Sprint("text ", i))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
