package outdated_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/hub/outdated"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// testEnv is a hub with clusters that have charts, and a Checker.
type testEnv struct {
	testing.TB
	client.Client
	ns       string
	clock    *clocktesting.FakeClock
	checker  *outdated.Checker
	registry *prometheus.Registry
	elected  chan struct{}
}

// start is the time when the Checker starts.
var start = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func newTestEnv(t *testing.T, change func(*outdated.Options)) *testEnv {
	t.Helper()
	plane := localkube.ForTest(t, localkube.Named("outdated"))
	if err := hub.InstallCRDs(t.Context(), plane.Config); err != nil {
		t.Fatal(err)
	}
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	w := &testEnv{
		TB: t, Client: hubClient, ns: plane.Namespace(t, "outdated"), clock: clocktesting.NewFakeClock(start),
		registry: prometheus.NewRegistry(), elected: make(chan struct{}),
	}
	charts, err := source.NewCharts(t.TempDir(), w.clock)
	w.must(err)
	options := outdated.Options{
		Hub: hubClient, Secrets: hubClient, Newest: charts.Newest, Elected: w.elected, Interval: time.Hour, Clock: w.clock,
	}
	if change != nil {
		change(&options)
	}
	w.checker = outdated.New(options)
	w.must(w.registry.Register(w.checker))
	return w
}

func (w *testEnv) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// deploy creates a cluster with a provisioned chart, and its ClusterProfile and summary.
func (w *testEnv) deploy(cluster string, chart configv1beta1.HelmChart, status libv1beta1.FeatureStatus) *configv1beta1.ClusterSummary {
	w.Helper()
	member := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: cluster}}
	w.must(w.Create(w.Context(), member))
	// The garbage collector deletes a summary whose owner does not exist.
	profile := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + cluster}}
	w.must(w.Create(w.Context(), profile))
	summary := &configv1beta1.ClusterSummary{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p-" + cluster, OwnerReferences: []metav1.OwnerReference{{
			APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: profile.Name, UID: profile.UID, Controller: new(true),
		}}},
		Spec: configv1beta1.ClusterSummarySpec{
			ClusterNamespace: w.ns, ClusterName: cluster, ClusterType: libv1beta1.ClusterTypeSveltos,
			ClusterProfileSpec: configv1beta1.ProfileSpec{HelmCharts: []configv1beta1.HelmChart{chart}},
		},
	}
	w.must(w.Create(w.Context(), summary))
	w.setDeployed(summary, chart.ChartVersion, status)
	return summary
}

// setDeployed sets the deployed version in the status of a summary.
func (w *testEnv) setDeployed(summary *configv1beta1.ClusterSummary, version string, status libv1beta1.FeatureStatus) {
	w.Helper()
	chart := summary.Spec.ClusterProfileSpec.HelmCharts[0]
	summary.Status = configv1beta1.ClusterSummaryStatus{
		FeatureSummaries: []configv1beta1.FeatureSummary{{FeatureID: libv1beta1.FeatureHelm, Status: status}},
		HelmReleaseSummaries: []configv1beta1.HelmChartSummary{{
			ReleaseNamespace: chart.ReleaseNamespace, ReleaseName: "hello-" + summary.Spec.ClusterName, Status: configv1beta1.HelmChartStatusManaging,
			ChartName: "hello", RepoURL: chart.RepositoryURL, ChartVersion: version,
		}},
	}
	w.must(w.Status().Update(w.Context(), summary))
}

// metrics lists the samples, as "name{values} number", without the namespace of the test.
func (w *testEnv) metrics() []string {
	w.Helper()
	families, err := w.registry.Gather()
	w.must(err)
	var all []string
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			value := metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
			name := strings.TrimPrefix(family.GetName(), "projectsveltos_outdated_helm_chart")
			if name == "" {
				all = append(all, fmt.Sprintf("%s %s/%s %s %s < %s: %v", labels["cluster_name"], labels["release_namespace"], labels["release_name"],
					labels["chart"], labels["version"], labels["latest"], value))
				continue
			}
			all = append(all, fmt.Sprintf("%s{%s} %.0f", name, labels["repository"], value))
		}
	}
	slices.Sort(all)
	return all
}

