package source_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/source"
)

func TestKustomizationReadsObjects(t *testing.T) {
	t.Parallel()
	web := configMap("web", nil)
	web.BinaryData = map[string][]byte{"kustomize.tar.gz": {0xff}}
	marked := configMap("marked", map[string]string{"kustomization.yaml": ""})
	marked.Annotations = map[string]string{libv1beta1.TemplateAnnotation: "ok"}
	hub, tmplCtx := createHub(t, web, marked, configMap("empty", nil),
		secret("private", libv1beta1.ProfileSecretType, map[string]string{"kustomization.yaml": "a"}))
	read := func(ref configv1beta1.KustomizationRef) (source.Content, error) {
		return contentsOf(hub).Kustomization(t.Context(), ref, tmplCtx)
	}
	got, err := read(configv1beta1.KustomizationRef{Kind: libv1beta1.SourceConfigMap, Namespace: "{{ .ClusterNamespace }}", Name: `{{ "web" }}`})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]source.File{{Name: "kustomize.tar.gz", Data: []byte{0xff}}}, got.Files); diff != "" || got.Reference.Name != "web" {
		t.Errorf("%s (-want +got):\n%s", got.Reference, diff)
	}
	// The annotation of a template has no effect.
	if got, err = read(configv1beta1.KustomizationRef{Kind: libv1beta1.SourceConfigMap, Name: "marked"}); err != nil || len(got.Files) != 1 {
		t.Errorf("an object with an annotation: got %+v, error %v", got, err)
	}
	if got, err = read(configv1beta1.KustomizationRef{Kind: libv1beta1.SourceSecret, Name: "private"}); err != nil || !got.Sensitive {
		t.Errorf("a Secret: got %+v, error %v", got, err)
	}
	if got, err = read(configv1beta1.KustomizationRef{Kind: libv1beta1.SourceSecret, Name: "nowhere", Optional: true}); err != nil || len(got.Files) > 0 {
		t.Errorf("an optional reference: got %+v, error %v", got, err)
	}
	for want, ref := range map[string]configv1beta1.KustomizationRef{
		"ConfigMap " + tmplCtx.Namespace + "/empty has no data": {Kind: libv1beta1.SourceConfigMap, Name: "empty"},
	} {
		_, err := read(ref)
		wantInvalid(t, err, want)
	}
}

func TestArchiveOfContent(t *testing.T) {
	t.Parallel()
	gzip := []byte{0x1f, 0x8b}
	for name, test := range map[string]struct {
		kind  string
		files []source.File
		want  string
	}{
		"the key":             {"ConfigMap", []source.File{{Name: "README"}, {Name: "kustomize.tar.gz"}}, "kustomize.tar.gz"},
		"the only key":        {"Secret", []source.File{{Name: "app", Data: gzip}}, "app"},
		"one of several":      {"Secret", []source.File{{Name: "app", Data: gzip}, {Name: "kustomization.yaml"}}, ""},
		"plain files":         {"ConfigMap", []source.File{{Name: "kustomization.yaml"}}, ""},
		"in a Git repository": {"GitRepository", []source.File{{Name: "kustomize.tar.gz", Data: gzip}}, ""},
	} {
		content := source.Content{Reference: source.Reference{Kind: test.kind}, Files: test.files}
		if got, ok := content.Archive(); got.Name != test.want || ok != (test.want != "") {
			t.Errorf("%s: got %q, %t", name, got.Name, ok)
		}
	}
}

func TestArchivesOfManifestsAreUnpacked(t *testing.T) {
	t.Parallel()
	web := tarball(t, map[string]string{"README.md": "r", "b/b.yml": "2", "a.yaml": "1", "kustomization.yaml": "k"})
	limits := archive.Limits{Files: 10, Size: 1000}
	content := func(kind string, files ...source.File) source.Content {
		return source.Content{Reference: source.Reference{Kind: kind, Namespace: "eu", Name: "web"}, Files: files, Sensitive: kind == "Secret"}
	}
	last := source.File{Name: "last", Data: []byte("3")}
	got, err := content("ConfigMap", source.File{Name: "app.tar.gz", Data: web}, last).Unpacked(limits)
	want := map[string]string{"app.tar.gz/a.yaml": "1", "app.tar.gz/b/b.yml": "2", "last": "3"}
	if diff := cmp.Diff(want, filesOf(got)); err != nil || diff != "" || got.Files[2].Name != "last" {
		t.Errorf("got %v and %v (-want +got):\n%s", got.Files, err, diff)
	}
	// An archive in a Git repository is a file.
	if got, err = content("GitRepository", source.File{Name: "app.tar.gz", Data: web}).Unpacked(limits); err != nil || len(got.Files) != 1 {
		t.Errorf("a Git repository: got %v and %v", got.Files, err)
	}
	large := tarball(t, map[string]string{"large.yaml": strings.Repeat("x", 600)})
	for want, refused := range map[string]source.Content{
		"ConfigMap eu/web, key app: the archive has no file that": content("ConfigMap", source.File{Name: "app", Data: tarball(t, map[string]string{"README.md": "r"})}),
		"ConfigMap eu/web, key b: read archive: its files":        content("ConfigMap", source.File{Name: "a", Data: large}, source.File{Name: "b", Data: large}),
		"key cut: read archive":                                   content("ConfigMap", source.File{Name: "cut", Data: web[:50]}),
		"Secret eu/web, key app: it is invalid (details are not ": content("Secret", source.File{Name: "app", Data: web[:50]}),
	} {
		_, err := refused.Unpacked(limits)
		wantInvalid(t, err, want)
	}
}

func TestSubstitute(t *testing.T) {
	t.Parallel()
	values := map[string]string{"region": "east", "a-b": "<&>"}
	got, err := templateContext().Substitute([]source.Text{{Text: `{{ .region | upper }}`}, {Text: `{{ index . "a-b" }}`}, {Text: "text"}}, values)
	if diff := cmp.Diff([]string{"EAST", "<&>", "text"}, got); err != nil || diff != "" {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
	for text, want := range map[string]string{
		"{{ .gone }}":          `expand the second: line 1:3: at <.gone>: map has no entry for key "gone"`,
		"{{ .region":           "parse the second: line 1: unclosed action",
		"{{ randAlphaNum 5 }}": `function "randAlphaNum" not defined`,
		"{{ range 10000000000 }}some text{{ end }}": "larger than 64 MiB",
	} {
		_, err := templateContext().Substitute([]source.Text{{Description: "the first"}, {Description: "the second", Text: text}}, values)
		wantInvalid(t, err, want)
	}
}
