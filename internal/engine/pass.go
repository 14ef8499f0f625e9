package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// lastSaveLimit is how long it may take to save what was done until the time was up.
const lastSaveLimit = 5 * time.Second

// pass is one attempt to make the cluster equal one bundle. Its caller holds the bundle's ID.
type pass struct {
	engine *Engine
	bundle bundle.Bundle
	digest bundle.Digest
	motive motive
	prior  *inventory.Record // what the record said before
	only   map[kube.Ref]bool // if not nil: look at these objects and prune nothing
	lost   bool              // prior has lost its inventory

	targets []*target
	wanted  map[kube.Ref]bool
	// retained are the objects that are not pruned: those wanted, and those kept although the bundle lacks them.
	retained map[kube.Ref]bool

	// mu guards what follows while objects are applied in parallel.
	mu    sync.Mutex
	next  *inventory.Record // what the record will say
	saved *inventory.Record // what it says now
	// defined are the kinds of the definitions that this pass has created or changed, and unserved the definitions, by name, whose kinds
	// may not be served yet.
	defined  map[schema.GroupKind]bool
	unserved map[string]map[schema.GroupVersionKind]kube.Resource
	changes  bundle.ChangeSet
	failures passError
	// waiting is what a Helm release waits for, nil for nothing.
	waiting *pendingWait
}

// run plans, looks, decides, and only then writes: first the record, then the cluster, then the record again.
func (p *pass) run(ctx context.Context) (bundle.Report, error) {
	report := p.prior.Report()
	report.Digest = p.digest
	if err := p.plan(); err != nil {
		return failed(report, err)
	}
	verdicts, release, err := p.survey(ctx)
	if err != nil {
		return failed(report, err)
	}
	defer release()
	if err := p.promise(ctx, verdicts); err != nil {
		return failed(report, err)
	}
	if err := p.write(ctx, verdicts); err != nil {
		return p.cutOff(ctx, err)
	}
	p.awaitServed(ctx)
	if p.only == nil && p.waiting == nil {
		done := true
		if len(p.failures) == 0 || p.bundle.Options.ContinueOnError && !slices.ContainsFunc(p.failures, isNoObjects) {
			done, err = p.uninstallDropped(ctx)
		}
		if err == nil && done {
			err = p.prune(ctx)
		}
		if err != nil {
			return p.cutOff(ctx, err)
		}
	}
	if err := p.verifyRecords(ctx); err != nil {
		return p.cutOff(ctx, err)
	}
	return p.settle(ctx)
}

// plan turns the bundle into targets, as far as kinds are known.
func (p *pass) plan() error {
	gvks := map[schema.GroupVersionKind]bool{}
	for _, ref := range p.bundle.Refs() {
		gvks[ref.GVK()] = true
	}
	known, err := p.engine.member.resolve(gvks)
	if err != nil {
		return err
	}
	targets, problems, err := plan(p.bundle, known)
	if err != nil {
		return err
	}
	p.failures = problems
	p.wanted = make(map[kube.Ref]bool, len(targets))
	for _, t := range targets {
		p.engine.ownerScope.Annotate(t.marks.annotations)
		p.wanted[t.key()] = true
		if p.only == nil || p.only[t.key()] {
			p.targets = append(p.targets, t)
		}
	}
	return nil
}

// survey takes hold of everything that the pass may touch, and looks at it. If that shows that the record was lost, what it held is
// traced first, so that it is pruned if nobody wants it any more: then more objects have to be held, all at once again.
func (p *pass) survey(ctx context.Context) (verdicts []verdict, release func(), err error) {
	if p.lost {
		if err := p.trace(ctx); err != nil {
			return nil, nil, err
		}
	}
	for {
		release, err := p.engine.objects.acquire(ctx, p.touched()...)
		if err != nil {
			return nil, nil, err
		}
		verdicts, err := p.look(ctx)
		if err != nil {
			release()
			return nil, nil, err
		}
		if p.lost || p.prior.Exists() || !p.metBefore(verdicts) {
			return verdicts, release, nil
		}
		release()
		p.lost = true
		if err := p.trace(ctx); err != nil {
			return nil, nil, err
		}
	}
}

// metBefore says whether any target was applied for the bundle's ID already, as far as the server tells.
func (p *pass) metBefore(verdicts []verdict) bool {
	return slices.ContainsFunc(verdicts, func(v verdict) bool {
		return v.unread || v.seen != nil && v.seen.Signature() == p.engine.ownerScope.Signature(p.bundle.ID) && v.seen.Fields != ""
	})
}

// trace finds what the lost record held, as far as it can: delivering goes before pruning. It fails if the Helm releases are not found for sure:
// their hooks would run again.
func (p *pass) trace(ctx context.Context) error {
	traced, err := p.engine.trace(ctx, p.prior)
	if err != nil {
		log.FromContext(ctx).Info("not all that was deployed was found again", logkeys.Bundle, p.bundle.ID.String(), logkeys.Reason, err.Error())
	}
	p.prior = traced
	var failure *releaseTraceError
	if errors.As(err, &failure) {
		return err
	}
	return nil
}

