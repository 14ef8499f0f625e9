package chaos

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"helm.sh/helm/v4/pkg/release/common"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
	"github.com/towline/towline/internal/status"
)

// reportInterval is the time between two reports of a fleet that has not settled.
const reportInterval = time.Minute

// awaitModel waits until the fleet is as the model requires.
func (f *fleet) awaitModel(m *model) {
	f.t.Helper()
	f.wantNoPermanentError() // a permanent error is found before the wait
	nextReport := time.Now().Add(reportInterval)
	err := pollUntil(f.t.Context(), settleTimeout, func() error {
		err := f.compare(m)
		if err != nil && time.Now().After(nextReport) {
			f.t.Logf("not settled yet: %v", err)
			nextReport = time.Now().Add(reportInterval)
		}
		return err
	})
	if err != nil {
		f.logUnfinishedGroups()
		f.t.Fatalf("the fleet does not settle: %v", err)
	}
	f.wantNoPermanentError()
	m.recordSettled()
	for _, member := range f.members {
		f.labelManaged(m, member)
		if _, isRegistered := m.env[member.name]; !isRegistered && member.agent != nil {
			member.agent.stop() // its Deployment is deleted
			member.agent = nil
		}
	}
}

// wantNoPermanentError checks for errors that no retry repairs: changed objects of others, hooks that ran twice, and
// programs that have crashed.
func (f *fleet) wantNoPermanentError() {
	f.t.Helper()
	f.wantForeign("hub", f.admin, f.foreign)
	if err := f.hub.check(); err != nil {
		f.t.Fatal(err)
	}
	for _, member := range f.members {
		f.wantForeign(member.name, member.admin, member.foreign)
		if member.agent != nil {
			if err := member.agent.check(); err != nil {
				f.t.Fatal(err)
			}
		}
		if err := errors.Join(member.hooks.checkRepeated(), f.checkHooksRanOnce(member)); err != nil {
			f.t.Fatalf("%s: %v", member.name, err)
		}
	}
}

