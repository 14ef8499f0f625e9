package hub_test

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"helm.sh/helm/v4/pkg/provenance"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
)

// helm returns the expected state of the Helm feature.
func helm(status libv1beta1.FeatureStatus, message string) configv1beta1.FeatureSummary {
	return configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureHelm, Status: status, FailureMessage: message}
}

// serveCharts serves a repository with charts, by default the example chart, and returns its URL.
func (w *world) serveCharts(charts ...examples.Chart) string {
	w.Helper()
	repository, err := examples.Repository(charts...)
	w.must(err)
	server := httptest.NewServer(repository)
	w.Cleanup(server.Close)
	return server.URL
}

// deployChart returns a change of a profile, after which it deploys only the chart hello of a repository, modified by
// change.
func deployChart(address string, change func(*configv1beta1.HelmChart)) func(*configv1beta1.ProfileSpec) {
	chart := configv1beta1.HelmChart{
		RepositoryURL: address, RepositoryName: "examples", ChartName: "examples/hello", ChartVersion: "0.1.0",
		ReleaseName: "hello", ReleaseNamespace: "hello",
	}
	if change != nil {
		change(&chart)
	}
	return func(s *configv1beta1.ProfileSpec) {
		s.PolicyRefs, s.HelmCharts = nil, []configv1beta1.HelmChart{chart}
	}
}

// listDeployments lists the Deployments of charts on a member, as "chart version namespace/name: replicas".
func (w *world) listDeployments(member string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for key, found := range w.deployed {
		for _, item := range found.Items {
			for _, obj := range item.Objects {
				if key == member+" "+found.ID.String() && item.Release != nil && obj.GetKind() == "Deployment" {
					replicas, _, _ := unstructured.NestedFieldNoCopy(obj.Object, "spec", "replicas")
					all = append(all, fmt.Sprintf("%s %s %s/%s: %v", item.Release.ChartName, item.Release.ChartVersion, obj.GetNamespace(), obj.GetName(), replicas))
				}
			}
		}
	}
	slices.Sort(all)
	return all
}

func (w *world) wantDeployed(want ...string) {
	w.Helper()
	w.eventually("deployed", func() error { return checkEqual(want, w.listDeployments("one")) })
}

func TestProfileReadsItsOwnNamespaceOnly(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	elsewhere := w.plane.Namespace(t, "elsewhere")
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: elsewhere, Name: "manifests"}, Data: map[string]string{"content": manifest("hidden")}})
	one := w.createReadyMember("one", w.prodLabels())
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Annotations = map[string]string{"elsewhere": elsewhere} })
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p"},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "prod"}},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "{{ .Cluster.metadata.annotations.elsewhere }}", Name: "manifests"}},
			HelmCharts: []configv1beta1.HelmChart{{
				RepositoryURL: "http://127.0.0.1:1", RepositoryName: "r", ChartName: "r/c", ChartVersion: "1.0.0", ReleaseName: "c", ReleaseNamespace: "c",
				RegistryCredentialsConfig: &configv1beta1.RegistryCredentialsConfig{Credentials: &corev1.SecretReference{Namespace: elsewhere, Name: "login"}},
			}},
		},
	}
	w.create(profile)
	only := ": a Profile reads its own namespace " + w.ns + " only"
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{
		FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusFailedNonRetriable, FailureMessage: "ConfigMap " + elsewhere + "/manifests" + only,
	})
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable,
		"helm release c/c: registryCredentialsConfig.credentials: Secret "+elsewhere+"/login"+only))
	update(w, profile, func(p *configv1beta1.Profile) {
		p.Spec.HelmCharts, p.Spec.PolicyRefs[0].Namespace = nil, w.ns
	})
	w.wantProvisioned(profile, "one")
	if err := checkEqual([]string{"ConfigMap default/a"}, w.refs("one", "Resources")); err != nil {
		t.Errorf("objects on one: %v", err)
	}
	w.must(w.Delete(t.Context(), profile))
	w.wantNoSummary(profile, "one")
}

