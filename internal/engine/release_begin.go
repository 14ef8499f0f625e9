package engine

import (
	"context"
	"fmt"
	"slices"

	"helm.sh/helm/v4/pkg/release/common"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// begin chooses the operation and starts it. done is false if the release must wait. After each RecoverAfter failed
// installations in a row, the operation is the uninstallation of the failed one.
func (d *releaseDeployment) begin(ctx context.Context) (done bool, err error) {
	s := d.op.state
	entries, err := d.op.releaseRecords().List(ctx, s.Key())
	if err != nil {
		return false, err
	}
	if len(entries) > 0 && d.op.setHelmClientWait(entries[len(entries)-1]) || d.setRenderingWait(entries) {
		return false, nil
	}
	if prepared, err := d.prepare(ctx); err != nil || !prepared {
		return false, err
	}
	if after := s.Options.RecoverAfter; after > 0 && s.Failures > s.FailuresAtUninstall && s.Failures%after == 0 && s.Operation == inventory.Installing {
		s.FailuresAtUninstall = s.Failures
		beginOperation(s, inventory.Uninstalling, d.engine.now())
		return true, nil
	}
	d.setNextRevision(entries)
	if err := d.failPendingRevisions(ctx, entries); err != nil {
		return false, err
	}
	// With the new record there are MaxHistory records, but at least one old record is left. 0 is no limit.
	oldRecords := max(s.Options.MaxHistory-1, min(s.Options.MaxHistory, 1))
	if err := d.op.releaseRecords().Prune(ctx, s.Key(), entries, oldRecords, s.PreviousRevision); err != nil {
		return false, err
	}
	return true, d.start(ctx, entries)
}

// prepare checks for conflicts, and creates the release namespace, in which the release record is. prepared is false if
// the release cannot be deployed now.
func (d *releaseDeployment) prepare(ctx context.Context) (prepared bool, err error) {
	if conflicts := d.findConflicts(); len(conflicts) > 0 {
		// Report them, and apply nothing: all other decisions are dropped.
		d.earlyApplied, d.proceed, d.decisions = true, false, nil
		_, err := d.applyRanks(ctx, conflicts)
		return false, err
	}
	namespace := d.op.state.Namespace
	if d.desired[kube.Ref{Kind: "Namespace", Name: namespace}] {
		if proceed, err := d.applyEarly(ctx); err != nil || !proceed {
			d.proceed = false
			d.skipUnapplied()
			return false, err
		}
		return true, nil
	}
	if d.item.SkipNamespaceCreation {
		return true, nil
	}
	if err := d.engine.member.ensureNamespace(withAccount(ctx, d.op.account), namespace); err != nil {
		return false, fmt.Errorf("create namespace %s: %w", namespace, err)
	}
	return true, nil
}

// setNextRevision sets the number of the new revision, which follows the recorded ones, and the previous revision.
func (d *releaseDeployment) setNextRevision(entries []release.Entry) {
	s := d.op.state
	if s.Revision == 0 {
		// A version of Towline without release records may have deployed it.
		s.HadObjectsBefore = slices.ContainsFunc(d.decisions, func(v decision) bool { return v.rank > rankCRD && d.prior.Entries[v.key()].UID != "" })
	}
	s.PreviousRevision = 0
	for _, entry := range entries {
		s.Revision = max(s.Revision, entry.Revision)
		if entry.Status == common.StatusDeployed {
			s.PreviousRevision = entry.Revision
		}
	}
	s.Revision++
	s.HelmSecretUID, s.HelmSecretFingerprint = "", ""
}

// failPendingRevisions sets the status of this bundle's pending revisions to failed. They are unfinished, because the
// content of the bundle has changed meanwhile.
func (d *releaseDeployment) failPendingRevisions(ctx context.Context, entries []release.Entry) error {
	for _, entry := range entries {
		if !entry.Status.IsPending() || isFromHelm(entry) || d.op.isFromOtherBundle(entry) {
			continue
		}
		description := fmt.Sprintf("Replaced by revision %d before it was deployed", d.op.state.Revision)
		if err := d.op.releaseRecords().SetStatus(ctx, entry, common.StatusFailed, description); err != nil {
			return err
		}
	}
	return nil
}

// start begins the operation. If the run is aborted in between, the next run can repeat all of it.
func (d *releaseDeployment) start(ctx context.Context, entries []release.Entry) error {
	s := d.op.state
	now := d.engine.now()
	operation, status, description := inventory.Upgrading, common.StatusPendingUpgrade, "Preparing upgrade"
	if s.PreviousRevision == 0 && !s.HadObjectsBefore {
		operation, status, description = inventory.Installing, common.StatusPendingInstall, "Initial install underway"
		s.FirstDeployed = now
	}
	beginOperation(s, operation, now)
	s.FirstDeployed = firstNonZero(s.FirstDeployed, now)
	if i := slices.IndexFunc(entries, func(entry release.Entry) bool { return entry.Revision == s.PreviousRevision }); i >= 0 && isFromHelm(entries[i]) {
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
	return d.putReleaseRecord(ctx, status, description)
}
