package stories

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// TestKarmadaAttacks tries what somebody could who has a bootstrap token, or the credential of an agent, or is on the
// way between. Each attempt is refused, and leaves the hub as it was.
func TestKarmadaAttacks(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	planes := w.karmadaMembers("alpha", "beta")
	alpha, beta := planes[0], planes[1]
	spent := w.token()
	w.typed(alpha, spent)
	w.registers(beta)
	w.loot(beta)

	t.Run("a bootstrap token is for one request", func(t *testing.T) { w.in(t).tokenIsForOneRequest() })
	t.Run("forged requests", func(t *testing.T) { w.in(t).forgedRequests(spent) })
	t.Run("on the way to the hub", func(t *testing.T) { w.in(t).untrustworthyHubs(alpha) })
	t.Run("the agent's own things", func(t *testing.T) { w.in(t).ownThings(alpha) })
	t.Run("an agent's certificate", func(t *testing.T) { w.in(t).agentsCertificate(alpha, beta) })
}

// loot puts things on the hub that are a cluster's, so that there is something to steal.
func (w *world) loot(plane *localkube.Plane) {
	w.t.Helper()
	w.sends(plane, "secret")
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {namespace: karmada-es-%[1]s, name: %[1]s-key}
stringData: {key: secret}
---
apiVersion: v1
kind: Secret
metadata: {namespace: karmada-cluster, name: %[1]s}
stringData: {token: secret}
`, plane.Name))
}

// tokenIsForOneRequest asks the hub what a token may do, and tries the worst of the rest.
func (w *world) tokenIsForOneRequest() {
	w.t.Helper()
	before := w.settled(w.hub)
	token := w.bootstrapToken()
	config := w.bearer(token.String())
	w.eventually("the hub knows the token", func() error {
		_, err := kubernetes.NewForConfigOrDie(config).Discovery().ServerVersion()
		return err
	})
	got := map[string]bool{}
	for _, namespace := range []string{"default", "kube-system", "kube-public", "karmada-cluster", "karmada-es-beta", kube.AgentNamespace} {
		for _, rule := range w.rules(config, namespace) {
			got[rule] = true
		}
	}
	want := []string{
		"create certificatesigningrequests.certificates.k8s.io", "create certificatesigningrequests.certificates.k8s.io/clusteragent",
		"create selfsubjectaccessreviews.authorization.k8s.io", "create selfsubjectreviews.authentication.k8s.io", "create selfsubjectrulesreviews.authorization.k8s.io",
	}
	if diff := gocmp.Diff(want, slices.Sorted(maps.Keys(got))); diff != "" {
		w.t.Errorf("what a bootstrap token may do (-want +got):\n%s", diff)
	}
	client, ctx := dynamic.NewForConfigOrDie(config), w.t.Context()
	for _, resource := range karmadaLoot() {
		_, err := client.Resource(resource).List(ctx, metav1.ListOptions{})
		if !refused(err) {
			w.t.Errorf("a token lists %s: %v", resource.Resource, err)
		}
		one := client.Resource(resource).Namespace("karmada-es-beta")
		if resource.Resource == "clusters" {
			one = client.Resource(resource)
		}
		if _, err = one.Get(ctx, "beta", metav1.GetOptions{}); !refused(err) {
			w.t.Errorf("a token reads %s: %v", resource.Resource, err)
		}
	}
	w.readsOwnRequestsOnly(config)
	anonymous := kubernetes.NewForConfigOrDie(rest.AnonymousClientConfig(w.hub.Config)).CoreV1().ConfigMaps("kube-public")
	if _, err := anonymous.Get(ctx, "cluster-info", metav1.GetOptions{}); err != nil {
		w.t.Errorf("cluster-info is not readable without a credential: %v", err)
	}
	if _, err := anonymous.List(ctx, metav1.ListOptions{}); !refused(err) {
		w.t.Errorf("everybody may list ConfigMaps: %v", err)
	}
	w.wantUnchanged("a bootstrap token", w.hub, before)
}

// readsOwnRequestsOnly asks for a certificate with another token than that of config, and tries to read the request.
func (w *world) readsOwnRequestsOnly(config *rest.Config) {
	w.t.Helper()
	other := w.bootstrapToken()
	owner := w.bearer(other.String())
	name, err := w.files(owner, honest("rbac-generator", "00000000-0000-4000-8000-000000000002"))
	if err != nil {
		w.t.Fatal(err)
	}
	if v, err := w.decided(name); err != nil || !v.denied {
		w.t.Errorf("a request for the reserved name: %+v, %v", v, err)
	}
	requests := func(c *rest.Config) error {
		_, err := kubernetes.NewForConfigOrDie(c).CertificatesV1().CertificateSigningRequests().Get(w.t.Context(), name, metav1.GetOptions{})
		return err
	}
	if err := requests(config); !refused(err) {
		w.t.Errorf("a token reads another one's request: %v", err)
	}
	w.eventually("whoever asked reads the answer", func() error { return requests(owner) })
}

// rules asks the hub what the holder of a credential may do in a namespace, and everywhere.
func (w *world) rules(config *rest.Config, namespace string) (rules []string) {
	w.t.Helper()
	review, err := kubernetes.NewForConfigOrDie(config).AuthorizationV1().SelfSubjectRulesReviews().Create(w.t.Context(),
		&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, rule := range review.Status.ResourceRules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				text := strings.Join(rule.Verbs, ",") + " " + resourceName(group, resource)
				if len(rule.ResourceNames) > 0 {
					text += " " + strings.Join(rule.ResourceNames, ",")
				}
				rules = append(rules, text)
			}
		}
	}
	return rules
}

// forgedRequests asks for certificates that the token is not for. spent is the command that registered alpha.
func (w *world) forgedRequests(spent string) {
	w.t.Helper()
	before := w.settled(w.hub)
	token := w.bootstrapToken()
	config := w.bearer(token.String())
	const id = "00000000-0000-4000-8000-000000000001"
	for what, forgery := range forgeries(id) {
		w.wantDenied(what, config, forgery.certificateRequest, forgery.reason)
	}
	beta, err := w.cluster("beta")
	if err != nil {
		w.t.Fatal(err)
	}
	w.wantDenied("another cluster's name", config, honest("beta", id), "registered")
	w.wantDenied("another cluster's name and id", config, honest("beta", beta.Spec.ID), "")
	w.wantDenied("another cluster's id", config, honest("fresh", beta.Spec.ID), "registered")
	// A token that has registered alpha is worth nothing for anybody else.
	fields := strings.Fields(spent)
	used := w.bearer(fields[slices.Index(fields, "--token")+1])
	w.wantDenied("a token that was used", used, honest("fresh", id), "token")
	w.wantUnspent(token)

	ignored := map[string]string{}
	for what, p := range map[string]certificateRequest{
		"a kubelet": honest("fresh", id).but(func(p *certificateRequest) { p.signer = certificatesv1.KubeletServingSignerName }),
		"an agent who is a master": honest("fresh", id).but(func(p *certificateRequest) {
			p.request.Subject.Organization = []string{bootstrap.AgentsGroup, "system:masters"}
		}),
		"a master": honest("fresh", id).but(func(p *certificateRequest) {
			p.request.Subject.CommonName, p.request.Subject.Organization = "admin", []string{"system:masters"}
		}),
	} {
		name, err := w.files(config, p)
		if err == nil {
			ignored[what] = name
		} else if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			w.t.Errorf("%s: %v", what, err)
		}
	}
	w.wantDenied("the last one", config, honest("rbac-generator", id), "") // by now the others have been seen
	w.wantIgnored(ignored)
	w.wantUnchanged("forged requests", w.hub, before)
}

// karmadaLoot are the kinds of objects that belong to one Cluster.
func karmadaLoot() []schema.GroupVersionResource {
	return slices.Concat([]schema.GroupVersionResource{
		clusterv1alpha1.GroupVersion.WithResource("clusters"), workv1alpha1.GroupVersion.WithResource("works"),
		{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"},
	}, slices.DeleteFunc(slices.Clone(loot), func(r schema.GroupVersionResource) bool { return r.Resource == "sveltosclusters" }))
}

// ownThings tries to change what an agent may write, but not like that.
func (w *world) ownThings(plane *localkube.Plane) {
	w.t.Helper()
	config, _ := w.agentConfig(plane)
	w.apply(w.hub, fmt.Sprintf(karmadaWork, plane.Name, "mine"))
	before := w.settled(w.hub)
	client, ctx := dynamic.NewForConfigOrDie(config), w.t.Context()
	cluster := client.Resource(clusterv1alpha1.GroupVersion.WithResource("clusters"))
	space := "karmada-es-" + plane.Name
	work := client.Resource(workv1alpha1.GroupVersion.WithResource("works")).Namespace(space)
	lease := client.Resource(schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}).Namespace(space)
	for _, attempt := range []struct {
		what  string
		on    dynamic.ResourceInterface
		name  string
		patch string
	}{
		{"its id", cluster, plane.Name, `{"spec":{"id":"other"}}`},
		{"its mode", cluster, plane.Name, `{"spec":{"syncMode":"Push"}}`},
		{"its credentials", cluster, plane.Name, `{"spec":{"secretRef":{"namespace":"karmada-es-beta","name":"beta-key"}}}`},
		{"its impersonator", cluster, plane.Name, `{"spec":{"impersonatorSecretRef":{"namespace":"karmada-es-beta","name":"beta-key"}}}`},
		{"its taints", cluster, plane.Name, `{"spec":{"taints":[{"key":"intruder","effect":"NoSchedule"}]}}`},
		{"the check of certificates", cluster, plane.Name, `{"spec":{"insecureSkipTLSVerification":true}}`},
		{"the headers for its proxy", cluster, plane.Name, `{"spec":{"proxyHeader":{"intruder":"intruder"}}}`},
		{"its labels", cluster, plane.Name, `{"metadata":{"labels":{"intruder":"intruder"}}}`},
		{"its annotations", cluster, plane.Name, `{"metadata":{"annotations":{"intruder":"intruder"}}}`},
		{"its finalizers", cluster, plane.Name, `{"metadata":{"finalizers":null}}`},
		{"its owners", cluster, plane.Name, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Namespace","name":"intruder","uid":"intruder"}]}}`},
		{"what a Work says", work, "delivered", `{"spec":{"suspendDispatching":true}}`},
		{"the labels of a Work", work, "delivered", `{"metadata":{"labels":{"intruder":"intruder"}}}`},
		{"another finalizer of a Work", work, "delivered", `{"metadata":{"finalizers":["karmada.io/execution-controller","example.com/intruder"]}}`},
		{"the owners of its Lease", lease, plane.Name, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Namespace","name":"intruder","uid":"intruder"}]}}`},
	} {
		_, err := attempt.on.Patch(ctx, attempt.name, types.MergePatchType, []byte(attempt.patch), metav1.PatchOptions{})
		if !refused(err) && !apierrors.IsInvalid(err) {
			w.t.Errorf("the agent changes %s: %v", attempt.what, err)
		}
	}
	w.wantUnchanged("the agent's own credential", w.hub, before)
}

