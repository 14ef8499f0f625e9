package engine

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// removal is the result of removing one object.
type removal struct {
	inventory.Entry
	action   pruneAction
	reason   string
	location objectLocation
	existing *live // nil if it did not exist
	err      error
}

// removeOptions change how objects are removed.
type removeOptions struct {
	// instead maps decisions to other decisions that replace them.
	instead map[pruneAction]pruneAction
	// propagation is the policy for dependents. Default: Background.
	propagation metav1.DeletionPropagation
	// account is the "namespace/name" of the ServiceAccount that has applied the objects, "" for this engine.
	account string
}

// removeRank removes those objects of one rank that the bundle still owns. The errors of objects
// are in the removals. It returns an error only if it has removed nothing.
func (e *Engine) removeRank(ctx context.Context, id bundle.ID, entries []inventory.Entry, options removeOptions) ([]removal, error) {
	removals := make([]removal, len(entries))
	locations, found, err := e.readEntries(ctx, entries)
	if err != nil {
		return nil, err
	}
	var work errgroup.Group
	work.SetLimit(maxConcurrent)
	var mu sync.Mutex // guards removals
	for i, entry := range entries {
		existing := found[entry.Ref.Key()]
		action, reason := decidePrune(entry, existing, id, e.ownerScope)
		if instead, ok := options.instead[action]; ok {
			action, reason = instead, ""
		}
		work.Go(func() error {
			var err error
			switch action {
			case pruneDelete:
				err = removeAs(ctx, options.account, entry.IsProvenApplied(), func(ctx context.Context) error {
					return e.member.deleteWith(ctx, locations[i], existing.UID, cmp.Or(options.propagation, metav1.DeletePropagationBackground))
				})
			case pruneOrphan:
				err = removeAs(ctx, options.account, true, func(ctx context.Context) error {
					return e.member.removeMarks(ctx, locations[i], existing)
				})
			case pruneForget, pruneAwait:
			}
			mu.Lock()
			defer mu.Unlock()
			removals[i] = removal{Entry: entry, action: action, reason: reason, location: locations[i], existing: existing, err: err}
			return nil
		})
	}
	// Failures of objects are in removals, not errors of the group.
	_ = work.Wait()
	return removals, nil
}

// readEntries reads the metadata of the objects of entries. Objects that do not exist are not in the map.
func (e *Engine) readEntries(ctx context.Context, entries []inventory.Entry) ([]objectLocation, map[kube.Ref]*live, error) {
	locations := make([]objectLocation, len(entries))
	for i, entry := range entries {
		resource, err := e.locate(entry.Ref)
		if err != nil {
			return nil, nil, err
		}
		locations[i] = objectLocation{key: entry.Ref.Key(), resource: resource}
	}
	found, err := e.member.readMetadata(ctx, locations)
	return locations, found, err
}

// locate returns the resource with which an object of a record is read. It is zero if the kind no longer exists: then
// its objects do not exist either.
func (e *Engine) locate(ref kube.Ref) (kube.Resource, error) {
	resource, err := e.member.mapper.ResourceInAnyVersion(ref.GVK())
	if err == nil || !meta.IsNoMatchError(err) {
		return resource, err
	}
	gone, err := e.member.mapper.IsNoLongerServed(ref.GVK())
	if err != nil {
		return kube.Resource{}, err
	}
	if gone {
		return kube.Resource{}, nil
	}
	e.member.mapper.Reset()
	return e.member.mapper.ResourceInAnyVersion(ref.GVK())
}

// prune removes the objects in the inventory that the bundle lacks, the highest rank first. Objects that are not
// removed, because of an error or of other failures, stay in the inventory.
func (p *applyRun) prune(ctx context.Context) error {
	groups := toPrune(p.prior.Entries, p.keep)
	if len(p.failures) > 0 {
		if groups = p.selectPrunable(groups); len(groups) == 0 {
			return nil
		}
	} else if err := p.forgetMissingKept(ctx); err != nil {
		return err
	}
	return p.pruneGroups(ctx, groups)
}

