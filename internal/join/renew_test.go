package join_test

import (
	"context"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
)

// renewal returns a Renewal for the clusters of p, and its clock.
func (p push) renewal(t *testing.T, hub *rest.Config) (join.Renewal, *testclock.FakePassiveClock) {
	t.Helper()
	hubClient, err := client.New(hub, client.Options{Scheme: p.hubClient.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	clock := testclock.NewFakePassiveClock(time.Now())
	return join.Renewal{Hub: hubClient, Clock: clock, Member: func(_ context.Context, cluster *libv1beta1.SveltosCluster) (*rest.Config, error) {
		return p.config(t, cluster), nil
	}}, clock
}

func run(t *testing.T, r join.Renewal, cluster *libv1beta1.SveltosCluster) time.Duration {
	t.Helper()
	next, err := r.Run(t.Context(), cluster)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// wantAbout checks a time that depends on how long the test takes.
func wantAbout(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if got > want || got < want-time.Minute {
		t.Errorf("%s: got %s, want %s", what, got, want)
	}
}

func renew(t *testing.T, p push) {
	cluster := p.register(t, p.request("c"))
	first := p.config(t, cluster)
	r, clock := p.renewal(t, p.hub.Config)
	wantAbout(t, "a fresh token", run(t, r, cluster), 50*time.Minute)
	clock.SetTime(clock.Now().Add(51 * time.Minute))
	run(t, r, cluster)
	live := p.cluster(t, "c")
	if live.Spec.KubeconfigKeyName != "re-kubeconfig" || live.Status.LastReconciledTokenRequestAt != clock.Now().UTC().Format(time.RFC3339) {
		t.Errorf("after: got %+v, %+v", live.Spec, live.Status)
	}
	if cluster.Spec.KubeconfigKeyName != "re-kubeconfig" || cluster.Status.LastReconciledTokenRequestAt == "" {
		t.Errorf("what the caller has: %+v, %+v", cluster.Spec, cluster.Status)
	}
	if second := p.config(t, live); second.BearerToken == first.BearerToken {
		t.Error("the token is the old one")
	}
	p.wantEverythingAllowed(t, p.config(t, live))
	wantAbout(t, "a renewed token", run(t, r, live), 50*time.Minute)
	// The issuer gives less than the interval.
	live.Spec.TokenRequestRenewalOption.TokenDuration.Duration = 10 * time.Minute
	live.Spec.TokenRequestRenewalOption.RenewTokenRequestInterval.Duration = 5 * time.Hour
	if err := p.hubClient.Update(t.Context(), live); err != nil {
		t.Fatal(err)
	}
	clock.SetTime(time.Now().Add(5 * time.Hour))
	if next := run(t, r, live); next > 8*time.Minute {
		t.Errorf("a token of ten minutes is renewed after %s", next)
	}
	// Without the option, or in pull mode, nothing is renewed.
	live.Spec.TokenRequestRenewalOption = nil
	if next := run(t, r, live); next != 0 {
		t.Errorf("without the option: got %s, want 0", next)
	}
}

func renewAgain(t *testing.T, p push) {
	cluster := p.register(t, p.request("c"))
	r, clock := p.renewal(t, p.hub.Config)
	clock.SetTime(clock.Now().Add(time.Hour))
	run(t, r, cluster)
	renewed := p.config(t, cluster)
	// Registering again after a renewal leaves the new kubeconfig in use.
	again := p.request("c")
	again.Member = nil
	var err error
	if again.Kubeconfig, err = join.GenerateKubeconfig(t.Context(), p.member.Config, join.GenerateRequest{}); err != nil {
		t.Fatal(err)
	}
	cluster = p.register(t, again)
	if got := string(p.kubeconfig(t, cluster)); got != string(again.Kubeconfig) {
		t.Error("the kubeconfig in use is not the one that was registered last")
	}
	// And it goes on being renewed.
	clock.SetTime(clock.Now().Add(time.Hour))
	run(t, r, cluster)
	cluster = p.cluster(t, "c")
	if got := p.config(t, cluster); got.BearerToken == renewed.BearerToken || string(p.kubeconfig(t, cluster)) == string(again.Kubeconfig) {
		t.Error("it was not renewed again")
	}
	p.wantEverythingAllowed(t, p.config(t, cluster))

	// A token that may do nothing is not taken, and the old one goes on.
	member := p.memberClient(t)
	if _, err := member.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	option := cluster.Spec.TokenRequestRenewalOption
	option.SANamespace, option.SAName, option.KubeconfigKeyName = "default", "default", "mine"
	if err := p.hubClient.Update(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	clock.SetTime(clock.Now().Add(time.Hour))
	before := p.kubeconfig(t, cluster)
	next, err := r.Run(t.Context(), cluster)
	wantText(t, err, "try the new token: it may not create Secrets")
	if next != time.Minute || string(p.kubeconfig(t, p.cluster(t, "c"))) != string(before) {
		t.Errorf("after a refused token: next %s, or another kubeconfig", next)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "default-admin"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "default"}},
	}
	if _, err := member.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is renewed for the account and under the key that the option names", func() bool {
		_, err := r.Run(t.Context(), cluster)
		return err == nil && p.cluster(t, "c").Spec.KubeconfigKeyName == "mine"
	})
	p.wantEverythingAllowed(t, p.config(t, p.cluster(t, "c")))
}

