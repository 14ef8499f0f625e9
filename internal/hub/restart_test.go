package hub_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/hub"
)

// listVersions lists the resourceVersions of the summaries, the groups and the inventories.
func (w *world) listVersions() []string {
	w.Helper()
	var summaries configv1beta1.ClusterSummaryList
	w.must(w.List(w.Context(), &summaries))
	var groups libv1beta1.ConfigurationGroupList
	w.must(w.List(w.Context(), &groups))
	var all []string
	for _, summary := range summaries.Items {
		all = append(all, "summary "+summary.Name+" "+summary.ResourceVersion)
	}
	for _, group := range groups.Items {
		all = append(all, "group "+group.Name+" "+group.ResourceVersion)
	}
	for _, record := range w.listInventories() {
		all = append(all, "record "+record.Name+" "+record.ResourceVersion)
	}
	slices.Sort(all)
	return all
}

// TestRestartDoesNotRenderUnchangedRelease restarts a hub with a push and a pull member. The restarted hub has no
// charts and cannot start a child process for the rendering.
func TestRestartDoesNotRenderUnchangedRelease(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	repository, err := examples.Repository(examples.Chart{Files: map[string]string{
		"templates/seen.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\ndata:\n  password: {{ randAlphaNum 20 }}\n  operation: {{ .Release.Revision }} {{ .Release.IsUpgrade }}\n",
	}})
	w.must(err)
	var fetches atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, request *http.Request) {
		fetches.Add(1)
		repository.ServeHTTP(out, request)
	}))
	t.Cleanup(server.Close)
	stop := w.start(w.plane.Config, hub.Options{CacheDir: t.TempDir()})
	w.registerPushMember("pushed")
	w.createReadyMember("pulled", w.prodLabels())
	profile := w.createProfile(deployChart(server.URL, nil))
	w.wantFeature(profile, "pulled", helm(libv1beta1.FeatureStatusProvisioning, ""))
	w.reportGroup(w.awaitGroup(libv1beta1.ActionDeploy), libv1beta1.FeatureStatusProvisioned)
	for _, member := range []string{"pushed", "pulled"} {
		w.wantFeature(profile, member, helm(libv1beta1.FeatureStatusProvisioned, ""))
	}
	stop()

	before := w.listVersions()
	fetches.Store(0)
	requests := &requestRecorder{}
	config := requests.on(w.plane.Config)
	var kubeconfigs atomic.Int32
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if strings.HasSuffix(request.URL.Path, "/secrets/pushed-sveltos-kubeconfig") {
				kubeconfigs.Add(1)
			}
			return next.RoundTrip(request)
		})
	})
	w.start(config, hub.Options{CacheDir: t.TempDir(), SandboxCommand: []string{"/does/not/exist"}})
	w.eventually("the hub has nothing to do", func() error {
		requests.take()
		return w.checkNoRequests(requests, 2*time.Second)
	})
	// The first reconciles of the cluster, its bundles and its summary, which may run at the same time, may read it.
	if got := kubeconfigs.Swap(0); got > 3 {
		t.Errorf("%d reads of the unchanged kubeconfig", got)
	}
	if got := fetches.Load(); got > 0 {
		t.Errorf("%d requests to the chart repository", got)
	}
	if err := checkEqual(before, w.listVersions()); err != nil {
		t.Errorf("the hub has delivered unchanged content: %v", err)
	}

	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].Values = "message: other\n" })
	w.eventually("the chart is fetched for new values", func() error {
		if fetches.Load() == 0 {
			return fmt.Errorf("no request to the chart repository")
		}
		return nil
	})
	w.wantSummary(profile, "pushed", func(s configv1beta1.ClusterSummaryStatus) bool {
		return slices.ContainsFunc(s.FeatureSummaries, func(f configv1beta1.FeatureSummary) bool { return f.FailureMessage != "" })
	})
	if got := kubeconfigs.Load(); got > 0 {
		t.Errorf("%d reads of the unchanged kubeconfig for a change of the profile", got)
	}
}
