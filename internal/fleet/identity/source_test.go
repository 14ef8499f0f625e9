package identity_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/identity"
	"github.com/towline/towline/internal/localkube"
)

// wantLine checks that err is one line that contains all of texts and no secrets.
func wantLine(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("got no error, want an error with %q", texts)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("got error %q, want an error with %q", err, text)
		}
	}
	if strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), secret) {
		t.Errorf("error %q is not one line without secrets", err)
	}
}

// tokenEndpoint is the token endpoint of a provider.
type tokenEndpoint struct {
	mu       sync.Mutex
	status   int
	body     string
	requests atomic.Int64
}

func (s *tokenEndpoint) respondWith(status int, body string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.body = status, body
}

func (s *tokenEndpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if strings.HasSuffix(r.URL.Path, "/.well-known/openid-configuration") {
		self := "https://" + r.Host + "/tenant"
		_, _ = fmt.Fprintf(w, `{"issuer":"%[1]s/v2.0","authorization_endpoint":"%[1]s/authorize","token_endpoint":"%[1]s/token"}`, self)
		return
	}
	s.requests.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	w.WriteHeader(s.status)
	_, _ = fmt.Fprint(w, s.body)
}

func issued(token string) string {
	return fmt.Sprintf(`{"access_token":%q,"token_type":"Bearer","expires_in":3600}`, token)
}

