package source_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/source"
)

// createHub returns a client of a real API server, and a template context in a new namespace with the objects.
func createHub(t *testing.T, objects ...client.Object) (client.Client, source.TemplateContext) {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	tmplCtx := templateContext()
	tmplCtx.Namespace = plane.Namespace(t, "source")
	for _, object := range objects {
		object.SetNamespace(tmplCtx.Namespace)
		if err := hub.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	return hub, tmplCtx
}

func contentsOf(hub client.Reader) *source.Contents { return &source.Contents{Hub: hub} }

func configMap(name string, data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}
}

func secret(name string, kind corev1.SecretType, data map[string]string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Type: kind, StringData: data}
}

func TestManifestsReadsConfigMaps(t *testing.T) {
	t.Parallel()
	web := configMap("web-eu-1", map[string]string{"b.yaml": "b", "a.yaml": "a"})
	web.BinaryData = map[string][]byte{"aa": {0xff}}
	web.Annotations = map[string]string{libv1beta1.TemplateAnnotation: "ok"}
	hub, tmplCtx := createHub(t, web)
	ref := libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: "{{ .ClusterNamespace }}", Name: "web-{{ .ClusterName }}", Path: "has/no/effect"}
	got, err := contentsOf(hub).Manifests(t.Context(), ref, tmplCtx)
	if err != nil {
		t.Fatal(err)
	}
	want := source.Content{
		Reference: source.Reference{Kind: "ConfigMap", Namespace: tmplCtx.Namespace, Name: "web-eu-1"},
		Files: []source.File{
			{Name: "a.yaml", Data: []byte("a")},
			{Name: "aa", Data: []byte{0xff}},
			{Name: "b.yaml", Data: []byte("b")},
		},
		Template: true,
	}
	want.Digest = got.Digest // the digest is checked below
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("content differs (-want +got):\n%s", diff)
	}
	web.Data["b.yaml"] = "changed"
	if err := hub.Update(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	changed, err := contentsOf(hub).Manifests(t.Context(), ref, tmplCtx)
	if err != nil {
		t.Fatal(err)
	}
	if changed.Digest == got.Digest || got.Digest == "" {
		t.Errorf("the digest %q has not changed with the content", got.Digest)
	}
}

func TestManifestsReadsSecretsMadeForProfiles(t *testing.T) {
	t.Parallel()
	hub, tmplCtx := createHub(t,
		secret("made-for-it", libv1beta1.ProfileSecretType, map[string]string{"a.yaml": "a"}),
		secret("something-else", corev1.SecretTypeOpaque, map[string]string{"a.yaml": "hidden"}),
	)
	got, err := contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceSecret, Name: "made-for-it"}, tmplCtx)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Sensitive || len(got.Files) != 1 || string(got.Files[0].Data) != "a" {
		t.Errorf("got %+v, want one sensitive file", got)
	}
	_, err = contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceSecret, Name: "something-else"}, tmplCtx)
	wantInvalid(t, err, "Secret "+tmplCtx.Namespace+"/something-else", `"Opaque"`, `"addons.projectsveltos.io/cluster-profile"`)
}

// storedConfigMap is a hub with one ConfigMap.
type storedConfigMap struct {
	client.Reader
	*corev1.ConfigMap
}

func (s storedConfigMap) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	s.DeepCopyInto(obj.(*corev1.ConfigMap))
	return nil
}

// TestDigestIsComputedOncePerVersion changes content without its version: only a new computation changes the digest.
func TestDigestIsComputedOncePerVersion(t *testing.T) {
	t.Parallel()
	stored := configMap("web", nil)
	cached, computed := contentsOf(storedConfigMap{ConfigMap: stored}), contentsOf(storedConfigMap{ConfigMap: stored})
	cached.Digests = source.NewDigests()
	digest := func(contents *source.Contents, text string) string {
		t.Helper()
		stored.Data = map[string]string{"a.yaml": text}
		content, err := contents.Values(t.Context(), configv1beta1.ValueFrom{Kind: configv1beta1.ValueFromConfigMap, Name: "web"}, templateContext())
		if err != nil {
			t.Fatal(err)
		}
		return content.Digest
	}
	a, b := digest(computed, "a"), digest(computed, "b")
	if a == b || a == "" {
		t.Fatalf("got the digests %q and %q", a, b)
	}
	for i, step := range []struct {
		uid              types.UID
		version          string
		text, wantDigest string
	}{
		{"1", "1", "a", a}, {"1", "1", "b", a}, {"1", "2", "b", b}, {"2", "1", "b", b}, {"1", "1", "b", a}, {"", "1", "a", a}, {"", "1", "b", b},
	} {
		stored.UID, stored.ResourceVersion = step.uid, step.version
		if got := digest(cached, step.text); got != step.wantDigest {
			t.Errorf("step %d: got the digest %s, want %s", i, got, step.wantDigest)
		}
	}
}