func (w *testEnv) want(want ...string) {
	w.Helper()
	if diff := cmp.Diff(want, w.metrics()); diff != "" {
		w.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// repositoryServer is a chart repository behind a password that counts the requests for its index. It responds with 500
// while it is down.
type repositoryServer struct {
	mu      sync.Mutex // guards the fields below
	indexes int
	down    bool
	login   string
	charts  http.Handler
}

func (s *repositoryServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if user, password, _ := r.BasicAuth(); s.login != "" && user+":"+password != s.login {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if s.down {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	s.indexes++
	s.charts.ServeHTTP(w, r)
}

func (s *repositoryServer) set(change func(*repositoryServer)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (w *testEnv) serve(login string, versions ...string) (*repositoryServer, string) {
	w.Helper()
	var charts []examples.Chart
	for _, version := range versions {
		charts = append(charts, examples.Chart{Version: version})
	}
	handler, err := examples.Repository(charts...)
	w.must(err)
	s := &repositoryServer{login: login, charts: handler}
	server := httptest.NewServer(s)
	w.Cleanup(server.Close)
	return s, server.URL
}

// hello returns the example chart for the spec of a profile.
func hello(repositoryURL, version string) configv1beta1.HelmChart {
	return configv1beta1.HelmChart{
		RepositoryURL: repositoryURL, RepositoryName: "r", ChartName: "r/hello", ChartVersion: version,
		ReleaseName: "hello-{{ .Cluster.metadata.name }}", ReleaseNamespace: "apps",
	}
}

func TestCheckReportsOutdatedCharts(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, nil)
	open, repositoryURL := w.serve("", "0.1.0", "0.2.0", "1.0.0-rc.1")
	guarded, guardedURL := w.serve("me:s3cret", "0.1.0", "0.3.0")
	w.must(w.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "login"}, Type: libv1beta1.ProfileSecretType, StringData: map[string]string{"username": "me", "password": "s3cret"},
	}))
	secret := hello(guardedURL, "0.1.0")
	secret.RegistryCredentialsConfig = &configv1beta1.RegistryCredentialsConfig{Credentials: &corev1.SecretReference{Name: "login"}}
	old := w.deploy("old", hello(repositoryURL, "0.1.0"), libv1beta1.FeatureStatusProvisioned)
	current := w.deploy("current", hello(repositoryURL, "0.2.0"), libv1beta1.FeatureStatusProvisioned)
	w.deploy("failing", hello(repositoryURL, "0.1.0"), libv1beta1.FeatureStatusFailed)
	w.deploy("flux", hello("gitrepository://flux/app/charts/hello", "0.1.0"), libv1beta1.FeatureStatusProvisioned)
	w.deploy("secret", secret, libv1beta1.FeatureStatusProvisioned)
	elsewhere := w.deploy("elsewhere", hello(repositoryURL, "0.1.0"), libv1beta1.FeatureStatusProvisioned)
	member := &libv1beta1.SveltosCluster{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: elsewhere.Spec.ClusterName}, member))
	metav1.SetMetaDataAnnotation(&member.ObjectMeta, libv1beta1.ShardAnnotation, "other")
	w.must(w.Update(t.Context(), member))

	w.must(w.checker.Check(t.Context()))
	if got := w.metrics(); len(got) > 0 {
		t.Errorf("a hub that is not the leader reports %q", got)
	}
	close(w.elected)
	lastCheck := fmt.Sprintf("_check_last_run_timestamp_seconds{} %d", start.Unix())
	w.want(lastCheck, "current apps/hello-current hello 0.2.0 < 0.2.0: 0", "old apps/hello-old hello 0.1.0 < 0.2.0: 1",
		"secret apps/hello-secret hello 0.1.0 < 0.3.0: 1")
	if open.indexes != 1 || guarded.indexes != 1 {
		t.Errorf("indexes were requested %d and %d times, want once each", open.indexes, guarded.indexes)
	}

	// Upgrades and deletions are reported at once.
	w.setDeployed(old, "0.2.0", libv1beta1.FeatureStatusProvisioned)
	w.must(w.Delete(t.Context(), current))
	w.want(lastCheck, "old apps/hello-old hello 0.2.0 < 0.2.0: 0", "secret apps/hello-secret hello 0.1.0 < 0.3.0: 1")

	// A failed repository is counted, and its earlier results stay.
	w.clock.Step(time.Hour)
	lastCheck = fmt.Sprintf("_check_last_run_timestamp_seconds{} %d", start.Add(time.Hour).Unix())
	open.set(func(s *repositoryServer) { s.down = true })
	guarded.set(func(s *repositoryServer) { s.login = "me:changed" })
	w.must(w.checker.Check(t.Context()))
	failures := []string{"_check_failures_total{" + repositoryURL + "} 1", "_check_failures_total{" + guardedURL + "} 1"}
	slices.Sort(failures)
	w.want(append(failures, lastCheck, "old apps/hello-old hello 0.2.0 < 0.2.0: 0", "secret apps/hello-secret hello 0.1.0 < 0.3.0: 1")...)
	w.must(w.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "login"}}))
	w.must(w.Delete(t.Context(), old))
	w.must(w.checker.Check(t.Context()))
	w.want("_check_failures_total{"+guardedURL+"} 2", lastCheck, "secret apps/hello-secret hello 0.1.0 < 0.3.0: 1")
}

