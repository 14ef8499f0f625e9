package approvals_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

func takenText(id, name string) string {
	return fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", id, name)
}

func (w *testEnv) agent(cfg *rest.Config) client.Client {
	w.Helper()
	agent, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	return agent
}

func TestTokenRegistersACluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	token, certificate := w.registered("first")
	c := w.cluster("first")
	if diff := cmp.Diff(c.Spec, clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull, ID: "id-first"}); diff != "" {
		t.Errorf("spec (-got +want):\n%s", diff)
	}
	if c.Annotations[kube.AnnotationBootstrapToken] != token.ID || c.Annotations[kube.AnnotationFirstUse] == "" || c.Annotations[kube.AnnotationHub] == "" {
		t.Errorf("annotations %v", c.Annotations)
	}
	csr := &certificatesv1.CertificateSigningRequest{}
	w.must(w.Get(t.Context(), client.ObjectKey{Name: certificate.CSR}, csr))
	if len(csr.Status.Conditions) != 1 || csr.Status.Conditions[0].Type != "Approved" || csr.Status.Conditions[0].Reason != "AutoApproved" || csr.Labels["karmada.io/system"] != "true" {
		t.Errorf("conditions %v, labels %v", csr.Status.Conditions, csr.Labels)
	}
	if life := certificate.NotAfter.Sub(certificate.NotBefore); life < 55*time.Minute || life > 70*time.Minute {
		t.Errorf("its lifetime is %s", life)
	}
	agent := w.agent(w.certificateConfig(certificate))
	w.eventually(func() string {
		if err := agent.Get(t.Context(), client.ObjectKey{Name: "first"}, &clusterv1alpha1.Cluster{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := agent.Get(t.Context(), client.ObjectKey{Name: "second"}, &clusterv1alpha1.Cluster{}); !apierrors.IsForbidden(err) {
		t.Errorf("got another Cluster: %v", err)
	}
	if err := agent.Get(t.Context(), client.ObjectKey{Name: certificate.CSR}, csr); !apierrors.IsForbidden(err) {
		t.Errorf("got the request of the token: %v", err)
	}
}

func TestAgentRenewsItsCertificate(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	_, certificate := w.registered("renewer")
	w.registered("bystander")
	before := w.cluster("bystander")
	for range 2 {
		next, err := w.request(w.certificateConfig(certificate), "renewer", "")
		w.must(err)
		if string(next.KeyPEM) == string(certificate.KeyPEM) {
			t.Error("the key has not changed")
		}
		certificate = next
	}
	_, err := w.request(w.certificateConfig(certificate), "bystander", "")
	w.wantDenied(err, bootstrap.ReasonInvalidRequest, "system:karmada:agent:renewer may not have the certificate of the agent of cluster bystander")
	if diff := cmp.Diff(w.cluster("bystander"), before); diff != "" {
		t.Errorf("the bystander changed:\n%s", diff)
	}
	w.must(w.Delete(t.Context(), w.cluster("renewer")))
	w.wantNone("renewer")
	// The garbage collector deletes the agent's RBAC after the Cluster. Until then, its requests are denied.
	if _, err := w.request(w.certificateConfig(certificate), "renewer", ""); err == nil {
		t.Error("a deleted cluster got a certificate")
	}
}

func TestTokenIsValidForOneRegistration(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	token, _ := w.registered("once")
	_, err := w.request(w.tokenConfig(token), "twice", "id-twice")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.wantNone("twice")
	_, err = w.request(w.tokenConfig(token), "once", "another-id")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	// The registration is retried before the agent has reported.
	_, err = w.request(w.tokenConfig(token), "once", "id-once")
	w.must(err)
	w.report("once")
	before := w.cluster("once")
	_, err = w.request(w.tokenConfig(token), "once", "id-once")
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText("id-once", "once"))
	if diff := cmp.Diff(w.cluster("once"), before); diff != "" {
		t.Errorf("the Cluster changed:\n%s", diff)
	}
	_, err = w.request(w.tokenConfig(token), "twice", "id-twice")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
}

func TestNamesAndIDsOfOthersAreTaken(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	w.registered("winner")
	before := w.cluster("winner")
	token := w.token("")
	_, err := w.request(w.tokenConfig(token), "winner", "id-loser")
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText("id-loser", "winner"))
	// A token whose request was denied is still unused.
	_, err = w.request(w.tokenConfig(token), "loser", "id-winner")
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText("id-winner", "loser"))
	w.wantNone("loser")
	if diff := cmp.Diff(w.cluster("winner"), before); diff != "" {
		t.Errorf("the winner changed:\n%s", diff)
	}
	_, err = w.request(w.tokenConfig(token), "loser", "id-loser")
	w.must(err)
}

