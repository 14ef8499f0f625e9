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

// annotationRevisionDigest on the Secret of a release record holds the bundle.Item.RevisionDigest of what the revision deployed. With it a
// lost inventory is no reason to run hooks again: see Engine.traceReleases.
const annotationRevisionDigest = "towline.dev/revision-digest"

// operate returns an operation on a release of the pass.
func (p *pass) operate(s *inventory.ReleaseState, hooks []release.Hook) *releaseOp {
	return &releaseOp{engine: p.engine, id: p.bundle.ID, record: p.next, save: p.save, state: s, hooks: hooks}
}

// writeItems applies the items in order, each Helm release in Helm's stages. It stops before an item that must not be deployed yet.
func (p *pass) writeItems(ctx context.Context, verdicts []verdict) error {
	for i, item := range p.bundle.Items {
		of := func(v verdict) bool { return v.item == i }
		start := slices.IndexFunc(verdicts, of)
		var own []verdict
		if start >= 0 {
			end := start
			for end < len(verdicts) && of(verdicts[end]) {
				end++
			}
			own, verdicts = verdicts[:end], verdicts[end:]
		}
		deploy := p.deployRelease
		if item.Release == nil {
			deploy = func(ctx context.Context, _ bundle.Item, own []verdict) (bool, error) { return p.writeRanks(ctx, own) }
		}
		goOn, err := deploy(ctx, item, own)
		if err != nil {
			return err
		}
		if !goOn {
			p.skipRest(verdicts)
			return nil
		}
	}
	return nil
}

// deployRelease moves a release toward its item, whose objects the verdicts are about. goOn is false if the items after it have to wait.
func (p *pass) deployRelease(ctx context.Context, item bundle.Item, verdicts []verdict) (goOn bool, err error) {
	s := p.next.FindRelease(releaseKey(item))
	if s.Stage == inventory.StageDeployed {
		return p.writeRanks(ctx, verdicts)
	}
	d := &releaseDeployment{pass: p, op: p.operate(s, release.ItemHooks(item)), item: item, verdicts: verdicts, goOn: true}
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

// releaseDeployment is the deployment of one release in one pass.
type releaseDeployment struct {
	*pass
	op       *releaseOp
	item     bundle.Item
	verdicts []verdict
	// early and written say that the objects before the hooks, and all, were applied by this pass.
	early, written bool
	goOn           bool
}

// run does one step after the other until the release is deployed, or something waits or has failed.
func (d *releaseDeployment) run(ctx context.Context) (goOn bool, err error) {
	s := d.op.state
	next := d.step
	if isAfterObjects(s) {
		next = d.writeObjects // an earlier pass applied them, and they may have drifted since
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
			return d.stop(), nil
		}
		next = d.step
	}
	if s.Stage == inventory.StageFailed {
		return d.reportFailure(ctx)
	}
	return d.goOn, nil
}

// stop ends the pass for a release that waits or whose objects have failed. It returns whether the items after it may be deployed.
func (d *releaseDeployment) stop() (goOn bool) {
	if d.op.waiting == nil {
		return d.goOn
	}
	d.waiting = d.op.waiting
	d.waiting.message = fmt.Sprintf("Helm release %s: %s", d.op.state.Key(), d.waiting.message)
	d.skip()
	return false
}

// step does the work of the stage that the release is in and enters the next one. done is false if the pass cannot go on with the release;
// then something waits or has failed.
func (d *releaseDeployment) step(ctx context.Context) (done bool, err error) {
	s := d.op.state
	pre, post := hookEvents(s.Operation)
	switch {
	case s.Stage == inventory.StageBegin:
		return d.begin(ctx)
	case s.Operation == inventory.Uninstalling:
		return d.undo(ctx)
	case s.Stage == inventory.StagePreHooks:
		return d.runHooks(ctx, pre, inventory.StageObjects)
	case s.Stage == inventory.StageObjects:
		return d.writeObjects(ctx)
	case s.Stage == inventory.StageWait:
		if (s.Options.Wait || s.Options.WaitForJobs) && !d.awaitDefinitions(ctx) {
			return false, context.Cause(ctx)
		}
		if done, err := d.op.waitReady(ctx); err != nil || !done {
			return false, err
		}
		enterStage(s, inventory.StagePostHooks, d.engine.now())
		return true, nil
	case s.Stage == inventory.StagePostHooks:
		return d.runHooks(ctx, post, inventory.StageTests)
	case s.Stage == inventory.StageTests && s.Options.RunTests && s.Operation != inventory.RollingBack:
		return d.runHooks(ctx, helm.HookTest, inventory.StageRecord)
	}
	return d.recordDeployed(ctx)
}

// undo removes a failed installation: with the option atomic, or before the next attempt.
func (d *releaseDeployment) undo(ctx context.Context) (done bool, err error) {
	s := d.op.state
	if done, err := d.op.uninstall(ctx, nil); err != nil || !done {
		return false, err
	}
	s.ObjectsApplied = false
	enterStage(s, inventory.StageFailed, d.engine.now())
	return true, nil
}

// hooksDisabled returns whether the hooks of the operation are not run.
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