// gcpHub sets the environment of a hub with a Google service account, and returns the token endpoint.
func gcpHub(t *testing.T) *tokenEndpoint {
	t.Helper()
	google := &tokenEndpoint{status: http.StatusInternalServerError}
	server := httptest.NewServer(google)
	t.Cleanup(server.Close)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	credentials, err := json.Marshal(map[string]string{
		"type": "service_account", "client_email": "hub@example.iam.gserviceaccount.com", "private_key_id": "1", "token_uri": server.URL,
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "credentials.json")
	if err := os.WriteFile(file, credentials, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
	return google
}

func gke() *libv1beta1.WorkloadIdentity {
	return &libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: "https://127.0.0.1:1", GCP: &libv1beta1.GCPIdentity{}}
}

// accountToken returns a token that the plane accepts.
func accountToken(t *testing.T, plane *localkube.Plane) string {
	t.Helper()
	admin, err := kubernetes.NewForConfig(plane.Config)
	if err != nil {
		t.Fatal(err)
	}
	accounts := admin.CoreV1().ServiceAccounts(plane.Namespace(t, "identity"))
	account, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "hub"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	request, err := accounts.CreateToken(t.Context(), account.Name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}

// requestVersion requests the version of the API server at host with the tokens of source.
func requestVersion(t *testing.T, host string, authority []byte, source *identity.Source) error {
	t.Helper()
	endpoint, err := url.Parse(host)
	if err != nil {
		t.Fatal(err)
	}
	config := &rest.Config{Host: host, TLSClientConfig: rest.TLSClientConfig{CAData: authority}}
	config.Wrap(source.Wrap(endpoint))
	_, err = fleet.Probe(t.Context(), config)
	return err
}

func TestGKETokenReachesAMember(t *testing.T) {
	plane, google := localkube.Shared(t), gcpHub(t)
	google.respondWith(http.StatusOK, issued(accountToken(t, plane)))
	source, err := identity.New(gke(), identity.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := requestVersion(t, plane.Config.Host, plane.Config.CAData, source); err != nil {
			t.Fatal(err)
		}
	}
	if requests := google.requests.Load(); requests != 1 {
		t.Errorf("requested %d tokens, want one", requests)
	}
}

func TestAKSTokenReachesAMember(t *testing.T) {
	plane, entra := localkube.Shared(t), &tokenEndpoint{}
	server := httptest.NewTLSServer(entra)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("assertion"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AZURE_AUTHORITY_HOST", server.URL)
	t.Setenv("AZURE_FEDERATED_TOKEN_FILE", file)
	spec := &libv1beta1.WorkloadIdentity{
		Provider: libv1beta1.WorkloadIdentityAzure, Endpoint: "https://127.0.0.1:1", Azure: &libv1beta1.AzureIdentity{TenantID: "tenant", ClientID: "client"},
	}
	clock := testclock.NewFakeClock(time.Now())
	source, err := identity.New(spec, identity.Options{Client: server.Client(), Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	entra.respondWith(http.StatusUnauthorized, `{"error":"invalid_client","error_description":"AADSTS700213: No matching\r\nfederated identity record found"}`)
	wantLine(t, requestVersion(t, plane.Config.Host, plane.Config.CAData, source), "workload identity: get a token from Azure: 127.0.0.1:", "answered 401 Unauthorized: invalid_client: AADSTS700213: No matching federated identity record found")
	clock.Step(time.Minute)
	entra.respondWith(http.StatusOK, issued(accountToken(t, plane)))
	if err := requestVersion(t, plane.Config.Host, plane.Config.CAData, source); err != nil {
		t.Error(err)
	}
	t.Setenv("AZURE_FEDERATED_TOKEN_FILE", filepath.Join(t.TempDir(), "missing"))
	if source, err = identity.New(spec, identity.Options{Client: server.Client()}); err != nil {
		t.Fatal(err)
	}
	_, err = source.Token(t.Context())
	wantLine(t, err, "workload identity: get a token from Azure: ", "no such file")
	for field, lacking := range map[string]libv1beta1.AzureIdentity{"tenantID": {ClientID: "c"}, "clientID": {TenantID: "t"}} {
		spec.Azure = &lacking
		_, err := identity.New(spec, identity.Options{})
		wantLine(t, err, "spec.workloadIdentity.azure."+field+" is missing")
	}
}

// roundTripper is a function that implements http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestGKEEndpointIsVerified checks that the source returns a token for an address only if the GKE API confirms the
// address.
func TestGKEEndpointIsVerified(t *testing.T) {
	google := gcpHub(t)
	google.respondWith(http.StatusOK, issued("secret-token"))
	var status int
	var body string
	var requests []string
	client := &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Host != "container.googleapis.com" {
			return http.DefaultTransport.RoundTrip(r)
		}
		requests = append(requests, r.URL.EscapedPath()+" "+r.Header.Get("Authorization"))
		return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
	})}
	token := func(endpoint string, cluster libv1beta1.GCPIdentity) (string, error) {
		w := gke()
		w.Endpoint, w.GCP = endpoint, &cluster
		source, err := identity.New(w, identity.Options{Client: client, VerifyEndpoint: true})
		if err != nil {
			t.Fatal(err)
		}
		return source.Token(t.Context())
	}
	whole := libv1beta1.GCPIdentity{ProjectID: "shop", Location: "europe-west1", ClusterName: "a/../prod"}
	const name = "projects/shop/locations/europe-west1/clusters/a%2F..%2Fprod"
	status, body = http.StatusOK, `{"endpoint": "34.1.2.3", "privateClusterConfig": {"publicEndpoint": "34.1.2.4", "privateEndpoint": "10.0.0.2"},
		"controlPlaneEndpointsConfig": {"ipEndpointsConfig": {"publicEndpoint": "34.1.2.5", "privateEndpoint": "34.9.9.9"}}}`
	for _, endpoint := range []string{"34.1.2.3", "https://34.1.2.4:443", "34.1.2.5"} {
		if got, err := token(endpoint, whole); got != "secret-token" || err != nil {
			t.Errorf("token for %s: got %q and %v", endpoint, got, err)
		}
	}
	if want := "/v1/" + name + " Bearer secret-token"; len(requests) != 3 || requests[0] != want {
		t.Errorf("requests to the GKE API: got %q, want three of %q", requests, want)
	}
	_, err := token("35.1.1.1", whole)
	wantLine(t, err, "35.1.1.1 is not a public endpoint of "+name)
	// A private endpoint may have an address that belongs to another server in the public network.
	_, err = token("34.9.9.9", whole)
	wantLine(t, err, "34.9.9.9 is not a public endpoint of "+name, "--workload-identity-hosts")
	_, err = token("34.1.2.3", libv1beta1.GCPIdentity{ProjectID: "shop"})
	wantLine(t, err, "spec.workloadIdentity.gcp must have projectID, location and clusterName")
	status = http.StatusForbidden
	_, err = token("34.1.2.3", whole)
	wantLine(t, err, "the GKE API answered 403", "container.clusters.get")
	status, body = http.StatusOK, "<html>"
	_, err = token("34.1.2.3", whole)
	wantLine(t, err, "decode the response of the GKE API")
}

// TestPrivateEndpointsGetNoToken simulates a user who may write SveltosClusters and owns a GKE cluster with a private
// endpoint. The GKE API confirms its address, but in the network of the hub another server of the user has this
// address.
func TestPrivateEndpointsGetNoToken(t *testing.T) {
	google := gcpHub(t)
	google.respondWith(http.StatusOK, issued("secret-token"))
	for _, address := range []string{
		"10.0.0.2", "172.16.0.2", "192.168.0.2", "100.64.0.2", "127.0.0.1", "169.254.0.2", "240.0.0.2", "198.18.0.2", "0.0.0.1", "192.0.0.2", "224.0.0.2",
		"[fd00::2]", "[fe80::2]", "[::1]", "[::ffff:10.0.0.2]", "[64:ff9b::a00:2]", "[2001:db8::2]", "[2002:a00:2::1]",
	} {
		w := gke()
		w.Endpoint, w.GCP = address, &libv1beta1.GCPIdentity{ProjectID: "attacker", Location: "europe-west1", ClusterName: "private"}
		body := fmt.Sprintf(`{"endpoint": %q}`, strings.Trim(address, "[]"))
		source, err := identity.New(w, identity.Options{VerifyEndpoint: true, Client: &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.URL.Host != "container.googleapis.com" {
				return http.DefaultTransport.RoundTrip(r)
			}
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
		})}})
		if err != nil {
			t.Fatal(err)
		}
		if token, err := source.Token(t.Context()); err == nil {
			t.Errorf("%s gets the token %q", address, token)
		} else {
			wantLine(t, err, strings.Trim(address, "[]")+" is not a public address", "--workload-identity-hosts")
		}
	}
}