// touched lists every object that the pass may write or remove.
func (p *pass) touched() []kube.Ref {
	keys := slices.Collect(maps.Keys(p.wanted))
	for key := range p.prior.Entries {
		if !p.wanted[key] {
			keys = append(keys, key)
		}
	}
	return keys
}

// look reads the metadata of every target and decides what to do with each. If the bundle goes on after errors, what the server does not show
// keeps nobody from the rest.
func (p *pass) look(ctx context.Context) ([]verdict, error) {
	spots := make([]spot, len(p.targets))
	for i, t := range p.targets {
		spots[i] = spot{key: t.key(), resource: t.served}
	}
	found, unread := p.engine.member.observeEach(ctx, spots)
	for _, t := range p.targets {
		err := unread[t.key()]
		if status := apierrors.APIStatus(nil); err != nil && (!p.bundle.Options.ContinueOnError || !errors.As(err, &status)) {
			return nil, err
		}
	}
	who := asker{id: p.bundle.ID, ownerScope: p.engine.ownerScope, owner: p.bundle.Owner, motive: p.motive}
	verdicts := make([]verdict, len(p.targets))
	for i, t := range p.targets {
		if err := unread[t.key()]; err != nil {
			verdicts[i] = verdict{target: t, verb: refuse, unread: true, err: err}
			continue
		}
		verdicts[i] = decide(t, found[t.key()], p.prior.Entries[t.key()], who)
	}
	return verdicts, nil
}

// promise plans the new inventory and saves it with the content, if the record does not cover it yet and there is anything to write.
// A planned object has no UID: whoever reads the record after a crash cannot tell whether it exists, and looks.
func (p *pass) promise(ctx context.Context, verdicts []verdict) error {
	p.next = p.prior.Edit()
	p.next.Head = inventory.Head{
		ID: p.bundle.ID, Owner: p.bundle.Owner, Options: p.bundle.Options, Digest: p.digest[:],
		State: bundle.StateApplying, LastApplied: p.prior.LastApplied, Hub: cmp.Or(p.bundle.Hub, p.prior.Hub), Releases: p.next.Releases,
	}
	if err := p.planReleases(); err != nil {
		return err
	}
	p.saved = p.prior
	p.defined = map[schema.GroupKind]bool{}
	p.retain()
	busy := p.only == nil && len(toPrune(p.prior.Entries, p.retained)) > 0 || !p.releasesDeployed()
	for _, v := range verdicts {
		p.planItem(v)
		busy = busy || v.verb == write
	}
	if !busy || p.prior.Covers(p.next) {
		return nil
	}
	return p.save(ctx)
}

// planItem puts what the verdict is about into the record to come.
func (p *pass) planItem(v verdict) {
	had, ok := p.next.Entries[v.key()]
	if v.unread && ok {
		return
	}
	item := inventory.Entry{Ref: v.ref, Claim: v.claim, Adopted: v.adopt, Origin: v.origin}
	if v.verb == refuse {
		item.Adopted = had.Adopted
	}
	var conflict *conflictError
	if errors.As(v.err, &conflict) {
		item.Rival = conflict.rival
	}
	if v.seen != nil && v.verb != refuse && (v.seen.Signature() == p.engine.ownerScope.Signature(p.bundle.ID) || had.UID == v.seen.UID) {
		item.UID, item.Fields = v.seen.UID, had.Fields
	}
	if v.verb == keep {
		item.Fields = v.seen.Fingerprint()
	}
	p.next.Entries[v.key()] = item
}

// save writes the record as it is planned now.
func (p *pass) save(ctx context.Context) error {
	var content *bundle.Bundle
	if p.saved.BundleDigest() != p.digest || !p.saved.HasContent() {
		content = &p.bundle
	}
	saved, err := p.engine.store.Save(ctx, p.saved, p.next, content)
	if err != nil {
		return err
	}
	p.saved = saved
	return nil
}

