package summaries

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

func TestReleaseOptions(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		options string
		want    bundle.ReleaseOptions
	}{
		"none":  {want: bundle.ReleaseOptions{MaxHistory: 2, RecoverAfter: 5}},
		"empty": {options: "{installOptions: {}, upgradeOptions: {}, uninstallOptions: {}}", want: bundle.ReleaseOptions{MaxHistory: 2, RecoverAfter: 5}},
		"no limits": {
			options: "{installOptions: {recoverAfterConsecutiveFailures: 0}, upgradeOptions: {maxHistory: 0}}", want: bundle.ReleaseOptions{},
		},
		"negative limits": {
			options: "{installOptions: {recoverAfterConsecutiveFailures: -1}, upgradeOptions: {maxHistory: -1}}", want: bundle.ReleaseOptions{},
		},
		"atomic waits":           {options: "{atomic: true}", want: bundle.ReleaseOptions{Atomic: true, Wait: true, MaxHistory: 2, RecoverAfter: 5}},
		"waitForJobs needs wait": {options: "{waitForJobs: true}", want: bundle.ReleaseOptions{MaxHistory: 2, RecoverAfter: 5}},
		"waitForJobs with atomic": {
			options: "{atomic: true, waitForJobs: true}",
			want:    bundle.ReleaseOptions{Atomic: true, Wait: true, WaitForJobs: true, MaxHistory: 2, RecoverAfter: 5},
		},
		"all": {
			options: `{timeout: 90s, wait: true, waitForJobs: true, runTests: true, labels: {team: web}, description: d,
				installOptions: {disableHooks: true, recoverAfterConsecutiveFailures: 3},
				upgradeOptions: {disableHooks: true, cleanupOnFail: true, upgradeCRDs: true, maxHistory: 7},
				uninstallOptions: {disableHooks: true, keepHistory: true, deletionPropagation: foreground}}`,
			want: bundle.ReleaseOptions{
				Timeout: 90 * time.Second, Wait: true, WaitForJobs: true, RunTests: true, Labels: map[string]string{"team": "web"}, Description: "d",
				DisableInstallHooks: true, RecoverAfter: 3, DisableUpgradeHooks: true, CleanupOnFail: true, UpgradeCRDs: true, MaxHistory: 7,
				DisableUninstallHooks: true, KeepHistory: true, DeletionPropagation: "foreground",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var options *configv1beta1.HelmOptions
			if err := yaml.UnmarshalStrict([]byte(test.options), &options); err != nil {
				t.Fatal(err)
			}
			got, err := releaseOptions(options)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("options differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReleaseOptionsAreRefused(t *testing.T) {
	t.Parallel()
	for want, options := range map[string]configv1beta1.HelmOptions{
		"owner is a label that Helm sets itself": {Labels: map[string]string{"owner": "me", "team": "web"}},
		`"a b" is not a valid label key`:         {Labels: map[string]string{"a b": "c"}},
		"is not a valid value of label team":     {Labels: map[string]string{"team": "a b"}},
		"options.timeout is negative":            {Timeout: ptr.To(metav1.Duration{Duration: -time.Second})},
	} {
		if _, err := releaseOptions(&options); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q in it", err, want)
		}
	}
}

func TestBundlesHaveAMaximalNumberOfObjects(t *testing.T) {
	t.Parallel()
	half := bundle.Item{Objects: make([]*unstructured.Unstructured, kube.MaxObjects/2)}
	if err := checkObjects([]bundle.Item{half, half}); err != nil {
		t.Error(err)
	}
	err := checkObjects([]bundle.Item{half, half, {Objects: half.Objects[:1]}})
	if _, isInvalid := errors.AsType[phase.TerminalError](err); !isInvalid || !strings.HasPrefix(err.Error(), "there are 20001 objects") {
		t.Errorf("checkObjects() = %v", err)
	}
	// Each content has less values than a manifest may have.
	objects := []*unstructured.Unstructured{{Object: map[string]any{"x": make([]any, kube.MaxValues/2)}}}
	content := bundle.Item{Objects: objects, Documents: kube.NewDocuments(objects)}
	if err := checkObjects([]bundle.Item{content}); err != nil {
		t.Error(err)
	}
	err = checkObjects([]bundle.Item{content, content})
	if _, isInvalid := errors.AsType[phase.TerminalError](err); !isInvalid || !strings.HasPrefix(err.Error(), "the objects have more than 3000000 values") {
		t.Errorf("checkObjects() = %v", err)
	}
}
