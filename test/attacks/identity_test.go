package attacks

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// TestCloudIdentity: an attacker who may create SveltosClusters wants the hub to sign a token for another user's EKS
// cluster, and to send it to the attacker's server.
func TestCloudIdentity(t *testing.T) {
	w := newWorld(t)
	server := newListener(func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, "no", http.StatusForbidden) })
	server.StartTLS()
	t.Cleanup(server.Close)
	// identify registers the victim's cluster with an endpoint, and waits until its failure message has text.
	identify := func(tenant client.Client, name, endpoint, text string) {
		t.Helper()
		cluster := &libv1beta1.SveltosCluster{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
			Spec: libv1beta1.SveltosClusterSpec{WorkloadIdentity: &libv1beta1.WorkloadIdentity{
				Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: endpoint, AWS: &libv1beta1.AWSIdentity{ClusterName: "victim"},
				CASecretRef: &corev1.SecretReference{Name: "ca"},
			}},
		}
		w.noError(tenant.Create(t.Context(), cluster))
		w.eventually("the hub has tried to connect", func() error {
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
				return err
			}
			return wantText(cluster.Status.FailureMessage, text)
		})
	}
	prepare := func() client.Client {
		t.Helper()
		tenant := w.clusterOwner()
		w.noError(tenant.Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "ca"}, Data: map[string][]byte{"ca.crt": certificateOf(server.Server)},
		}))
		return tenant
	}
	identify(prepare(), "stolen", server.URL, "--workload-identity-namespaces")

	// In a namespace that may use the identity, tokens go only to the hosts that the operator has listed.
	w.ns = cloudNamespace
	w.noError(client.IgnoreAlreadyExists(w.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}})))
	tenant := prepare()
	identify(tenant, "elsewhere", strings.Replace(server.URL, "127.0.0.1", "localhost", 1), "--workload-identity-hosts")
	if requests, _ := server.received(); requests > 0 {
		t.Errorf("the server got %d requests", requests)
	}
	identify(tenant, "listed", server.URL, "403")
	if _, credentials := server.received(); len(credentials) == 0 || !strings.HasPrefix(credentials[0], "Bearer k8s-aws-v1.") {
		t.Errorf("a listed host got the credentials %q, want a token", credentials)
	}
}

// TestExistenceOfSecrets: an author of SveltosClusters without rights on Secrets wants to find out which Secrets exist
// in the author's namespace and in other ones, and which Secrets in other namespaces have a certificate authority. The
// author's namespace may use the cloud identity of the hub.
func TestExistenceOfSecrets(t *testing.T) {
	w := newWorld(t)
	for _, namespace := range []string{cloudNamespace, otherCloudNamespace} {
		w.noError(client.IgnoreAlreadyExists(w.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})))
		w.noError(w.Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "existing"}, StringData: map[string]string{"password": "s3cret"},
		}))
	}
	w.noError(w.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: otherCloudNamespace, Name: "authority"}, Data: map[string][]byte{fleet.AuthorityKey: w.hub.Config.CAData},
	}))
	foreign := w.ns
	w.noError(w.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "authority"}, Data: map[string][]byte{fleet.AuthorityKey: w.hub.Config.CAData},
	}))
	w.ns = cloudNamespace
	tenant := w.account("curious", rbacv1.PolicyRule{APIGroups: []string{libv1beta1.GroupVersion.Group}, Resources: []string{"*"}, Verbs: []string{"*"}})
	for i, test := range []struct {
		namespace string
		secrets   []string
	}{
		{w.ns, []string{"missing", "existing"}},
		{otherCloudNamespace, []string{"missing", "existing", "authority"}},
		{foreign, []string{"missing", "authority"}},
	} {
		messages := map[string]string{}
		for _, secret := range test.secrets {
			cluster := &libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: fmt.Sprintf("%s-%d", secret, i)},
				Spec: libv1beta1.SveltosClusterSpec{WorkloadIdentity: &libv1beta1.WorkloadIdentity{
					Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: "https://127.0.0.1:1", AWS: &libv1beta1.AWSIdentity{ClusterName: "victim"},
					CASecretRef: &corev1.SecretReference{Namespace: test.namespace, Name: secret},
				}},
			}
			w.noError(tenant.Create(t.Context(), cluster))
			w.eventually("the hub reports why it does not connect", func() error {
				if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
					return err
				}
				return wantText(cluster.Status.FailureMessage, "connect")
			})
			messages[secret] = strings.ReplaceAll(cluster.Status.FailureMessage, secret, "secret")
		}
		for _, secret := range test.secrets {
			if messages[secret] != messages["missing"] || !strings.Contains(messages[secret], "caSecretRef") {
				t.Errorf("namespace %s: the messages differ: %q", test.namespace, messages)
			}
		}
	}
}
