package status_test

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/status"
)

var (
	key    = status.HashKey("a key")
	one    = bundle.Digest{1}
	two    = bundle.Digest{2}
	noon   = time.Date(2026, 1, 2, 12, 0, 0, 123, time.UTC)
	noonAt = &metav1.Time{Time: noon.Truncate(time.Second)}
	member = fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one"}
)

func feature(s libv1beta1.FeatureStatus, hash bundle.Digest, message string) configv1beta1.FeatureSummary {
	return configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: s, Hash: key.HashOf(hash), FailureMessage: message}
}

func TestComputeStatusAndEvents(t *testing.T) {
	t.Parallel()
	delivered := func(state bundle.State, digest bundle.Digest, message string) status.FeatureResult {
		return status.FeatureResult{
			Feature: libv1beta1.FeatureResources, Kind: status.Delivered, DesiredDigest: one,
			Report: bundle.Report{State: state, Digest: digest, Message: message, LastApplied: noon, Kinds: []string{"ConfigMap.v1."}},
		}
	}
	provisioned := feature(libv1beta1.FeatureStatusProvisioned, one, "")
	provisioned.LastAppliedTime = noonAt
	failing := feature(libv1beta1.FeatureStatusFailed, one, "no room")
	failing.FailureReason, failing.ConsecutiveFailures = status.ReasonApply, 1
	with := func(f configv1beta1.FeatureSummary, change func(*configv1beta1.FeatureSummary)) configv1beta1.FeatureSummary {
		change(&f)
		return f
	}
	tests := map[string]struct {
		old        configv1beta1.FeatureSummary
		result     status.FeatureResult
		want       configv1beta1.FeatureSummary
		wantEvents []status.Event
	}{
		"the first delivery is pending": {
			result: delivered(bundle.StatePending, bundle.Digest{}, ""),
			want:   feature(libv1beta1.FeatureStatusProvisioning, one, ""),
		},
		"applied": {
			old: feature(libv1beta1.FeatureStatusProvisioning, one, ""), result: delivered(bundle.StateApplied, one, ""), want: provisioned,
			wantEvents: []status.Event{{Type: "Normal", Reason: "Sveltos", Note: "Feature: Resources deployed to cluster Sveltos eu/one"}},
		},
		"applied still is no news": {
			old: provisioned,
			result: func() status.FeatureResult {
				f := delivered(bundle.StateApplied, one, "")
				f.Report.LastApplied = noon.Add(time.Hour)
				return f
			}(),
			want: provisioned,
		},
		"an old bundle applied is on its way": {
			old: feature(libv1beta1.FeatureStatusProvisioned, two, ""), result: delivered(bundle.StateApplied, two, ""),
			want: feature(libv1beta1.FeatureStatusProvisioning, one, ""),
		},
		"a failure of the member": {
			old: feature(libv1beta1.FeatureStatusProvisioning, one, ""), result: delivered(bundle.StateFailed, one, "no room"), want: failing,
			wantEvents: []status.Event{{Type: "Warning", Reason: "ApplyFailed", Note: "Feature: Resources: no room"}},
		},
		"the same failure is no news": {old: failing, result: delivered(bundle.StateFailed, one, "no room"), want: failing},
		"another failure counts": {
			old: failing, result: delivered(bundle.StateFailed, one, "no node"),
			want:       with(failing, func(f *configv1beta1.FeatureSummary) { f.FailureMessage, f.ConsecutiveFailures = "no node", 2 }),
			wantEvents: []status.Event{{Type: "Warning", Reason: status.ReasonApply, Note: "Feature: Resources: no node"}},
		},
		"a repeated failure of the hub is no news": {
			old: failing,
			result: status.FeatureResult{
				Feature: libv1beta1.FeatureResources, Kind: status.Failed, Err: errors.New("no room"), Reason: status.ReasonApply, Status: libv1beta1.FeatureStatusFailed,
			},
			want: failing,
		},
		"a new attempt alone is no news": {old: failing, result: delivered(bundle.StateApplying, one, ""), want: failing},
		"what a release waits for is told": {
			old: feature(libv1beta1.FeatureStatusProvisioning, one, ""), result: delivered(bundle.StateApplying, one, "waiting for a hook"),
			want: with(feature(libv1beta1.FeatureStatusProvisioning, one, ""), func(f *configv1beta1.FeatureSummary) { f.FailureMessage = "waiting for a hook" }),
		},
		"the failure of an old bundle is not ours": {old: provisioned, result: delivered(bundle.StateFailed, two, "no room"), want: with(feature(libv1beta1.FeatureStatusProvisioning, one, ""), func(f *configv1beta1.FeatureSummary) { f.LastAppliedTime = noonAt })},
		"a render error keeps the hash": {
			old: feature(libv1beta1.FeatureStatusProvisioned, two, ""),
			result: status.FeatureResult{
				Feature: libv1beta1.FeatureResources, Kind: status.Failed, Err: errors.New("bad yaml"), Reason: status.ReasonRender,
				Status: libv1beta1.FeatureStatusFailedNonRetriable,
			},
			want: with(feature(libv1beta1.FeatureStatusFailedNonRetriable, two, "bad yaml"), func(f *configv1beta1.FeatureSummary) {
				f.FailureReason, f.ConsecutiveFailures = status.ReasonRender, 1
			}),
			wantEvents: []status.Event{{Type: "Warning", Reason: "FailedNonRetriable", Note: "Feature: Resources: bad yaml"}},
		},
		"what is held stays provisioned": {
			old:    provisioned,
			result: status.FeatureResult{Feature: libv1beta1.FeatureResources, Kind: status.Skipped, Err: errors.New("silent"), Status: libv1beta1.FeatureStatusFailed},
			want:   provisioned,
		},
		"what is held and not provisioned says why": {
			result:     status.FeatureResult{Feature: libv1beta1.FeatureResources, Kind: status.Skipped, Err: errors.New("cluster is not ready"), Reason: status.ReasonNotReady, Status: libv1beta1.FeatureStatusFailed},
			want:       configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusFailed, FailureMessage: "cluster is not ready", FailureReason: status.ReasonNotReady},
			wantEvents: []status.Event{{Type: "Warning", Reason: "NotReady", Note: "Feature: Resources: cluster is not ready"}},
		},
		"leaving": {
			old: provisioned, result: status.FeatureResult{Feature: libv1beta1.FeatureResources, Kind: status.Withdrawing, Status: libv1beta1.FeatureStatusAgentRemoving},
			want: with(provisioned, func(f *configv1beta1.FeatureSummary) { f.Status = libv1beta1.FeatureStatusAgentRemoving }),
		},
		"left": {
			old: feature(libv1beta1.FeatureStatusRemoving, one, ""), result: status.FeatureResult{Feature: libv1beta1.FeatureResources, Kind: status.Withdrawn},
			want:       configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusRemoved},
			wantEvents: []status.Event{{Type: "Normal", Reason: "Sveltos", Note: "Feature: Resources removed from cluster Sveltos eu/one"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			old := configv1beta1.ClusterSummaryStatus{}
			if tc.old.FeatureID != "" {
				old.FeatureSummaries = []configv1beta1.FeatureSummary{tc.old}
			}
			before := old.DeepCopy()
			now := status.ComputeStatus(old, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{tc.result}})
			if diff := cmp.Diff(*before, old); diff != "" {
				t.Errorf("Fold() changed its input (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(tc.want, status.FeatureOf(now, libv1beta1.FeatureResources)); diff != "" {
				t.Errorf("feature (-want +got):\n%s", diff)
			}
			if *now.Dependencies != status.NoDependencies {
				t.Errorf("dependencies = %q", *now.Dependencies)
			}
			if diff := cmp.Diff(tc.wantEvents, status.Events(old, now, member)); diff != "" {
				t.Errorf("Events() (-want +got):\n%s", diff)
			}
			again := status.ComputeStatus(now, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{tc.result}})
			if events := status.Events(now, again, member); len(events) > 0 {
				t.Errorf("Events() of the same result again = %v", events)
			}
		})
	}
}