func TestTokenForOneClusterRenewsThatOne(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	w.registered("expired")
	w.report("expired")
	uid := w.cluster("expired").UID
	token := w.token("expired")
	_, err := w.request(w.tokenConfig(token), "somebody", "id-somebody")
	w.wantDenied(err, bootstrap.ReasonInvalidRequest, `the bootstrap token is for cluster "expired" alone`)
	_, err = w.request(w.tokenConfig(token), "expired", "id-another")
	w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText("id-another", "expired"))
	certificate, err := w.request(w.tokenConfig(token), "expired", "id-expired")
	w.must(err)
	if w.cluster("expired").UID != uid {
		t.Error("the Cluster was created again")
	}
	_, err = w.request(w.certificateConfig(certificate), "expired", "")
	w.must(err)
}

func TestRacingRegistrationsHaveOneWinner(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	for round := range 5 {
		const racers = 3
		var (
			running sync.WaitGroup
			errs    [racers]error
			id      = fmt.Sprintf("id-race-%d", round)
			tokens  [racers]bootstrap.Token
		)
		for i := range racers {
			tokens[i] = w.token("")
		}
		for i := range racers {
			running.Go(func() { _, errs[i] = w.request(w.tokenConfig(tokens[i]), fmt.Sprintf("race-%d-%d", round, i), id) })
		}
		running.Wait()
		won := 0
		for i, err := range errs {
			name := fmt.Sprintf("race-%d-%d", round, i)
			if err == nil {
				won++
				w.cluster(name)
				continue
			}
			w.wantDenied(err, bootstrap.ReasonClusterTaken, takenText(id, name))
			w.wantNone(name)
		}
		if won != 1 {
			t.Errorf("%d winners of %d", won, racers)
		}
	}
}

func TestInvalidTokensAreDenied(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	// The API server accepts a deleted token for a moment, so the controller must check it.
	token := w.token("")
	_, err := bootstrap.DeleteToken(t.Context(), w, token.ID)
	w.must(err)
	if _, err := w.request(w.tokenConfig(token), "deleted", "id-deleted"); err == nil {
		t.Error("a deleted token registered a cluster")
	}
	forged := w.token("")
	forged.Secret = "0123456789abcdef"
	if _, err := w.request(w.tokenConfig(forged), "forged", "id-forged"); !apierrors.IsUnauthorized(err) {
		t.Errorf("a forged token: %v", err)
	}
	unrelated := w.tokenWith(bootstrap.TokenOptions{TTL: time.Hour, Groups: []string{"system:bootstrappers:others"}})
	if _, err := w.request(w.tokenConfig(unrelated), "strange", "id-strange"); !apierrors.IsForbidden(err) {
		t.Errorf("a foreign token: %v", err)
	}
	for _, name := range []string{"deleted", "forged", "strange"} {
		w.wantNone(name)
	}
}

func TestReservedNameIsRefused(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	_, err := w.request(w.tokenConfig(w.token("")), "rbac-generator", "id-reserved")
	w.wantDenied(err, bootstrap.ReasonInvalidRequest, "")
	w.wantNone("rbac-generator")
}

// certificateRequest creates a CertificateSigningRequest.
func certificateRequest(t *testing.T, name string, subject pkix.Name) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{kube.AnnotationClusterID: "id-" + name}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: bootstrap.Signer, Usages: []certificatesv1.KeyUsage{"digital signature", "client auth"}, ExpirationSeconds: ptr.To[int32](3600),
		},
	}
}

// answer waits for the answer to a request.
func (w *testEnv) answer(name string) certificatesv1.CertificateSigningRequestCondition {
	w.Helper()
	csr := &certificatesv1.CertificateSigningRequest{}
	w.eventually(func() string {
		w.must(w.Get(w.Context(), client.ObjectKey{Name: name}, csr))
		if len(csr.Status.Conditions) == 0 {
			return "no answer"
		}
		return ""
	})
	return csr.Status.Conditions[0]
}