func TestMissingContent(t *testing.T) {
	t.Parallel()
	hub, tmplCtx := createHub(t)
	_, err := contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Name: "nowhere"}, tmplCtx)
	if !errors.Is(err, source.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	wantTexts(t, err, "ConfigMap "+tmplCtx.Namespace+"/nowhere does not exist")
	_, err = contentsOf(hub).Values(t.Context(), configv1beta1.ValueFrom{Kind: configv1beta1.ValueFromSecret, Name: "nowhere"}, tmplCtx)
	wantTexts(t, err, "Secret "+tmplCtx.Namespace+"/nowhere does not exist")

	got, err := contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Name: "nowhere", Optional: true}, tmplCtx)
	if err != nil || len(got.Files) != 0 {
		t.Errorf("optional and missing: got %v and %v, want no content", got, err)
	}
}

func TestUnsupportedContentIsRefused(t *testing.T) {
	t.Parallel()
	scripted, partial := configMap("scripted", nil), configMap("partial", nil)
	scripted.Annotations = map[string]string{libv1beta1.LuaAnnotation: "", libv1beta1.TemplateAnnotation: ""}
	partial.Annotations = map[string]string{libv1beta1.SubresourcesAnnotation: "status, /scale"}
	hub, tmplCtx := createHub(t, scripted, partial)
	for name, test := range map[string]struct {
		ref  libv1beta1.PolicyRef
		want string
	}{
		"subresources":   {libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Name: "partial"}, "annotation projectsveltos.io/subresources: \"/scale\" is not the name of a subresource"},
		"no name":        {libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap}, "a reference to a ConfigMap has no name"},
		"bad template":   {libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Name: "{{ .Nothing }}"}, "name of a ConfigMap"},
		"both languages": {libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Name: "scripted"}, "cannot have both annotations"},
	} {
		_, err := contentsOf(hub).Manifests(t.Context(), test.ref, tmplCtx)
		t.Run(name, func(t *testing.T) { wantInvalid(t, err, test.want) })
	}
}

// newAnnotatedSecret returns a Secret of another type with a login and an annotation for hosts.
func newAnnotatedSecret(name, hosts string) *corev1.Secret {
	named := secret(name, corev1.SecretTypeOpaque, map[string]string{"username": "me", "password": "s:cret"})
	named.Annotations = map[string]string{kube.AnnotationAllowedHosts: hosts}
	return named
}

