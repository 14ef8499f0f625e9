// Package release makes the linked-in Kubernetes code say its true version, which it learns from the modules it was built from.
package release

import (
	"fmt"
	"runtime/debug"
	"strings"
	_ "unsafe" // for go:linkname

	"k8s.io/component-base/version"
)

// gitVersion is a placeholder that upstream's build scripts replace by linker flags. Reaching it from here instead keeps the number in
// go.mod alone; version.SetDynamicVersion refuses whatever differs from it.
//
//nolint:gochecknoglobals // upstream's, not ours
//go:linkname gitVersion k8s.io/component-base/version.gitVersion
var gitVersion string

// Set makes version.Get return the release of the k8s.io modules in this binary. Call it first thing.
func Set() error {
	number, err := linked("k8s.io/component-base")
	if err != nil {
		return err
	}
	gitVersion = number
	if err := version.SetDynamicVersion(number); err != nil {
		return fmt.Errorf("set Kubernetes version: %w", err)
	}
	return nil
}

// linked returns the release of Kubernetes that a staging module belongs to: v0.X.Y is part of v1.X.Y.
func linked(module string) (string, error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "", fmt.Errorf("this binary does not say which modules it was built from")
	}
	for _, dep := range info.Deps {
		if dep.Path != module {
			continue
		}
		if dep.Replace != nil {
			dep = dep.Replace
		}
		if rest, ok := strings.CutPrefix(dep.Version, "v0."); ok {
			return "v1." + rest, nil
		}
		return "", fmt.Errorf("%s has the unexpected version %q", module, dep.Version)
	}
	return "", fmt.Errorf("this binary was built without %s", module)
}
