package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// selectPrunable returns the entries that are pruned although the run has failures: with ContinueOnError, those of Helm
// releases and referenced objects (Entry.Origin) without a failure. Entries without an origin could belong to an origin
// with a failure, so they wait. Namespaces and CustomResourceDefinitions wait, too, because their deletion deletes
// other objects.
func (p *applyRun) selectPrunable(groups [][]inventory.Entry) [][]inventory.Entry {
	if !p.bundle.Options.ContinueOnError || slices.ContainsFunc(p.failures, isBundleFailure) {
		return nil
	}
	incomplete := map[string]bool{"": true} // by origin
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
	mustWait := func(entry inventory.Entry) bool {
		return incomplete[entry.Origin] || rankOf(entry.Ref.GVK().GroupKind()) <= rankCRD
	}
	var safe [][]inventory.Entry
	for _, entries := range groups {
		if entries = slices.DeleteFunc(slices.Clone(entries), mustWait); len(entries) > 0 {
			safe = append(safe, entries)
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
		if !p.keep[key] && !tried[key] {
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
