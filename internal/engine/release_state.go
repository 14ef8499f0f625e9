package engine

import (
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/towline/towline/internal/drift"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// hookEvents returns the hook events before and after the objects of an operation.
func hookEvents(o inventory.Operation) (pre, post helm.HookEvent) {
	switch o {
	case inventory.Installing:
		return helm.HookPreInstall, helm.HookPostInstall
	case inventory.Upgrading:
		return helm.HookPreUpgrade, helm.HookPostUpgrade
	case inventory.RollingBack:
		return helm.HookPreRollback, helm.HookPostRollback
	case inventory.Uninstalling:
	}
	return helm.HookPreDelete, helm.HookPostDelete
}

// enterStage sets the stage and the time when it begins.
func enterStage(s *inventory.ReleaseState, stage inventory.ReleaseStage, now time.Time) {
	s.Stage, s.Changed = stage, now
}

// beginOperation starts an operation at its first stage. Former hooks whose objects must be deleted become Abandoned.
func beginOperation(s *inventory.ReleaseState, operation inventory.Operation, now time.Time) {
	for _, run := range s.Hooks {
		if run.UID != "" && (run.Phase == helm.HookPhaseRunning || run.DeleteOnSuccess) {
			s.Abandoned = append(s.Abandoned, run)
		}
	}
	s.Operation, s.Hooks, s.Attempt = operation, nil, rand.String(8)
	enterStage(s, inventory.StagePreHooks, now)
}

// beginUninstall begins to uninstall a release that the bundle no longer has. It deletes the digest, so that the
// release is deployed again if the bundle has it again. account is the ServiceAccount that deployed the release: the
// hooks run as this account, and not as another one with more rights.
func beginUninstall(s *inventory.ReleaseState, account string, now time.Time) {
	s.Digest, s.IsUnconfirmed, s.NextRevision, s.UninstallAs = "", false, 0, account
	beginOperation(s, inventory.Uninstalling, now)
}

// isAfterObjects returns whether the stage is after the objects were applied and before the release is deployed.
func isAfterObjects(s *inventory.ReleaseState) bool {
	switch s.Stage {
	case inventory.StageWait, inventory.StagePostHooks, inventory.StageTests, inventory.StageHelmRecord:
		return s.Operation == inventory.Installing || s.Operation == inventory.Upgrading
	case inventory.StageBegin, inventory.StagePreHooks, inventory.StageObjects, inventory.StageDeployed, inventory.StageFailed:
	}
	return false
}

// retryAt returns the time of the next attempt for a failed release. The delay grows with each failure.
func retryAt(s *inventory.ReleaseState) time.Time {
	return s.Changed.Add(drift.Backoff(max(s.Failures-1, 0)))
}

// findHookRun returns the run of a hook for an event, or nil if it has not begun.
func findHookRun(s *inventory.ReleaseState, event helm.HookEvent, ref kube.Ref) *inventory.HookRun {
	for i := range s.Hooks {
		if s.Hooks[i].Event == event && s.Hooks[i].Ref == ref {
			return &s.Hooks[i]
		}
	}
	return nil
}

// isReleaseKept returns whether the objects of a release are kept although the bundle lacks them, see
// bundle.Bundle.KeepObjects.
func isReleaseKept(r *inventory.Record, key release.Key) bool {
	for _, entry := range entriesOfRelease(r, key) {
		if entry.Kept {
			return true
		}
	}
	return false
}

// entriesOfRelease returns the inventory entries of one release.
func entriesOfRelease(r *inventory.Record, key release.Key) map[kube.Ref]inventory.Entry {
	entries := map[kube.Ref]inventory.Entry{}
	for ref, entry := range r.Entries {
		if entry.Origin == originOfRelease(key.String()) {
			entries[ref] = entry
		}
	}
	return entries
}