// write applies what has to be, rank by rank, and stops after a rank with a failure that the bundle does not want to go on after.
// Its own error means that the pass has to end here; failures of objects are in p.failures.
func (p *pass) write(ctx context.Context, verdicts []verdict) error {
	if err := p.ensureNamespaces(ctx, verdicts); err != nil {
		p.failures = append(p.failures, err)
		p.skipRest(verdicts)
		return context.Cause(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(p.next.Releases) > 0 {
		return p.writeItems(ctx, verdicts)
	}
	_, err := p.writeRanks(ctx, verdicts)
	return err
}

// writeRanks applies objects rank by rank. goOn is false after a failure that the bundle does not tolerate.
func (p *pass) writeRanks(ctx context.Context, verdicts []verdict) (goOn bool, err error) {
	for start := 0; start < len(verdicts); {
		end := start
		for end < len(verdicts) && verdicts[end].rank == verdicts[start].rank {
			end++
		}
		goOn, err := p.writeRank(ctx, verdicts[start:end])
		if err != nil {
			return false, err
		}
		if !goOn {
			p.skipRest(verdicts[end:])
			return false, nil
		}
		start = end
	}
	return true, nil
}

// outcome is what became of one verdict.
type outcome struct {
	action bundle.Action
	err    error
}

// writeRank applies objects of one rank in parallel. Objects are begun in order, so the first failure in order is always among those
// that are reported.
func (p *pass) writeRank(ctx context.Context, verdicts []verdict) (goOn bool, err error) {
	if p.needsServed(verdicts) && !p.awaitServed(ctx) {
		p.skipRest(verdicts)
		return false, context.Cause(ctx)
	}
	outcomes := make([]outcome, len(verdicts))
	goOn = true
	var mu sync.Mutex // guards goOn
	going := func() bool { mu.Lock(); defer mu.Unlock(); return goOn }
	var work errgroup.Group
	work.SetLimit(parallel)
	for i, v := range verdicts {
		if v.verb == keep {
			outcomes[i] = outcome{action: bundle.Unchanged}
			if v.isCRD() && !p.isServed(v) {
				p.addUnserved(v)
			}
			continue
		}
		if !going() || ctx.Err() != nil {
			continue
		}
		work.Go(func() error {
			action, err := p.writeOne(ctx, v)
			outcomes[i] = outcome{action, err}
			if err != nil && !p.tolerates(err) {
				mu.Lock()
				defer mu.Unlock()
				goOn = false
			}
			return nil
		})
	}
	// Failures of objects are outcomes, not errors of the group.
	_ = work.Wait()
	for i, v := range verdicts {
		p.note(v, outcomes[i])
	}
	return goOn, context.Cause(ctx)
}

// note adds one outcome to what the pass reports.
func (p *pass) note(v verdict, o outcome) {
	change := bundle.Change{Ref: v.ref, Action: o.action}
	switch {
	case o.err != nil:
		change.Action, change.Reason = bundle.Failed, o.err.Error()
		p.failures = append(p.failures, &objectError{ref: v.ref, err: o.err})
	case o.action == "":
		change.Action, change.Reason = bundle.Skipped, "another object failed before it"
		if p.waiting != nil {
			change.Reason = "a Helm release is not deployed yet"
		}
	}
	p.changes = append(p.changes, change)
}

func (p *pass) skipRest(verdicts []verdict) {
	for _, v := range verdicts {
		if v.verb == keep {
			p.note(v, outcome{action: bundle.Unchanged})
			continue
		}
		p.note(v, outcome{})
	}
}

// tolerates says whether the bundle wants to go on after err.
func (p *pass) tolerates(err error) bool {
	var conflict *conflictError
	if errors.As(err, &conflict) && conflict.rival != "" {
		// There is nothing to do about it here, and what the rival left is still ours to heal.
		return true
	}
	if errors.Is(err, ErrConflict) {
		return p.bundle.Options.ContinueOnConflict
	}
	return p.bundle.Options.ContinueOnError
}

// settle saves how the pass ended, if the record does not say so already, and reports it.
func (p *pass) settle(ctx context.Context) (bundle.Report, error) {
	p.next.State, p.next.Message = bundle.StateApplied, keptMessage(p.next)
	switch {
	case len(p.failures) > 0:
		p.next.State, p.next.Message = bundle.StateFailed, p.failures.Error()+p.waitingMessage()
	case p.waiting != nil:
		p.next.State, p.next.Message = bundle.StateApplying, p.waiting.message
	}
	if p.waiting != nil {
		p.waiting.digest = p.digest
	}
	p.engine.waits.set(p.bundle.ID, p.waiting)
	if !p.saved.Equal(p.next) {
		if p.next.State == bundle.StateApplied {
			p.next.LastApplied = p.engine.now()
		}
		if err := p.save(ctx); err != nil {
			return p.cutOff(ctx, err)
		}
	}
	report := p.saved.Report()
	report.Changes = p.changes
	if len(p.failures) > 0 {
		return report, fmt.Errorf("converge %s: %w", p.bundle.ID, p.failures)
	}
	return report, nil
}

// cutOff reports a pass that ends with err. What it had done until its time was up is saved, so that the next one goes on from there.
func (p *pass) cutOff(ctx context.Context, err error) (bundle.Report, error) {
	p.engine.waits.set(p.bundle.ID, nil)
	report, err := failed(p.report(), err)
	if !errors.Is(context.Cause(ctx), ErrTimeUp) || p.saved.Equal(p.next) {
		return report, err
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastSaveLimit)
	defer cancel()
	return report, errors.Join(err, p.save(last))
}

// report is what can be said in the middle of a pass.
func (p *pass) report() bundle.Report {
	report := p.next.Report()
	report.Changes = p.changes
	return report
}
