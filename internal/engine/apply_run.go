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

// abortSaveTimeout is the timeout for saving the inventory of an aborted run.
const abortSaveTimeout = 5 * time.Second

// applyRun is one attempt to make the cluster equal one bundle. The caller must hold the lock of the bundle's ID.
type applyRun struct {
	engine        *Engine
	bundle        bundle.Bundle
	digest        bundle.Digest
	trigger       trigger
	prior         *inventory.Record // the inventory before the run
	only          map[kube.Ref]bool // if not nil: apply only these objects, and prune nothing
	inventoryLost bool              // the record on the cluster is lost: prior is empty until recoverInventory

	targets []*target
	desired map[kube.Ref]bool // the keys of all objects of the bundle, also with only
	// keep are the objects that are not pruned: the desired ones, and others because of bundle.Bundle.KeepObjects.
	keep map[kube.Ref]bool

	// mu guards the fields below while objects are applied in parallel.
	mu    sync.Mutex
	next  *inventory.Record // the inventory after the run
	saved *inventory.Record // the inventory as it is stored now
	// defined are the kinds of the CustomResourceDefinitions that this run has created or changed. unserved are the
	// definitions, by name, whose kinds may not be served yet.
	defined  map[schema.GroupKind]bool
	unserved map[string]map[schema.GroupVersionKind]kube.Resource
	changes  bundle.ChangeSet
	failures applyErrors
	// waiting is the condition that a Helm release waits for, or nil.
	waiting *pendingWait
}

// isCorrectingFailed returns whether the run corrects single objects of a failed bundle. The bundle stays failed, for
// the same reason, until all its objects are applied.
func (p *applyRun) isCorrectingFailed() bool {
	return p.only != nil && p.prior.State == bundle.StateFailed
}

// run executes the run, logs its result and stores its failure.
func (p *applyRun) run(ctx context.Context) (bundle.Report, error) {
	started := p.engine.clock.Now()
	report, err := p.execute(ctx)
	p.logRun(ctx, started, report, err)
	return report, p.storeFailure(ctx, report, err)
}

// execute plans, reads, decides, and then writes: the planned inventory, the objects, and the resulting inventory.
func (p *applyRun) execute(ctx context.Context) (bundle.Report, error) {
	report := p.prior.Report()
	if report.Digest != p.digest {
		report.Digest, report.Outdated = p.digest, nil
	}
	if err := p.plan(); err != nil {
		return failedReport(report, err)
	}
	decisions, unlock, err := p.lockAndDecide(ctx)
	if err != nil {
		return failedReport(report, err)
	}
	defer unlock()
	if err := p.saveIntent(ctx, decisions); err != nil {
		return failedReport(report, err)
	}
	if err := p.applyAll(ctx, decisions); err != nil {
		return p.abort(ctx, err)
	}
	p.awaitServed(ctx) // definitions that are not served are in p.failures
	if p.only == nil && p.waiting == nil {
		done := true
		if len(p.failures) == 0 || p.bundle.Options.ContinueOnError && !slices.ContainsFunc(p.failures, isBundleFailure) {
			done, err = p.uninstallDropped(ctx)
		}
		if err == nil && done {
			err = p.prune(ctx)
		}
		if err != nil {
			return p.abort(ctx, err)
		}
	}
	if err := p.verifyReleaseRecords(ctx); err != nil {
		return p.abort(ctx, err)
	}
	return p.finish(ctx)
}

// plan converts the bundle to targets. An object of an unknown kind becomes a target without a resource.
func (p *applyRun) plan() error {
	gvks := map[schema.GroupVersionKind]bool{}
	for _, ref := range p.bundle.Refs() {
		gvks[ref.GVK()] = true
	}
	known, err := p.engine.member.resolveKinds(gvks)
	if err != nil {
		return err
	}
	targets, problems, err := planTargets(p.bundle, known)
	if err != nil {
		return err
	}
	p.failures = problems
	p.desired = make(map[kube.Ref]bool, len(targets))
	for _, t := range targets {
		p.engine.ownerScope.Annotate(t.ownership.annotations)
		p.desired[t.key()] = true
		if p.only == nil || p.only[t.key()] {
			p.targets = append(p.targets, t)
		}
	}
	return nil
}