func TestFoldOrdersFeaturesAndTracksKinds(t *testing.T) {
	t.Parallel()
	result := func(id libv1beta1.FeatureID, kind status.ResultKind) status.FeatureResult {
		return status.FeatureResult{Feature: id, Kind: kind, DesiredDigest: one, Report: bundle.Report{State: bundle.StateApplied, Digest: one, Kinds: []string{"Pod.v1."}}}
	}
	s := status.ComputeStatus(configv1beta1.ClusterSummaryStatus{}, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{result(libv1beta1.FeatureHelm, status.Delivered), result(libv1beta1.FeatureResources, status.Delivered)}})
	if s.FeatureSummaries[0].FeatureID != libv1beta1.FeatureResources || s.DeployedGVKs[1].FeatureID != libv1beta1.FeatureHelm {
		t.Errorf("order = %v, %v", s.FeatureSummaries, s.DeployedGVKs)
	}
	s = status.ComputeStatus(s, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{result(libv1beta1.FeatureResources, status.Withdrawn)}, SuspensionReason: "paused"})
	if len(s.DeployedGVKs) != 1 || !s.ReconciliationSuspended || s.SuspensionReason != "paused" {
		t.Errorf("status = %+v", s)
	}
}

func TestFoldReleases(t *testing.T) {
	t.Parallel()
	release := func(name string) configv1beta1.HelmChartSummary {
		return configv1beta1.HelmChartSummary{ReleaseName: name, ReleaseNamespace: "web", Status: configv1beta1.HelmChartStatusManaging}
	}
	old := configv1beta1.ClusterSummaryStatus{HelmReleaseSummaries: []configv1beta1.HelmChartSummary{release("a"), release("b")}}
	names := func(state bundle.State, kind status.ResultKind) []string {
		s := status.ComputeStatus(old, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{{
			Feature: libv1beta1.FeatureHelm, Kind: kind, DesiredDigest: one, Report: bundle.Report{State: state, Digest: one},
			Releases: []configv1beta1.HelmChartSummary{release("c"), release("b")},
		}}})
		var got []string
		for _, r := range s.HelmReleaseSummaries {
			got = append(got, r.ReleaseName)
		}
		return got
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, names(bundle.StateApplying, status.Delivered)); diff != "" {
		t.Errorf("on the way (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"b", "c"}, names(bundle.StateApplied, status.Delivered)); diff != "" {
		t.Errorf("applied (-want +got):\n%s", diff)
	}
	if got := names("", status.Withdrawn); got != nil {
		t.Errorf("left = %v", got)
	}
}

