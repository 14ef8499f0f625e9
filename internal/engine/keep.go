package engine

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// maxKeptListed is how many kept objects a message lists.
const maxKeptListed = 10

// retain computes the objects that prune must not delete: those in the bundle, those marked Kept and, with KeepObjects,
// all others in the inventory, which it marks Kept.
func (p *applyRun) retain() {
	p.retained = maps.Clone(p.desired)
	for key, item := range p.next.Entries {
		if p.desired[key] || (!item.Kept && !p.bundle.KeepObjects) {
			continue
		}
		item.Kept = true
		p.next.Entries[key] = item
		p.retained[key] = true
	}
}

// forgetGone removes Kept entries from the inventory whose objects no longer exist.
func (p *applyRun) forgetGone(ctx context.Context) error {
	var locations []objectLocation
	for key, item := range p.next.Entries {
		if !item.Kept {
			continue
		}
		resource, err := p.engine.locate(item.Ref)
		if err != nil {
			return fmt.Errorf("look for kept objects: %w", err)
		}
		locations = append(locations, objectLocation{key: key, resource: resource})
	}
	if len(locations) == 0 {
		return nil
	}
	found, err := p.engine.member.observe(ctx, locations)
	if err != nil {
		return fmt.Errorf("look for kept objects: %w", err)
	}
	for _, s := range locations {
		if found[s.key] == nil {
			delete(p.next.Entries, s.key)
		}
	}
	return nil
}

// keptMessage lists the objects that are kept although the bundle lacks them, "" if there are none.
func keptMessage(r *inventory.Record) string {
	var names []string
	for _, item := range r.SortedEntries() {
		if item.Kept {
			names = append(names, item.Ref.String())
		}
	}
	if len(names) == 0 {
		return ""
	}
	if more := len(names) - maxKeptListed; more > 0 {
		names = append(names[:maxKeptListed], fmt.Sprintf("%d more", more))
	}
	return bundle.KeptPrefix + strings.Join(names, ", ")
}
