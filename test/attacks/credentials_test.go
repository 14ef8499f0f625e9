package attacks

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// loginIn returns the reference to a Secret, or nil without a name.
func loginIn(secret string) *corev1.SecretReference {
	if secret == "" {
		return nil
	}
	return &corev1.SecretReference{Name: secret}
}

// chartFrom returns a function that makes a Profile deploy a chart with a login.
func chartFrom(address, secret string) func(*configv1beta1.ProfileSpec) {
	return func(spec *configv1beta1.ProfileSpec) {
		spec.HelmCharts = []configv1beta1.HelmChart{{
			RepositoryURL: address, RepositoryName: "r", ChartName: "r/c", ChartVersion: "1.0.0", ReleaseNamespace: "c",
			RegistryCredentialsConfig: &configv1beta1.RegistryCredentialsConfig{Credentials: loginIn(secret), PlainHTTP: true},
		}}
	}
}

// remoteFrom returns a function that makes a Profile deploy a file with a login.
func remoteFrom(address, secret string) func(*configv1beta1.ProfileSpec) {
	return func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs = []libv1beta1.PolicyRef{{RemoteURL: &libv1beta1.RemoteURL{RemoteSource: libv1beta1.RemoteSource{URL: address, SecretRef: loginIn(secret)}}}}
	}
}

// TestRegistryCredentials: the author of a Profile has no right on Secrets, and wants the hub to send the Secrets of
// the author's namespace to the author's server.
func TestRegistryCredentials(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	server := w.startListener(func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, "no", http.StatusForbidden) })
	host := strings.TrimPrefix(server.URL, "http://")
	for name, secret := range map[string]*corev1.Secret{
		"database": {Type: corev1.SecretTypeBasicAuth},
		"token":    {},
		"for-them": {ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.AnnotationAllowedHosts: "registry.example.com"}}, Type: libv1beta1.ProfileSecretType},
		"for-us":   {ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.AnnotationAllowedHosts: host}}},
	} {
		secret.Namespace, secret.Name = w.ns, name
		secret.StringData = map[string]string{"username": "admin", "password": name, "token": name}
		w.noError(w.Create(t.Context(), secret))
	}
	w.pullCluster(tenant, "mine")
	for _, secret := range []string{"database", "token", "for-them"} {
		for kind, change := range map[string]func(*configv1beta1.ProfileSpec){
			"chart": chartFrom(server.URL, secret), "registry": chartFrom("oci://"+host, secret), "file": remoteFrom(server.URL+"/x.yaml", secret),
		} {
			name := fmt.Sprintf("%s-%s", secret, kind)
			w.createProfile(tenant, name, change)
			w.awaitFailure(name, hasTexts("Secret "+w.ns+"/"+secret))
		}
	}
	if requests, _ := server.received(); requests > 0 {
		t.Errorf("the server got %d requests", requests)
	}
	// The hub sends a login for this host, so it would also have sent the others.
	w.createProfile(tenant, "allowed", chartFrom(server.URL, "for-us"))
	w.awaitFailure("allowed", hasTexts("403"))
	if _, credentials := server.received(); len(credentials) == 0 {
		t.Error("the login for this host was not sent")
	}
}

// TestRegistryCredentialsRedirected: a server that may get a login redirects the hub to another port of the same host,
// where another server listens.
func TestRegistryCredentialsRedirected(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	other := w.startListener(func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, "no", http.StatusTeapot) })
	server := w.startListener(func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, other.URL+r.URL.Path, http.StatusFound)
	})
	w.noError(w.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "login"}, Type: libv1beta1.ProfileSecretType,
		StringData: map[string]string{"username": "admin", "password": "s3cret"},
	}))
	w.pullCluster(tenant, "mine")
	w.createProfile(tenant, "chart", chartFrom(server.URL, "login"))
	w.createProfile(tenant, "registry", chartFrom("oci://"+strings.TrimPrefix(server.URL, "http://"), "login"))
	w.createProfile(tenant, "file", remoteFrom(server.URL+"/x.yaml", "login"))
	for _, name := range []string{"chart", "registry", "file"} {
		w.awaitFailure(name, hasTexts("418"))
	}
	if _, credentials := server.received(); len(credentials) == 0 {
		t.Error("the login was not sent to its own server")
	}
	if requests, credentials := other.received(); requests == 0 || len(credentials) > 0 {
		t.Errorf("the other server got %d requests with the credentials %q", requests, credentials)
	}
}