// lockAndDecide locks all objects that the run may change, and decides about the targets. If there is no record, but
// the objects show that there was one, it rebuilds the inventory and starts again: all objects must be locked at once.
func (p *applyRun) lockAndDecide(ctx context.Context) (decisions []decision, unlock func(), err error) {
	if p.inventoryLost {
		if err := p.recoverInventory(ctx); err != nil {
			return nil, nil, err
		}
	}
	for {
		unlock, err := p.engine.objectLocks.acquire(ctx, p.affectedKeys()...)
		if err != nil {
			return nil, nil, err
		}
		decisions, err := p.readAndDecide(ctx)
		if err != nil {
			unlock()
			return nil, nil, err
		}
		if p.inventoryLost || p.prior.Exists() || !p.hasAppliedTargets(decisions) {
			return decisions, unlock, nil
		}
		unlock()
		p.inventoryLost = true
		if err := p.recoverInventory(ctx); err != nil {
			return nil, nil, err
		}
	}
}

// hasAppliedTargets returns whether an earlier run has applied a target for the bundle's ID: the object has the
// ownership annotations of the bundle, and fields of our last apply. An object that could not be read counts, too.
func (p *applyRun) hasAppliedTargets(decisions []decision) bool {
	return slices.ContainsFunc(decisions, func(v decision) bool {
		return v.unread || v.existing != nil && v.existing.OwnerKey() == p.engine.ownerScope.OwnerKey(p.bundle.ID) && v.existing.FieldsDigest != ""
	})
}

// recoverInventory replaces prior by an inventory that is rebuilt from the objects with our ownership annotations.
// Objects that cannot be listed are missing in it, so they are not pruned. It fails if the Helm releases cannot be
// listed, since their hooks would run again.
func (p *applyRun) recoverInventory(ctx context.Context) error {
	rebuilt, err := p.engine.rebuildInventory(ctx, p.prior)
	if err != nil {
		log.FromContext(ctx).Info("could not rebuild the whole inventory", logkeys.Bundle, p.bundle.ID.String(), logkeys.Reason, err.Error())
	}
	p.prior = rebuilt
	var failure *releaseRebuildError
	if errors.As(err, &failure) {
		return err
	}
	return nil
}

// affectedKeys returns the keys of all objects that the run may apply or prune.
func (p *applyRun) affectedKeys() []kube.Ref {
	keys := slices.Collect(maps.Keys(p.desired))
	for key := range p.prior.Entries {
		if !p.desired[key] {
			keys = append(keys, key)
		}
	}
	return keys
}

// readAndDecide reads the metadata of every target and decides about it. With ContinueOnError, an API error for one
// target does not affect the others.
func (p *applyRun) readAndDecide(ctx context.Context) ([]decision, error) {
	locations := make([]objectLocation, len(p.targets))
	for i, t := range p.targets {
		locations[i] = objectLocation{key: t.key(), resource: t.served}
	}
	found, unread := p.engine.member.readMetadataEach(ctx, locations)
	for _, t := range p.targets {
		err := unread[t.key()]
		if status := apierrors.APIStatus(nil); err != nil && (!p.bundle.Options.ContinueOnError || !errors.As(err, &status)) {
			return nil, err
		}
	}
	run := runContext{
		id: p.bundle.ID, ownerScope: p.engine.ownerScope, owner: p.bundle.Owner, trigger: p.trigger,
		isImpersonated: p.bundle.Options.ServiceAccount != "", hasNewAccount: p.hasNewAccount(),
	}
	decisions := make([]decision, len(p.targets))
	for i, t := range p.targets {
		if err := unread[t.key()]; err != nil {
			decisions[i] = decision{target: t, action: actionReject, unread: true, err: err}
			continue
		}
		decisions[i] = decide(t, found[t.key()], p.prior.Entries[t.key()], run)
	}
	return decisions, nil
}

// hasNewAccount returns whether another identity applied the objects before. Then all objects are applied again, since
// the new identity may have other rights.
func (p *applyRun) hasNewAccount() bool {
	return p.prior.Exists() && p.prior.Options.ServiceAccount != p.bundle.Options.ServiceAccount
}

