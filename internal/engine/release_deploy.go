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
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// annotationRevisionDigest on the Secret of a release record holds the bundle.Item.RevisionDigest of what the revision deployed. With it a
// lost inventory is no reason to run hooks again: see Engine.traceReleases.
const annotationRevisionDigest = "towline.dev/revision-digest"

func releaseKey(item bundle.Item) release.Key {
	return release.Key{Namespace: item.Release.Namespace, Name: item.Release.Name}
}

// planReleases writes into the record to come which releases have to be deployed or uninstalled.
func (p *pass) planReleases() error {
	if p.only != nil {
		return nil
	}
	wanted := map[release.Key]bool{}
	for _, item := range p.bundle.Items {
		if item.Release == nil {
			continue
		}
		key := releaseKey(item)
		if wanted[key] {
			return fmt.Errorf("helm release %s is there twice", key)
		}
		wanted[key] = true
		if err := p.planRelease(item); err != nil {
			return err
		}
	}
	for i := range p.next.Releases {
		s := &p.next.Releases[i]
		if wanted[s.Key()] || s.Operation == inventory.Uninstalling && s.Digest == "" {
			continue
		}
		if p.bundle.KeepObjects || isReleaseKept(p.next, s.Key()) {
			continue // the hub was restored from a backup: its objects stay, and so does the release
		}
		beginUninstall(s, p.engine.now())
	}
	return nil
}

// planRelease writes into the record to come that the release of an item has to be deployed, if it is not.
func (p *pass) planRelease(item bundle.Item) error {
	key := releaseKey(item)
	s := p.next.FindRelease(key)
	if s == nil {
		p.next.Releases = append(p.next.Releases, inventory.ReleaseState{Namespace: key.Namespace, Name: key.Name})
		s = p.next.FindRelease(key)
	}
	s.Options, s.Sensitive = item.Release.Options, item.Sensitive
	s.Inputs, s.RenderedRevision, s.IsUpgrade = item.Release.Inputs, item.Release.Revision, item.Release.IsUpgrade
	if s.Digest != "" && p.prior.BundleDigest() == p.digest {
		return nil
	}
	digest, err := item.RevisionDigest()
	if err == nil && s.Digest != digest {
		s.Digest, s.Failures, s.Recovered, s.Message, s.ObjectsApplied = digest, 0, 0, "", false
		enterStage(s, inventory.StageBegin, p.engine.now())
	}
	return err
}

// releasesDeployed returns whether every release in the record to come is deployed.
func (p *pass) releasesDeployed() bool {
	return !slices.ContainsFunc(p.next.Releases, func(s inventory.ReleaseState) bool { return s.Stage != inventory.StageDeployed })
}

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

// begin applies Namespaces and CustomResourceDefinitions, decides which operation has to be done and starts it.
func (d *releaseDeployment) begin(ctx context.Context) (bool, error) {
	s := d.op.state
	if prepared, err := d.prepare(ctx); err != nil || !prepared {
		return false, err
	}
	entries, err := d.op.records().List(ctx, s.Key())
	if err != nil {
		return false, err
	}
	if len(entries) > 0 && d.op.waitForOthers(entries[len(entries)-1]) {
		return false, nil
	}
	if after := s.Options.RecoverAfter; after > 0 && s.Failures > s.Recovered && s.Failures%after == 0 && s.Operation == inventory.Installing {
		s.Recovered = s.Failures
		beginOperation(s, inventory.Uninstalling, d.engine.now())
		return true, nil
	}
	d.nextRevision(entries)
	if err := d.endPending(ctx, entries); err != nil {
		return false, err
	}
	if err := d.op.records().Prune(ctx, s.Key(), entries, max(s.Options.MaxHistory-1, min(s.Options.MaxHistory, 1)), s.Former); err != nil {
		return false, err
	}
	return true, d.start(ctx, entries)
}

