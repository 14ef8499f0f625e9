package fleet_test

import (
	"crypto/x509"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/identity"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func TestConfigOfAnIdentityIsCached(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	ns := plane.Namespace(t, "identity")
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	clients := fleet.NewClients(hubClient, plane.Config, identity.Wrap, nil)
	member := func() fleet.Member {
		return fleet.Member{Namespace: ns, Name: "one", Mode: fleet.Push, Identity: &libv1beta1.WorkloadIdentity{
			Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: "127.0.0.1:1", GCP: &libv1beta1.GCPIdentity{}, CASecretRef: &corev1.SecretReference{Name: "ca"},
		}}
	}
	_, err = clients.Config(t.Context(), member())
	wantText(t, err, "connect to "+ns+`/one: read spec.workloadIdentity.caSecretRef: secrets "ca" not found`)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "ca"}}
	if err := hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	set := func(key, value string) {
		secret.Data = map[string][]byte{key: []byte(value)}
		if err := hubClient.Update(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	_, err = clients.Config(t.Context(), member())
	wantText(t, err, `secret `+ns+`/ca has no key "ca.crt"`)
	set("ca.crt", "nonsense")
	_, err = clients.Config(t.Context(), member())
	wantText(t, err, `key "ca.crt" of secret `+ns+`/ca: `)
	set("ca.crt", string(plane.Config.CAData))
	first, err := clients.Config(t.Context(), member())
	if err != nil {
		t.Fatal(err)
	}
	authority := x509.NewCertPool()
	authority.AppendCertsFromPEM(plane.Config.CAData)
	trusted, err := utilnet.TLSClientConfig(first.Transport)
	if err != nil || !authority.Equal(trusted.RootCAs) || first.Host != "https://127.0.0.1:1" || first.BearerToken != "" {
		t.Errorf("Config() = %+v with the TLS configuration %+v, %v", first, trusted, err)
	}
	secret.Labels = map[string]string{"other": "label"}
	set("ca.crt", string(plane.Config.CAData))
	if again, err := clients.Config(t.Context(), member()); err != nil || again != first {
		t.Errorf("Config() again = %p, %v, want the same config %p", again, err, first)
	}
	set("ca.crt", string(plane.Config.CAData)+"\n"+string(plane.Config.CAData))
	second, err := clients.Config(t.Context(), member())
	if err != nil || second == first {
		t.Errorf("Config() with another authority = %p, %v, want another config", second, err)
	}
	m := member()
	m.Identity.Endpoint = "127.0.0.1:2"
	if third, err := clients.Config(t.Context(), m); err != nil || third == second {
		t.Errorf("Config() with another endpoint = %p, %v, want another config", third, err)
	}
	m.Identity.Endpoint = "http://127.0.0.1:2"
	_, err = clients.Config(t.Context(), m)
	wantText(t, err, "spec.workloadIdentity.endpoint: ")
	m.Identity = &libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAzure, Endpoint: "h", Azure: &libv1beta1.AzureIdentity{}}
	_, err = clients.Config(t.Context(), m)
	wantText(t, err, "spec.workloadIdentity.azure.tenantID is missing")
}

func TestParseEndpoint(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"34.1.2.3": "https://34.1.2.3", "ABC.gr7.eu-west-1.eks.amazonaws.com": "https://ABC.gr7.eu-west-1.eks.amazonaws.com",
		"https://h:8443/path": "https://h:8443/path", "[::1]:6443": "https://[::1]:6443",
	} {
		if got, err := fleet.ParseEndpoint(in); err != nil || got.String() != want {
			t.Errorf("ParseEndpoint(%q) = %v, %v, want %q", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"http://h": "over TLS only", "https://": "has no host", "": "has no host", "https://u:p@h": "are allowed", "h?x=y": "are allowed", "https://h h": "invalid address",
	} {
		_, err := fleet.ParseEndpoint(in)
		wantText(t, err, want)
	}
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one with %q", err, text)
	}
}