// TestWrapVerifiesTheEndpoint sends requests to an endpoint that is not in the policy of the hub, and to an endpoint of
// the policy.
func TestWrapVerifiesTheEndpoint(t *testing.T) {
	google := gcpHub(t)
	google.respondWith(http.StatusOK, issued("secret-token"))
	for _, isUnverified := range []bool{true, false} {
		endpoint, err := url.Parse(gke().Endpoint)
		if err != nil {
			t.Fatal(err)
		}
		wrap, err := identity.Wrap(gke(), endpoint, isUnverified)
		if err != nil {
			t.Fatal(err)
		}
		var credentials []string
		member := http.Client{Transport: wrap(roundTripper(func(r *http.Request) (*http.Response, error) {
			credentials = append(credentials, r.Header.Get("Authorization"))
			return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
		}))}
		response, err := member.Get(endpoint.String())
		if err == nil {
			response.Body.Close()
		}
		if isUnverified {
			wantLine(t, err, "127.0.0.1 is not a public address")
		}
		if gotToken := len(credentials) == 1 && credentials[0] == "Bearer secret-token"; gotToken == isUnverified {
			t.Errorf("unverified %t: the endpoint gets the credentials %q, error %v", isUnverified, credentials, err)
		}
	}
}

func TestTokenIsUsedUntilItExpires(t *testing.T) {
	google, clock := gcpHub(t), testclock.NewFakeClock(time.Now())
	source, err := identity.New(gke(), identity.Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	google.respondWith(http.StatusBadRequest, `{"error":"invalid_grant","error_description":"Invalid JWT"}`)
	for range 3 {
		_, err := source.Token(t.Context())
		wantLine(t, err, "workload identity: get a token from GCP: 127.0.0.1:", "answered 400 Bad Request: invalid_grant: Invalid JWT")
	}
	if requests := google.requests.Load(); requests != 1 {
		t.Errorf("requested %d tokens at the same time, want one", requests)
	}
	clock.Step(10 * time.Second)
	for _, step := range []struct {
		after  time.Duration
		status int
		body   string
		want   string
	}{
		{0, http.StatusOK, issued("first"), "first"},
		{50 * time.Minute, http.StatusInternalServerError, "", "first"},
		{8 * time.Minute, http.StatusInternalServerError, "", "first"},
		{5 * time.Minute, http.StatusInternalServerError, "", ""},
		{time.Minute, http.StatusOK, `{"access_token":"second","expires_in":7200}`, "second"},
	} {
		google.respondWith(step.status, step.body)
		clock.Step(step.after)
		if got, err := source.Token(t.Context()); got != step.want || (err != nil) != (step.want == "") {
			t.Errorf("%s later: got token %q and error %v, want %q", step.after, got, err, step.want)
		}
	}
}

func TestUnresponsiveProviderDoesNotBlock(t *testing.T) {
	silent := gcpHub(t)
	silent.mu.Lock()
	defer silent.mu.Unlock()
	source, err := identity.New(gke(), identity.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = source.Token(ctx)
	wantLine(t, err, "workload identity: get a token from GCP: no token was issued")
	if t.Context().Err() != nil {
		t.Error("the request was delayed")
	}
}

func TestTokenIsSentToItsMemberOnly(t *testing.T) {
	google, clock := gcpHub(t), testclock.NewFakeClock(time.Now())
	source, err := identity.New(gke(), identity.Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	google.respondWith(http.StatusOK, issued("secret-token"))
	var elsewhere, here atomic.Value
	other := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { elsewhere.Store(r.Header.Get("Authorization")) }))
	t.Cleanup(other.Close)
	member := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		here.Store(r.Header.Get("Authorization"))
		if r.URL.Path == "/refused" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		http.Redirect(w, r, other.URL, http.StatusFound)
	}))
	t.Cleanup(member.Close)
	endpoint, err := url.Parse(member.URL)
	if err != nil {
		t.Fatal(err)
	}
	visitor := member.Client()
	visitor.Transport = source.Wrap(endpoint)(visitor.Transport)
	get := func(path string) {
		response, err := visitor.Get(member.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
	}
	get("/")
	if here.Load() != "Bearer secret-token" || elsewhere.Load() != "" {
		t.Errorf("the member got %q, the target of its redirect got %q", here.Load(), elsewhere.Load())
	}
	// A rejected token is discarded, unless it is new.
	google.respondWith(http.StatusOK, issued("next-token"))
	get("/refused")
	get("/refused")
	if here.Load() != "Bearer secret-token" {
		t.Errorf("got %q immediately after a refusal", here.Load())
	}
	clock.Step(2 * time.Minute)
	get("/refused")
	get("/refused")
	if here.Load() != "Bearer next-token" {
		t.Errorf("got %q after a refusal", here.Load())
	}
}