// TestChartThatCannotBeExpandedNowKeepsItsResult expands names in a sandbox whose processes do not start.
func TestChartThatCannotBeExpandedNowKeepsItsResult(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, nil)
	_, repositoryURL := w.serve("", "0.1.0", "0.2.0")
	w.deploy("one", hello(repositoryURL, "0.1.0"), libv1beta1.FeatureStatusProvisioned)
	w.must(w.checker.Check(t.Context()))
	close(w.elected)
	lastCheck, outdatedChart := fmt.Sprintf("_check_last_run_timestamp_seconds{} %d", start.Unix()), "one apps/hello-one hello 0.1.0 < 0.2.0: 1"
	w.want(lastCheck, outdatedChart)
	w.checker.Sandbox = sandbox.NewPool([]string{"/does/not/exist"}, w.clock)
	w.must(w.checker.Check(t.Context()))
	w.want("_check_failures_total{"+repositoryURL+"} 1", lastCheck, outdatedChart)
}

func TestFirstCheckIsSomeMinutesAfterTheStart(t *testing.T) {
	t.Parallel()
	queried := make(chan time.Time, 10)
	var clock *clocktesting.FakeClock
	w := newTestEnv(t, func(o *outdated.Options) {
		clock = o.Clock.(*clocktesting.FakeClock)
		o.Newest = func(context.Context, source.Repository, []string) (map[string]string, error) {
			queried <- clock.Now()
			return nil, errors.New("down")
		}
	})
	w.deploy("one", hello("http://127.0.0.1:1", "0.1.0"), libv1beta1.FeatureStatusProvisioned)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.checker.Start(ctx) }()
	// next steps the clock by seconds until the repository gets a request.
	next := func(from time.Time) time.Duration {
		for range 3 * 3600 {
			for !clock.HasWaiters() {
				select {
				case at := <-queried:
					return at.Sub(from)
				default:
				}
			}
			clock.Step(time.Second)
		}
		t.Fatal("the repository gets no request")
		return 0
	}
	first := next(start)
	if first < time.Minute || first > 5*time.Minute+time.Second {
		t.Errorf("the first check is %s after the start, want some minutes", first)
	}
	if second := next(start.Add(first)); second < time.Hour || second > 67*time.Minute {
		t.Errorf("the second check is %s after the first, want an hour and at most a tenth more", second)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
