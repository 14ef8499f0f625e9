package engine

import (
	"slices"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// operation is what makes, or removes, a revision of a Helm release.
type operation string

const (
	installing   operation = "install"
	upgrading    operation = "upgrade"
	rollingBack  operation = "rollback"
	uninstalling operation = "uninstall"
)

// events returns the hook events before and after the objects of an operation.
func (o operation) events() (pre, post helm.HookEvent) {
	switch o {
	case installing:
		return helm.HookPreInstall, helm.HookPostInstall
	case upgrading:
		return helm.HookPreUpgrade, helm.HookPostUpgrade
	case rollingBack:
		return helm.HookPreRollback, helm.HookPostRollback
	case uninstalling:
	}
	return helm.HookPreDelete, helm.HookPostDelete
}

// releaseStage is the next step of an operation.
type releaseStage string

const (
	stageBegin     releaseStage = ""
	stagePreHooks  releaseStage = "pre-hooks"
	stageObjects   releaseStage = "objects"
	stageWait      releaseStage = "wait"
	stagePostHooks releaseStage = "post-hooks"
	stageTests     releaseStage = "tests"
	stageRecord    releaseStage = "record"
	stageDeployed  releaseStage = "deployed"
	stageFailed    releaseStage = "failed"
)

// releaseState is how far a member is with one Helm release. It is part of the inventory record and saved before every step that must not
// be done twice.
type releaseState struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Digest is the bundle.Item.RevisionDigest of the item that is deployed, or is being deployed.
	Digest    string       `json:"digest,omitempty"`
	Revision  int          `json:"revision,omitempty"`
	Operation operation    `json:"operation,omitempty"`
	Stage     releaseStage `json:"stage,omitempty"`
	// Changed is when Stage was entered; it begins the time limit of a wait.
	Changed       time.Time `json:"changed,omitzero"`
	FirstDeployed time.Time `json:"firstDeployed,omitzero"`
	// Hooks are the hooks of the operation that were begun, in order.
	Hooks []hookRun `json:"hooks,omitempty"`
	// Abandoned are hooks of former operations whose objects have to be deleted, if they exist still.
	Abandoned []hookRun `json:"abandoned,omitempty"`
	// Attempt identifies the operation, and is in the marks of its hooks.
	Attempt string `json:"attempt,omitempty"`
	// Message is why the release failed, and Failures how often in a row it did. Recovered is how many of the failures were followed by an
	// uninstallation.
	Message   string `json:"message,omitempty"`
	Failures  int    `json:"failures,omitempty"`
	Recovered int    `json:"recovered,omitempty"`
	// Sensitive is that of the item: logs of its hooks are not reported.
	Sensitive bool `json:"sensitive,omitempty"`
	// Former is the revision that was deployed before the operation, 0 if there was none.
	Former int `json:"former,omitempty"`
	// Existed says that objects of the release were deployed before its first recorded revision: no failure uninstalls them.
	Existed bool `json:"existed,omitempty"`
	// ObjectsApplied says that the objects on the member are those of Digest.
	ObjectsApplied bool `json:"objectsApplied,omitempty"`
	// Options are those of the item, for the time when the bundle no longer has it.
	Options bundle.ReleaseOptions `json:"options,omitzero"`
	// Inputs, RenderedRevision and IsUpgrade are those of the bundle.Release.
	Inputs           string `json:"inputs,omitempty"`
	RenderedRevision int    `json:"renderedRevision,omitempty"`
	IsUpgrade        bool   `json:"isUpgrade,omitempty"`
	// SecretUID and SecretState identify the release record of Revision as it was written last. They are empty until it is.
	SecretUID   types.UID `json:"secretUID,omitempty"`
	SecretState string    `json:"secretState,omitempty"`
}

// hookRun is one execution of a hook.
type hookRun struct {
	Event helm.HookEvent `json:"event"`
	Ref   kube.Ref       `json:"ref"`
	// UID is that of the created object; it is empty while it is not known whether the object was created.
	UID       types.UID      `json:"uid,omitempty"`
	Started   time.Time      `json:"started,omitzero"`
	Completed time.Time      `json:"completed,omitzero"`
	Phase     helm.HookPhase `json:"phase"`
	// DeleteOnSuccess says that the hook has that delete policy.
	DeleteOnSuccess bool `json:"deleteOnSuccess,omitempty"`
}

func (s *releaseState) key() release.Key { return release.Key{Namespace: s.Namespace, Name: s.Name} }

// enter begins a stage.
func (s *releaseState) enter(stage releaseStage, now time.Time) { s.Stage, s.Changed = stage, now }

