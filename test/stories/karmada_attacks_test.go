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

// TestKarmadaAttacks attacks with a bootstrap token, with the credential of an agent, and on the network. Each attempt
// is refused, and leaves the hub unchanged.
func TestKarmadaAttacks(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.karmadaMembers("alpha", "beta")
	alpha, beta := planes[0], planes[1]
	spent := w.createTokenCommand()
	w.runShell(alpha, spent)
	w.registerMember(beta)
	w.createOwnedObjects(beta)

	t.Run("a bootstrap token allows one request", func(t *testing.T) { w.forSubtest(t).tokenIsForOneRequest() })
	t.Run("forged requests", func(t *testing.T) { w.forSubtest(t).forgedRequests(spent) })
	t.Run("untrusted hubs", func(t *testing.T) { w.forSubtest(t).rejectsUntrustedHubs(alpha) })
	t.Run("the agent's own objects", func(t *testing.T) { w.forSubtest(t).limitsAgentWrites(alpha) })
	t.Run("an agent's certificate", func(t *testing.T) { w.forSubtest(t).attackWithCertificate(alpha, beta) })
}

// createOwnedObjects creates objects of a cluster on the hub, as targets of attacks.
func (w *world) createOwnedObjects(plane *localkube.Plane) {
	w.t.Helper()
	w.propagateWork(plane, "secret")
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

// tokenIsForOneRequest compares the permissions of a token, and tries the most dangerous other requests.
func (w *world) tokenIsForOneRequest() {
	w.t.Helper()
	before := w.awaitStable(w.hub)
	token := w.newBootstrapToken()
	config := w.tokenConfig(token.String())
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
		w.t.Errorf("permissions of a bootstrap token (-want +got):\n%s", diff)
	}
	client, ctx := dynamic.NewForConfigOrDie(config), w.t.Context()
	for _, resource := range karmadaOwnedKinds() {
		_, err := client.Resource(resource).List(ctx, metav1.ListOptions{})
		if !isRefused(err) {
			w.t.Errorf("a token lists %s: %v", resource.Resource, err)
		}
		one := client.Resource(resource).Namespace("karmada-es-beta")
		if resource.Resource == "clusters" {
			one = client.Resource(resource)
		}
		if _, err = one.Get(ctx, "beta", metav1.GetOptions{}); !isRefused(err) {
			w.t.Errorf("a token reads %s: %v", resource.Resource, err)
		}
	}
	w.readsOwnRequestsOnly(config)
	anonymous := kubernetes.NewForConfigOrDie(rest.AnonymousClientConfig(w.hub.Config)).CoreV1().ConfigMaps("kube-public")
	if _, err := anonymous.Get(ctx, "cluster-info", metav1.GetOptions{}); err != nil {
		w.t.Errorf("cluster-info is not readable without a credential: %v", err)
	}
	if _, err := anonymous.List(ctx, metav1.ListOptions{}); !isRefused(err) {
		w.t.Errorf("a request without a credential lists ConfigMaps: %v", err)
	}
	w.wantUnchanged("a bootstrap token", w.hub, before)
}

// readsOwnRequestsOnly requests a certificate with another token than the one in config, and tries to read the request.
func (w *world) readsOwnRequestsOnly(config *rest.Config) {
	w.t.Helper()
	other := w.newBootstrapToken()
	owner := w.tokenConfig(other.String())
	name, err := w.createRequest(owner, validRequest("rbac-generator", "00000000-0000-4000-8000-000000000002"))
	if err != nil {
		w.t.Fatal(err)
	}
	if v, err := w.awaitDecision(name); err != nil || !v.denied {
		w.t.Errorf("a request for the reserved name: %+v, %v", v, err)
	}
	requests := func(c *rest.Config) error {
		_, err := kubernetes.NewForConfigOrDie(c).CertificatesV1().CertificateSigningRequests().Get(w.t.Context(), name, metav1.GetOptions{})
		return err
	}
	if err := requests(config); !isRefused(err) {
		w.t.Errorf("a token reads the request of another token: %v", err)
	}
	w.eventually("the owner of the request reads it", func() error { return requests(owner) })
}

// rules returns the permissions of a credential in a namespace and in the whole cluster.
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

// forgedRequests requests certificates that the token does not allow. spent is the command that registered alpha.
func (w *world) forgedRequests(spent string) {
	w.t.Helper()
	before := w.awaitStable(w.hub)
	token := w.newBootstrapToken()
	config := w.tokenConfig(token.String())
	const id = "00000000-0000-4000-8000-000000000001"
	for what, forgery := range forgedRequestCases(id) {
		w.wantDenied(what, config, forgery.certificateRequest, forgery.reason)
	}
	beta, err := w.readCluster("beta")
	if err != nil {
		w.t.Fatal(err)
	}
	w.wantDenied("another cluster's name", config, validRequest("beta", id), "registered")
	w.wantDenied("another cluster's name and id", config, validRequest("beta", beta.Spec.ID), "")
	w.wantDenied("another cluster's id", config, validRequest("fresh", beta.Spec.ID), "registered")
	// A token that has registered alpha registers no other cluster.
	fields := strings.Fields(spent)
	used := w.tokenConfig(fields[slices.Index(fields, "--token")+1])
	w.wantDenied("a token that was used", used, validRequest("fresh", id), "token")
	w.wantTokenUnused(token)

	ignored := map[string]string{}
	for what, p := range map[string]certificateRequest{
		"a kubelet": validRequest("fresh", id).with(func(p *certificateRequest) { p.signer = certificatesv1.KubeletServingSignerName }),
		"an agent in system:masters": validRequest("fresh", id).with(func(p *certificateRequest) {
			p.request.Subject.Organization = []string{bootstrap.AgentsGroup, "system:masters"}
		}),
		"a user in system:masters": validRequest("fresh", id).with(func(p *certificateRequest) {
			p.request.Subject.CommonName, p.request.Subject.Organization = "admin", []string{"system:masters"}
		}),
	} {
		name, err := w.createRequest(config, p)
		if err == nil {
			ignored[what] = name
		} else if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			w.t.Errorf("%s: %v", what, err)
		}
	}
	w.wantDenied("the last one", config, validRequest("rbac-generator", id), "") // the hub has handled the requests before it
	w.wantUndecided(ignored)
	w.wantUnchanged("forged requests", w.hub, before)
}

