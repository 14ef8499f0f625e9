package summaries

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/phase"
)

const (
	// defaultMaxHistory is the default of upgradeOptions.maxHistory.
	defaultMaxHistory = 2
	// defaultRecoverAfter is the default of installOptions.recoverAfterConsecutiveFailures.
	defaultRecoverAfter = 5
)

// releaseOptions converts the options of a chart for the engine. It fails with phase.TerminalError for invalid options.
func releaseOptions(options *configv1beta1.HelmOptions) (bundle.ReleaseOptions, error) {
	var spec configv1beta1.HelmOptions
	if options != nil {
		spec = *options
	}
	if err := checkLabels(spec.Labels); err != nil {
		return bundle.ReleaseOptions{}, err
	}
	wait := spec.Wait || spec.Atomic // atomic implies wait
	release := bundle.ReleaseOptions{
		Wait:        wait,
		WaitForJobs: wait && spec.WaitForJobs,
		Atomic:      spec.Atomic,
		RunTests:    spec.RunTests,
		Labels:      spec.Labels,
		Description: spec.Description,
	}
	if spec.Timeout != nil {
		if spec.Timeout.Duration < 0 {
			return bundle.ReleaseOptions{}, phase.TerminalErrorf("options.timeout is negative: %s", spec.Timeout.Duration)
		}
		release.Timeout = spec.Timeout.Duration
	}
	addInstallOptions(&release, cmp.Or(spec.InstallOptions, &configv1beta1.HelmInstallOptions{}))
	addUpgradeOptions(&release, cmp.Or(spec.UpgradeOptions, &configv1beta1.HelmUpgradeOptions{}))
	addUninstallOptions(&release, cmp.Or(spec.UninstallOptions, &configv1beta1.HelmUninstallOptions{}))
	return release, nil
}

func addInstallOptions(release *bundle.ReleaseOptions, install *configv1beta1.HelmInstallOptions) {
	release.DisableInstallHooks = install.DisableHooks
	release.RecoverAfter = limitOrDefault(install.RecoverAfterConsecutiveFailures, defaultRecoverAfter)
}

func addUpgradeOptions(release *bundle.ReleaseOptions, upgrade *configv1beta1.HelmUpgradeOptions) {
	release.DisableUpgradeHooks = upgrade.DisableHooks
	release.CleanupOnFail, release.UpgradeCRDs = upgrade.CleanupOnFail, upgrade.UpgradeCRDs
	release.MaxHistory = limitOrDefault(upgrade.MaxHistory, defaultMaxHistory)
}

func addUninstallOptions(release *bundle.ReleaseOptions, uninstall *configv1beta1.HelmUninstallOptions) {
	release.DisableUninstallHooks = uninstall.DisableHooks
	release.KeepHistory = uninstall.KeepHistory
	release.DeletionPropagation = string(uninstall.DeletionPropagation)
}

// limitOrDefault returns count, or fallback if count is not set. As in Helm, zero or less means no limit.
func limitOrDefault(count *int32, fallback int) int {
	if count == nil {
		return fallback
	}
	return max(0, int(*count))
}

// isForced returns bundle.Item.Force: whether an object is deleted and created again if an immutable field changes.
func isForced(options *configv1beta1.HelmOptions) bool {
	return options != nil && options.UpgradeOptions != nil && options.UpgradeOptions.Force
}

// checkLabels returns phase.TerminalError for labels that are not valid on the Secret of a release record, or that Helm
// sets itself.
func checkLabels(labels map[string]string) error {
	system := []string{"createdAt", "modifiedAt", "name", "owner", "status", "version"}
	var problems []string
	for key, value := range labels {
		if slices.Contains(system, key) {
			problems = append(problems, key+" is a label that Helm sets itself")
		}
		for _, reason := range validation.IsQualifiedName(key) {
			problems = append(problems, fmt.Sprintf("%q is not a valid label key: %s", key, reason))
		}
		for _, reason := range validation.IsValidLabelValue(value) {
			problems = append(problems, fmt.Sprintf("%q is not a valid value of label %s: %s", value, key, reason))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return phase.TerminalErrorf("options.labels: %s", slices.Min(problems))
}
