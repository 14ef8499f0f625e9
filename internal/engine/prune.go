package engine

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// removal is what became of one object that is no longer wanted.
type removal struct {
	held
	fate   fate
	reason string
	spot   spot
	err    error
}

// removeRank removes objects of one rank, as far as each of them is still ours to remove. Its own error means that nothing was tried.
func (e *Engine) removeRank(ctx context.Context, id bundle.ID, items []held, leave map[fate]fate) ([]removal, error) {
	removals := make([]removal, len(items))
	spots := make([]spot, len(items))
	for i, item := range items {
		resource, err := e.locate(item.Ref)
		if err != nil {
			return nil, err
		}
		spots[i] = spot{key: item.Ref.Key(), resource: resource}
	}
	found, err := e.member.observe(ctx, spots)
	if err != nil {
		return nil, err
	}
	var work errgroup.Group
	work.SetLimit(parallel)
	var mu sync.Mutex // guards removals
	for i, item := range items {
		seen := found[item.Ref.Key()]
		what, reason := condemn(item, seen, id, e.domain)
		if instead, ok := leave[what]; ok {
			what, reason = instead, ""
		}
		work.Go(func() error {
			var err error
			switch what {
			case remove:
				err = e.member.delete(ctx, spots[i], seen.uid)
			case strip:
				err = e.member.unmark(ctx, spots[i], seen)
			case forget, await:
			}
			mu.Lock()
			defer mu.Unlock()
			removals[i] = removal{held: item, fate: what, reason: reason, spot: spots[i], err: err}
			return nil
		})
	}
	// Failures of objects are in removals, not errors of the group.
	_ = work.Wait()
	return removals, nil
}

// locate finds where an object of a record is served. The zero Resource means that its kind is certainly gone, and the object with it.
func (e *Engine) locate(ref kube.Ref) (kube.Resource, error) {
	resource, err := e.member.mapper.AnyVersion(ref.GVK())
	if err == nil || !meta.IsNoMatchError(err) {
		return resource, err
	}
	gone, err := e.member.mapper.Gone(ref.GVK())
	if err != nil {
		return kube.Resource{}, err
	}
	if gone {
		return kube.Resource{}, nil
	}
	e.member.mapper.Reset()
	return e.member.mapper.AnyVersion(ref.GVK())
}

// prune removes what the record holds and the bundle does not want any more, the last ranks first. What fails stays in the record.
func (p *pass) prune(ctx context.Context) error {
	for _, items := range p.prior.doomed(p.wanted) {
		removals, err := p.engine.removeRank(ctx, p.bundle.ID, items, nil)
		if err != nil {
			return fmt.Errorf("prune: %w", err)
		}
		for _, r := range removals {
			p.noteRemoval(r)
		}
		if len(p.failures) > 0 && !p.bundle.Options.ContinueOnError {
			return nil
		}
	}
	return nil
}

func (p *pass) noteRemoval(r removal) {
	change := bundle.Change{Ref: r.Ref, Action: bundle.Deleted}
	switch {
	case r.err != nil:
		change.Action, change.Reason = bundle.Failed, r.err.Error()
		p.failures = append(p.failures, &objectError{ref: r.Ref, err: fmt.Errorf("delete it: %w", r.err)})
	case r.reason != "":
		change.Action, change.Reason = bundle.Skipped, r.reason
	case r.fate == forget:
		change.Reason = "it was gone already"
	}
	if r.err == nil {
		delete(p.next.inventory, r.Ref.Key())
	}
	p.changes = append(p.changes, change)
}
