package summaries

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/source"
)

var helmID = bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: "web-one", Feature: string(libv1beta1.FeatureHelm)}

// useChart replaces the policyRefs of the summary by a chart with one template, and with more fields in Chart.yaml. It
// returns the number of requests to the repository.
func (r *restarts) useChart(template, fields string, change func(*configv1beta1.HelmChart)) *atomic.Int32 {
	repository, err := examples.Repository(examples.Chart{Files: map[string]string{
		"Chart.yaml":               "apiVersion: v2\nname: hello\nversion: 0.1.0\n" + fields,
		"templates/configmap.yaml": "# none",
		"templates/added.yaml":     "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: added}\ndata: {added: '" + template + "'}\n",
	}})
	r.must(err)
	requests := &atomic.Int32{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		requests.Add(1)
		repository.ServeHTTP(w, request)
	}))
	r.t.Cleanup(server.Close)
	s := r.summary()
	s.Generation++
	chart := configv1beta1.HelmChart{
		RepositoryURL: server.URL, RepositoryName: "r", ChartName: "r/hello", ChartVersion: "0.1.0", ReleaseName: "web", ReleaseNamespace: "site",
	}
	if change != nil {
		change(&chart)
	}
	s.Spec.ClusterProfileSpec.PolicyRefs, s.Spec.ClusterProfileSpec.HelmCharts = nil, []configv1beta1.HelmChart{chart}
	r.must(r.hub.Update(r.t.Context(), s))
	r.feature = libv1beta1.FeatureHelm
	return requests
}

// generatedSecret returns the Secret with the generated values of the release.
func (r *restarts) generatedSecret() *corev1.Secret {
	var list corev1.SecretList
	r.must(r.hub.List(r.t.Context(), &list))
	for i := range list.Items {
		if list.Items[i].Type == generatedType {
			return &list.Items[i]
		}
	}
	r.t.Fatal("there are no generated values")
	return nil
}

// largeSecret returns the config of a member that has one Secret, which is too large to store what lookup finds.
func largeSecret(t *testing.T) map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/api/v1" {
			_, _ = w.Write([]byte(`{"kind": "APIResourceList", "groupVersion": "v1", "resources": [{"name": "secrets", "kind": "Secret", "namespaced": true}]}`))
			return
		}
		_, _ = w.Write([]byte(`{"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "there"}, "data": {"password": "` + strings.Repeat("a", 80<<10) + `"}}`))
	}))
	t.Cleanup(server.Close)
	return map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
		fleet.Push: func(context.Context, fleet.Member) (*rest.Config, error) { return &rest.Config{Host: server.URL}, nil },
	}
}