func TestReleasesAreIdentifiedByExpandedNames(t *testing.T) {
	w := newWorld(t)
	address := w.serveCharts()
	one := w.createReadyMember("one", w.prodLabels())
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Annotations = map[string]string{"release": "hello"} })
	first := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) {
		c.ReleaseName = "{{ .Cluster.metadata.annotations.release }}"
	}))
	holder := w.wantFeature(first, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	second := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) { c.ReleaseNamespace = `{{ "HELLO" | lower }}` }))
	conflicting := w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable, "helm release hello/hello is managed by ClusterSummary "+holder.Name))
	if got := conflicting.Status.HelmReleaseSummaries; len(got) != 1 || got[0].ReleaseNamespace != "hello" || got[0].Status != configv1beta1.HelmChartStatusConflict {
		t.Errorf("helmReleaseSummaries = %+v", got)
	}
	// A label of the cluster gives the first release another name. The second profile can deploy its release.
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Annotations["release"] = "other" })
	w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantDeployed("hello 0.1.0 hello/hello: 1", "hello 0.1.0 hello/other: 1")
}

func TestMissingReleaseToUninstallIsReported(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	uninstall := func(c *configv1beta1.HelmChart) { c.HelmChartAction = configv1beta1.HelmChartActionUninstall }
	address := w.serveCharts()
	nothing := []configv1beta1.HelmChartSummary{{ReleaseName: "hello", ReleaseNamespace: "hello", ConflictMessage: "Towline has not deployed release hello/hello"}}
	profile := w.createProfile(deployChart(address, uninstall))
	summary := w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	if err := checkEqual(nothing, summary.Status.HelmReleaseSummaries); err != nil {
		t.Errorf("never installed: helmReleaseSummaries %v", err)
	}
	update(w, profile, func(p *configv1beta1.ClusterProfile) { deployChart(address, nil)(&p.Spec) })
	w.wantDeployed("hello 0.1.0 hello/hello: 1")
	update(w, profile, func(p *configv1beta1.ClusterProfile) { deployChart(address, uninstall)(&p.Spec) })
	w.wantDeployed()
	w.eventually("uninstalled", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		return checkEqual(nothing, summary.Status.HelmReleaseSummaries)
	})
}

func TestOptionalReferencesMayBeMissing(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	address := w.serveCharts()
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		later := libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "later", Optional: true}
		refs := slices.Concat(s.PolicyRefs, []libv1beta1.PolicyRef{later})
		deployChart(address, func(c *configv1beta1.HelmChart) {
			c.ValuesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Namespace: w.ns, Name: "values", Optional: true}}
		})(s)
		s.PolicyRefs = refs
	})
	w.wantProvisioned(profile, "one")
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantDeployed("hello 0.1.0 hello/hello: 1")

	// The references take effect when the objects exist.
	w.createConfigMap("later", manifest("b"))
	w.createConfigMap("values", "replicas: 2\n")
	w.eventually("manifests", func() error {
		return checkEqual([]string{"ConfigMap default/a", "ConfigMap default/b"}, w.refs("one", "Resources"))
	})
	w.wantDeployed("hello 0.1.0 hello/hello: 2")
}

func TestChangedValuesAreDeliveredWithoutProfileChange(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	plain := w.createConfigMap("values", "replicas: 2\n")
	hidden := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "values"}, Type: libv1beta1.ProfileSecretType,
		Data: map[string][]byte{"values": []byte("message: hidden\n")},
	}
	w.create(hidden)
	w.createProfile(deployChart(w.serveCharts(), func(c *configv1beta1.HelmChart) {
		c.ValuesFrom = []configv1beta1.ValueFrom{
			{Kind: configv1beta1.ValueFromConfigMap, Namespace: w.ns, Name: "values"},
			{Kind: configv1beta1.ValueFromSecret, Namespace: w.ns, Name: "values"},
		}
	}))
	w.wantDeployed("hello 0.1.0 hello/hello: 2")
	update(w, plain, func(cm *corev1.ConfigMap) { cm.Data["content"] = "replicas: 3\n" })
	w.wantDeployed("hello 0.1.0 hello/hello: 3")
	update(w, hidden, func(s *corev1.Secret) { s.Data["values"] = []byte("replicas: 4\n") })
	w.wantDeployed("hello 0.1.0 hello/hello: 4")
}