// checkHooksRanOnce returns an error if a revision has failed because a hook whose Job existed was run again. A
// revision can also fail because a newer one has replaced it.
func (f *fleet) checkHooksRanOnce(on *member) error {
	f.t.Helper()
	var records corev1.SecretList
	f.retry("list the release records of "+on.name, func() error {
		return on.admin.List(f.t.Context(), &records, client.InNamespace(chartProfile))
	})
	var errs []error
	for _, secret := range records.Items {
		entry, isRelease := release.ParseEntry(secret.ObjectMeta)
		if !isRelease || entry.Status != common.StatusFailed {
			continue
		}
		text, err := decodeRecord(secret.Data["release"])
		if err == nil && strings.Contains(text, "already exists") {
			err = fmt.Errorf("a hook of revision %d ran again: %.400s", entry.Revision, text)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// decodeRecord returns the JSON of a release record.
func decodeRecord(encoded []byte) (string, error) {
	zipped, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding, bytes.NewReader(encoded)))
	if err != nil {
		return "", fmt.Errorf("decode a release record: %w", err)
	}
	text, err := io.ReadAll(zipped)
	return string(text), err
}

// compare returns the differences between the fleet and the model. It lists all kinds only if nothing else differs.
func (f *fleet) compare(m *model) error {
	ctx := f.t.Context()
	errs := []error{
		f.compareSummaries(ctx, m), f.compareProfiles(ctx, m), f.compareConfigurations(ctx, m),
		f.compareGroups(ctx, m), f.compareBundles(ctx),
	}
	for _, member := range f.members {
		err := errors.Join(f.compareMember(ctx, m, member), f.compareCluster(ctx, m, member), f.compareLeftovers(ctx, m, member))
		errs = append(errs, named(member.name, err))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, member := range f.members {
		errs = append(errs, named(member.name, compareManaged(ctx, m, member)))
	}
	return errors.Join(errs...)
}

func named(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}

// compareMember compares the objects on a member.
func (f *fleet) compareMember(ctx context.Context, m *model, on *member) error {
	var list corev1.ConfigMapList
	if err := on.admin.List(ctx, &list, client.InNamespace(contentNamespace)); err != nil {
		return err
	}
	found := map[string]string{}
	for _, object := range list.Items {
		if !isForeign(&object) && object.Name != "kube-root-ca.crt" && object.Name != adoptedObject {
			found[object.Name] = object.Data["text"]
		}
	}
	want := m.objects(on.name)
	delete(want, adoptedObject)
	if diff := gocmp.Diff(want, found); diff != "" {
		return fmt.Errorf("objects (-want +got):\n%s", diff)
	}
	edition := &corev1.ConfigMap{}
	err := on.admin.Get(ctx, client.ObjectKey{Namespace: chartProfile, Name: chartObject}, edition)
	if _, isRegistered := m.env[on.name]; !isRegistered {
		if err == nil {
			err = errors.New("the chart is still deployed")
		}
		return errors.Join(client.IgnoreNotFound(err), on.hooks.checkUninstalled(m.hadChart[on.name]))
	}
	if want := fmt.Sprint(m.chart); err == nil && edition.Data["edition"] != want {
		err = fmt.Errorf("the chart has edition %s, want %s", edition.Data["edition"], want)
	}
	if err != nil {
		return err
	}
	jobs, err := on.hooks.jobs.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	return errors.Join(compareRecords(ctx, m, on), on.hooks.checkDeployed(m.chart), on.hooks.checkKept(m.chart, jobs.Items))
}

// compareRecords checks that a member has a record of each of its bundles and no other record, and that the release has
// one deployed and no unfinished revision.
func compareRecords(ctx context.Context, m *model, on *member) error {
	var list corev1.SecretList
	if err := on.admin.List(ctx, &list); err != nil {
		return err
	}
	want := []string{fmt.Sprintf("release %[1]s/%[1]s: deployed", chartProfile)}
	for _, summary := range m.summariesOf(on.name) {
		feature := libv1beta1.FeatureResources
		if summary == summaryName(chartProfile, on.name) {
			feature = libv1beta1.FeatureHelm
		}
		want = append(want, "record "+bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: summary, Feature: string(feature)}.String())
	}
	var found []string
	for _, secret := range list.Items {
		entry, isRelease := release.ParseEntry(secret.ObjectMeta)
		switch requestor, isOfBundle := secret.Annotations[kube.AnnotationRequestor]; {
		case isRelease && entry.Status != common.StatusSuperseded && entry.Status != common.StatusFailed:
			found = append(found, fmt.Sprintf("release %s/%s: %s", entry.Namespace, entry.Name, entry.Status))
		case !isRelease && isOfBundle:
			found = append(found, "record "+requestor)
		}
	}
	return difference("records", want, found)
}

// compareCluster compares the status of a SveltosCluster.
func (f *fleet) compareCluster(ctx context.Context, m *model, of *member) error {
	cluster := &libv1beta1.SveltosCluster{}
	err := f.admin.Get(ctx, client.ObjectKey{Namespace: clusters, Name: of.name}, cluster)
	if _, isRegistered := m.env[of.name]; !isRegistered {
		if err == nil {
			err = fmt.Errorf("the cluster still exists: %+v", cluster.Status)
		}
		return client.IgnoreNotFound(err)
	}
	if err == nil && (!cluster.Status.Ready || cluster.Status.ConnectionStatus != libv1beta1.ConnectionHealthy || cluster.Status.FailureMessage != "") {
		err = fmt.Errorf("the status is %+v", cluster.Status)
	}
	return err
}

// compareSummaries compares the summaries and their status.
func (f *fleet) compareSummaries(ctx context.Context, m *model) error {
	var list configv1beta1.ClusterSummaryList
	if err := f.admin.List(ctx, &list); err != nil {
		return err
	}
	var found []string
	var errs []error
	for _, summary := range list.Items {
		found = append(found, summary.Name)
		if len(summary.Status.FeatureSummaries) == 0 || summary.Status.FailureMessage != "" || summary.Status.ReconciliationSuspended {
			errs = append(errs, fmt.Errorf("%s has the status %+v", summary.Name, summary.Status))
		}
		errs = append(errs, named(summary.Name, compareReleases(&summary)))
		for _, feature := range summary.Status.FeatureSummaries {
			if feature.Status != libv1beta1.FeatureStatusProvisioned || feature.FailureMessage != "" {
				errs = append(errs, fmt.Errorf("%s: %s is %s: %v", summary.Name, feature.FeatureID, feature.Status, feature.FailureMessage))
			}
		}
	}
	return errors.Join(append(errs, difference("summaries", m.summaries(), found))...)
}

// compareReleases compares the releases in the status of a summary.
func compareReleases(summary *configv1beta1.ClusterSummary) error {
	var want, found []string
	if strings.HasPrefix(summary.Name, chartProfile+"-") {
		want = []string{fmt.Sprintf("%[1]s/%[1]s is Managing", chartProfile)}
	}
	for _, r := range summary.Status.HelmReleaseSummaries {
		found = append(found, fmt.Sprintf("%s/%s is %s%s%s", r.ReleaseNamespace, r.ReleaseName, r.Status, r.ConflictMessage, r.FailureMessage))
	}
	return difference("releases", want, found)
}

// compareProfiles compares the matching clusters in the status of profiles.
func (f *fleet) compareProfiles(ctx context.Context, m *model) error {
	errs := []error{f.compareMatching(ctx, chartProfile, m.registered())}
	for _, p := range m.profiles {
		if !p.isAbsent {
			errs = append(errs, f.compareMatching(ctx, p.name, m.matching(p)))
			continue
		}
		err := f.admin.Get(ctx, client.ObjectKey{Name: p.name}, &configv1beta1.ClusterProfile{})
		if err == nil {
			err = fmt.Errorf("profile %s still exists", p.name)
		}
		errs = append(errs, client.IgnoreNotFound(err))
	}
	return errors.Join(errs...)
}

// compareMatching compares the clusters that the status of a profile lists.
func (f *fleet) compareMatching(ctx context.Context, profile string, want []string) error {
	stored := &configv1beta1.ClusterProfile{}
	if err := f.admin.Get(ctx, client.ObjectKey{Name: profile}, stored); err != nil {
		return err
	}
	if len(stored.Status.FailedClusters) > 0 || stored.Status.ReconciliationSuspended {
		return fmt.Errorf("profile %s has the status %+v", profile, stored.Status)
	}
	var found []string
	for _, matching := range stored.Status.MatchingClusters {
		found = append(found, matching.Name)
	}
	return difference("clusters of profile "+profile, want, found)
}

// compareConfigurations compares the ClusterConfigurations.
func (f *fleet) compareConfigurations(ctx context.Context, m *model) error {
	var list configv1beta1.ClusterConfigurationList
	if err := f.admin.List(ctx, &list); err != nil {
		return err
	}
	var found []string
	for i := range list.Items {
		found = append(found, configurationLines(&list.Items[i])...)
	}
	return difference("ClusterConfigurations", m.deployed(), found)
}

// configurationLines returns a line with the name of a ClusterConfiguration, and one for each object and release in it.
func configurationLines(configuration *configv1beta1.ClusterConfiguration) []string {
	all := []string{configuration.Name}
	status.EachDeployedFeature(configuration.Status, func(_, profile string, feature configv1beta1.DeployedFeature) {
		prefix := fmt.Sprintf("%s %s %s: ", configuration.Name, profile, feature.FeatureID)
		for _, r := range feature.Resources {
			version := schema.GroupVersion{Group: r.Group, Version: r.Version}
			all = append(all, fmt.Sprintf("%s%s %s %s/%s %s", prefix, version, r.Kind, r.Namespace, r.Name, r.DeploymentType))
		}
		for _, c := range feature.Charts {
			all = append(all, fmt.Sprintf("%srelease %s/%s %s", prefix, c.Namespace, c.ReleaseName, c.ChartVersion))
		}
	})
	return all
}

// compareGroups checks that there is one deployed group for each summary of a member in pull mode.
func (f *fleet) compareGroups(ctx context.Context, m *model) error {
	var list libv1beta1.ConfigurationGroupList
	if err := f.admin.List(ctx, &list); err != nil {
		return err
	}
	var want, found []string
	for _, member := range f.members {
		if !member.isPull {
			continue
		}
		for _, summary := range m.summariesOf(member.name) {
			want = append(want, summary+": Deploy, Provisioned")
		}
	}
	for i := range list.Items {
		found = append(found, groupLine(&list.Items[i]))
	}
	return difference("groups", want, found)
}

// logUnfinishedGroups logs the field managers and times of the groups that are not provisioned.
func (f *fleet) logUnfinishedGroups() {
	var list libv1beta1.ConfigurationGroupList
	if err := f.admin.List(f.t.Context(), &list); err != nil {
		f.t.Log(err)
	}
	for _, group := range list.Items {
		if group.Status.DeploymentStatus != libv1beta1.FeatureStatusProvisioned {
			f.t.Logf("%s: %+v, written by %+v", groupLine(&group), group.Status, group.ManagedFields)
		}
	}
}

// groupLine returns the summary, the action and the state of a group.
func groupLine(group *libv1beta1.ConfigurationGroup) string {
	text := fmt.Sprintf("%s: %s, %s", group.Spec.SourceRef.Name, group.Spec.Action, group.Status.DeploymentStatus)
	if group.Status.ObservedGeneration != group.Generation || !bytes.Equal(group.Status.ObservedRequestorHash, group.Spec.RequestorHash) {
		text += " for an earlier request"
	}
	return text + group.Status.FailureMessage
}

// difference returns an error if the lists have different elements. It sorts them.
func difference(what string, want, found []string) error {
	slices.Sort(want)
	slices.Sort(found)
	if diff := gocmp.Diff(want, found, cmpopts.EquateEmpty()); diff != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, diff)
	}
	return nil
}

// compareBundles checks that the content of delivered bundles is deleted.
func (f *fleet) compareBundles(ctx context.Context) error {
	var list libv1beta1.ConfigurationBundleList
	if err := f.admin.List(ctx, &list); err != nil {
		return err
	}
	if len(list.Items) > 0 {
		return fmt.Errorf("%d bundles are left on the hub", len(list.Items))
	}
	return nil
}