func TestUnchangedReleaseIsNotRenderedAgain(t *testing.T) {
	t.Parallel()
	cluster := func() *libv1beta1.SveltosCluster {
		return &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
	}
	label := func(r *restarts) {
		one := cluster()
		r.update(one, func() { one.Labels = map[string]string{"env": "prod"} })
	}
	setStatus := func(change func(*libv1beta1.SveltosClusterStatus)) func(*restarts) {
		return func(r *restarts) {
			one := cluster()
			r.must(r.hub.Get(r.t.Context(), client.ObjectKeyFromObject(one), one))
			change(&one.Status)
			r.must(r.hub.Status().Update(r.t.Context(), one))
		}
	}
	push := func(r *restarts) {
		one := cluster()
		r.update(one, func() { one.Spec.PullMode = false })
	}
	newVersion := setStatus(func(s *libv1beta1.SveltosClusterStatus) { s.Version = "v1.37.0" })
	newAPI := setStatus(func(s *libv1beta1.SveltosClusterStatus) { s.APIVersions = append(s.APIVersions, "batch/v1") })
	updateSummary := func(change func(*configv1beta1.ClusterSummary)) func(*restarts) {
		return func(r *restarts) {
			s := r.summary()
			change(s)
			r.must(r.hub.Update(r.t.Context(), s))
		}
	}
	updateReleases := func(change func([]configv1beta1.HelmChartSummary) []configv1beta1.HelmChartSummary) func(*restarts) {
		return func(r *restarts) {
			s := r.summary()
			s.Status.HelmReleaseSummaries = change(s.Status.HelmReleaseSummaries)
			r.must(r.hub.Status().Update(r.t.Context(), s))
		}
	}
	valuesFrom := func(name string) func(*configv1beta1.HelmChart) {
		return func(c *configv1beta1.HelmChart) {
			c.ValuesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Name: name}}
		}
	}
	values := func(text string) func(*restarts) {
		return func(r *restarts) {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "values"}, Data: map[string]string{"values": text}}
			if r.hub.Create(r.t.Context(), c) != nil {
				r.update(c, func() { c.Data = map[string]string{"values": text} })
			}
		}
	}
	manage := func(r *restarts) {
		other := r.summary()
		other.ResourceVersion, other.Name, other.UID, other.Spec.ClusterProfileSpec.Tier = "", "other", "other", -1
		r.must(r.hub.Create(r.t.Context(), other))
	}
	const random, capabilities, apis = "{{ randAlphaNum 8 }}", "{{ .Capabilities.KubeVersion }}", `{{ .Capabilities.APIVersions.Has "batch/v1" }}`
	for name, test := range map[string]struct {
		template, fields string
		chart            func(*configv1beta1.HelmChart)
		prepare          func(r *restarts)
		change           func(r *restarts)
		isBuilt          bool
		want             libv1beta1.FeatureStatus // default: Provisioned
	}{
		"nothing":                     {},
		"push mode":                   {prepare: push},
		"a label without templates":   {change: label},
		"a label with templates":      {change: label, chart: func(c *configv1beta1.HelmChart) { c.Values = "a: '{{ .ClusterName }}'" }, isBuilt: true},
		"a label and a template name": {change: label, chart: func(c *configv1beta1.HelmChart) { c.ReleaseName = "{{ .ClusterName }}" }, isBuilt: true},
		"the spec": {isBuilt: true, change: updateSummary(func(s *configv1beta1.ClusterSummary) {
			s.Generation++
			s.Spec.ClusterProfileSpec.HelmCharts[0].Values = "replicas: 2"
		})},
		"the account": {isBuilt: true, change: updateSummary(func(s *configv1beta1.ClusterSummary) {
			s.Labels = map[string]string{libv1beta1.ServiceAccountNameLabel: "a", libv1beta1.ServiceAccountNamespaceLabel: "a"}
		})},
		"values that do not change":                  {chart: valuesFrom("values"), prepare: values("a: b")},
		"values":                                     {chart: valuesFrom("values"), prepare: values("a: b"), change: values("a: c"), isBuilt: true},
		"a version without capabilities":             {change: newVersion},
		"an API without capabilities":                {change: newAPI},
		"capabilities that do not change":            {template: capabilities},
		"a version":                                  {template: capabilities, change: newVersion, isBuilt: true},
		"an API for a chart that reads the version":  {template: capabilities, change: newAPI},
		"a version of a chart that is for some only": {fields: "kubeVersion: '>=1.25.0-0'\n", change: newVersion, isBuilt: true},
		"an API":                        {template: apis, change: newAPI, isBuilt: true},
		"capabilities in values":        {chart: func(c *configv1beta1.HelmChart) { c.Values = "a: .Capabilities" }, change: newAPI, isBuilt: true},
		"generated values":              {template: random},
		"generated values in push mode": {template: random, prepare: push},
		"deleted generated values": {template: random, isBuilt: true, change: func(r *restarts) {
			r.must(r.hub.Delete(r.t.Context(), r.generatedSecret()))
		}},
		"edited generated values": {template: random, isBuilt: true, change: func(r *restarts) {
			secret := r.generatedSecret()
			r.update(secret, func() { metav1.SetMetaDataAnnotation(&secret.ObjectMeta, "edited", "") })
		}},
		"a stored lookup": {template: `{{ lookup "v1" "ConfigMap" "site" "added" | len }}`},
		"the revision":    {template: "{{ .Release.Revision }}"},
		"a revision to render again": {template: "{{ .Release.Revision }}", isBuilt: true, change: func(r *restarts) {
			d := r.deployed[helmID]
			d.Report.Outdated = []bundle.OutdatedRelease{{Namespace: "site", Name: "web", Revision: 2, IsUpgrade: true}}
			r.deployed[helmID] = d
		}},
		"a lookup that is not stored": {isBuilt: true, template: `{{ (lookup "v1" "Secret" "site" "there").data | len }}`, prepare: func(r *restarts) {
			push(r)
			r.memberConfig = largeSecret(r.t)
		}},
		"a range of versions": {isBuilt: true, chart: func(c *configv1beta1.HelmChart) { c.ChartVersion = "~0.1.0" }},
		"an uninstallation": {prepare: updateSummary(func(s *configv1beta1.ClusterSummary) {
			s.Spec.ClusterProfileSpec.HelmCharts = append(s.Spec.ClusterProfileSpec.HelmCharts, configv1beta1.HelmChart{
				ReleaseName: "old", ReleaseNamespace: "site", HelmChartAction: configv1beta1.HelmChartActionUninstall,
			})
		})},
		// The conflict is found without rendering.
		"another manager": {change: manage, want: libv1beta1.FeatureStatusFailedNonRetriable},
		"another manager that is tolerated": {isBuilt: true, change: manage, prepare: updateSummary(func(s *configv1beta1.ClusterSummary) {
			s.Spec.ClusterProfileSpec.ContinueOnConflict = true
		})},
		"an entry of the status is edited": {isBuilt: true, change: updateReleases(func(all []configv1beta1.HelmChartSummary) []configv1beta1.HelmChartSummary {
			all[0].ChartVersion = "0.0.1"
			return all
		})},
		"the entries of the status are lost": {isBuilt: true, change: updateReleases(func([]configv1beta1.HelmChartSummary) []configv1beta1.HelmChartSummary { return nil })},
		"a lost ClusterConfiguration": {isBuilt: true, change: func(r *restarts) {
			key := ConfigurationKey(fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"})
			r.must(r.hub.Delete(r.t.Context(), &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRestarts(t)
			requests := r.useChart(test.template, test.fields, test.chart)
			if test.prepare != nil {
				test.prepare(r)
			}
			for range 2 { // the second one has the values that the first one has generated
				if got := r.reconcile(); got.Status != libv1beta1.FeatureStatusProvisioned {
					t.Fatalf("status of the feature: %s (%v)", got.Status, got.FailureMessage)
				}
			}
			if test.change != nil {
				test.change(r)
			}
			before := r.summary().Status.HelmReleaseSummaries
			requests.Store(0)
			want := libv1beta1.FeatureStatusProvisioned
			if test.want != "" {
				want = test.want
			}
			if got := r.reconcile(); got.Status != want {
				t.Errorf("status of the feature: got %s (%v), want %s", got.Status, got.FailureMessage, want)
			}
			if got := requests.Load() > 0; got != test.isBuilt {
				t.Errorf("%d requests for the chart and %d deliveries, want the bundle built: %t", requests.Load(), r.deliveries, test.isBuilt)
			}
			if !test.isBuilt && r.deliveries > 0 {
				t.Errorf("the bundle was delivered %d times", r.deliveries)
			}
			if after := r.summary().Status.HelmReleaseSummaries; len(after) == 0 || !test.isBuilt && test.want == "" && len(after) != len(before) {
				t.Errorf("got releases %+v in the status, had %+v", after, before)
			}
		})
	}
}

// TestObjectsOfAChartAreInputs changes each object on the hub that a chart refers to.
func TestObjectsOfAChartAreInputs(t *testing.T) {
	t.Parallel()
	chart := configv1beta1.HelmChart{
		RepositoryURL: "gitrepository://flux/app/chart", ReleaseName: "web", ReleaseNamespace: "site",
		RegistryCredentialsConfig: &configv1beta1.RegistryCredentialsConfig{Credentials: &corev1.SecretReference{Name: "login"}, CA: &corev1.SecretReference{Name: "ca"}},
		ProvenanceVerification:    &configv1beta1.ProvenanceVerification{KeyringSecretRef: &corev1.SecretReference{Name: "keyring"}},
		SignatureVerification:     &configv1beta1.SignatureVerification{SecretRef: &corev1.SecretReference{Name: "key"}},
	}
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "web-one"}}
	summary.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{chart}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
	artifact := &unstructured.Unstructured{Object: map[string]any{}}
	_ = unstructured.SetNestedField(artifact.Object, "http://127.0.0.1/a.tar.gz", "status", "artifact", "url")
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).Build()
	names := []string{"login", "ca", "keyring", "key"}
	for _, name := range names {
		if err := hub.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	c := &Controller{Composer: &Composer{CodeVersion: "v1"}, metadata: hub, fluxObject: func(context.Context, source.Reference) (*unstructured.Unstructured, error) { return artifact, nil }}
	digest := func() string {
		t.Helper()
		s := newState(summary, cluster, fleet.FromSveltosCluster(cluster))
		inputs, err := c.inputsOf(t.Context(), s, ComposeRequest{Summary: summary, TemplateContext: templateContextOfCluster(cluster, nil)}, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		digest, err := inputs.digestFor(Composition{})
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	seen := map[string]bool{"": true, digest(): true}
	wantNew := func(what string) {
		t.Helper()
		if got := digest(); seen[got] {
			t.Errorf("%s: the inputs have the digest %q again", what, got)
		} else {
			seen[got] = true
		}
	}
	for _, name := range names {
		if err := hub.Update(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string][]byte{"a": nil}}); err != nil {
			t.Fatal(err)
		}
		wantNew("Secret " + name)
	}
	_ = unstructured.SetNestedField(artifact.Object, "sha256:b", "status", "artifact", "digest")
	wantNew("the artifact")
	if err := hub.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "key"}}); err != nil {
		t.Fatal(err)
	}
	if got := digest(); got != "" {
		t.Errorf("a missing Secret: got digest %q, want none", got)
	}
}
