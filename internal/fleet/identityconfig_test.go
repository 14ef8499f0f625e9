package fleet_test

import (
	"crypto/x509"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/transport"
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
	policy := fleet.IdentityPolicy{Namespaces: []string{ns}, Hosts: []string{"127.0.0.1", "h"}, NewTransportWrapper: identity.Wrap}
	clients := fleet.NewClients(fleet.SecretReaders{Live: hubClient}, plane.Config, policy, nil)
	member := func() fleet.Member {
		return fleet.Member{Namespace: ns, Name: "one", Mode: fleet.Push, Identity: &libv1beta1.WorkloadIdentity{
			Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: "127.0.0.1:1", GCP: &libv1beta1.GCPIdentity{}, CASecretRef: &corev1.SecretReference{Name: "ca"},
		}}
	}
	_, err = clients.Config(t.Context(), member())
	missing := "connect to " + ns + `/one: spec.workloadIdentity.caSecretRef: key "ca.crt" of Secret ` + ns + `/ca: there is no certificate in PEM`
	wantText(t, err, missing)
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
	wantText(t, err, missing)
	set("ca.crt", "nonsense")
	_, err = clients.Config(t.Context(), member())
	wantText(t, err, missing)
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

// TestIdentityPolicy checks which namespaces may use the cloud identity of the hub, and for which hosts.
func TestIdentityPolicy(t *testing.T) {
	t.Parallel()
	aws := func(endpoint string) *libv1beta1.WorkloadIdentity {
		return &libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: endpoint, AWS: &libv1beta1.AWSIdentity{ClusterName: "victim"}}
	}
	azure := func(endpoint string) *libv1beta1.WorkloadIdentity {
		return &libv1beta1.WorkloadIdentity{
			Provider: libv1beta1.WorkloadIdentityAzure, Endpoint: endpoint, Azure: &libv1beta1.AzureIdentity{TenantID: "t", ClientID: "c"},
		}
	}
	google := func(endpoint string) *libv1beta1.WorkloadIdentity {
		return &libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: endpoint}
	}
	foreignSecret := aws("a.gr7.eu-west-1.eks.amazonaws.com")
	foreignSecret.CASecretRef = &corev1.SecretReference{Namespace: "also-listed", Name: "ca"}
	var wasUnverified []string
	policy := fleet.IdentityPolicy{
		Namespaces: []string{"listed", "also-listed"}, Hosts: []string{"k8s.example.com", "*.clusters.example.com"},
		NewTransportWrapper: func(w *libv1beta1.WorkloadIdentity, _ *url.URL, isUnverified bool) (transport.WrapperFunc, error) {
			if isUnverified {
				wasUnverified = append(wasUnverified, w.Endpoint)
			}
			return func(next http.RoundTripper) http.RoundTripper { return next }, nil
		},
	}
	const unknownHost, notListed = "is not a host of API servers of ", "is not in the hub's --workload-identity-namespaces"
	for i, test := range []struct {
		namespace string
		identity  *libv1beta1.WorkloadIdentity
		want      string
	}{
		{"listed", aws("ABC.gr7.eu-west-1.eks.amazonaws.com"), ""},
		{"listed", aws("abc.gr7.cn-north-1.eks.amazonaws.com.cn:443"), ""},
		{"listed", aws("abc.eks-cluster.eu-west-1.api.aws"), ""},
		{"listed", aws("k8s.example.com"), ""},
		{"listed", aws("a.clusters.example.com:6443"), ""},
		{"listed", azure("https://prod-1234.hcp.westeurope.azmk8s.io:443"), ""},
		{"listed", azure("prod.1234.privatelink.westeurope.azmk8s.io"), ""},
		{"listed", google("gke-123.europe-west1.gke.goog"), ""},
		{"listed", google("34.1.2.3"), ""}, // NewTransportWrapper verifies it with the GKE API
		{"other", aws("abc.gr7.eu-west-1.eks.amazonaws.com"), notListed},
		{"", aws("abc.gr7.eu-west-1.eks.amazonaws.com"), notListed},
		{"listed", foreignSecret, "must be in the namespace of the cluster, listed"},
		{"listed", aws("attacker.example.com"), unknownHost},
		{"listed", aws("clusters.example.com"), unknownHost},
		{"listed", aws("eks.amazonaws.com.attacker.example.com"), unknownHost},
		{"listed", aws("xeks.amazonaws.com"), unknownHost},
		{"listed", aws("abc.execute-api.eu-west-1.api.aws"), unknownHost},
		{"listed", aws("prod-1234.hcp.westeurope.azmk8s.io"), unknownHost},
		{"listed", azure("abc.gr7.eu-west-1.eks.amazonaws.com"), unknownHost},
		{"listed", aws("34.1.2.3"), unknownHost},
		{"listed", google("[2001:db8::1%25a.gke.goog]"), "has an IPv6 zone"},
	} {
		clients := fleet.NewClients(fleet.SecretReaders{}, nil, policy, nil)
		_, err := clients.Config(t.Context(), fleet.Member{Namespace: test.namespace, Name: "one", Mode: fleet.Push, Identity: test.identity})
		if test.want == "" && err != nil {
			t.Errorf("%d: got error %v for %s", i, err, test.identity.Endpoint)
		}
		if test.want != "" {
			wantText(t, err, test.want)
		}
	}
	if !slices.Equal(wasUnverified, []string{"34.1.2.3"}) {
		t.Errorf("the provider verified %q, want only 34.1.2.3", wasUnverified)
	}
	everywhere := fleet.NewClients(fleet.SecretReaders{}, nil, fleet.IdentityPolicy{Namespaces: []string{fleet.AllNamespaces}, NewTransportWrapper: policy.NewTransportWrapper}, nil)
	if _, err := everywhere.Config(t.Context(), fleet.Member{Namespace: "any", Identity: aws("abc.gr7.eu-west-1.eks.amazonaws.com")}); err != nil {
		t.Error(err)
	}
	for _, host := range []string{"", "*.", "a:443", "https://a", "*"} {
		if err := (fleet.IdentityPolicy{Hosts: []string{host}}).Validate(); err == nil {
			t.Errorf("got no error for the host %q", host)
		}
	}
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
		t.Errorf("got error %v, want an error with %q", err, text)
	}
}
