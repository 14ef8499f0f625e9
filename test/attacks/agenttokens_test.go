package attacks

import (
	"context"
	"errors"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
)

const tenYears = 87600 * time.Hour

// TestTokensOfAnAgent: an attacker with the token of an agent requests tokens that live longer, stay valid after its
// revocation, are valid for other systems, or belong to another account.
func TestTokensOfAnAgent(t *testing.T) {
	w := newWorld(t)
	m := fleet.FromSveltosCluster(w.pullCluster(w.tenant(), "edge"))
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}}
	agent, anchor := w.accountClient(account), join.AnchorSecret(m.Name)
	request := func(of *corev1.ServiceAccount, secret string, life time.Duration, audiences ...string) error {
		token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(life.Seconds())), Audiences: audiences}}
		if secret != "" {
			token.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret}
		}
		return agent.SubResource("token").Create(t.Context(), of, token)
	}
	const day = 24 * time.Hour
	w.eventually("the agent gets a token of a day", func() error { return request(account, anchor, day) })
	w.awaitForbidden("a token of ten years", "at most 86400 seconds", func() error { return request(account, anchor, tenYears) })
	w.awaitForbidden("a token without its Secret", "bound to Secret", func() error { return request(account, "", day) })
	w.awaitForbidden("a token for a cloud", "only tokens for the API server", func() error { return request(account, anchor, day, "sts.amazonaws.com") })
	w.awaitForbidden("a token of another account", "cannot create resource", func() error {
		return request(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: "default"}}, "", day)
	})
}

// TestTokensAfterThePolicyIsDeleted: the policy for the tokens of agents is deleted, and a tenant registers a cluster.
// Its agent requests a token that lives longer.
func TestTokensAfterThePolicyIsDeleted(t *testing.T) {
	w := newWorld(t)
	tenant, policy := w.tenant(), metav1.ObjectMeta{Name: "towline-token-life"}
	w.noError(client.IgnoreNotFound(w.Delete(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: policy})))
	w.noError(client.IgnoreNotFound(w.Delete(t.Context(), &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: policy})))
	m := fleet.FromSveltosCluster(w.pullCluster(tenant, "late"))
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}}
	agent := w.accountClient(account)
	w.awaitForbidden("a token of ten years", "at most 86400 seconds", func() error {
		return agent.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: ptr.To(int64(tenYears.Seconds())),
			BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: join.AnchorSecret(m.Name)},
		}})
	})
}

// TestBootstrapTokenOfAnAttacker: the holder of a bootstrap token requests a certificate for ten years, certificates
// for several clusters, and the ID of another cluster. TestReservationOfAForeignID in internal/hub/approvals checks,
// with a clock, that the attacker loses the ID with the registration.
func TestBootstrapTokenOfAnAttacker(t *testing.T) {
	w := newWorld(t)
	w.noError(bootstrap.EnsureHubObjects(t.Context(), w.hub.Config, join.HubAddress{Server: w.hub.Config.Host, CA: w.hub.Config.CAData}))
	holder := func() *rest.Config {
		token, err := bootstrap.CreateToken(t.Context(), w, bootstrap.TokenOptions{TTL: time.Hour})
		w.noError(err)
		config := rest.AnonymousClientConfig(w.hub.Config)
		config.BearerToken = token.String()
		w.eventually("the hub accepts the token", func() error {
			return w.clientFor(config).Create(t.Context(), &authenticationv1.SelfSubjectReview{})
		})
		return config
	}
	attacker, victim := holder(), holder()
	request := func(config *rest.Config, cluster, id string, lifetime time.Duration) error {
		t.Cleanup(func() {
			_ = w.Delete(context.WithoutCancel(t.Context()), &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: cluster}}) // it may not exist
		})
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		_, err := bootstrap.RequestCertificate(ctx, config, bootstrap.CertificateRequest{Cluster: cluster, ID: id, Lifetime: lifetime})
		return err
	}
	wantDenied := func(what, reason string, err error) {
		t.Helper()
		if denied, ok := errors.AsType[*bootstrap.DeniedError](err); !ok || denied.Reason != reason {
			t.Errorf("%s: got %v, want a denial for %s", what, err, reason)
		}
	}
	squatter, second, owner, id := w.ns+"-squatter", w.ns+"-second", w.ns+"-owner", w.ns+"-id"
	wantDenied("ten years", bootstrap.ReasonInvalidRequest, request(attacker, squatter, id, tenYears))
	if err := w.Get(t.Context(), client.ObjectKey{Name: squatter}, &clusterv1alpha1.Cluster{}); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("a denied request: got Cluster %s, error %v", squatter, err)
	}
	w.noError(request(attacker, squatter, id, time.Hour))
	wantDenied("a second cluster", bootstrap.ReasonTokenSpent, request(attacker, second, w.ns+"-other", time.Hour))
	wantDenied("the name of the attacker", bootstrap.ReasonClusterTaken, request(victim, squatter, w.ns+"-other", time.Hour))
	// The denied request has not used up the token of the victim.
	w.noError(request(victim, owner, w.ns+"-owner", time.Hour))
}
