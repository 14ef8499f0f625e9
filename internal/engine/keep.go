package engine

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// maxKeptListed is the maximum number of kept objects that a message lists.
const maxKeptListed = 10

// planKept sets the objects that prune must not delete: the desired objects, and those with a Kept entry. With
// KeepObjects, it first sets Kept in all entries that the bundle lacks.
func (p *applyRun) planKept() {
	p.keep = maps.Clone(p.desired)
	for key, entry := range p.next.Entries {
		if p.desired[key] || (!entry.Kept && !p.bundle.KeepObjects) {
			continue
		}
		entry.Kept = true
		p.next.Entries[key] = entry
		p.keep[key] = true
	}
}

// forgetMissingKept deletes the Kept entries whose objects no longer exist from the next inventory.
func (p *applyRun) forgetMissingKept(ctx context.Context) error {
	var locations []objectLocation
	for key, entry := range p.next.Entries {
		if !entry.Kept {
			continue
		}
		resource, err := p.engine.locate(entry.Ref)
		if err != nil {
			return fmt.Errorf("look for kept objects: %w", err)
		}
		locations = append(locations, objectLocation{key: key, resource: resource})
	}
	if len(locations) == 0 {
		return nil
	}
	found, err := p.engine.member.readMetadata(ctx, locations)
	if err != nil {
		return fmt.Errorf("look for kept objects: %w", err)
	}
	for _, location := range locations {
		if found[location.key] == nil {
			delete(p.next.Entries, location.key)
		}
	}
	return nil
}

// keptMessage lists the objects that are kept although the bundle lacks them, "" if there are none.
func keptMessage(r *inventory.Record) string {
	var names []string
	for _, entry := range r.SortedEntries() {
		if entry.Kept {
			names = append(names, entry.Ref.String())
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