// pruneGroups removes objects that the bundle lacks, group by group.
func (p *applyRun) pruneGroups(ctx context.Context, groups [][]inventory.Entry) error {
	groups, err := p.engine.orderRoles(ctx, groups)
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	for i, entries := range groups {
		proceed, err := p.pruneGroup(ctx, entries)
		if err != nil {
			p.keepEntries(groups[i:])
			return fmt.Errorf("prune: %w", err)
		}
		if !proceed {
			p.keepEntries(groups[i+1:])
			return nil
		}
	}
	return nil
}

// keepEntries keeps the entries of groups that are not pruned now, so that the next run prunes them. orderRoles has put
// ClusterRoles in two groups: those that are already deleted stay in the inventory, too, for the last group.
func (p *applyRun) keepEntries(groups [][]inventory.Entry) {
	for _, entry := range slices.Concat(groups...) {
		p.next.Entries[entry.Ref.Key()] = entry
	}
}

// pruneGroup removes objects. proceed is true if the next group may be removed.
func (p *applyRun) pruneGroup(ctx context.Context, entries []inventory.Entry) (proceed bool, err error) {
	removals, err := p.engine.removeRank(ctx, p.bundle.ID, entries, removeOptions{account: p.bundle.Options.ServiceAccount})
	if err != nil {
		return false, err
	}
	// An aggregated ClusterRole must be deleted before the roles that it aggregates, which are in a later group.
	aggregated := slices.DeleteFunc(slices.Clone(removals), func(r removal) bool { return !r.existing.isAggregated() })
	left, err := p.engine.findRemaining(ctx, aggregated)
	if err != nil {
		return false, err
	}
	for _, r := range removals {
		if left[r.Ref.Key()] && r.err == nil {
			r.err = errAggregating
		}
		p.recordRemoval(r)
	}
	return len(left) == 0 && (len(p.failures) == 0 || p.bundle.Options.ContinueOnError), nil
}

// recordRemoval adds a removal to the changes and failures of the run.
func (p *applyRun) recordRemoval(r removal) {
	if _, ok := p.next.Entries[r.Ref.Key()]; !ok && r.err == nil {
		return // a ClusterRole that is also in an earlier group of orderRoles
	}
	change := bundle.Change{Ref: r.Ref, Action: bundle.Deleted}
	switch {
	case r.err != nil:
		change.Action, change.Reason = bundle.Failed, r.err.Error()
		p.failures = append(p.failures, &objectError{ref: r.Ref, err: fmt.Errorf("delete it: %w", r.err)})
	case r.reason != "":
		change.Action, change.Reason = bundle.Skipped, r.reason
	case r.action == pruneForget:
		change.Reason = "it no longer existed"
	}
	if r.err == nil {
		delete(p.next.Entries, r.Ref.Key())
	} else {
		p.next.Entries[r.Ref.Key()] = r.Entry
	}
	p.changes = append(p.changes, change)
}

// toPrune returns the entries that are not in keep, in groups of equal rank, the highest rank first: the order of
// removal.
func toPrune(entries map[kube.Ref]inventory.Entry, keep map[kube.Ref]bool) [][]inventory.Entry {
	var sorted []inventory.Entry
	for key, entry := range entries {
		if !keep[key] {
			sorted = append(sorted, entry)
		}
	}
	slices.SortFunc(sorted, func(a, b inventory.Entry) int {
		return cmp.Or(cmp.Compare(rankOf(b.Ref.GVK().GroupKind()), rankOf(a.Ref.GVK().GroupKind())), kube.CompareRefs(a.Ref, b.Ref))
	})
	var groups [][]inventory.Entry
	for i, entry := range sorted {
		if i == 0 || rankOf(entry.Ref.GVK().GroupKind()) != rankOf(sorted[i-1].Ref.GVK().GroupKind()) {
			groups = append(groups, nil)
		}
		groups[len(groups)-1] = append(groups[len(groups)-1], entry)
	}
	return groups
}