// agentsCertificate tries a's credential on everything that the hub serves, and on everything of b's. The agents are
// stopped by then, so that whatever changes on the hub was changed by the credential.
func (w *world) agentsCertificate(alpha, beta *localkube.Plane) {
	w.t.Helper()
	a := insider{namespace: "karmada-es-" + alpha.Name, cluster: alpha.Name, delivery: "karmada-es-" + alpha.Name}
	b := insider{namespace: "karmada-es-" + beta.Name, cluster: beta.Name, delivery: "karmada-es-" + beta.Name}
	a.config, _ = w.agentConfig(alpha)
	b.config, _ = w.agentConfig(beta)
	for _, plane := range []*localkube.Plane{alpha, beta} {
		w.stopAgent(plane)
		w.kubectl(w.hub, "label", "cluster", plane.Name, "env=isolation")
	}
	w.apply(w.hub, isolationProfile)
	w.eventually("there is something to steal", func() error { return w.staged([]insider{a, b}) })
	for _, plane := range []*localkube.Plane{alpha, beta} {
		w.wantTaint(plane.Name, "cluster.karmada.io/unreachable") // the last thing that the hub does by itself
	}

	id := w.kubectl(w.hub, "get", "cluster", beta.Name, "-o", "jsonpath={.spec.id}")
	before := w.settled(w.hub)
	allowed := documentedFor(w.t, "agent of a Cluster")
	w.wantAllowed(a, w.surface(), allowed)
	// Whoever asks for a certificate may read the answer: these come after the question what the agent may do.
	w.wantDenied("a renewal for another cluster", a.config, honest(beta.Name, ""), beta.Name)
	w.wantDenied("a registration by an agent", a.config, honest("fresh", id), "fresh")
	for _, pair := range [][2]insider{{a, b}, {b, a}} {
		w.attackCluster(pair[0], pair[1], allowed)
		w.wantSharedByNameOnly(pair[0])
	}
	w.wantUnchanged("an agent's certificate", w.hub, before)
}