func TestFoldKeepsAReleaseUntilItIsUninstalled(t *testing.T) {
	t.Parallel()
	managed := configv1beta1.HelmChartSummary{ReleaseName: "a", ReleaseNamespace: "web", Status: configv1beta1.HelmChartStatusManaging}
	nothing := configv1beta1.HelmChartSummary{ReleaseName: "a", ReleaseNamespace: "web", ConflictMessage: "nothing of ours"}
	old := configv1beta1.ClusterSummaryStatus{HelmReleaseSummaries: []configv1beta1.HelmChartSummary{managed}}
	for state, want := range map[bundle.State]configv1beta1.HelmChartSummary{bundle.StateApplying: managed, bundle.StateApplied: nothing} {
		s := status.ComputeStatus(old, status.ReconcileResult{HashKey: key, Features: []status.FeatureResult{{
			Feature: libv1beta1.FeatureHelm, Kind: status.Delivered, DesiredDigest: one, Report: bundle.Report{State: state, Digest: one},
			Releases: []configv1beta1.HelmChartSummary{nothing},
		}}})
		if diff := cmp.Diff([]configv1beta1.HelmChartSummary{want}, s.HelmReleaseSummaries); diff != "" {
			t.Errorf("%s (-want +got):\n%s", state, diff)
		}
	}
}

