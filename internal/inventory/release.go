package inventory

import (
	"iter"
	"slices"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// Operation is the Helm operation on a release.
type Operation string

// The operations.
const (
	Installing   Operation = "install"
	Upgrading    Operation = "upgrade"
	RollingBack  Operation = "rollback"
	Uninstalling Operation = "uninstall"
)

// ReleaseStage is the next step of an operation.
type ReleaseStage string

// The stages of an operation, in order; StageDeployed and StageFailed end it.
const (
	StageBegin      ReleaseStage = ""
	StagePreHooks   ReleaseStage = "pre-hooks"
	StageObjects    ReleaseStage = "objects"
	StageWait       ReleaseStage = "wait"
	StagePostHooks  ReleaseStage = "post-hooks"
	StageTests      ReleaseStage = "tests"
	StageHelmRecord ReleaseStage = "record"
	StageDeployed   ReleaseStage = "deployed"
	StageFailed     ReleaseStage = "failed"
)

// ReleaseState is the state of one Helm release. It is data only: the engine decides about stages, and saves the state
// before every step that must not be done twice.
type ReleaseState struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Digest is the bundle.Item.RevisionDigest of the item that is deployed, or is being deployed.
	Digest    string       `json:"digest,omitempty"`
	Revision  int          `json:"revision,omitempty"`
	Operation Operation    `json:"operation,omitempty"`
	Stage     ReleaseStage `json:"stage,omitempty"`
	// Changed is the time when Stage was entered. The timeout of a wait begins then.
	Changed       time.Time `json:"changed,omitzero"`
	FirstDeployed time.Time `json:"firstDeployed,omitzero"`
	// Hooks are the started hooks of the operation, in order.
	Hooks []HookRun `json:"hooks,omitempty"`
	// Abandoned are hooks of former operations whose objects must be deleted if they still exist.
	Abandoned []HookRun `json:"abandoned,omitempty"`
	// Attempt identifies the operation. It is part of the annotation of its hooks.
	Attempt string `json:"attempt,omitempty"`
	// Message is the reason of the last failure, and Failures the number of consecutive failures. After
	// Options.RecoverAfter failures the engine uninstalls the release; FailuresAtUninstall is Failures at that time.
	Message             string `json:"message,omitempty"`
	Failures            int    `json:"failures,omitempty"`
	FailuresAtUninstall int    `json:"recovered,omitempty"`
	// Sensitive is true if the item is: then logs of its hooks are not reported.
	Sensitive bool `json:"sensitive,omitempty"`
	// PreviousRevision is the revision that was deployed before the operation, 0 if there was none.
	PreviousRevision int `json:"former,omitempty"`
	// HadObjectsBefore is true if the bundle had deployed objects of the release before its first revision, without
	// release records. Then a failure does not uninstall them.
	HadObjectsBefore bool `json:"existed,omitempty"`
	// ObjectsApplied is true if the objects of the item that Digest identifies are applied.
	ObjectsApplied bool `json:"objectsApplied,omitempty"`
	// UninstallAs is set when the uninstallation begins. It is the "namespace/name" of the ServiceAccount that deployed
	// the release. If it is "", the account of the bundle is used.
	UninstallAs string `json:"uninstallAs,omitempty"`
	// Options are the options of the item. They are used after the bundle no longer has the item.
	Options bundle.ReleaseOptions `json:"options,omitzero"`
	// Inputs, RenderedRevision and IsUpgrade are copies of Inputs, Revision and IsUpgrade of bundle.Release. The hub has
	// rendered the release for this revision and operation. All are empty if no template reads the revision or the
	// operation.
	Inputs           string `json:"inputs,omitempty"`
	RenderedRevision int    `json:"renderedRevision,omitempty"`
	IsUpgrade        bool   `json:"isUpgrade,omitempty"`
	// IsUnconfirmed is true until the engine has compared RenderedRevision and IsUpgrade with the Helm release Secrets. If
	// they differ, the engine sets NextRevision and NextIsUpgrade, and the hub must render the release again for these.
	IsUnconfirmed bool `json:"isUnconfirmed,omitempty"`
	NextRevision  int  `json:"nextRevision,omitempty"`
	NextIsUpgrade bool `json:"nextIsUpgrade,omitempty"`
	// HelmSecretUID and HelmSecretFingerprint are the UID and the LiveMeta.Fingerprint of the Helm release Secret of
	// Revision after its last write. They are empty before the first write.
	HelmSecretUID         types.UID `json:"secretUID,omitempty"`
	HelmSecretFingerprint string    `json:"secretState,omitempty"`
}