// attackCluster makes every kind of request for b's objects with a's credential. All that is not documented must be
// refused.
func (w *world) attackCluster(a, b insider, documented permissions) {
	w.t.Helper()
	var targets []possession
	hub := dynamic.NewForConfigOrDie(w.hub.Config)
	for _, resource := range karmadaLoot() {
		list, err := hub.Resource(resource).List(w.t.Context(), metav1.ListOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, item := range list.Items {
			if item.GetNamespace() == b.delivery || item.GetNamespace() == "" && strings.HasPrefix(item.GetName(), b.cluster) ||
				item.GetNamespace() == "karmada-cluster" && item.GetName() != "kube-root-ca.crt" {
				targets = append(targets, possession{resource, &item})
			}
		}
	}
	for kind := range map[string]bool{"clusters": true, "configurationbundles": true, "configurationgroups": true, "leases": true, "configmaps": true} {
		if !slices.ContainsFunc(targets, func(p possession) bool { return p.resource.Resource == kind }) {
			w.t.Fatalf("%s has no %s to attack", b.cluster, kind)
		}
	}
	w.attackObjects(a, b, targets, documented)
}

// documentedFor reads the table of SECURITY.md under a heading that has a text.
func documentedFor(t *testing.T, heading string) permissions {
	t.Helper()
	text, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), heading)
	if !found {
		t.Fatalf("SECURITY.md says nothing about the %s", heading)
	}
	return parsePermissions(t, rest)
}