// serveRegistry serves an OCI registry with the example chart, with the login "me" and "s:cret", and returns its
// oci:// URL.
func (w *world) serveRegistry() string {
	w.Helper()
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "s:cret" {
			rw.Header().Set("WWW-Authenticate", `Basic realm="charts"`)
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		images.ServeHTTP(rw, r)
	}))
	w.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	opened, err := remote.NewRepository(host + "/charts/hello:0.1.0")
	w.must(err)
	opened.PlainHTTP = true
	opened.Client = &auth.Client{Credential: auth.StaticCredential(host, auth.Credential{Username: "me", Password: "s:cret"})}
	archive, err := examples.Chart{}.Archive()
	w.must(err)
	layer, err := oras.PushBytes(w.Context(), opened, "application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)
	w.must(err)
	packed, err := oras.PackManifest(w.Context(), opened, oras.PackManifestVersion1_1, "application/vnd.cncf.helm.config.v1+json",
		oras.PackManifestOptions{Layers: []ocispec.Descriptor{layer}})
	w.must(err)
	w.must(opened.Tag(w.Context(), packed, opened.Reference.Reference))
	return "oci://" + host + "/charts"
}

func TestChartFromRegistryWithLogin(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	address := w.serveRegistry()
	login := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "login"}, Type: libv1beta1.ProfileSecretType,
		Data: map[string][]byte{"username": []byte("me"), "password": []byte("a guess")},
	}
	w.create(login)
	profile := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) {
		c.ChartName = "hello"
		c.RegistryCredentialsConfig = &configv1beta1.RegistryCredentialsConfig{
			Credentials: &corev1.SecretReference{Namespace: w.ns, Name: "login"}, PlainHTTP: true,
		}
	}))
	w.eventually("wrong password", func() error { return w.checkFailure(profile, "Failed", "401") })
	// The corrected password takes effect without a change of the profile.
	update(w, login, func(s *corev1.Secret) { s.Data["password"] = []byte("s:cret") })
	summary := w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantDeployed("hello 0.1.0 hello/hello: 1")
	if got := summary.Status.HelmReleaseSummaries[0].CredentialsSecretRef; got == nil || got.Name != "login" {
		t.Errorf("credentialsSecretRef = %v", got)
	}
}

// serveSignedCharts serves a repository with a provenance file of hello 0.1.0, which is signed by entity, and returns
// its URL.
func (w *world) serveSignedCharts(entity *openpgp.Entity) string {
	w.Helper()
	repository, err := examples.Repository()
	w.must(err)
	archive := httptest.NewRecorder()
	repository.ServeHTTP(archive, httptest.NewRequestWithContext(w.Context(), http.MethodGet, "/hello-0.1.0.tgz", nil))
	signatory := provenance.Signatory{Entity: entity}
	file, err := signatory.ClearSign(archive.Body.Bytes(), "hello-0.1.0.tgz", []byte("name: hello\nversion: 0.1.0\n"))
	w.must(err)
	mux := http.NewServeMux()
	mux.Handle("/", repository)
	mux.HandleFunc("/hello-0.1.0.tgz.prov", func(out http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(out, file) })
	server := httptest.NewServer(mux)
	w.Cleanup(server.Close)
	return server.URL
}

func TestUnverifiedChartIsNotDeployed(t *testing.T) {
	w := newWorld(t)
	publisher := func(name string) (*openpgp.Entity, []byte) {
		entity, err := openpgp.NewEntity(name, "", name+"@example.com", &packet.Config{Algorithm: packet.PubKeyAlgoEdDSA})
		w.must(err)
		var public bytes.Buffer
		w.must(entity.Serialize(&public))
		return entity, public.Bytes()
	}
	signer, trusted := publisher("signer")
	_, foreign := publisher("foreign")
	w.createReadyMember("one", w.prodLabels())
	address := w.serveSignedCharts(signer)
	profile := w.createProfile(deployChart(address, nil))
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantDeployed("hello 0.1.0 hello/hello: 1")

	// An unverified chart changes nothing on the member.
	keyring := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "keyring"}, Data: map[string][]byte{"keyring.gpg": foreign}}
	w.create(keyring)
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		deployChart(address, func(c *configv1beta1.HelmChart) {
			c.Values = "replicas: 3"
			c.ProvenanceVerification = &configv1beta1.ProvenanceVerification{KeyringSecretRef: &corev1.SecretReference{Name: "keyring"}}
		})(&p.Spec)
	})
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable, "helm release hello/hello: chart examples/hello 0.1.0 in "+address+
		": provenanceVerification: openpgp: signature made by unknown entity"))
	w.wantDeployed("hello 0.1.0 hello/hello: 1")

	// The hub watches the Secret.
	update(w, keyring, func(s *corev1.Secret) { s.Data["keyring.gpg"] = trusted })
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantDeployed("hello 0.1.0 hello/hello: 3")
}
