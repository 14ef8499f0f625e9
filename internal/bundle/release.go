package bundle

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// HookAnnotation makes an object of a Helm release a hook of the release. Its value lists the events that run it.
const HookAnnotation = "helm.sh/hook"

// Release describes the Helm release that an item belongs to. The objects of the item that have HookAnnotation are the
// hooks of the release, the others its manifest in Helm's install order.
type Release struct {
	Name         string `json:"name"`
	Namespace    string `json:"namespace"`
	RepoURL      string `json:"repoURL,omitempty"`
	ChartName    string `json:"chartName,omitempty"`
	ChartVersion string `json:"chartVersion,omitempty"`
	AppVersion   string `json:"appVersion,omitempty"`
	Icon         string `json:"icon,omitempty"`
	// Inputs is a digest of the chart, the values and the options if the templates read the revision or the operation, ""
	// for all other charts. Revision and IsUpgrade do not change while it is the same.
	Inputs string `json:"inputs,omitempty"`
	// Revision and IsUpgrade are the values for the templates, 0 and false if Inputs is "".
	Revision  int  `json:"revision,omitempty"`
	IsUpgrade bool `json:"isUpgrade,omitempty"`
	// IsUnconfirmed is true if the member must compare Revision and IsUpgrade with the release records before it deploys
	// the release. If they differ, Report.Outdated lists the release, and the hub renders it again. It is not part of the
	// digest.
	IsUnconfirmed bool `json:"-"`

	Options ReleaseOptions `json:"options,omitzero"`
	Data    ReleaseData    `json:"data,omitzero"`
}

// ReleaseOptions are options for deploying and uninstalling a release. They have the meaning of Helm's flags with the
// same names. A change of options alone does not create a revision.
type ReleaseOptions struct {
	// Timeout limits each hook and each wait; zero means DefaultTimeout.
	Timeout     time.Duration `json:"timeout,omitempty"`
	Wait        bool          `json:"wait,omitempty"`
	WaitForJobs bool          `json:"waitForJobs,omitempty"`
	// Atomic rolls a failed upgrade back to the last deployed revision, and uninstalls a failed installation.
	Atomic bool `json:"atomic,omitempty"`
	// RunTests runs the test hooks after a revision is deployed. A failed test fails the revision.
	RunTests bool `json:"runTests,omitempty"`
	// Labels are set on the Secrets with the release records.
	Labels      map[string]string `json:"labels,omitempty"`
	Description string            `json:"description,omitempty"`
	// MaxHistory is the maximum number of recorded revisions; zero means no limit.
	MaxHistory int `json:"maxHistory,omitempty"`
	// DisableInstallHooks, DisableUpgradeHooks and DisableUninstallHooks disable the hooks of the operation.
	DisableInstallHooks   bool `json:"disableInstallHooks,omitempty"`
	DisableUpgradeHooks   bool `json:"disableUpgradeHooks,omitempty"`
	DisableUninstallHooks bool `json:"disableUninstallHooks,omitempty"`
	// CleanupOnFail deletes the objects that a failed upgrade created.
	CleanupOnFail bool `json:"cleanupOnFail,omitempty"`
	// RecoverAfter is the number of failed installations in a row after which the release is uninstalled before the
	// next attempt; zero means never.
	RecoverAfter int `json:"recoverAfter,omitempty"`
	// KeepHistory keeps the release records after the release is uninstalled.
	KeepHistory bool `json:"keepHistory,omitempty"`
	// UpgradeCRDs updates existing CRDs of the chart's crds directories. Without it they are only created, as with Helm.
	UpgradeCRDs bool `json:"upgradeCRDs,omitempty"`
	// DeletionPropagation is "background" (also if empty), "foreground" or "orphan".
	DeletionPropagation string `json:"deletionPropagation,omitempty"`
}

// DefaultTimeout limits hooks and waits of a release that sets no timeout, as with Helm.
const DefaultTimeout = 5 * time.Minute

// TimeoutOrDefault returns the limit of each hook and each wait.
func (o ReleaseOptions) TimeoutOrDefault() time.Duration {
	if o.Timeout > 0 {
		return o.Timeout
	}
	return DefaultTimeout
}

// ReleaseData is the content of Helm's release record without the objects. It may be large and contain secrets, so it
// is stored together with the objects.
type ReleaseData struct {
	// Chart is the content of Chart.yaml as JSON.
	Chart json.RawMessage `json:"chart,omitempty"`
	// Values are the values of the profile as JSON, without the defaults of the chart.
	Values json.RawMessage `json:"values,omitempty"`
	// Defaults are the default values of the chart and its subcharts as JSON. `helm get values --all` reads them.
	Defaults json.RawMessage `json:"defaults,omitempty"`
	Notes    string          `json:"notes,omitempty"`
	// Paths are the template paths of the item's objects, in their order.
	Paths []string `json:"paths,omitempty"`
}

// IsZero returns whether d is empty.
func (d ReleaseData) IsZero() bool {
	return len(d.Chart) == 0 && len(d.Values) == 0 && len(d.Defaults) == 0 && d.Notes == "" && len(d.Paths) == 0
}

// IsHook returns whether an object of a Helm release is a hook.
func IsHook(obj *unstructured.Unstructured) bool {
	_, ok := obj.GetAnnotations()[HookAnnotation]
	return ok
}

// RevisionDigest returns a digest of the parts of a Helm item whose change creates a revision: the objects, the chart
// and the values. i.Release must not be nil.
func (i Item) RevisionDigest() (string, error) {
	release := *i.Release
	release.Options, release.Icon, release.RepoURL = ReleaseOptions{}, "", ""
	// A change of these fields counts only if it changes the objects.
	release.Inputs, release.Revision, release.IsUpgrade, release.Data.Defaults = "", 0, false, nil
	raw, err := json.Marshal(Item{Objects: i.Objects, Release: &release})
	if err != nil {
		return "", fmt.Errorf("encode Helm release %s/%s: %w", release.Namespace, release.Name, err)
	}
	sum := sha256.Sum256(raw)
	return DigestFromBytes(sum[:]).String(), nil
}