// HookRun is one execution of a hook.
type HookRun struct {
	Event helm.HookEvent `json:"event"`
	Ref   kube.Ref       `json:"ref"`
	// UID is the UID of the created object. It is empty while it is not known whether the object was created.
	UID       types.UID      `json:"uid,omitempty"`
	Started   time.Time      `json:"started,omitzero"`
	Completed time.Time      `json:"completed,omitzero"`
	Phase     helm.HookPhase `json:"phase"`
	// FoundByAnnotation is true if the UID is of an object that existed and had the annotation of this run. Its creator
	// is not certain: other users can set the annotation.
	FoundByAnnotation bool `json:"found,omitempty"`
	// DeleteOnSuccess is true if the hook has that delete policy.
	DeleteOnSuccess bool `json:"deleteOnSuccess,omitempty"`
}

// HasBegun returns whether the operation on the release has begun. Otherwise it waits, and none of its objects is
// applied. A retry after a failure also begins at StageBegin, but has Failures > 0.
func (s *ReleaseState) HasBegun() bool { return s.Stage != StageBegin || s.Failures > 0 }

// Key returns the namespace and the name of the release.
func (s *ReleaseState) Key() release.Key { return release.Key{Namespace: s.Namespace, Name: s.Name} }

// SecretRef returns the key of the Helm release Secret of Revision.
func (s *ReleaseState) SecretRef() kube.Ref {
	return kube.Ref{Version: "v1", Kind: "Secret", Namespace: s.Namespace, Name: release.SecretName(s.Name, s.Revision)}.Key()
}

// FindRelease returns a pointer into r.Releases, nil if the release is not in it. Change the state only in a copy of r:
// see Edit.
func (r *Record) FindRelease(key release.Key) *ReleaseState {
	for i := range r.Releases {
		if r.Releases[i].Key() == key {
			return &r.Releases[i]
		}
	}
	return nil
}

// DeployedReleases returns, for the hub, each release with the revision for which it was rendered, or with its Helm
// revision if no template reads the revision or the operation.
func (r *Record) DeployedReleases() []bundle.DeployedRelease {
	var all []bundle.DeployedRelease
	for _, s := range r.Releases {
		revision := s.Revision
		if s.Inputs != "" {
			revision = s.RenderedRevision
		}
		all = append(all, bundle.DeployedRelease{
			Namespace: s.Namespace, Name: s.Name, Inputs: s.Inputs, Revision: revision, IsUpgrade: s.IsUpgrade,
			IsUnconfirmed: s.IsUnconfirmed,
		})
	}
	return all
}

// outdatedReleases returns Report.Outdated of the bundle: nil unless a waiting release must be rendered again,
// otherwise all waiting releases with Inputs, since the hub renders them together. Revision is 0 for a release that
// need not be rendered again.
func (r *Record) outdatedReleases() []bundle.OutdatedRelease {
	if !slices.ContainsFunc(r.Releases, func(s ReleaseState) bool { return s.NextRevision > 0 && !s.HasBegun() }) {
		return nil
	}
	var all []bundle.OutdatedRelease
	for _, s := range r.Releases {
		if s.Inputs != "" && !s.HasBegun() {
			all = append(all, bundle.OutdatedRelease{Namespace: s.Namespace, Name: s.Name, Revision: s.NextRevision, IsUpgrade: s.NextIsUpgrade})
		}
	}
	return all
}

// DeleteRelease removes the state of a release from the record.
func (r *Record) DeleteRelease(key release.Key) {
	r.Releases = slices.DeleteFunc(r.Releases, func(s ReleaseState) bool { return s.Key() == key })
}

// FindTracked returns the entry of a tracked object: one of Entries, or an entry with IsHelmSecret for the Helm release
// Secret of a deployed release.
func (r *Record) FindTracked(key kube.Ref) (Entry, bool) {
	if entry, ok := r.Entries[key]; ok {
		return entry, true
	}
	for i := range r.Releases {
		s := &r.Releases[i]
		if s.Stage == StageDeployed && s.HelmSecretUID != "" && s.SecretRef() == key {
			return Entry{Ref: key, UID: s.HelmSecretUID, Fingerprint: s.HelmSecretFingerprint, IsHelmSecret: true}, true
		}
	}
	return Entry{}, false
}

// tracked returns the objects that FindTracked finds.
func (r *Record) tracked() iter.Seq[kube.Ref] {
	return func(yield func(kube.Ref) bool) {
		for _, entry := range r.Entries {
			if !yield(entry.Ref) {
				return
			}
		}
		for i := range r.Releases {
			if s := &r.Releases[i]; s.Stage == StageDeployed && s.HelmSecretUID != "" && !yield(s.SecretRef()) {
				return
			}
		}
	}
}

// TrackedOfKind returns the keys of the objects of a kind that FindTracked finds.
func (r *Record) TrackedOfKind(kind schema.GroupKind) []kube.Ref {
	var keys []kube.Ref
	for ref := range r.tracked() {
		if ref.Group == kind.Group && ref.Kind == kind.Kind {
			keys = append(keys, ref.Key())
		}
	}
	return keys
}
