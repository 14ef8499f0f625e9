package join_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
	"github.com/towline/towline/internal/localkube/faults"
)

// requestToken requests a token for ServiceAccount namespace/c, bound to a Secret of that name unless it is "", with
// the credentials of config.
func requestToken(ctx context.Context, config *rest.Config, namespace, secret string, seconds int64, audiences ...string) error {
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(seconds), Audiences: audiences,
	}}
	if secret != "" {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret}
	}
	_, err = clientset.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, "c", request, metav1.CreateOptions{})
	return err
}

func TestTokenPolicyLimitsTheTokensOfAgents(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "guard")
	config, _ := agentConfig(t, registered(t, plane, pullRequest(n, "c")))
	for range 2 {
		if _, err := join.EnsureTokenPolicy(t.Context(), hubClient); err != nil {
			t.Fatal(err)
		}
	}
	const day, tenYears = 86400, 87600 * 3600
	anchor, registration := join.AnchorSecret("c"), join.RegistrationSecret("c")
	eventually(t, "a token of ten years is refused", func() bool {
		return apierrors.IsForbidden(requestToken(t.Context(), config, n, anchor, tenYears))
	})
	wantText(t, requestToken(t.Context(), config, n, anchor, day+1), "an agent may request a token of at most 86400 seconds for itself")
	const unbound = "an agent may request only tokens that are bound to Secret <cluster>-sveltos-agent for itself"
	wantText(t, requestToken(t.Context(), config, n, "", day), unbound)
	wantText(t, requestToken(t.Context(), config, n, registration, day), unbound)
	const foreign = "an agent may request only tokens for the API server for itself"
	wantText(t, requestToken(t.Context(), config, n, anchor, day, "sts.amazonaws.com"), foreign)
	const own = "https://kubernetes.default.svc.cluster.local"
	wantText(t, requestToken(t.Context(), config, n, anchor, day, own, "sts.amazonaws.com"), foreign)
	if err := requestToken(t.Context(), config, n, anchor, day, own); err != nil {
		t.Errorf("a token for the audience of the API server: %v", err)
	}
	if err := requestToken(t.Context(), config, n, anchor, day); err != nil {
		t.Errorf("a token of a day: %v", err)
	}
	if err := requestToken(t.Context(), plane.Config, n, "", tenYears); err != nil {
		t.Errorf("a token of ten years, requested by the administrator: %v", err)
	}
	// The API server needs a moment to know new permissions.
	foreignConfig := nonAgentConfig(t, plane, "token")
	eventually(t, "a ServiceAccount that is no agent gets a token of ten years", func() bool {
		return requestToken(t.Context(), foreignConfig, "token", "", tenYears) == nil
	})
}

// TestNoAgentWithoutAdmissionPolicies registers a cluster on a hub before Kubernetes 1.30.
func TestNoAgentWithoutAdmissionPolicies(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "old")
	cluster := declared(t, hubClient, n, "c")
	config := faults.Wrap(plane.Config, faults.HideAdmissionPolicies)
	old, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := join.Establish(t.Context(), old, cluster); !errors.Is(err, kube.ErrNoAdmissionPolicies) {
		t.Errorf("Establish: got error %v", err)
	}
	if _, err := join.EstablishNew(t.Context(), old, hubClient, cluster); !errors.Is(err, kube.ErrNoAdmissionPolicies) {
		t.Errorf("EstablishNew: got error %v", err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: n, Name: "c"}, &corev1.ServiceAccount{}); !apierrors.IsNotFound(err) {
		t.Errorf("the ServiceAccount of the agent: got error %v, want that there is none", err)
	}
	if _, err := join.EnsureTokenPolicy(t.Context(), old); !errors.Is(err, kube.ErrNoAdmissionPolicies) {
		t.Errorf("EnsureTokenPolicy: got error %v", err)
	}
}

// TestRegistrationRestoresTheTokenPolicy registers clusters before a hub has created the policy, or after somebody has
// deleted it. The agent then requests a token of ten years.
func TestRegistrationRestoresTheTokenPolicy(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err := errors.Join(err, crds.Install(t.Context(), hubClient)); err != nil {
		t.Fatal(err)
	}
	for name, register := range map[string]func(namespace string) error{
		"Establish": func(namespace string) error {
			_, err := join.Establish(t.Context(), hubClient, declared(t, hubClient, namespace, "c"))
			return err
		},
		"EstablishNew": func(namespace string) error {
			_, err := join.EstablishNew(t.Context(), hubClient, hubClient, declared(t, hubClient, namespace, "c"))
			return err
		},
		"RegisterPull": func(namespace string) error {
			return join.RegisterPull(t.Context(), plane.Config, pullRequest(namespace, "c"), io.Discard)
		},
	} {
		deleteTokenPolicy(t, hubClient)
		n, from := plane.Namespace(t, "unlimited"), time.Now()
		if err := register(n); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if took := time.Since(from); took < kube.PolicyDelay {
			t.Errorf("%s does not wait until the policy is enforced: it took %s", name, took)
		}
		issued, err := kubernetes.NewForConfigOrDie(plane.Config).CoreV1().ServiceAccounts(n).CreateToken(t.Context(), "c", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		agent := rest.AnonymousClientConfig(plane.Config)
		agent.BearerToken = issued.Status.Token
		// The API server is slow on a busy machine.
		eventually(t, "after "+name+", a token of ten years is refused", func() bool {
			err := requestToken(t.Context(), agent, n, join.AnchorSecret("c"), 87600*3600)
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "at most 86400 seconds")
		})
	}
}

