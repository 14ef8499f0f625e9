package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/release"
)

// annotationRevisionDigest on the Secret of a release record holds the bundle.Item.RevisionDigest of the revision.
// Engine.rebuildReleases reads it if the inventory is lost, so that hooks do not run again.
const annotationRevisionDigest = "towline.dev/revision-digest"

// newReleaseOp returns an operation on a release.
func (p *applyRun) newReleaseOp(s *inventory.ReleaseState, hooks []release.Hook) *releaseOp {
	return &releaseOp{engine: p.engine, id: p.bundle.ID, account: p.bundle.Options.ServiceAccount, inventory: p.next, save: p.save, state: s, hooks: hooks}
}

// applyItems applies the items in order, each Helm release in stages. It stops before an item that must wait.
func (p *applyRun) applyItems(ctx context.Context, decisions []decision) error {
	for i, item := range p.bundle.Items {
		isOfItem := func(v decision) bool { return v.item == i }
		start := slices.IndexFunc(decisions, isOfItem)
		var own []decision
		if start >= 0 {
			end := start
			for end < len(decisions) && isOfItem(decisions[end]) {
				end++
			}
			own, decisions = decisions[:end], decisions[end:]
		}
		deploy := p.deployRelease
		if item.Release == nil {
			deploy = func(ctx context.Context, _ bundle.Item, own []decision) (bool, error) { return p.applyRanks(ctx, own) }
		}
		proceed, err := deploy(ctx, item, own)
		if err != nil {
			return err
		}
		if !proceed {
			p.skipRemaining(decisions)
			return nil
		}
	}
	return nil
}

// deployRelease continues the deployment of a release item. decisions are about the objects of the item. proceed is
// false if the next items must wait.
func (p *applyRun) deployRelease(ctx context.Context, item bundle.Item, decisions []decision) (proceed bool, err error) {
	s := p.next.FindRelease(releaseKey(item))
	if s.Stage == inventory.StageDeployed {
		return p.applyRanks(ctx, decisions)
	}
	ctx = withReadingAccount(ctx, p.bundle.Options.ServiceAccount)
	d := &releaseDeployment{applyRun: p, op: p.newReleaseOp(s, release.ItemHooks(item)), item: item, decisions: decisions, proceed: true}
	defer d.op.close()
	if s.Operation == inventory.RollingBack && s.Stage != inventory.StageBegin && s.Stage != inventory.StageFailed {
		if err := d.loadFormer(ctx); err != nil {
			if err = d.endFailed(err, "the rollback failed"); err != nil {
				return false, err
			}
		}
	}
	if s.Stage == inventory.StageFailed && !p.engine.now().Before(retryAt(s)) {
		enterStage(s, inventory.StageBegin, p.engine.now())
	}
	return d.run(ctx)
}

// releaseDeployment is the deployment of one release in one run. It has the steps that need the run; releaseOp has
// those that withdrawals need, too. A step returns done true after it has entered the next stage. It returns done false
// if the release waits or has failed: then the deployment ends for this run. proceed is true if the run may continue
// with the next items of the bundle.
type releaseDeployment struct {
	*applyRun
	op        *releaseOp
	item      bundle.Item
	decisions []decision
	// earlyApplied is true if this run applied the Namespaces and CustomResourceDefinitions, allApplied if it applied all
	// objects.
	earlyApplied, allApplied bool
	// proceed is the result of a run that ends before the release is deployed.
	proceed bool
}

// run carries out steps until the release is deployed, waits, or has failed.
func (d *releaseDeployment) run(ctx context.Context) (proceed bool, err error) {
	s := d.op.state
	next := d.step
	if isAfterObjects(s) {
		next = d.applyObjects // an earlier run applied them, and they may have drifted
	}
	for s.Stage != inventory.StageDeployed && s.Stage != inventory.StageFailed {
		done, err := next(ctx)
		if failure, ok := errors.AsType[*releaseError](err); ok {
			done, err = true, d.fail(ctx, failure)
		}
		if err != nil {
			return false, err
		}
		if !done {
			return d.stopRun(), nil
		}
		next = d.step
	}
	if s.Stage == inventory.StageFailed {
		return d.reportFailure(ctx)
	}
	return d.proceed, nil
}

// stopRun ends the run for a release that waits or whose objects have failed. It returns whether the next items may be
// deployed.
func (d *releaseDeployment) stopRun() (proceed bool) {
	if d.op.waiting == nil {
		return d.proceed
	}
	d.waiting = d.op.waiting
	d.waiting.message = fmt.Sprintf("Helm release %s: %s", d.op.state.Key(), d.waiting.message)
	d.skipUnapplied()
	return false
}