func TestLogin(t *testing.T) {
	t.Parallel()
	docker := `{"auths":{"https://other.example.com/v1/":{"auth":"b3RoZXI6bm8="},"registry.example.com:5000":{"auth":"bWU6czpjcmV0"}}}`
	hub, tmplCtx := createHub(t,
		secret("basic", libv1beta1.ProfileSecretType, map[string]string{"username": "me", "password": "s:cret"}),
		secret("other", corev1.SecretTypeBasicAuth, map[string]string{"username": "me", "password": "s:cret"}),
		newAnnotatedSecret("named", "example.com, registry.example.com:5000"),
		newAnnotatedSecret("named-without-port", "registry.example.com"),
		newAnnotatedSecret("named-otherwise", "registry.example.com:443"),
		secret("docker", corev1.SecretTypeDockerConfigJson, map[string]string{".dockerconfigjson": docker}),
		secret("generic", corev1.SecretTypeOpaque, map[string]string{"config.json": docker, "x": "y"}),
		secret("keyed", corev1.SecretTypeOpaque, map[string]string{"a": docker, "b": "not it"}),
		secret("ca", corev1.SecretTypeOpaque, map[string]string{"ca.crt": "PEM"}),
	)
	docked := source.Login{Username: "me", Password: "s:cret", Hosts: []string{"registry.example.com:5000"}}
	chart := func(config configv1beta1.RegistryCredentialsConfig, secretName string) configv1beta1.HelmChart {
		if secretName != "" {
			config.Credentials = &corev1.SecretReference{Name: secretName}
		}
		return configv1beta1.HelmChart{RepositoryURL: "oci://registry.example.com:5000/charts", RegistryCredentialsConfig: &config}
	}
	for name, test := range map[string]struct {
		chart configv1beta1.HelmChart
		want  source.Login
		err   string
	}{
		"none":          {chart: configv1beta1.HelmChart{}},
		"basic":         {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "basic"), want: source.Login{Username: "me", Password: "s:cret"}},
		"docker":        {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "docker"), want: docked},
		"generic":       {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "generic"), want: docked},
		"by key":        {chart: chart(configv1beta1.RegistryCredentialsConfig{Key: "a"}, "keyed"), want: docked},
		"another type":  {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "other"), err: `Secret NS/other: it has the type "kubernetes.io/basic-auth", so its login is not sent`},
		"named host":    {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "named"), want: source.Login{Username: "me", Password: "s:cret", Hosts: []string{"example.com", "registry.example.com:5000"}}},
		"any port":      {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "named-without-port"), want: source.Login{Username: "me", Password: "s:cret", Hosts: []string{"registry.example.com"}}},
		"another port":  {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "named-otherwise"), err: `its annotation towline.dev/allowed-hosts does not name registry.example.com:5000`},
		"no such key":   {chart: chart(configv1beta1.RegistryCredentialsConfig{Key: "c"}, "keyed"), err: `Secret NS/keyed: no key "c"`},
		"not a config":  {chart: chart(configv1beta1.RegistryCredentialsConfig{Key: "b"}, "keyed"), err: `Secret NS/keyed: key "b" is not a Docker configuration`},
		"no Secret":     {chart: chart(configv1beta1.RegistryCredentialsConfig{}, "none"), err: "Secret NS/none does not exist"},
		"own authority": {chart: chart(configv1beta1.RegistryCredentialsConfig{CA: &corev1.SecretReference{Name: "ca"}}, ""), want: source.Login{CA: []byte("PEM")}},
		"no authority":  {chart: chart(configv1beta1.RegistryCredentialsConfig{CA: &corev1.SecretReference{Name: "basic"}}, ""), err: "Secret NS/basic has no key ca.crt"},
		"all hosts": {
			chart: configv1beta1.HelmChart{Options: &configv1beta1.HelmOptions{PassCredentialsAll: true}},
			want:  source.Login{PassCredentialsAll: true},
		},
		"other switches": {chart: chart(configv1beta1.RegistryCredentialsConfig{InsecureSkipTLSVerify: true, PlainHTTP: true}, ""), want: source.Login{InsecureSkipTLSVerify: true, PlainHTTP: true}},
	} {
		got, err := source.LoginFor(t.Context(), hub, test.chart, tmplCtx)
		t.Run(name, func(t *testing.T) {
			if test.err != "" {
				wantTexts(t, err, strings.ReplaceAll(test.err, "NS", tmplCtx.Namespace))
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("login differs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRestrictedContextReadsOneNamespace(t *testing.T) {
	t.Parallel()
	_, elsewhere := createHub(t,
		configMap("content", map[string]string{"a.yaml": "a"}),
		secret("login", corev1.SecretTypeOpaque, map[string]string{"username": "me", "password": "s:cret", "ca.crt": "PEM",
			"keyring.gpg": "keys", "cosign.pub": "PEM", "trusted_root.json": "{}"}),
	)
	hub, tmplCtx := createHub(t, configMap("content", map[string]string{"a.yaml": "a"}))
	tmplCtx.RestrictedNamespace = tmplCtx.Namespace
	tmplCtx.Cluster = func() (map[string]any, error) { return map[string]any{"elsewhere": elsewhere.Namespace}, nil }
	if _, err := contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: tmplCtx.Namespace, Name: "content"}, tmplCtx); err != nil {
		t.Errorf("its own namespace: %v", err)
	}
	login := func(config configv1beta1.RegistryCredentialsConfig) error {
		_, err := source.LoginFor(t.Context(), hub, configv1beta1.HelmChart{RepositoryURL: "oci://registry", RegistryCredentialsConfig: &config}, tmplCtx)
		return err
	}
	verification := func(chart configv1beta1.HelmChart) error {
		_, err := source.VerificationFor(t.Context(), hub, chart, tmplCtx)
		return err
	}
	for _, namespace := range []string{elsewhere.Namespace, "{{ .Cluster.elsewhere }}"} {
		held := &corev1.SecretReference{Namespace: namespace, Name: "login"}
		_, manifests := contentsOf(hub).Manifests(t.Context(), libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: namespace, Name: "content"}, tmplCtx)
		_, values := contentsOf(hub).Values(t.Context(), configv1beta1.ValueFrom{Kind: configv1beta1.ValueFromConfigMap, Namespace: namespace, Name: "content", Optional: true}, tmplCtx)
		for name, test := range map[string]struct {
			err  error
			want string
		}{
			"policyRefs":  {manifests, "ConfigMap " + elsewhere.Namespace + "/content: "},
			"valuesFrom":  {values, "ConfigMap " + elsewhere.Namespace + "/content: "},
			"credentials": {login(configv1beta1.RegistryCredentialsConfig{Credentials: held}), "credentials: Secret " + elsewhere.Namespace + "/login: "},
			"authority":   {login(configv1beta1.RegistryCredentialsConfig{CA: held}), "ca: Secret " + elsewhere.Namespace + "/login: "},
			"keyring": {
				verification(configv1beta1.HelmChart{ProvenanceVerification: &configv1beta1.ProvenanceVerification{KeyringSecretRef: held}}),
				"keyringSecretRef: Secret " + elsewhere.Namespace + "/login: ",
			},
			"public key": {
				verification(configv1beta1.HelmChart{SignatureVerification: &configv1beta1.SignatureVerification{Provider: "PublicKey", SecretRef: held}}),
				"secretRef: Secret " + elsewhere.Namespace + "/login: ",
			},
			"trust root": {
				verification(configv1beta1.HelmChart{SignatureVerification: &configv1beta1.SignatureVerification{Provider: "Keyless", SecretRef: held}}),
				"secretRef: Secret " + elsewhere.Namespace + "/login: ",
			},
		} {
			t.Run(name+" in "+namespace, func(t *testing.T) {
				wantInvalid(t, test.err, test.want+"a Profile reads its own namespace "+tmplCtx.Namespace+" only")
			})
		}
	}
}