// karmadaOwnedKinds are the kinds of objects that belong to one Cluster.
func karmadaOwnedKinds() []schema.GroupVersionResource {
	return slices.Concat([]schema.GroupVersionResource{
		clusterv1alpha1.GroupVersion.WithResource("clusters"), workv1alpha1.GroupVersion.WithResource("works"),
		{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"},
	}, slices.DeleteFunc(slices.Clone(ownedKinds), func(r schema.GroupVersionResource) bool { return r.Resource == "sveltosclusters" }))
}

// limitsAgentWrites tries forbidden changes of objects that an agent may write.
func (w *world) limitsAgentWrites(plane *localkube.Plane) {
	w.t.Helper()
	config, _ := w.agentConfig(plane)
	w.apply(w.hub, fmt.Sprintf(karmadaWork, plane.Name, "mine"))
	before := w.awaitStable(w.hub)
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
		{"the spec of a Work", work, "delivered", `{"spec":{"suspendDispatching":true}}`},
		{"the labels of a Work", work, "delivered", `{"metadata":{"labels":{"intruder":"intruder"}}}`},
		{"another finalizer of a Work", work, "delivered", `{"metadata":{"finalizers":["karmada.io/execution-controller","example.com/intruder"]}}`},
		{"the owners of its Lease", lease, plane.Name, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Namespace","name":"intruder","uid":"intruder"}]}}`},
	} {
		_, err := attempt.on.Patch(ctx, attempt.name, types.MergePatchType, []byte(attempt.patch), metav1.PatchOptions{})
		if !isRefused(err) && !apierrors.IsInvalid(err) {
			w.t.Errorf("the agent changes %s: %v", attempt.what, err)
		}
	}
	w.wantUnchanged("the agent's own credential", w.hub, before)
}

// attackWithCertificate tries a's credential on all resources of the hub, and on all objects of b. The agents are
// stopped before, so that each change on the hub is made by an attack.
func (w *world) attackWithCertificate(alpha, beta *localkube.Plane) {
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
	w.eventually("the hub has content of both agents", func() error { return w.wantContent([]insider{a, b}) })
	for _, plane := range []*localkube.Plane{alpha, beta} {
		w.wantTaint(plane.Name, "cluster.karmada.io/unreachable") // after that the hub changes nothing by itself
	}

	id := w.kubectl(w.hub, "get", "cluster", beta.Name, "-o", "jsonpath={.spec.id}")
	before := w.awaitStable(w.hub)
	allowed := documentedFor(w.t, "agent of a Cluster")
	w.wantAllowed(a, w.surface(), allowed)
	// The creator of a request for a certificate may read it: these requests come after the comparison of permissions.
	w.wantDenied("a renewal for another cluster", a.config, validRequest(beta.Name, ""), beta.Name)
	w.wantDenied("a registration by an agent", a.config, validRequest("fresh", id), "fresh")
	for _, pair := range [][2]insider{{a, b}, {b, a}} {
		w.attackCluster(pair[0], pair[1], allowed)
		w.wantSharedByNameOnly(pair[0])
	}
	w.wantUnchanged("an agent's certificate", w.hub, before)
}

// attackCluster makes every kind of request for b's objects with a's credential. All requests that are not documented
// must be refused.
func (w *world) attackCluster(a, b insider, documented permissions) {
	w.t.Helper()
	var targets []ownedObject
	hub := dynamic.NewForConfigOrDie(w.hub.Config)
	for _, resource := range karmadaOwnedKinds() {
		list, err := hub.Resource(resource).List(w.t.Context(), metav1.ListOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, item := range list.Items {
			if item.GetNamespace() == b.delivery || item.GetNamespace() == "" && strings.HasPrefix(item.GetName(), b.cluster) ||
				item.GetNamespace() == "karmada-cluster" && item.GetName() != "kube-root-ca.crt" {
				targets = append(targets, ownedObject{resource, &item})
			}
		}
	}
	for kind := range map[string]bool{"clusters": true, "configurationbundles": true, "configurationgroups": true, "leases": true, "configmaps": true} {
		if !slices.ContainsFunc(targets, func(p ownedObject) bool { return p.resource.Resource == kind }) {
			w.t.Fatalf("%s has no %s to attack", b.cluster, kind)
		}
	}
	w.attackObjects(a, b, targets, documented)
}

// documentedFor reads the table of SECURITY.md under a heading with a text.
func documentedFor(t *testing.T, heading string) permissions {
	t.Helper()
	text, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), heading)
	if !found {
		t.Fatalf("SECURITY.md has no heading with %q", heading)
	}
	return parsePermissions(t, rest)
}