func TestForeignRequestsAreIgnoredOrDenied(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	foreign := certificateRequest(t, "foreign", pkix.Name{CommonName: "jane", Organization: []string{"developers"}})
	w.must(w.Create(t.Context(), foreign))
	admin := certificateRequest(t, "by-admin", pkix.Name{CommonName: bootstrap.AgentUser("by-admin"), Organization: []string{bootstrap.AgentsGroup}})
	w.must(w.Create(t.Context(), admin))
	if got := w.answer("by-admin"); got.Type != certificatesv1.CertificateDenied || got.Reason != bootstrap.ReasonInvalidRequest {
		t.Errorf("an administrator's request for an agent: %+v", got)
	}
	w.wantNone("by-admin")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(foreign), foreign))
	if len(foreign.Status.Conditions) > 0 {
		t.Errorf("the foreign request: %+v", foreign.Status.Conditions)
	}
}

func TestLateRequestIsDenied(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	late := certificateRequest(t, "late", pkix.Name{CommonName: bootstrap.AgentUser("late"), Organization: []string{bootstrap.AgentsGroup}})
	late.Annotations[kube.AnnotationUntil] = time.Now().Add(-time.Minute).Format(time.RFC3339)
	token := w.token("")
	w.must(w.agent(w.tokenConfig(token)).Create(t.Context(), late))
	if got := w.answer("late"); got.Type != certificatesv1.CertificateDenied || got.Reason != bootstrap.ReasonTooLate {
		t.Errorf("answer %+v", got)
	}
	w.wantNone("late")
	_, err := w.request(w.tokenConfig(token), "late", "id-late")
	w.must(err)
}

// annotationsOf returns the annotations of a token's Secret.
func (w *testEnv) annotationsOf(ctx context.Context, token bootstrap.Token) map[string]string {
	w.Helper()
	secret := &corev1.Secret{}
	w.must(w.Get(ctx, bootstrap.TokenSecret(token.ID), secret))
	return secret.Annotations
}

// setReady sets the Ready condition of a Cluster.
func (w *testEnv) setReady(cluster string) {
	w.Helper()
	c := w.cluster(cluster)
	c.Status.KubernetesVersion = "v1.36.3"
	c.Status.Conditions = []metav1.Condition{{
		Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionTrue, Reason: "Test", Message: "set by a test", LastTransitionTime: metav1.Now(),
	}}
	w.must(w.Status().Update(w.Context(), c))
}

// deleteCluster removes a Cluster from the fleet.
func (w *testEnv) deleteCluster(cluster string) {
	w.Helper()
	w.must(w.Delete(w.Context(), w.cluster(cluster)))
	w.wantNone(cluster)
}

// setFirstUse sets the time of the first use of a token to this long ago.
func (w *testEnv) setFirstUse(token bootstrap.Token, ago time.Duration) {
	w.Helper()
	secret := &corev1.Secret{}
	w.must(w.Get(w.Context(), bootstrap.TokenSecret(token.ID), secret))
	before := client.MergeFrom(secret.DeepCopy())
	secret.Annotations[kube.AnnotationFirstUse] = time.Now().Add(-ago).UTC().Format(time.RFC3339)
	w.must(w.Patch(w.Context(), secret, before))
}

func TestTokenDoesNotRegisterRemovedClusterAgain(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	token, _ := w.registered("evicted")
	w.setReady("evicted")
	w.eventually(func() string {
		if w.annotationsOf(t.Context(), token)["towline.dev/registered-uid"] == "" {
			return "the registration is not complete"
		}
		return ""
	})
	w.deleteCluster("evicted")
	_, err := w.request(w.tokenConfig(token), "evicted", "id-evicted")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.wantNone("evicted")
}

func TestFailedRegistrationCanBeRetriedForAWhile(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	token, _ := w.registered("retried")
	for _, report := range []func(string){func(string) {}, w.report} {
		report("retried")
		w.deleteCluster("retried") // as a failed registration does
		_, err := w.request(w.tokenConfig(token), "retried", "id-retried")
		w.must(err)
	}
	w.setFirstUse(token, 16*time.Minute)
	_, err := w.request(w.tokenConfig(token), "retried", "id-retried")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.cluster("retried")
	w.deleteCluster("retried")
	_, err = w.request(w.tokenConfig(token), "retried", "id-retried")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.wantNone("retried")
}

