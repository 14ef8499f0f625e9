package attacks

import (
	"archive/tar"
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
)

// contentsPerKind is the number of contents of each kind in fillingContents. The contents compete for memory, and some
// wait for minutes: the test waits until testedContents of all have a result, which is less than half of them.
const contentsPerKind, testedContents = 8, 24

// The numbers of values in a manifest and in the result of a chart. With a few more the hub would refuse them, since
// they would need more than 128 MiB while they are decoded. A profile of manifestsPerProfile manifests needs nearly as
// much until it is delivered.
const (
	valuesPerManifest   = 155_000
	valuesPerChart      = 290_000
	manifestsPerProfile = 8
)

// fillingContents creates profiles whose contents take as much memory as possible: manifests of many values, one by one
// and many in one profile, templates that keep long texts, charts with many values, large and many-valued indexes of
// repositories, files of many URLs, and texts that are much larger as JSON.
func (w *world) fillingContents(tenant client.Client) {
	w.Helper()
	w.pullCluster(tenant, "contents")
	manifest := func(i int, values string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a-%d, namespace: default}\nx: [%s]\n", i, values)
	}
	charts := make([]examples.Chart, contentsPerKind)
	for i := range contentsPerKind {
		charts[i] = examples.Chart{Name: fmt.Sprint("values-", i), Version: "1.0.0", Files: map[string]string{"templates/a.yaml": manifest(i, fmt.Sprintf("{{ range %d }}{},{{ end }}", valuesPerChart))}}
	}
	repository, err := examples.Repository(charts...)
	w.noError(err)
	file := bytes.Repeat([]byte("# "+strings.Repeat("x", 1021)+"\n"), 25<<10)
	escaped := bytes.Repeat([]byte{1}, 20<<20)
	tree := tarOf(w, map[string][]byte{"kustomization.yaml": []byte("resources: [large.yaml]"), "large.yaml": escaped})
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/text/"): // an index of one long field
			_, _ = fmt.Fprintf(rw, `{"entries":{"a":[{"version":"1.0.0","urls":["%s"]}]}}`, bytes.Repeat([]byte("x"), 60<<20)) // the hub may have closed the connection, here and below
		case strings.HasPrefix(r.URL.Path, "/values/"):
			_, _ = fmt.Fprintf(rw, "entries: {a: [%s]}", strings.Repeat("{},", 740_000))
		case strings.HasPrefix(r.URL.Path, "/file/"):
			_, _ = rw.Write(file)
		case strings.HasPrefix(r.URL.Path, "/escaped/"):
			_, _ = rw.Write(escaped)
		case strings.HasPrefix(r.URL.Path, "/tree/"):
			_, _ = rw.Write(tree)
		default:
			repository.ServeHTTP(rw, r)
		}
	}))
	w.Cleanup(server.Close)
	chart := func(path, name string) func(*configv1beta1.ProfileSpec) {
		return func(spec *configv1beta1.ProfileSpec) {
			spec.HelmCharts = []configv1beta1.HelmChart{{
				RepositoryURL: server.URL + path, RepositoryName: "r", ChartName: "r/" + name, ChartVersion: "1.0.0", ReleaseNamespace: "c",
			}}
		}
	}
	for i := range contentsPerKind {
		for kind, text := range map[string]string{
			"manifest": manifest(i, strings.Repeat("{},", valuesPerManifest)),
			"template": fmt.Sprintf(`{{ $x := repeat %d "x" }}{{ range 1000000000 }}{{ end }}{{ len $x }}`, 200_000_000+i),
		} {
			name := fmt.Sprint(kind, "-", i)
			annotation := map[string]string{"template": libv1beta1.TemplateAnnotation, "manifest": "example.com/plain"}[kind]
			w.noError(tenant.Create(w.Context(), &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Annotations: map[string]string{annotation: "ok"}}, Data: map[string]string{"objects.yaml": text},
			}))
			w.createProfile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
				spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: name}}
			})
		}
		w.createProfile(tenant, fmt.Sprint("many-", i), func(spec *configv1beta1.ProfileSpec) {
			for n := range manifestsPerProfile {
				spec.PolicyRefs = append(spec.PolicyRefs, libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: fmt.Sprint("manifest-", (i+n)%contentsPerKind)})
			}
		})
		w.createProfile(tenant, fmt.Sprint("chart-", i), chart("", charts[i].Name))
		w.createProfile(tenant, fmt.Sprint("text-", i), chart(fmt.Sprint("/text/", i), "a"))
		w.createProfile(tenant, fmt.Sprint("values-", i), chart(fmt.Sprint("/values/", i), "a"))
		w.createProfile(tenant, fmt.Sprint("file-", i), remoteFrom(fmt.Sprint(server.URL, "/file/", i), ""))
		w.createProfile(tenant, fmt.Sprint("escaped-", i), func(spec *configv1beta1.ProfileSpec) {
			remoteFrom(server.URL+"/escaped/0.yaml", "")(spec)
			spec.PolicyRefs[0].RemoteURL.Template = true
		})
		w.createProfile(tenant, fmt.Sprint("tree-", i), func(spec *configv1beta1.ProfileSpec) {
			spec.KustomizationRefs = []configv1beta1.KustomizationRef{{RemoteURL: &libv1beta1.RemoteSource{URL: server.URL + "/tree/0.tar"}}}
		})
	}
}

// tarOf returns an archive with files.
func tarOf(w *world, files map[string][]byte) []byte {
	w.Helper()
	var out bytes.Buffer
	archive := tar.NewWriter(&out)
	for name, content := range files {
		w.noError(archive.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(content))}))
		_, err := archive.Write(content)
		w.noError(err)
	}
	w.noError(archive.Close())
	return out.Bytes()
}

// awaitResults waits until n contents of fillingContents have been delivered, or have failed.
func (w *world) awaitResults(n int) {
	w.Helper()
	w.eventually("results of the contents", func() error {
		summaries := &configv1beta1.ClusterSummaryList{}
		err := w.List(w.Context(), summaries, client.InNamespace(w.ns), client.MatchingLabels{libv1beta1.ClusterNameLabel: "contents"})
		found := 0
		for _, summary := range summaries.Items {
			if len(summary.Status.FeatureSummaries) > 0 {
				found++
			}
		}
		if err == nil && found < n {
			err = fmt.Errorf("%d of %d contents have a result", found, len(summaries.Items))
		}
		return err
	})
}
