package join_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/faults"
)

// push is a hub, with a namespace of the test's own, and a member which no other test uses at the same time.
type push struct {
	hub       *localkube.Plane
	hubClient client.Client
	namespace string
	hubUID    string
	member    *localkube.Plane
}

// TestPushMembers runs the tests about identities on a member one after the other: their names are the same on each
// member.
func TestPushMembers(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	uid, err := join.ClusterUID(t.Context(), hubClient)
	if err != nil {
		t.Fatal(err)
	}
	member := localkube.ForTest(t, localkube.Named("member"))
	for _, test := range []struct {
		name string
		run  func(*testing.T, push)
	}{
		{"the namespace is taken back", namespaceIsTakenBack},
		{"register by context", registerByContext},
		{"interrupted on the member", interruptedOnTheMember},
		{"interrupted on the hub", interruptedOnTheHub},
		{"the identity goes with its last user", identityGoesWithItsLastUser},
		{"a token that does not expire", tokenThatDoesNotExpire},
		{"an identity of someone else", identityOfSomeoneElse},
		{"register again by kubeconfig", registerAgainByKubeconfig},
		{"generate", generate},
		{"generate is undone", generateIsUndone},
		{"another cluster under the name", anotherUnderTheName},
		{"a refusal that is no lost right", refusalIsNoLostRight},
		{"renew", renew},
		{"renew again", renewAgain},
		{"renewal cut off", renewalCutOff},
		{"renewal overtaken", renewalOvertaken},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := push{hub: plane, hubClient: hubClient, hubUID: uid, member: member, namespace: plane.Namespace(t, "push")}
			t.Cleanup(func() { p.clear(t) })
			test.run(t, p)
		})
	}
}

func (p push) request(name string) join.PushRequest {
	return join.PushRequest{Request: join.Request{Namespace: p.namespace, Name: name}, Member: p.member.Config}
}

func (p push) register(t *testing.T, r join.PushRequest) *libv1beta1.SveltosCluster {
	t.Helper()
	if err := join.RegisterPush(t.Context(), p.hub.Config, r); err != nil {
		t.Fatal(err)
	}
	return p.cluster(t, r.Name)
}