// prepare does what comes before a revision begins. prepared is false if the release cannot be deployed now.
func (d *releaseDeployment) prepare(ctx context.Context) (prepared bool, err error) {
	if conflicts := d.conflicts(); len(conflicts) > 0 {
		d.early, d.goOn, d.verdicts = true, false, nil
		_, err := d.writeRanks(ctx, conflicts)
		return false, err
	}
	if goOn, err := d.writeEarly(ctx); err != nil || !goOn {
		d.goOn = false
		d.skip()
		return false, err
	}
	namespace := d.op.state.Namespace
	if d.item.SkipNamespaceCreation || d.wanted[kube.Ref{Kind: "Namespace", Name: namespace}] {
		return true, nil
	}
	if err := d.engine.member.ensureNamespace(ctx, namespace); err != nil {
		return false, fmt.Errorf("create namespace %s: %w", namespace, err)
	}
	return true, nil
}

// nextRevision numbers the revision that begins, after the recorded ones.
func (d *releaseDeployment) nextRevision(entries []release.Entry) {
	s := d.op.state
	if s.Revision == 0 {
		// A version of Towline without release records may have deployed it.
		s.Existed = slices.ContainsFunc(d.verdicts, func(v verdict) bool { return v.rank > rankCRD && d.prior.Entries[v.key()].UID != "" })
	}
	s.Former = 0
	for _, entry := range entries {
		s.Revision = max(s.Revision, entry.Revision)
		if entry.Status == common.StatusDeployed {
			s.Former = entry.Revision
		}
	}
	s.Revision++
	s.SecretUID, s.SecretState = "", ""
}

// endPending records that revisions have failed which this bundle began and did not end, because its content changed.
func (d *releaseDeployment) endPending(ctx context.Context, entries []release.Entry) error {
	for _, entry := range entries {
		if !entry.Status.IsPending() || isOfHelm(entry) {
			continue
		}
		description := fmt.Sprintf("Replaced by revision %d before it was deployed", d.op.state.Revision)
		if err := d.op.records().SetStatus(ctx, entry, common.StatusFailed, description); err != nil {
			return err
		}
	}
	return nil
}