// saveIntent sets next to the planned inventory, and saves it with the content of the bundle. It saves nothing if the
// run has nothing to write, or if the stored inventory covers the plan. The entry of an object that is not applied yet
// has no UID: after a crash the next run reads whether the object exists.
func (p *applyRun) saveIntent(ctx context.Context, decisions []decision) error {
	p.next = p.prior.Edit()
	p.next.Head = inventory.Head{
		ID: p.bundle.ID, Owner: p.bundle.Owner, Options: p.bundle.Options, Digest: slices.Clone(p.digest[:]),
		State: bundle.StateApplying, LastApplied: p.prior.LastApplied, Hub: cmp.Or(p.bundle.Hub, p.prior.Hub), Releases: p.next.Releases, Inputs: p.inputs(),
	}
	if p.isCorrectingFailed() {
		p.next.State, p.next.Message = p.prior.State, p.prior.Message
	}
	if err := p.planReleases(); err != nil {
		return err
	}
	p.saved = p.prior
	p.defined = map[schema.GroupKind]bool{}
	p.planKept()
	needsWrite := p.only == nil && len(toPrune(p.prior.Entries, p.keep)) > 0 || !p.next.AreReleasesDeployed()
	for _, v := range decisions {
		p.planEntry(v)
		needsWrite = needsWrite || v.action == actionApply
	}
	if !needsWrite || p.prior.Covers(p.next) {
		return nil
	}
	return p.save(ctx)
}

// inputs returns the inputs of the bundle. If it has none, the recorded ones are valid for the same digest.
func (p *applyRun) inputs() string {
	if p.bundle.Inputs == "" && p.prior.BundleDigest() == p.digest {
		return p.prior.Inputs
	}
	return p.bundle.Inputs
}

// planEntry sets the entry of v's object in the next inventory, so that it is right if the run is aborted after
// saveIntent: UID only if the object is the bundle's, Claim if the run takes the object over, CompetingOwner if another
// bundle keeps it, and no Fingerprint if the next run must apply the object again. The entry stays as it is if the
// object could not be read, or does not exist and is not created.
func (p *applyRun) planEntry(v decision) {
	recorded, ok := p.next.Entries[v.key()]
	if ok && (v.unread || v.action == actionNone && v.existing == nil) {
		return
	}
	entry := inventory.Entry{Ref: v.ref, Claim: v.claim, Adopted: v.adopt, Origin: v.origin}
	if v.action == actionReject {
		entry.Adopted = recorded.Adopted
	}
	var conflict *conflictError
	if errors.As(v.err, &conflict) {
		entry.CompetingOwner = conflict.competingOwner
	}
	if v.existing != nil && v.action != actionReject && (v.existing.OwnerKey() == p.engine.ownerScope.OwnerKey(p.bundle.ID) || recorded.UID == v.existing.UID) {
		entry.UID, entry.Fingerprint = v.existing.UID, recorded.Fingerprint
		entry.Recovered = recorded.UID == v.existing.UID && !recorded.IsProvenApplied()
	}
	switch {
	case v.action == actionNone:
		entry.Fingerprint = v.existing.Fingerprint()
	case len(v.subresources) > 0, p.hasNewAccount():
		entry.Fingerprint = "" // after a crash or a failure before all of it is applied, the next run applies the object again
	}
	p.next.Entries[v.key()] = entry
}

// save stores the next inventory, with the content of the bundle if the stored record lacks it.
func (p *applyRun) save(ctx context.Context) error {
	var content *bundle.Bundle
	if p.saved.BundleDigest() != p.digest || !p.saved.HasContent() {
		content = &p.bundle
	}
	saved, err := p.engine.store.Save(withAccount(ctx, ""), p.saved, p.next, content)
	if err != nil {
		return err
	}
	p.saved = saved
	return nil
}