func (p push) cluster(t *testing.T, name string) *libv1beta1.SveltosCluster {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{}
	if err := p.hubClient.Get(t.Context(), client.ObjectKey{Namespace: p.namespace, Name: name}, cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// kubeconfig returns the kubeconfig with which the hub connects to the cluster.
func (p push) kubeconfig(t *testing.T, cluster *libv1beta1.SveltosCluster) []byte {
	t.Helper()
	secret := &corev1.Secret{}
	if err := p.hubClient.Get(t.Context(), client.ObjectKey{Namespace: p.namespace, Name: join.KubeconfigSecret(cluster.Name)}, secret); err != nil {
		t.Fatal(err)
	}
	return secret.Data[cluster.Spec.KubeconfigKeyName]
}

func (p push) config(t *testing.T, cluster *libv1beta1.SveltosCluster) *rest.Config {
	t.Helper()
	config, err := clientcmd.RESTConfigFromKubeConfig(p.kubeconfig(t, cluster))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func (p push) memberClient(t *testing.T) kubernetes.Interface {
	t.Helper()
	clientset, err := kubernetes.NewForConfig(p.member.Config)
	if err != nil {
		t.Fatal(err)
	}
	return clientset
}

// onMember lists the objects of the identity on the member, without the namespace.
func (p push) onMember(t *testing.T) []string {
	t.Helper()
	member, found := p.memberClient(t), []string{}
	roles, err := member.RbacV1().ClusterRoles().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range roles.Items {
		if role.Name == "projectsveltos" {
			found = append(found, "ClusterRole "+role.Name)
		}
	}
	bindings, err := member.RbacV1().ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, binding := range bindings.Items {
		if strings.HasPrefix(binding.Name, "projectsveltos") {
			found = append(found, "ClusterRoleBinding "+binding.Name)
		}
	}
	accounts, err := member.CoreV1().ServiceAccounts(kube.AgentNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, account := range accounts.Items {
		if account.Name != "default" {
			found = append(found, "ServiceAccount "+account.Name)
		}
	}
	secrets, err := member.CoreV1().Secrets(kube.AgentNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range secrets.Items {
		found = append(found, "Secret "+secret.Name)
	}
	return found
}

var wholeIdentity = []string{"ClusterRole projectsveltos", "ClusterRoleBinding projectsveltos", "ServiceAccount projectsveltos"}

func (p push) wantOnMember(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(append([]string{}, want...), p.onMember(t)); diff != "" {
		t.Errorf("on the member (-want +got):\n%s", diff)
	}
}

// clear takes everything but the namespace off the member for the next test.
func (p push) clear(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	member, none := p.memberClient(t), metav1.DeleteOptions{}
	selector := metav1.ListOptions{FieldSelector: "metadata.name!=default"}
	name := metav1.ListOptions{FieldSelector: "metadata.name=projectsveltos"}
	err := errors.Join(
		member.RbacV1().ClusterRoles().DeleteCollection(ctx, none, name),
		member.RbacV1().ClusterRoleBindings().DeleteCollection(ctx, none, name),
		client.IgnoreNotFound(member.RbacV1().ClusterRoleBindings().Delete(ctx, "projectsveltos:projectsveltos:other", none)),
		member.CoreV1().ServiceAccounts(kube.AgentNamespace).DeleteCollection(ctx, none, selector),
		member.CoreV1().Secrets(kube.AgentNamespace).DeleteCollection(ctx, none, metav1.ListOptions{}),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// namespaceIsTakenBack tries on a member without the namespace, which takes a while to go.
func namespaceIsTakenBack(t *testing.T, p push) {
	r := p.request("c")
	ctx, cancel := context.WithCancel(t.Context())
	r.Member = rest.CopyConfig(p.member.Config)
	r.Member.Wrap(cancelOn(cancel, "/token"))
	wantText(t, join.RegisterPush(ctx, p.hub.Config, r), "request a token for ServiceAccount projectsveltos/projectsveltos; everything was taken back")
	namespace, err := p.memberClient(t).CoreV1().Namespaces().Get(t.Context(), kube.AgentNamespace, metav1.GetOptions{})
	if err == nil && namespace.DeletionTimestamp == nil {
		t.Error("the namespace is still there")
	}
	p.wantNothing(t, "the first attempt")
	// The next registration must wait until it is deleted.
	p.register(t, p.request("c"))
	p.takeOff(t, "c")
}

func registerByContext(t *testing.T, p push) {
	r := p.request("c")
	r.Labels = map[string]string{"env": "test"}
	cluster := p.register(t, r)
	p.wantOnMember(t, wholeIdentity...)
	if diff := cmp.Diff(map[string]string{"env": "test"}, cluster.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	want := libv1beta1.SveltosClusterSpec{
		KubeconfigKeyName: "kubeconfig", ConsecutiveFailureThreshold: 3,
		TokenRequestRenewalOption: &libv1beta1.TokenRequestRenewalOption{
			RenewTokenRequestInterval: metav1.Duration{Duration: time.Hour}, TokenDuration: &metav1.Duration{Duration: 5 * time.Hour},
		},
	}
	if diff := cmp.Diff(want, cluster.Spec); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
	if got := cluster.Annotations[join.AnnotationMemberIdentity]; got != "true" {
		t.Errorf("annotation %s = %q", join.AnnotationMemberIdentity, got)
	}
	loaded, err := clientcmd.Load(p.kubeconfig(t, cluster))
	if err != nil {
		t.Fatal(err)
	}
	if loaded.CurrentContext != "sveltos-context" || loaded.Contexts["sveltos-context"].AuthInfo != "projectsveltos" || loaded.Clusters["local"] == nil {
		t.Errorf("kubeconfig = %+v", loaded.Contexts)
	}
	p.wantEverythingAllowed(t, p.config(t, cluster))
	// Once more, with a part of the identity lost.
	if err := p.memberClient(t).RbacV1().ClusterRoleBindings().Delete(t.Context(), "projectsveltos", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.Labels = map[string]string{"tier": "two"}
	cluster = p.register(t, r)
	p.wantOnMember(t, wholeIdentity...)
	if diff := cmp.Diff(map[string]string{"env": "test", "tier": "two"}, cluster.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if users := p.users(t); len(users) != 1 {
		t.Errorf("users of the identity: got %v, want one", users)
	}
}

// users returns the users of the identity.
func (p push) users(t *testing.T) []string {
	t.Helper()
	role, err := p.memberClient(t).RbacV1().ClusterRoles().Get(t.Context(), "projectsveltos", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var users []string
	for key, value := range role.Annotations {
		if strings.HasPrefix(key, "registration.towline.dev/") {
			users = append(users, value)
		}
	}
	slices.Sort(users)
	return users
}

func (p push) wantEverythingAllowed(t *testing.T, config *rest.Config) {
	t.Helper()
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	// A user may not grant permissions that the user does not have.
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "everything"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}, {NonResourceURLs: []string{"*"}, Verbs: []string{"*"}},
	}}
	if _, err := clientset.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Errorf("the hub may not do everything: %v", err)
	}
}

// trouble is the fault of one request.
type trouble string

const (
	notSent  trouble = "not sent"
	noAnswer trouble = "no answer"
	stopped  trouble = "stopped by the user"
)

// disturbed returns config, whose request number n, counted from 1, has trouble. A user who stops ends the context with
// cancel.
func disturbed(config *rest.Config, n int32, what trouble, cancel context.CancelFunc) *rest.Config {
	count := &atomic.Int32{}
	out := rest.CopyConfig(config)
	out.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if count.Add(1) != n {
				return next.RoundTrip(request)
			}
			switch what {
			case notSent:
				return nil, errors.New("the line is cut")
			case stopped:
				cancel()
				return next.RoundTrip(request)
			default:
				response, err := next.RoundTrip(request)
				if err == nil {
					response.Body.Close()
				}
				return nil, errors.New("the line is cut")
			}
		})
	})
	return out
}

// everyInterruption runs attempt with each kind of trouble at each request, until it has survived them all; check runs
// after each failure.
func everyInterruption(t *testing.T, attempt func(ctx context.Context, disturb func(*rest.Config) *rest.Config) error, check func(what string)) {
	t.Helper()
	for _, what := range []trouble{notSent, noAnswer, stopped} {
		failures := 0
		for n := int32(1); ; n++ {
			ctx, cancel := context.WithCancel(t.Context())
			reached := false
			err := attempt(ctx, func(config *rest.Config) *rest.Config {
				return disturbed(config, n, what, func() { reached = true; cancel() })
			})
			cancel()
			if err == nil {
				break
			}
			failures++
			check(fmt.Sprintf("request %d %s: %v", n, what, err))
			if what == stopped && !reached {
				t.Fatalf("request %d: it failed without being stopped: %v", n, err)
			}
		}
		if failures < 6 {
			t.Errorf("%s: got %d failures, want one for each request", what, failures)
		}
	}
}

func interruptedOnTheMember(t *testing.T, p push) {
	r, attempts := p.request("c"), 0
	everyInterruption(t, func(ctx context.Context, disturb func(*rest.Config) *rest.Config) error {
		attempts++
		r.Member, r.ServiceAccountToken = disturb(p.member.Config), attempts%2 == 0
		err := join.RegisterPush(ctx, p.hub.Config, r)
		if err == nil {
			p.wantEverythingAllowed(t, p.config(t, p.cluster(t, "c")))
			p.takeOff(t, "c")
		}
		return err
	}, func(what string) { p.wantNothing(t, what) })
}

func interruptedOnTheHub(t *testing.T, p push) {
	everyInterruption(t, func(ctx context.Context, disturb func(*rest.Config) *rest.Config) error {
		err := join.RegisterPush(ctx, disturb(p.hub.Config), p.request("c"))
		if err == nil {
			p.takeOff(t, "c")
		}
		return err
	}, func(what string) { p.wantNothing(t, what) })
}

// takeOff deregisters a cluster as the hub does.
func (p push) takeOff(t *testing.T, name string) {
	t.Helper()
	cluster := p.cluster(t, name)
	config := p.config(t, cluster)
	for range 2 {
		if err := join.DeleteMemberObjects(t.Context(), config, p.hubUID, cluster); err != nil {
			t.Fatal(err)
		}
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: join.KubeconfigSecret(name)}}
	if err := errors.Join(p.hubClient.Delete(t.Context(), cluster), p.hubClient.Delete(t.Context(), secret)); err != nil {
		t.Fatal(err)
	}
	// Where it had no other user, the identity goes in the background.
	eventually(t, "the identity is gone as a whole, or not at all", func() bool {
		left := p.onMember(t)
		return len(left) == 0 || left[0] == wholeIdentity[0]
	})
}

func (p push) wantNothing(t *testing.T, after string) {
	t.Helper()
	if left := append(p.onMember(t), inNamespace(t, p.hubClient, p.namespace)...); len(left) > 0 {
		t.Fatalf("after %s: left %v", after, left)
	}
}

func identityGoesWithItsLastUser(t *testing.T, p push) {
	first, second := p.register(t, p.request("first")), p.register(t, p.request("second"))
	if users := p.users(t); len(users) != 2 {
		t.Fatalf("users: got %v, want two", users)
	}
	// Another hub has a cluster of the same name, and takes nothing away.
	if err := join.DeleteMemberObjects(t.Context(), p.member.Config, "another", first); err != nil {
		t.Fatal(err)
	}
	own := p.config(t, first)
	if err := join.DeleteMemberObjects(t.Context(), own, p.hubUID, first); err != nil {
		t.Fatal(err)
	}
	p.wantOnMember(t, wholeIdentity...)
	if users := p.users(t); len(users) != 1 || !strings.Contains(users[0], p.namespace+"/second") {
		t.Errorf("users: got %v, want the second cluster", users)
	}
	p.wantEverythingAllowed(t, p.config(t, second))
	own = p.config(t, second)
	if err := join.DeleteMemberObjects(t.Context(), own, p.hubUID, second); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the identity is gone", func() bool { return len(p.onMember(t)) == 0 })
	// The identity is deleted, so the hub's credentials are invalid.
	if err := join.DeleteMemberObjects(t.Context(), own, p.hubUID, second); err != nil {
		t.Errorf("DeleteMemberObjects() again = %v", err)
	}
	refused := rest.CopyConfig(p.member.Config)
	refused.Host = "https://127.0.0.1:1"
	if err := join.DeleteMemberObjects(t.Context(), refused, p.hubUID, second); err == nil {
		t.Error("DeleteMemberObjects() of a member that cannot be reached succeeded")
	}
}

func tokenThatDoesNotExpire(t *testing.T, p push) {
	r := p.request("c")
	r.ServiceAccountToken = true
	other := p.register(t, p.request("other"))
	cluster := p.register(t, r)
	if cluster.Spec.TokenRequestRenewalOption != nil {
		t.Errorf("tokenRequestRenewalOption = %+v, want none", cluster.Spec.TokenRequestRenewalOption)
	}
	p.wantEverythingAllowed(t, p.config(t, cluster))
	if got := p.onMember(t); len(got) != 4 || !strings.HasPrefix(got[3], "Secret projectsveltos-") {
		t.Errorf("on the member: %v, want a Secret too", got)
	}
	p.takeOff(t, "c")
	p.wantOnMember(t, wholeIdentity...)
	// Registering without it later drops it.
	p.register(t, r)
	r.ServiceAccountToken = false
	if cluster = p.register(t, r); cluster.Spec.TokenRequestRenewalOption == nil {
		t.Error("tokenRequestRenewalOption is missing")
	}
	p.wantOnMember(t, wholeIdentity...)
	p.takeOff(t, "c")
	p.wantEverythingAllowed(t, p.config(t, other))
}

func identityOfSomeoneElse(t *testing.T, p push) {
	member, all := p.memberClient(t), []string{"*"}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "projectsveltos"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: all},
	}}
	if _, err := member.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// A half of it is not enough, and nothing is mixed with it.
	wantText(t, join.RegisterPush(t.Context(), p.hub.Config, p.request("c")), "was not made by a registration")
	p.wantOnMember(t, "ClusterRole projectsveltos")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "projectsveltos"}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "projectsveltos"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "projectsveltos"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: kube.AgentNamespace, Name: "projectsveltos"}},
	}
	account, err := member.CoreV1().ServiceAccounts(kube.AgentNamespace).Create(t.Context(), account, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := member.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r := p.request("c")
	r.ServiceAccountToken = true
	p.wantEverythingAllowed(t, p.config(t, p.register(t, r)))
	p.takeOff(t, "c")
	p.wantOnMember(t, wholeIdentity...)
	now, err := member.CoreV1().ServiceAccounts(kube.AgentNamespace).Get(t.Context(), "projectsveltos", metav1.GetOptions{})
	if err != nil || now.UID != account.UID || len(now.OwnerReferences) > 0 || len(now.Labels) > 0 {
		t.Errorf("the account = %+v, %v, want it as it was", now, err)
	}
}