// begin starts an operation at its first stage.
func (s *releaseState) begin(what operation, now time.Time) {
	for _, run := range s.Hooks {
		if run.UID != "" && (run.Phase == helm.HookPhaseRunning || run.DeleteOnSuccess) {
			s.Abandoned = append(s.Abandoned, run)
		}
	}
	s.Operation, s.Hooks, s.Attempt = what, nil, rand.String(8)
	s.enter(stagePreHooks, now)
}

// drop begins to uninstall a release that the bundle no longer has. Without a digest it is deployed again if the bundle has it again.
func (s *releaseState) drop(now time.Time) {
	s.Digest = ""
	s.begin(uninstalling, now)
}

// isAfterObjects returns whether the objects of the item were applied and something else has to be done before the release is deployed.
func (s *releaseState) isAfterObjects() bool {
	switch s.Stage {
	case stageWait, stagePostHooks, stageTests, stageRecord:
		return s.Operation == installing || s.Operation == upgrading
	case stageBegin, stagePreHooks, stageObjects, stageDeployed, stageFailed:
	}
	return false
}

// retryAt returns when a failed release may be tried again: later after each failure.
func (s *releaseState) retryAt() time.Time { return s.Changed.Add(backoff(max(s.Failures-1, 0))) }

// secretRef returns the key of the Secret with the release record.
func (s *releaseState) secretRef() kube.Ref {
	return kube.Ref{Version: "v1", Kind: "Secret", Namespace: s.Namespace, Name: release.SecretName(s.Name, s.Revision)}.Key()
}

// run returns the execution of a hook for an event, nil if it was not begun.
func (s *releaseState) run(event helm.HookEvent, ref kube.Ref) *hookRun {
	for i := range s.Hooks {
		if s.Hooks[i].Event == event && s.Hooks[i].Ref == ref {
			return &s.Hooks[i]
		}
	}
	return nil
}

// findRelease returns the state of a release in the record, nil if there is none.
func (r *record) findRelease(key release.Key) *releaseState {
	for i := range r.Releases {
		if r.Releases[i].key() == key {
			return &r.Releases[i]
		}
	}
	return nil
}

// deployedReleases describes the releases of the record as they were delivered; the revision is the recorded one where no template asks for it.
func (r *record) deployedReleases() []bundle.DeployedRelease {
	var all []bundle.DeployedRelease
	for _, s := range r.Releases {
		revision := s.Revision
		if s.Inputs != "" {
			revision = s.RenderedRevision
		}
		all = append(all, bundle.DeployedRelease{
			Namespace: s.Namespace, Name: s.Name, Inputs: s.Inputs, Revision: revision, IsUpgrade: s.IsUpgrade,
		})
	}
	return all
}

// dropRelease removes the state of a release from the record.
func (r *record) dropRelease(key release.Key) {
	r.Releases = slices.DeleteFunc(r.Releases, func(s releaseState) bool { return s.key() == key })
}

// tracked returns what the record holds of an object, release records included.
func (r *record) tracked(key kube.Ref) (held, bool) {
	if item, ok := r.inventory[key]; ok {
		return item, true
	}
	for i := range r.Releases {
		s := &r.Releases[i]
		if s.Stage == stageDeployed && s.SecretUID != "" && s.secretRef() == key {
			return held{Ref: key, UID: s.SecretUID, Fields: s.SecretState, isRecord: true}, true
		}
	}
	return held{}, false
}

// trackedRefs lists the objects that tracked knows.
func (r *record) trackedRefs() []kube.Ref {
	refs := make([]kube.Ref, 0, len(r.inventory)+len(r.Releases))
	for _, item := range r.inventory {
		refs = append(refs, item.Ref)
	}
	for i := range r.Releases {
		if s := &r.Releases[i]; s.Stage == stageDeployed && s.SecretUID != "" {
			refs = append(refs, s.secretRef())
		}
	}
	return refs
}

// isKept returns whether the objects of a release are kept although the bundle lacks them: see bundle.Bundle.KeepObjects.
func (r *record) isKept(key release.Key) bool {
	for _, item := range r.ofRelease(key) {
		if item.Kept {
			return true
		}
	}
	return false
}

// ofRelease lists the inventory of one release.
func (r *record) ofRelease(key release.Key) map[kube.Ref]held {
	items := map[kube.Ref]held{}
	for ref, item := range r.inventory {
		if item.Origin == originOfRelease(key.String()) {
			items[ref] = item
		}
	}
	return items
}
