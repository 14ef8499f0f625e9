package bootstrap_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/bootstrap"
)

func TestTokensAreCreatedListedAndDeleted(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	token, err := bootstrap.CreateToken(t.Context(), hubClient, bootstrap.TokenOptions{TTL: time.Hour, Description: "for a test", Cluster: "member1"})
	if err != nil {
		t.Fatal(err)
	}
	want := token
	want.Usages = []string{"authentication", "signing"}
	want.Groups = []string{bootstrap.DefaultTokenGroup, "system:bootstrappers:karmada:cluster:member1"}
	want.Expires = token.Expires.UTC().Truncate(time.Second)
	find := func() (found []bootstrap.Token) {
		tokens, err := bootstrap.ListTokens(t.Context(), hubClient, func(warning string) {
			if !strings.Contains(warning, "bootstrap-token-broken") {
				t.Errorf("warning %q", warning)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(tokens, func(other bootstrap.Token) bool { return other.ID != token.ID })
	}
	if diff := cmp.Diff(find(), []bootstrap.Token{want}); diff != "" {
		t.Errorf("listed (-got +want):\n%s", diff)
	}
	broken := &corev1.Secret{Type: corev1.SecretTypeBootstrapToken, ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "bootstrap-token-broken"}}
	broken.Data = map[string][]byte{"token-id": []byte("x"), "token-secret": []byte("y")}
	if err := hubClient.Create(t.Context(), broken); err != nil {
		t.Logf("a broken token cannot even be written here: %v", err)
	}
	id, err := bootstrap.DeleteToken(t.Context(), hubClient, token.String())
	if err != nil || id != token.ID || len(find()) > 0 {
		t.Errorf("deleted %q, error %v, left %v", id, err, find())
	}
	if _, err := bootstrap.DeleteToken(t.Context(), hubClient, token.ID); !apierrors.IsNotFound(err) {
		t.Errorf("deleted a second time: %v", err)
	}
	if _, err := bootstrap.DeleteToken(t.Context(), hubClient, "nonsense"); err == nil {
		t.Error("nonsense was deleted")
	}
}

func TestTokenOptionsAreChecked(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]bootstrap.TokenOptions{
		"usage": {Usages: []string{"cooking"}},
		"group": {Groups: []string{"system:masters"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if token, err := bootstrap.CreateToken(t.Context(), nil, o); err == nil {
				t.Errorf("created %s", token.ID)
			}
		})
	}
}

func newToken(t *testing.T, hubClient client.Client) bootstrap.Token {
	t.Helper()
	token, err := bootstrap.CreateToken(t.Context(), hubClient, bootstrap.TokenOptions{TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestDiscoveryOfAHub(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	token := newToken(t, hubClient)
	pins, err := bootstrap.Pins(plane.Config.CAData)
	if err != nil {
		t.Fatal(err)
	}
	d := bootstrap.Discovery{Endpoint: endpoint(plane.Config), Token: token, Pins: pins, Timeout: time.Minute, Progress: func(string) {}}
	ca, err := d.CA(t.Context())
	if err != nil || string(ca) != string(plane.Config.CAData) {
		t.Errorf("CA %q, error %v", ca, err)
	}
	d.Token.Secret = "0123456789abcdef"
	if _, err := d.CA(t.Context()); err == nil || !strings.Contains(err.Error(), "failed to verify JWS signature") {
		t.Errorf("with a forged token: %v", err)
	}
	d.Token.ID, d.Timeout = "zzzzzz", time.Second
	if _, err := d.CA(t.Context()); err == nil || !strings.Contains(err.Error(), "is invalid for this cluster or it has expired") {
		t.Errorf("with a token that does not exist: %v", err)
	}
}

// A registration that is taken back leaves the namespace of the claims, which is the hub's, so that it must not have
// made it.
func TestEnsureHubObjectsCreatesTheNamespaceOfReservations(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := &corev1.Namespace{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Name: "karmada-cluster"}, namespace); err != nil {
		t.Fatal(err)
	}
	if namespace.Labels["karmada.io/system"] != "true" {
		t.Errorf("its labels are %v", namespace.Labels)
	}
}

func TestEnsureHubObjectsKeepsClusterInfo(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	info := &corev1.ConfigMap{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: "kube-public", Name: "cluster-info"}, info); err != nil {
		t.Fatal(err)
	}
	if text := info.Data["kubeconfig"]; !strings.Contains(text, plane.Config.Host) || strings.Contains(text, "token") {
		t.Errorf("kubeconfig:\n%s", text)
	}
}

// wantRules waits until the user of config has these permissions in namespace, besides the self-subject reviews that
// every user may create. The API server reads tokens and roles from caches.
func wantRules(t *testing.T, config *rest.Config, namespace string, want []string) {
	t.Helper()
	reviews := kubernetes.NewForConfigOrDie(config).AuthorizationV1().SelfSubjectRulesReviews()
	eventually(t, func() string {
		review, err := reviews.Create(t.Context(),
			&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Sprintf("in %s: %v", namespace, err)
		}
		var rules []string
		for _, rule := range review.Status.ResourceRules {
			for _, resource := range rule.Resources {
				if !strings.HasPrefix(resource, "selfsubject") {
					rules = append(rules, fmt.Sprintf("%s%s%s", resource, rule.ResourceNames, rule.Verbs))
				}
			}
		}
		slices.Sort(rules)
		if diff := cmp.Diff(slices.Compact(rules), want); diff != "" {
			return fmt.Sprintf("in %s (-got +want):\n%s", namespace, diff)
		}
		return ""
	})
}

// newCSR returns a request for the certificate of an agent. It names another requester than the client that creates it.
func newCSR(t *testing.T, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	request, err := cert.MakeCSR(key, &pkix.Name{CommonName: bootstrap.AgentUser("member1"), Organization: []string{bootstrap.AgentsGroup}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: bootstrap.Signer, Username: bootstrap.TokenUserPrefix + "abcdef",
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}, ExpirationSeconds: ptr.To[int32](3600),
		},
	}
}

func TestBootstrapTokenMayOnlyRequestACertificate(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	token := newToken(t, hubClient)
	config := tokenConfig(plane.Config, token)
	want := []string{"certificatesigningrequests/clusteragent[][create]", "certificatesigningrequests[][create]"}
	for _, namespace := range []string{"default", "kube-system", "kube-public", "projectsveltos", "karmada-cluster"} {
		wantRules(t, config, namespace, want)
	}
	holder := clientOf(t, config)
	csr := newCSR(t, "bootstrap-may-create")
	if err := holder.Create(t.Context(), csr); err != nil {
		t.Fatal(err)
	}
	if err := holder.Get(t.Context(), client.ObjectKeyFromObject(csr), csr.DeepCopy()); !apierrors.IsForbidden(err) {
		t.Errorf("read its request before it was let: %v", err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(csr), csr); err != nil {
		t.Fatal(err)
	}
	// The request has another user.
	if got, want := csr.Spec.Username, bootstrap.TokenUserPrefix+token.ID; got != want {
		t.Errorf("the API server has recorded the requester %q, want %q", got, want)
	}
	other := newCSR(t, "bootstrap-others")
	if err := hubClient.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := bootstrap.EnsureCSRReadRBAC(t.Context(), hubClient, csr); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() string {
		if err := holder.Get(t.Context(), client.ObjectKeyFromObject(csr), csr.DeepCopy()); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := holder.Get(t.Context(), client.ObjectKeyFromObject(other), other.DeepCopy()); !apierrors.IsForbidden(err) {
		t.Errorf("read another's request: %v", err)
	}
	if err := holder.List(t.Context(), &certificatesv1.CertificateSigningRequestList{}); !apierrors.IsForbidden(err) {
		t.Errorf("listed requests: %v", err)
	}
	csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: "Approved", Status: "True"}}
	if err := holder.SubResource("approval").Update(t.Context(), csr); !apierrors.IsForbidden(err) {
		t.Errorf("approved itself: %v", err)
	}
}

func TestAnonymousUserMayOnlyReadClusterInfo(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	anonymous := rest.AnonymousClientConfig(plane.Config)
	transport, err := rest.TransportFor(anonymous)
	if err != nil {
		t.Fatal(err)
	}
	get := func(path string) int {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, plane.Config.Host+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		return response.StatusCode
	}
	eventually(t, func() string {
		if code := get("/api/v1/namespaces/kube-public/configmaps/cluster-info"); code != http.StatusOK {
			return fmt.Sprint("cluster-info: ", code)
		}
		return ""
	})
	for _, path := range []string{
		"/api/v1/namespaces/kube-public/configmaps", "/api/v1/namespaces/kube-public/configmaps/other", "/api/v1/namespaces/kube-system/secrets",
		"/apis/certificates.k8s.io/v1/certificatesigningrequests", "/apis/cluster.karmada.io/v1alpha1/clusters",
	} {
		if code := get(path); code != http.StatusForbidden {
			t.Errorf("%s: %d", path, code)
		}
	}
}