// step carries out the current stage and enters the next one. done is false if the release waits or has failed.
func (d *releaseDeployment) step(ctx context.Context) (done bool, err error) {
	s := d.op.state
	pre, post := hookEvents(s.Operation)
	switch {
	case s.Stage == inventory.StageBegin:
		return d.begin(ctx)
	case s.Operation == inventory.Uninstalling:
		return d.undoInstall(ctx)
	case s.Stage == inventory.StagePreHooks:
		return d.runHooks(ctx, pre, inventory.StageObjects)
	case s.Stage == inventory.StageObjects:
		return d.applyObjects(ctx)
	case s.Stage == inventory.StageWait:
		return d.checkReady(ctx)
	case s.Stage == inventory.StagePostHooks:
		return d.runHooks(ctx, post, inventory.StageTests)
	case s.Stage == inventory.StageTests && s.Options.RunTests && s.Operation != inventory.RollingBack:
		return d.runHooks(ctx, helm.HookTest, inventory.StageHelmRecord)
	}
	return d.recordDeployed(ctx)
}

// checkReady checks whether the objects of the release are ready, if its options demand that.
func (d *releaseDeployment) checkReady(ctx context.Context) (done bool, err error) {
	s := d.op.state
	if s.Options.Wait || s.Options.WaitForJobs || s.Options.Atomic {
		if served, err := d.awaitOwnDefinitions(ctx); err != nil || !served {
			return false, err
		}
	}
	if done, err := d.op.checkReady(ctx); err != nil || !done {
		return false, err
	}
	enterStage(s, inventory.StagePostHooks, d.engine.now())
	return true, nil
}

// undoInstall uninstalls a failed installation: with the option atomic, or before the next attempt.
func (d *releaseDeployment) undoInstall(ctx context.Context) (done bool, err error) {
	s := d.op.state
	if done, err := d.op.uninstall(ctx, nil); err != nil || !done {
		return false, err
	}
	s.ObjectsApplied = false
	enterStage(s, inventory.StageFailed, d.engine.now())
	return true, nil
}

// hooksDisabled returns whether the options disable the hooks of the operation.
func (d *releaseDeployment) hooksDisabled() bool {
	switch s := d.op.state; s.Operation {
	case inventory.Installing:
		return s.Options.DisableInstallHooks
	case inventory.Uninstalling:
		return s.Options.DisableUninstallHooks
	case inventory.Upgrading, inventory.RollingBack:
		return s.Options.DisableUpgradeHooks
	}
	return false
}

// awaitOwnDefinitions waits until the kinds of the CustomResourceDefinitions of the release are served. If that fails,
// it ends the run for the release. A definition that the API server refuses fails an atomic release.
func (d *releaseDeployment) awaitOwnDefinitions(ctx context.Context) (served bool, err error) {
	before := len(d.failures)
	proceed := true
	if s := d.op.state; s.Stage == inventory.StagePreHooks && s.Operation != inventory.RollingBack {
		// An earlier run applied them, and it may have been killed before they were served.
		if proceed, err = d.applyEarly(ctx); err != nil {
			return false, err
		}
	}
	if proceed && d.awaitServed(ctx) {
		return true, nil
	}
	d.proceed = false
	d.skipUnapplied()
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	return false, d.takeAtomicFailures(before)
}

// takeAtomicFailures removes the failures of an atomic release from the failures of the run, and returns them as a
// releaseError. They are the failures from index before. It returns nil if one of them is temporary: an API server that
// is slow or does not answer is no reason to undo a release.
func (d *releaseDeployment) takeAtomicFailures(before int) error {
	isTemporary := func(err error) bool { return errors.Is(err, errUnserved) || isUnanswered(err) }
	if !d.op.state.Options.Atomic || len(d.failures) == before || slices.ContainsFunc(d.failures[before:], isTemporary) {
		return nil
	}
	reason := d.failures[before:].Error()
	d.failures = d.failures[:before]
	return &releaseError{text: reason}
}

// runHooks runs the hooks of an event, unless they are disabled, and enters the stage next.
func (d *releaseDeployment) runHooks(ctx context.Context, event helm.HookEvent, next inventory.ReleaseStage) (bool, error) {
	if event == helm.HookTest || !d.hooksDisabled() {
		if len(release.ForEvent(d.op.hooks, event)) > 0 {
			if served, err := d.awaitOwnDefinitions(ctx); err != nil || !served {
				return false, err
			}
		}
		if done, err := d.op.runHooks(ctx, event); err != nil || !done {
			return false, err
		}
	}
	enterStage(d.op.state, next, d.engine.now())
	return true, nil
}

// applyEarly applies the objects that hooks may need: CustomResourceDefinitions and Namespaces.
func (d *releaseDeployment) applyEarly(ctx context.Context) (proceed bool, err error) {
	if d.earlyApplied {
		return true, nil
	}
	d.earlyApplied = true
	early := d.countEarly()
	return d.applyRanks(ctx, d.decisions[:early])
}

