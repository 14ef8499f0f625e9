package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// reportInterval is the time between two reports of a fleet that has not settled.
const reportInterval = time.Minute

// settle waits until the fleet is as the model says.
func (f *fleet) settle(m *model) {
	f.t.Helper()
	for _, member := range f.members {
		// What is wrong for good is found before the wait.
		f.wantForeign(member)
	}
	nextReport := time.Now().Add(reportInterval)
	err := until(f.t.Context(), settleTimeout, func() error {
		err := f.compare(m)
		if err != nil && time.Now().After(nextReport) {
			f.t.Logf("not settled yet: %v", err)
			nextReport = time.Now().Add(reportInterval)
		}
		return err
	})
	if err != nil {
		f.t.Fatalf("the fleet does not settle: %v", err)
	}
	for _, member := range f.members {
		f.wantForeign(member)
		if _, isRegistered := m.env[member.name]; !isRegistered && member.agent != nil {
			member.agent.stop() // its Deployment is deleted
			member.agent = nil
		}
	}
}

// compare returns the differences between the fleet and the model.
func (f *fleet) compare(m *model) error {
	ctx := f.t.Context()
	errs := []error{f.compareSummaries(ctx, m), f.compareProfiles(ctx, m), f.compareBundles(ctx)}
	for _, member := range f.members {
		errs = append(errs, named(member.name, f.compareMember(ctx, m, member)), named(member.name, f.compareCluster(ctx, m, member)))
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
	if err := on.admin.List(ctx, &list, client.InNamespace(site)); err != nil {
		return err
	}
	found := map[string]string{}
	for _, object := range list.Items {
		if _, isForeign := on.foreign[client.ObjectKeyFromObject(&object)]; !isForeign && object.Name != "kube-root-ca.crt" {
			found[object.Name] = object.Data["text"]
		}
	}
	if diff := gocmp.Diff(m.objects(on.name), found); diff != "" {
		return fmt.Errorf("objects (-want +got):\n%s", diff)
	}
	edition := &corev1.ConfigMap{}
	err := on.admin.Get(ctx, client.ObjectKey{Namespace: chartProfile, Name: "edition"}, edition)
	if _, isRegistered := m.env[on.name]; !isRegistered {
		if err == nil {
			err = errors.New("the chart is still there")
		}
		return client.IgnoreNotFound(err)
	}
	if want := fmt.Sprint(m.chart); err == nil && edition.Data["edition"] != want {
		err = fmt.Errorf("the chart has edition %s, want %s", edition.Data["edition"], want)
	}
	if err != nil {
		return err
	}
	return on.hooks.check(m.chart)
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
	if err == nil && (!cluster.Status.Ready || cluster.Status.ConnectionStatus != libv1beta1.ConnectionHealthy) {
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
		if len(summary.Status.FeatureSummaries) == 0 {
			errs = append(errs, fmt.Errorf("%s has no status", summary.Name))
		}
		for _, feature := range summary.Status.FeatureSummaries {
			if feature.Status != libv1beta1.FeatureStatusProvisioned {
				errs = append(errs, fmt.Errorf("%s: %s is %s: %v", summary.Name, feature.FeatureID, feature.Status, feature.FailureMessage))
			}
		}
	}
	slices.Sort(found)
	if diff := gocmp.Diff(m.summaries(), found); diff != "" {
		errs = append(errs, fmt.Errorf("summaries (-want +got):\n%s", diff))
	}
	return errors.Join(errs...)
}

// compareProfiles compares the matches in the status of profiles.
func (f *fleet) compareProfiles(ctx context.Context, m *model) error {
	for _, p := range m.profiles {
		stored := &configv1beta1.ClusterProfile{}
		err := f.admin.Get(ctx, client.ObjectKey{Name: p.name}, stored)
		if p.isAbsent {
			if apierrors.IsNotFound(err) {
				continue
			}
			return cmp.Or(err, fmt.Errorf("profile %s still exists", p.name))
		}
		if err != nil {
			return err
		}
		var want, got []string
		for name := range m.env {
			if slices.Contains(m.selected(name), p) {
				want = append(want, name)
			}
		}
		for _, matching := range stored.Status.MatchingClusters {
			got = append(got, matching.Name)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			return fmt.Errorf("profile %s matches %q, want %q", p.name, got, want)
		}
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

// wantForeign checks that the objects of others are as they were made.
func (f *fleet) wantForeign(on *member) {
	f.t.Helper()
	for key, made := range on.foreign {
		found := &corev1.ConfigMap{}
		f.try("read an object of others", func() error {
			err := on.admin.Get(f.t.Context(), key, found)
			if apierrors.IsNotFound(err) {
				f.t.Fatalf("%s: ConfigMap %s of others is deleted", on.name, key)
			}
			return err
		})
		if found.UID != made.UID || found.ResourceVersion != made.ResourceVersion {
			f.t.Fatalf("%s: ConfigMap %s of others was changed: %+v", on.name, key, found)
		}
	}
}