func TestEventsTellASummaryWideMessageOnce(t *testing.T) {
	t.Parallel()
	old := configv1beta1.ClusterSummaryStatus{}
	message := "spec.reloader is not supported yet" + strings.Repeat("é", 1024)
	pass := status.ReconcileResult{FailureMessage: message}
	for _, id := range []libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm} {
		pass.Features = append(pass.Features, status.FeatureResult{Feature: id, Kind: status.Failed, Err: errors.New(message), Reason: status.ReasonUnsupported, Status: libv1beta1.FeatureStatusFailedNonRetriable})
	}
	events := status.Events(old, status.ComputeStatus(old, pass), member)
	if len(events) != 1 || events[0].Reason != "FailedNonRetriable" || len(events[0].Note) > 1024 || !strings.HasPrefix(events[0].Note, "spec.reloader") {
		t.Errorf("Events() = %+v", events)
	}
}

func TestInventory(t *testing.T) {
	t.Parallel()
	obj := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "web", "namespace": "eu"}}}
	applied := configv1beta1.FeatureSummary{LastAppliedTime: noonAt, Hash: []byte("hash")}
	resources := status.DeployedFeatureOf(bundle.Bundle{ID: bundle.ID{Feature: "Resources"}, Items: []bundle.Item{{Objects: []*unstructured.Unstructured{obj}}}}, applied, "Remote")
	release := &bundle.Release{Name: "r", Namespace: "web", RepoURL: "https://charts.test", ChartVersion: "1.2.3", AppVersion: "9"}
	charts := status.DeployedFeatureOf(bundle.Bundle{ID: bundle.ID{Feature: "Helm"}, Items: []bundle.Item{{Release: release, Objects: []*unstructured.Unstructured{obj}}, {Release: release}}}, applied, "Remote")

	var s configv1beta1.ClusterConfigurationStatus
	s = status.SetDeployedFeature(s, "ClusterProfile", "b", charts, "Remote")
	s = status.SetDeployedFeature(s, "ClusterProfile", "b", resources, "Remote")
	s = status.SetDeployedFeature(s, "ClusterProfile", "a", resources, "Remote")
	s = status.SetDeployedFeature(s, "Profile", "a", resources, "Remote")
	deployment := configv1beta1.DeployedFeature{FeatureID: "Resources", Resources: []configv1beta1.DeployedResource{{Name: "web", Namespace: "eu", Group: "apps", Kind: "Deployment", Version: "v1", LastAppliedTime: noonAt, DeploymentType: "Remote"}}, Hash: []byte("hash")}
	want := configv1beta1.ClusterConfigurationStatus{
		ClusterProfileResources: []configv1beta1.ClusterProfileResource{
			{ClusterProfileName: "a", Features: []configv1beta1.DeployedFeature{deployment}},
			{ClusterProfileName: "b", Features: []configv1beta1.DeployedFeature{deployment, {FeatureID: "Helm", Charts: []configv1beta1.DeployedChart{{RepoURL: "https://charts.test", ReleaseName: "r", Namespace: "web", ChartVersion: "1.2.3", AppVersion: "9", LastAppliedTime: noonAt}}, Hash: []byte("hash")}}},
		},
		ProfileResources: []configv1beta1.ProfileResource{{ProfileName: "a", Features: []configv1beta1.DeployedFeature{deployment}}},
	}
	if diff := cmp.Diff(want, s); diff != "" {
		t.Errorf("Inventory() (-want +got):\n%s", diff)
	}
	for _, gone := range []struct{ kind, name, feature string }{{"ClusterProfile", "a", "Resources"}, {"ClusterProfile", "b", "Resources"}, {"ClusterProfile", "b", "Helm"}, {"Profile", "a", "Resources"}} {
		if status.IsEmpty(s) {
			t.Fatalf("empty before %v was taken out", gone)
		}
		s = status.SetDeployedFeature(s, gone.kind, gone.name, configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureID(gone.feature)}, "Remote")
	}
	if !status.IsEmpty(s) {
		t.Errorf("Inventory() after all = %+v, want empty", s)
	}
}