// awaitDefinitions waits until the kinds that the release has defined are served. If they are refused, it ends the pass for
// the release and returns false.
func (d *releaseDeployment) awaitDefinitions(ctx context.Context) bool {
	if d.awaitServed(ctx) {
		return true
	}
	d.goOn = false
	d.skip()
	return false
}

func (d *releaseDeployment) runHooks(ctx context.Context, event helm.HookEvent, next inventory.ReleaseStage) (bool, error) {
	if event == helm.HookTest || !d.hooksDisabled() {
		if len(release.ForEvent(d.op.hooks, event)) > 0 && !d.awaitDefinitions(ctx) {
			return false, context.Cause(ctx)
		}
		if done, err := d.op.runHooks(ctx, event); err != nil || !done {
			return false, err
		}
	}
	enterStage(d.op.state, next, d.engine.now())
	return true, nil
}

// writeEarly applies what Helm installs before it runs hooks: CustomResourceDefinitions, and Namespaces since hooks may be in them.
func (d *releaseDeployment) writeEarly(ctx context.Context) (goOn bool, err error) {
	if d.early {
		return true, nil
	}
	d.early = true
	early := d.split()
	return d.writeRanks(ctx, d.verdicts[:early])
}

// split returns how many of the verdicts are about Namespaces and CustomResourceDefinitions.
func (d *releaseDeployment) split() int {
	if i := slices.IndexFunc(d.verdicts, func(v verdict) bool { return v.rank > rankCRD }); i >= 0 {
		return i
	}
	return len(d.verdicts)
}

// skip reports the objects that this pass did not come to.
func (d *releaseDeployment) skip() {
	switch {
	case d.written:
	case d.early:
		d.skipRest(d.verdicts[d.split():])
	default:
		d.skipRest(d.verdicts)
	}
}

// writeObjects applies the manifest. After a failure the same revision goes on with it later: no hook is run again for that.
func (d *releaseDeployment) writeObjects(ctx context.Context) (bool, error) {
	s := d.op.state
	if s.Operation == inventory.RollingBack {
		return d.writeFormer(ctx)
	}
	before := len(d.failures)
	if goOn, err := d.writeEarly(ctx); err != nil || !goOn {
		d.goOn = false
		d.skip()
		return false, err
	}
	goOn, err := d.writeRanks(ctx, d.verdicts[d.split():])
	if err != nil {
		return false, err
	}
	d.written, d.goOn = true, goOn
	if len(d.failures) == before && !slices.ContainsFunc(d.failures, isNoObjects) {
		if err := d.pruneDropped(ctx); err != nil {
			return false, err
		}
	}
	if len(d.failures) > before {
		reason := d.failures[before:].Error()
		if s.Options.Atomic {
			d.failures = d.failures[:before]
			return false, &releaseError{text: reason}
		}
		if s.Message != reason {
			s.Message = reason
			return false, d.putRecord(ctx, common.StatusFailed, reason)
		}
		return false, nil
	}
	s.Message, s.ObjectsApplied = "", true
	if s.Stage == inventory.StageObjects {
		enterStage(s, inventory.StageWait, d.engine.now())
	}
	return true, nil
}

// pruneDropped deletes the objects that the former revision of the release has and this one lacks, as Helm does before it waits.
func (d *releaseDeployment) pruneDropped(ctx context.Context) error {
	return d.pruneGroups(ctx, toPrune(entriesOfRelease(d.prior, d.op.state.Key()), d.retained))
}

// conflicts returns the verdicts about objects that belong to others, so that no hook runs for a release that cannot be deployed.
func (d *releaseDeployment) conflicts() []verdict {
	var found []verdict
	for _, v := range d.verdicts {
		if errors.Is(v.err, ErrConflict) && !d.tolerates(v.err) {
			found = append(found, v)
		}
	}
	return found
}

// recordDeployed writes that the revision is deployed.
func (d *releaseDeployment) recordDeployed(ctx context.Context) (bool, error) {
	s := d.op.state
	description := s.Options.Description
	switch {
	case s.Operation == inventory.RollingBack:
		description = fmt.Sprintf("Rollback to %d", s.Former)
	case description != "":
	case s.Operation == inventory.Installing:
		description = "Install complete"
	default:
		description = "Upgrade complete"
	}
	if err := d.putRecord(ctx, common.StatusDeployed, description); err != nil {
		return false, err
	}
	entries, err := d.op.records().List(ctx, s.Key())
	if err != nil {
		return false, err
	}
	if err := d.op.records().Supersede(ctx, entries, s.Revision); err != nil {
		return false, err
	}
	if err := d.op.records().Prune(ctx, s.Key(), entries, s.Options.MaxHistory, s.Revision); err != nil {
		return false, err
	}
	if s.Operation == inventory.RollingBack {
		s.Message += fmt.Sprintf("; rolled back to revision %d", s.Former)
		s.Former, s.ObjectsApplied = s.Revision, false
		enterStage(s, inventory.StageFailed, d.engine.now())
		return true, nil
	}
	s.Failures, s.Recovered, s.Message = 0, 0, ""
	for i := range s.Hooks {
		s.Hooks[i].DeleteOnSuccess = false // that is done
	}
	enterStage(s, inventory.StageDeployed, d.engine.now())
	return true, nil
}