// TestRegistrationByAUserWithoutRightsForPolicies registers clusters as a user who may write all but admission
// policies.
func TestRegistrationByAUserWithoutRightsForPolicies(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err := errors.Join(err, crds.Install(t.Context(), hubClient)); err != nil {
		t.Fatal(err)
	}
	grant := func(name string, rule rbacv1.PolicyRule) {
		t.Helper()
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{rule}}
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "registrar"}},
		}
		if err := errors.Join(hubClient.Create(t.Context(), role), hubClient.Create(t.Context(), binding)); err != nil {
			t.Fatal(err)
		}
	}
	grant("all-but-policies", rbacv1.PolicyRule{
		APIGroups: []string{"", "lib.projectsveltos.io", rbacv1.GroupName, "coordination.k8s.io"}, Resources: []string{"*"}, Verbs: []string{"*"},
	})
	user := rest.CopyConfig(plane.Config)
	user.Impersonate = rest.ImpersonationConfig{UserName: "registrar"}
	n := plane.Namespace(t, "registrar")
	register := func() error { return join.RegisterPull(t.Context(), user, pullRequest(n, "c"), io.Discard) }
	eventually(t, "the registration fails because of the policy", func() bool {
		err := register()
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ensure ValidatingAdmissionPolicy towline-token-life")
	})
	if left := leftBy(t, hubClient, n); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := join.EnsureTokenPolicy(t.Context(), hubClient); err != nil {
		t.Fatal(err)
	}
	grant("reads-policies", rbacv1.PolicyRule{
		APIGroups: []string{"admissionregistration.k8s.io"}, Resources: []string{"*"}, ResourceNames: []string{"towline-token-life"}, Verbs: []string{"get"},
	})
	eventually(t, "a user who may only read the policy registers a cluster", func() bool { return register() == nil })
}

// deleteTokenPolicy deletes the policy for the tokens of agents and its binding.
func deleteTokenPolicy(t *testing.T, hubClient client.Client) {
	t.Helper()
	named := metav1.ObjectMeta{Name: "towline-token-life"}
	for _, obj := range []client.Object{
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: named}, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: named},
	} {
		if err := hubClient.Delete(t.Context(), obj); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
}

// nonAgentConfig returns the credential of a ServiceAccount c, of a new namespace, that may request its own tokens and
// is no agent.
func nonAgentConfig(t *testing.T, plane *localkube.Plane, namespace string) *rest.Config {
	t.Helper()
	clientset := kubernetes.NewForConfigOrDie(plane.Config)
	named := metav1.ObjectMeta{Name: "c", Namespace: namespace}
	_, errNamespace := clientset.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	_, errAccount := clientset.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: named}, metav1.CreateOptions{})
	_, errRole := clientset.RbacV1().Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: named, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, Verbs: []string{"create"}},
	}}, metav1.CreateOptions{})
	_, errBinding := clientset.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: named, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "c"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "c", Namespace: namespace}},
	}, metav1.CreateOptions{})
	token, errToken := clientset.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), "c", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err := errors.Join(errNamespace, errAccount, errRole, errBinding, errToken); err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(plane.Config)
	config.BearerToken = token.Status.Token
	return config
}

// TestRightsOfTheManifestSuffice guards the hub, and registers clusters, with the rights that config/hub.yaml gives the
// hub.
func TestRightsOfTheManifestSuffice(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	raw, err := os.ReadFile(filepath.Join("..", "..", "config", "hub.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	rights := &rbacv1.ClusterRole{}
	for part := range bytes.SplitSeq(raw, []byte("\n---\n")) {
		kind := metav1.PartialObjectMetadata{}
		if err := yaml.Unmarshal(part, &kind); err != nil {
			t.Fatal(err)
		}
		if kind.Kind != "ClusterRole" || kind.Name != "towline-hub" {
			continue
		}
		if err := yaml.UnmarshalStrict(part, rights); err != nil {
			t.Fatal(err)
		}
	}
	clientset := kubernetes.NewForConfigOrDie(plane.Config)
	if _, err := clientset.RbacV1().ClusterRoles().Create(t.Context(), rights, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const installer = "installer"
	if _, err := clientset.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: installer},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: rights.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: installer}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config := rest.CopyConfig(plane.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: installer}
	ensure := func() error {
		hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
		if err != nil {
			return err
		}
		_, err = join.EnsureTokenPolicy(t.Context(), hubClient)
		return err
	}
	eventually(t, "the hub's own rights suffice", func() bool { return ensure() == nil })
	if err := ensure(); err != nil {
		t.Errorf("once more: %v", err)
	}
	checkRegistering(t, plane, config)
}

// checkRegistering registers clusters with the hub's own rights.
func checkRegistering(t *testing.T, plane *localkube.Plane, config *rest.Config) {
	t.Helper()
	administrator, errAdministrator := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err := errors.Join(errAdministrator, err, crds.Install(t.Context(), administrator)); err != nil {
		t.Fatal(err)
	}
	manifests := join.Manifests{Hub: hubClient, Cache: hubClient, Address: join.HubAddress{Server: plane.Config.Host}, Clock: clock.RealClock{}}
	for _, name := range []string{"c", "second"} {
		cluster := declared(t, administrator, metav1.NamespaceDefault, name)
		established(t, hubClient, cluster)
		if err := administrator.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			t.Fatal(err)
		}
		if _, err := manifests.Reconcile(t.Context(), cluster); err != nil {
			t.Errorf("keep the manifest of %s: %v", name, err)
		}
	}
}