// countEarly returns the number of decisions about Namespaces and CustomResourceDefinitions, which come first.
func (d *releaseDeployment) countEarly() int {
	if i := slices.IndexFunc(d.decisions, func(v decision) bool { return v.rank > rankCRD }); i >= 0 {
		return i
	}
	return len(d.decisions)
}

// skipUnapplied reports the objects that this run has not applied as skipped.
func (d *releaseDeployment) skipUnapplied() {
	switch {
	case d.allApplied:
	case d.earlyApplied:
		d.skipRemaining(d.decisions[d.countEarly():])
	default:
		d.skipRemaining(d.decisions)
	}
}

// applyObjects applies the manifest. After a failure of objects the next run retries the same revision, without its pre
// hooks. The failure of an atomic release ends the revision.
func (d *releaseDeployment) applyObjects(ctx context.Context) (bool, error) {
	s := d.op.state
	if s.Operation == inventory.RollingBack {
		return d.applyFormer(ctx)
	}
	before := len(d.failures)
	proceed, err := d.applyEarly(ctx)
	if err == nil && proceed {
		d.allApplied = true
		proceed, err = d.applyRanks(ctx, d.decisions[d.countEarly():])
	}
	if err != nil {
		return false, err
	}
	d.proceed = proceed
	d.skipUnapplied()
	if len(d.failures) == before && !slices.ContainsFunc(d.failures, isBundleFailure) {
		if err := d.pruneDropped(ctx); err != nil {
			return false, err
		}
	}
	if len(d.failures) > before {
		reason := d.failures[before:].Error()
		if err := d.takeAtomicFailures(before); err != nil {
			return false, err
		}
		if s.Message != reason {
			s.Message = reason
			return false, d.putReleaseRecord(ctx, common.StatusFailed, reason)
		}
		return false, nil
	}
	s.Message, s.ObjectsApplied = "", true
	if s.Stage == inventory.StageObjects {
		enterStage(s, inventory.StageWait, d.engine.now())
	}
	return true, nil
}

// pruneDropped deletes the objects of the former revision that this revision lacks, as Helm does before it waits.
func (d *releaseDeployment) pruneDropped(ctx context.Context) error {
	return d.pruneGroups(ctx, toPrune(entriesOfRelease(d.prior, d.op.state.Key()), d.keep))
}

// findConflicts returns the decisions about objects of other owners. The caller runs no hook for a release with
// conflicts.
func (d *releaseDeployment) findConflicts() []decision {
	var found []decision
	for _, v := range d.decisions {
		if errors.Is(v.err, ErrConflict) && !d.canTolerate(v.err) {
			found = append(found, v)
		}
	}
	return found
}

// recordDeployed sets the status of the release record to deployed, and deletes old records. A rollback ends here, too,
// with StageFailed.
func (d *releaseDeployment) recordDeployed(ctx context.Context) (bool, error) {
	s := d.op.state
	description := s.Options.Description
	switch {
	case s.Operation == inventory.RollingBack:
		description = fmt.Sprintf("Rollback to %d", s.PreviousRevision)
	case description != "":
	case s.Operation == inventory.Installing:
		description = "Install complete"
	default:
		description = "Upgrade complete"
	}
	if err := d.putReleaseRecord(ctx, common.StatusDeployed, description); err != nil {
		return false, err
	}
	if s.Operation == inventory.RollingBack {
		d.item, d.op.hooks, d.op.releaseRecord = bundle.Item{}, nil, nil
		d.op.close() // release the memory of the record: Supersede needs it
	}
	entries, err := d.op.releaseRecords().List(ctx, s.Key())
	if err != nil {
		return false, err
	}
	if err := d.op.releaseRecords().Supersede(ctx, entries, s.Revision); err != nil {
		return false, err
	}
	if err := d.op.releaseRecords().Prune(ctx, s.Key(), entries, s.Options.MaxHistory, s.Revision); err != nil {
		return false, err
	}
	if s.Operation == inventory.RollingBack {
		// The release has failed: the bundle wants the revision before the rollback.
		s.Message += fmt.Sprintf("; rolled back to revision %d", s.PreviousRevision)
		s.PreviousRevision, s.ObjectsApplied = s.Revision, false
		enterStage(s, inventory.StageFailed, d.engine.now())
		return true, nil
	}
	s.Failures, s.FailuresAtUninstall, s.Message = 0, 0, ""
	for i := range s.Hooks {
		s.Hooks[i].DeleteOnSuccess = false // runHooks has deleted them
	}
	enterStage(s, inventory.StageDeployed, d.engine.now())
	logRelease(ctx, "deployed Helm release", s)
	return true, nil
}