func TestInventoryHasLimits(t *testing.T) {
	t.Parallel()
	feature := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureResources}
	for i := range 10_000 {
		feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{Name: strconv.Itoa(i), Kind: "ConfigMap", Version: "v1"})
	}
	var s configv1beta1.ClusterConfigurationStatus
	s = status.SetDeployedFeature(s, "ClusterProfile", "a", feature, "Remote")
	s = status.SetDeployedFeature(s, "ClusterProfile", "a", feature, "Remote")
	s = status.SetDeployedFeature(s, "Profile", "b", feature, "Remote")
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if listed := len(s.ClusterProfileResources[0].Features[0].Resources); len(raw) > 1<<20 || listed < 5000 {
		t.Errorf("inventory has %d bytes and lists %d objects", len(raw), listed)
	}
}

// TestUnchangedFeatureIsNotCopied sets features that change nothing, one of which is listed only in part.
func TestUnchangedFeatureIsNotCopied(t *testing.T) {
	t.Parallel()
	large := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureResources}
	for i := range 10_000 {
		large.Resources = append(large.Resources, configv1beta1.DeployedResource{Name: strconv.Itoa(i), Kind: "ConfigMap", Version: "v1"})
	}
	s := status.SetDeployedFeature(configv1beta1.ClusterConfigurationStatus{}, "ClusterProfile", "a", large, "Remote")
	for name, feature := range map[string]configv1beta1.DeployedFeature{"a large feature": large, "an empty feature": {FeatureID: libv1beta1.FeatureHelm}} {
		if got := status.SetDeployedFeature(s, "ClusterProfile", "a", feature, "Remote"); &got.ClusterProfileResources[0] != &s.ClusterProfileResources[0] {
			t.Errorf("%s is copied", name)
		}
	}
}

// TestOldStatusIsNotChanged changes, adds and removes entries. The results share memory with the old status.
func TestOldStatusIsNotChanged(t *testing.T) {
	t.Parallel()
	resources := func(names ...string) configv1beta1.DeployedFeature {
		feature := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureResources}
		for _, name := range names {
			feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{Name: name, Kind: "ConfigMap", Version: "v1"})
		}
		return feature
	}
	var old configv1beta1.ClusterConfigurationStatus
	for _, profile := range []string{"b", "c"} {
		old = status.SetDeployedFeature(old, "ClusterProfile", profile, resources("one", "two"), "Remote")
		old = status.SetDeployedFeature(old, "Profile", profile, resources("one"), "Remote")
	}
	before := old.DeepCopy()
	for name, changed := range map[string]configv1beta1.ClusterConfigurationStatus{
		"changed": status.SetDeployedFeature(old, "ClusterProfile", "b", resources("three"), "Remote"),
		"added":   status.SetDeployedFeature(old, "ClusterProfile", "a", resources("three"), "Remote"),
		"removed": status.SetDeployedFeature(old, "ClusterProfile", "b", resources(), "Remote"),
	} {
		if diff := cmp.Diff(*before, old); diff != "" {
			t.Fatalf("%s: the old status has changed (-before +after):\n%s", name, diff)
		}
		last, ok := status.FindDeployedFeature(changed, "ClusterProfile", "c", libv1beta1.FeatureResources)
		if !ok || &last.Resources[0] != &old.ClusterProfileResources[1].Features[0].Resources[0] {
			t.Errorf("%s: the entry of another profile is copied", name)
		}
	}
}

func TestMessagesAreLimited(t *testing.T) {
	t.Parallel()
	updated := status.ComputeStatus(configv1beta1.ClusterSummaryStatus{}, status.ReconcileResult{Features: []status.FeatureResult{{
		Feature: libv1beta1.FeatureHelm, Kind: status.Failed, Err: errors.New(strings.Repeat("x", 1<<20)), Status: libv1beta1.FeatureStatusFailed,
	}}})
	if n := len(status.FeatureOf(updated, libv1beta1.FeatureHelm).FailureMessage); n == 0 || n > kube.MaxMessage {
		t.Errorf("the message has %d bytes", n)
	}
}
