package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// selectPrunable returns the entries that are pruned after a failure, see bundle.Options.ContinueOnError. It omits
// entries without an origin. It also omits Namespaces and CustomResourceDefinitions, whose deletion deletes other
// objects.
func (p *applyRun) selectPrunable(groups [][]inventory.Entry) [][]inventory.Entry {
	if !p.bundle.Options.ContinueOnError || slices.ContainsFunc(p.failures, isBundleFailure) {
		return nil
	}
	incomplete := map[string]bool{"": true}
	for _, err := range p.failures {
		if failure, ok := errors.AsType[*releaseFailure](err); ok {
			incomplete[originOfRelease(failure.key.String())] = true
		}
	}
	for i := range p.next.Releases {
		if s := &p.next.Releases[i]; s.Operation == inventory.Uninstalling {
			incomplete[originOfRelease(s.Key().String())] = true // its hooks come first
		}
	}
	missing := map[kube.Ref]bool{}
	for _, change := range p.changes {
		if change.Action == bundle.Failed || change.Action == bundle.Skipped {
			missing[change.Ref.Key()] = true
		}
	}
	for _, t := range p.targets {
		if missing[t.key()] {
			incomplete[t.origin] = true
		}
	}
	mustWait := func(item inventory.Entry) bool {
		return incomplete[item.Origin] || rankOf(item.Ref.GVK().GroupKind()) <= rankCRD
	}
	var safe [][]inventory.Entry
	for _, items := range groups {
		if items = slices.DeleteFunc(slices.Clone(items), mustWait); len(items) > 0 {
			safe = append(safe, items)
		}
	}
	return safe
}

// isBundleFailure returns whether a failure concerns the whole bundle, and not one object or release.
func isBundleFailure(err error) bool {
	_, isObject := errors.AsType[*objectError](err)
	_, isRelease := errors.AsType[*releaseFailure](err)
	return !isObject && !isRelease
}

// pendingPruneMessage returns the end of the message of a failed run: the number of objects that are not pruned yet.
func (p *applyRun) pendingPruneMessage() string {
	tried := map[kube.Ref]bool{}
	for _, change := range p.changes {
		tried[change.Ref.Key()] = true
	}
	waiting := 0
	for key := range p.next.Entries {
		if !p.retained[key] && !tried[key] {
			waiting++
		}
	}
	switch waiting {
	case 0:
		return ""
	case 1:
		return "; 1 object is deleted after that"
	}
	return fmt.Sprintf("; %d objects are deleted after that", waiting)
}