// applyAll applies the objects rank by rank, and stops after a rank with a failure that the bundle does not tolerate.
// It adds failures of objects to p.failures. An error means that the run must be aborted.
func (p *applyRun) applyAll(ctx context.Context, decisions []decision) error {
	if err := p.ensureNamespaces(ctx, decisions); err != nil {
		p.failures = append(p.failures, err)
		p.skipRemaining(decisions)
		return context.Cause(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(p.next.Releases) > 0 {
		return p.applyItems(ctx, decisions)
	}
	_, err := p.applyRanks(ctx, decisions)
	return err
}

// applyRanks applies objects rank by rank. proceed is false after a failure that the bundle does not tolerate.
func (p *applyRun) applyRanks(ctx context.Context, decisions []decision) (proceed bool, err error) {
	for start := 0; start < len(decisions); {
		end := start
		for end < len(decisions) && decisions[end].rank == decisions[start].rank {
			end++
		}
		proceed, err := p.applyRank(ctx, decisions[start:end])
		if err != nil {
			return false, err
		}
		if !proceed {
			p.skipRemaining(decisions[end:])
			return false, nil
		}
		start = end
	}
	return true, nil
}

// outcome is the result of one decision. Its action is empty if the object was skipped.
type outcome struct {
	action bundle.Action
	err    error
}

// applyRank applies the objects of one rank concurrently. It starts them in order, and starts no more after a failure:
// each skipped object comes after the failed one, so the first failure is the same in each run.
func (p *applyRun) applyRank(ctx context.Context, decisions []decision) (proceed bool, err error) {
	if p.hasDefinedKinds(decisions) && !p.awaitServed(ctx) {
		p.skipRemaining(decisions)
		return false, context.Cause(ctx)
	}
	outcomes := make([]outcome, len(decisions))
	proceed = true
	var mu sync.Mutex // guards proceed
	canProceed := func() bool { mu.Lock(); defer mu.Unlock(); return proceed }
	var work errgroup.Group
	work.SetLimit(maxConcurrent)
	for i, v := range decisions {
		if v.action == actionNone {
			outcomes[i] = outcome{action: bundle.Unchanged}
			if v.isCRD() && !v.isLeftAlone() && !p.isServed(v) {
				p.addUnserved(v)
			}
			continue
		}
		if !canProceed() || ctx.Err() != nil {
			continue
		}
		work.Go(func() error {
			action, err := p.executeDecision(ctx, v)
			outcomes[i] = outcome{action, err}
			if err != nil && !p.canTolerate(err) {
				mu.Lock()
				defer mu.Unlock()
				proceed = false
			}
			return nil
		})
	}
	// Failures of objects are outcomes, not errors of the group.
	_ = work.Wait()
	for i, v := range decisions {
		p.recordOutcome(v, outcomes[i])
	}
	return proceed, context.Cause(ctx)
}

// recordOutcome adds one outcome to the changes and failures of the run.
func (p *applyRun) recordOutcome(v decision, o outcome) {
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

// skipRemaining records the objects as unchanged, or as skipped if they should be applied.
func (p *applyRun) skipRemaining(decisions []decision) {
	for _, v := range decisions {
		if v.action == actionNone {
			p.recordOutcome(v, outcome{action: bundle.Unchanged})
			continue
		}
		p.recordOutcome(v, outcome{})
	}
}

// canTolerate returns whether the run continues with other objects after err.
func (p *applyRun) canTolerate(err error) bool {
	var conflict *conflictError
	if errors.As(err, &conflict) && conflict.competingOwner != "" {
		// This bundle cannot resolve the conflict, and its other objects must still be applied.
		return true
	}
	if errors.Is(err, ErrConflict) {
		return p.bundle.Options.ContinueOnConflict
	}
	return p.bundle.Options.ContinueOnError
}

// finish saves the result of the run, if it is not stored yet, and reports it.
func (p *applyRun) finish(ctx context.Context) (bundle.Report, error) {
	switch {
	case p.isCorrectingFailed(): // next has the state and the message of prior
	case len(p.failures) > 0:
		p.next.State, p.next.Message = bundle.StateFailed, p.failures.Error()+p.pendingPruneMessage()
	case p.waiting != nil:
		p.next.State, p.next.Message = bundle.StateApplying, p.waiting.message
	default:
		p.next.State, p.next.Message = bundle.StateApplied, keptMessage(p.next)
	}
	if p.waiting != nil {
		p.waiting.digest = p.digest
	}
	p.engine.waits.set(p.bundle.ID, p.waiting)
	isSaved := p.saved.IsUpToDateWith(p.next)
	if !isSaved && p.next.State == bundle.StateApplied {
		p.next.LastApplied = p.engine.now()
	}
	if !isSaved || p.saved.Inputs != p.next.Inputs {
		if err := p.save(ctx); err != nil {
			return p.abort(ctx, err)
		}
	}
	report := p.saved.Report()
	report.Changes = p.changes
	if len(p.failures) > 0 {
		return report, fmt.Errorf("converge %s: %w", p.bundle.ID, p.failures)
	}
	return report, nil
}

// abort reports a run that ends with err. After ErrTimeUp it saves the inventory first, so that the next run continues
// from there.
func (p *applyRun) abort(ctx context.Context, err error) (bundle.Report, error) {
	p.engine.waits.set(p.bundle.ID, nil)
	report, err := failedReport(p.report(), err)
	if !errors.Is(context.Cause(ctx), ErrTimeUp) || p.saved.IsUpToDateWith(p.next) {
		return report, err
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortSaveTimeout)
	defer cancel()
	return report, errors.Join(err, p.save(last))
}

// report returns the report of a run that has not finished.
func (p *applyRun) report() bundle.Report {
	report := p.next.Report()
	report.Changes = p.changes
	return report
}