// renewalCutOff cuts a renewal off at each of its requests to the hub: the kubeconfig in use works all the time.
func renewalCutOff(t *testing.T, p push) {
	for _, what := range []trouble{notSent, noAnswer, stopped} {
		failures := 0
		for n := int32(1); n < 30; n++ {
			cluster := p.register(t, p.request("c"))
			ctx, cancel := context.WithCancel(t.Context())
			r, clock := p.renewal(t, disturbed(p.hub.Config, n, what, cancel))
			clock.SetTime(clock.Now().Add(100 * time.Minute))
			_, err := r.Run(ctx, cluster)
			cancel()
			live := p.cluster(t, "c")
			p.wantEverythingAllowed(t, p.config(t, live))
			// It is made good by the next run.
			r, clock = p.renewal(t, p.hub.Config)
			clock.SetTime(clock.Now().Add(200 * time.Minute))
			run(t, r, live)
			p.wantEverythingAllowed(t, p.config(t, p.cluster(t, "c")))
			if err := p.hubClient.Delete(t.Context(), live); err != nil {
				t.Fatal(err)
			}
			if err == nil {
				break
			}
			failures++
		}
		if failures < 4 {
			t.Errorf("%s: got %d failures, want one for each request", what, failures)
		}
	}
}

// renewalOvertaken registers the cluster again while its token is being renewed.
func renewalOvertaken(t *testing.T, p push) {
	kubeconfig, err := os.ReadFile(p.member.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	again := p.request("c")
	again.Member, again.Kubeconfig = nil, kubeconfig
	for n := int32(1); n < 30; n++ {
		cluster := p.register(t, p.request("c"))
		r, clock := p.renewal(t, disturbed(p.hub.Config, n, stopped, func() { p.register(t, again) }))
		clock.SetTime(clock.Now().Add(100 * time.Minute))
		_, err := r.Run(t.Context(), cluster)
		live := p.cluster(t, "c")
		if live.Annotations[join.AnnotationMemberIdentity] == "true" {
			return // the renewal was through
		}
		if got := p.kubeconfig(t, live); string(got) != string(kubeconfig) {
			t.Errorf("registered again at request %d of the renewal (%v): the kubeconfig in use is another one", n, err)
		}
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: join.KubeconfigSecret("c")}}
		if err := p.hubClient.Delete(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		if err := p.hubClient.Delete(t.Context(), live); err != nil {
			t.Fatal(err)
		}
	}
	t.Error("the renewal never came to its end")
}