func TestTokenForOneClusterIsValidForOneRenewal(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	w.registered("lapsed")
	w.report("lapsed")
	token, late := w.token("lapsed"), w.token("lapsed")
	for range 2 { // a retry
		_, err := w.request(w.tokenConfig(token), "lapsed", "id-lapsed")
		w.must(err)
	}
	_, err := w.request(w.tokenConfig(late), "lapsed", "id-lapsed")
	w.must(err)
	w.setFirstUse(late, 16*time.Minute)
	_, err = w.request(w.tokenConfig(late), "lapsed", "id-lapsed")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.deleteCluster("lapsed")
	_, err = w.request(w.tokenConfig(token), "lapsed", "id-lapsed")
	w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
	w.wantNone("lapsed")
}

func TestConcurrentUsesOfTokenRegisterOneName(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	for round := range 5 {
		var (
			running sync.WaitGroup
			errs    [2]error
			token   = w.token("")
		)
		name := func(i int) string { return fmt.Sprintf("shared-%d-%d", round, i) }
		for i := range errs {
			running.Go(func() { _, errs[i] = w.request(w.tokenConfig(token), name(i), "id-"+name(i)) })
		}
		running.Wait()
		won := 0
		for i, err := range errs {
			if err == nil {
				won++
				w.cluster(name(i))
				continue
			}
			w.wantDenied(err, bootstrap.ReasonTokenSpent, "")
			w.wantNone(name(i))
		}
		if won != 1 {
			t.Errorf("%d winners with one token", won)
		}
	}
}

func TestOnlyRequesterReadsAnswer(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	_, certificate := w.registered("asker")
	_, neighbour := w.registered("reader")
	request := &certificatesv1.CertificateSigningRequest{}
	next, err := w.request(w.certificateConfig(certificate), "asker", "")
	w.must(err)
	w.must(w.agent(w.certificateConfig(certificate)).Get(t.Context(), client.ObjectKey{Name: next.CSR}, request))
	for who, cfg := range map[string]*rest.Config{"another agent": w.certificateConfig(neighbour), "another token": w.tokenConfig(w.token(""))} {
		for _, name := range []string{certificate.CSR, next.CSR} {
			if err := w.agent(cfg).Get(t.Context(), client.ObjectKey{Name: name}, request); !apierrors.IsForbidden(err) {
				t.Errorf("%s reads %s: %v", who, name, err)
			}
		}
	}
}

// TestRequestsOfOneAgentDoNotDelayOthers has an agent that creates many requests for the certificate of another one.
// The hub examines a burst of them, and denies the others by one request each.
func TestRequestsOfOneAgentDoNotDelayOthers(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	_, certificate := w.registered("eager")
	token, agent := w.token(""), w.agent(w.certificateConfig(certificate))
	const requests = 150
	subject := pkix.Name{CommonName: bootstrap.AgentUser("another"), Organization: []string{bootstrap.AgentsGroup}}
	for i := range requests {
		w.must(agent.Create(t.Context(), certificateRequest(t, fmt.Sprintf("eager-%d", i), subject)))
	}
	start := time.Now()
	if _, err := w.request(w.tokenConfig(token), "patient", "id-patient"); err != nil {
		t.Error(err)
	}
	w.Logf("registered in %s", time.Since(start).Round(time.Millisecond))
	denied := map[string]int{}
	w.eventually(func() string {
		clear(denied)
		all := &certificatesv1.CertificateSigningRequestList{}
		w.must(w.List(t.Context(), all))
		for _, csr := range all.Items {
			if csr.Spec.Username == bootstrap.AgentUser("eager") && len(csr.Status.Conditions) > 0 {
				denied[csr.Status.Conditions[0].Reason]++
			}
		}
		if sum := denied[bootstrap.ReasonInvalidRequest] + denied[bootstrap.ReasonTooManyRequests]; sum != requests {
			return fmt.Sprintf("%d of %d requests are denied", sum, requests)
		}
		return ""
	})
	if examined := denied[bootstrap.ReasonInvalidRequest]; examined < 10 || examined > 30 {
		t.Errorf("%d of %d requests were examined, want about 20", examined, requests)
	}
}