// start begins the operation. Nothing has to be undone if the pass ends in the middle of it.
func (d *releaseDeployment) start(ctx context.Context, entries []release.Entry) error {
	s := d.op.state
	now := d.engine.now()
	what, status, description := inventory.Upgrading, common.StatusPendingUpgrade, "Preparing upgrade"
	if s.Former == 0 && !s.Existed {
		what, status, description = inventory.Installing, common.StatusPendingInstall, "Initial install underway"
		s.FirstDeployed = now
	}
	beginOperation(s, what, now)
	s.FirstDeployed = firstNonZero(s.FirstDeployed, now)
	if i := slices.IndexFunc(entries, func(entry release.Entry) bool { return entry.Revision == s.Former }); i >= 0 && isOfHelm(entries[i]) {
		if err := d.adoptFormer(ctx); err != nil {
			return err
		}
	}
	if err := d.op.deleteAbandoned(ctx); err != nil {
		return err
	}
	if err := d.save(ctx); err != nil {
		return err
	}
	return d.putRecord(ctx, status, description)
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

// fail ends the operation of a release. With the option atomic it begins the one that undoes it.
func (d *releaseDeployment) fail(ctx context.Context, failure *releaseError) error {
	s := d.op.state
	now := d.engine.now()
	if s.Operation == inventory.Uninstalling {
		// What undoes a failed installation failed itself: the next attempt begins with a revision of its own.
		enterStage(s, inventory.StageFailed, now)
		s.Message += "; uninstalling it failed: " + failure.text
		return nil
	}
	if err := d.putRecord(ctx, common.StatusFailed, failure.text); err != nil {
		refused, ok := errors.AsType[*releaseError](err)
		if !ok {
			return err
		}
		failure = &releaseError{text: failure.text + "; " + refused.text}
	}
	if s.Operation == inventory.RollingBack {
		enterStage(s, inventory.StageFailed, now)
		s.Message += "; the rollback failed: " + failure.text
		return nil
	}
	s.Failures++
	s.Message = fmt.Sprintf("%s of revision %d failed: %s", s.Operation, s.Revision, failure.text)
	switch {
	case s.Options.Atomic && s.Operation == inventory.Upgrading:
		beginOperation(s, inventory.RollingBack, now)
		s.Revision++
		return d.endFailed(d.loadFormer(ctx), "it is not rolled back")
	case s.Options.Atomic:
		beginOperation(s, inventory.Uninstalling, now)
		return nil
	case s.Options.CleanupOnFail && s.Operation == inventory.Upgrading:
		if err := d.cleanUp(ctx); err != nil {
			return err
		}
	}
	enterStage(s, inventory.StageFailed, now)
	return nil
}

// endFailed ends an operation as failed if err is a releaseError, and returns any other error.
func (d *releaseDeployment) endFailed(err error, what string) error {
	failure, ok := errors.AsType[*releaseError](err)
	if !ok {
		return err
	}
	d.op.state.Message += fmt.Sprintf("; %s: %s", what, failure.text)
	enterStage(d.op.state, inventory.StageFailed, d.engine.now())
	return nil
}

// reportFailure reports a release that failed and is not tried again yet. What it has deployed is kept as it is, unless that was undone.
func (d *releaseDeployment) reportFailure(ctx context.Context) (goOn bool, err error) {
	s := d.op.state
	if s.ObjectsApplied && !d.written {
		if _, err := d.writeRanks(ctx, d.verdicts); err != nil {
			return false, err
		}
	} else {
		d.skip()
	}
	d.failures = append(d.failures, &releaseFailure{key: s.Key(), message: s.Message})
	return d.bundle.Options.ContinueOnError, nil
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

// loadFormer makes the release that the operation deploys that of the former revision.
func (d *releaseDeployment) loadFormer(ctx context.Context) error {
	record, ok, err := d.op.records().Get(ctx, d.op.state.Key(), d.op.state.Former)
	if err != nil {
		return err
	}
	if !ok || !release.HasManifest(record) {
		return &releaseError{text: fmt.Sprintf("revision %d is not recorded any more", d.op.state.Former)}
	}
	if d.item, err = release.Item(record, d.op.state.Options); err != nil {
		return err
	}
	d.op.hooks = release.ItemHooks(d.item)
	return nil
}

// writeFormer applies the manifest of the former revision, and deletes what the failed one has beside it.
func (d *releaseDeployment) writeFormer(ctx context.Context) (bool, error) {
	s := d.op.state
	former := bundle.Bundle{ID: d.bundle.ID, Owner: d.bundle.Owner, Options: d.bundle.Options, Items: []bundle.Item{d.item}}
	rollback := &pass{engine: d.engine, bundle: former, digest: d.digest, motive: delivered, prior: d.next, defined: d.defined, next: d.next, saved: d.saved}
	if err := rollback.plan(); err != nil {
		return false, err
	}
	verdicts, err := rollback.look(ctx)
	if err != nil {
		return false, err
	}
	goOn, err := rollback.writeRanks(ctx, verdicts)
	d.saved, d.changes, d.unserved = rollback.saved, append(d.changes, rollback.changes...), rollback.unserved
	if err != nil {
		return false, err
	}
	if !goOn {
		return false, &releaseError{text: rollback.failures.Error()}
	}
	if done, err := d.op.removeObjects(ctx, rollback.wanted, entriesOfRelease(d.next, s.Key())); err != nil || !done {
		return false, err
	}
	enterStage(s, inventory.StageWait, d.engine.now())
	return true, nil
}

// cleanUp deletes the objects that a failed upgrade has created.
func (d *releaseDeployment) cleanUp(ctx context.Context) error {
	s := d.op.state
	former, ok, err := d.op.records().Get(ctx, s.Key(), s.Former)
	if err != nil || !ok || !release.HasManifest(former) {
		return err
	}
	item, err := release.Item(former, s.Options)
	if err != nil {
		return err
	}
	keep := map[kube.Ref]bool{}
	for _, obj := range item.Objects {
		ref := kube.RefOf(obj)
		keep[ref.Key()] = true
		ref.Namespace = s.Namespace // of an object that names none; one that is not namespaced is not mistaken for another one
		keep[ref.Key()] = true
	}
	s.ObjectsApplied = false
	return d.pruneGroups(ctx, toPrune(entriesOfRelease(d.next, s.Key()), keep))
}

// releaseFailure is why a release of a bundle is not deployed.
type releaseFailure struct {
	key     release.Key
	message string
}

// Error names the release and the reason.
func (e *releaseFailure) Error() string { return fmt.Sprintf("helm release %s: %s", e.key, e.message) }
