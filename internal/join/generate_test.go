package join_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/join"
)

func registerAgainByKubeconfig(t *testing.T, p push) {
	cluster := p.register(t, p.request("c"))
	made := p.kubeconfig(t, cluster)
	r := p.request("c")
	r.Member = nil
	// A token that can be renewed goes on being renewed, a certificate cannot.
	if r.Kubeconfig = made; p.register(t, r).Spec.TokenRequestRenewalOption == nil {
		t.Error("tokenRequestRenewalOption is gone with a token")
	}
	// What is taken off is put back when the registration fails.
	var err error
	for n := int32(1); ; n++ {
		if r.Kubeconfig, err = os.ReadFile(p.member.Kubeconfig); err != nil {
			t.Fatal(err)
		}
		cluster = p.register(t, p.request("c"))
		before := p.kubeconfig(t, cluster)
		if err := join.RegisterPush(t.Context(), disturbed(p.hub.Config, n, noAnswer, nil), r); err == nil {
			break
		}
		after := p.cluster(t, "c")
		if diff := cmp.Diff(cluster.Spec, after.Spec); diff != "" || after.Annotations[join.AnnotationMemberIdentity] != "true" {
			t.Errorf("after trouble with request %d: annotations %v, spec (-before +after):\n%s", n, after.Annotations, diff)
		}
		if got := p.kubeconfig(t, after); string(got) != string(before) {
			t.Errorf("after trouble with request %d: another kubeconfig", n)
		}
	}
	if r.Kubeconfig, err = os.ReadFile(p.member.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	cluster = p.register(t, r)
	if cluster.Spec.TokenRequestRenewalOption != nil || cluster.Annotations[join.AnnotationMemberIdentity] != "" {
		t.Errorf("with a certificate: got %+v, annotations %v", cluster.Spec, cluster.Annotations)
	}
	if diff := cmp.Diff(string(r.Kubeconfig), string(p.kubeconfig(t, cluster))); diff != "" {
		t.Errorf("kubeconfig (-want +got):\n%s", diff)
	}
	// The cluster has no AnnotationMemberIdentity, so the identity must stay.
	if err := join.DeleteMemberObjects(t.Context(), p.member.Config, p.hubUID, cluster); err != nil {
		t.Fatal(err)
	}
	p.wantOnMember(t, wholeIdentity...)
}

func (p push) generated(t *testing.T, r join.GenerateRequest) *rest.Config {
	t.Helper()
	kubeconfig, err := join.GenerateKubeconfig(t.Context(), p.member.Config, r)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func generate(t *testing.T, p push) {
	_, err := join.GenerateKubeconfig(t.Context(), p.member.Config, join.GenerateRequest{})
	wantText(t, err, "ServiceAccount projectsveltos/projectsveltos does not exist; --create makes it")
	p.wantOnMember(t)
	p.wantEverythingAllowed(t, p.generated(t, join.GenerateRequest{Create: true}))
	p.wantEverythingAllowed(t, p.generated(t, join.GenerateRequest{ExpirationSeconds: 600}))
	p.wantEverythingAllowed(t, p.generated(t, join.GenerateRequest{ServiceAccountToken: true}))
	if _, err := p.memberClient(t).CoreV1().Secrets("projectsveltos").Get(t.Context(), "projectsveltos", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	p.wantEverythingAllowed(t, p.generated(t, join.GenerateRequest{Create: true, ServiceAccount: "other"}))
	// What people were given does not go with a registration.
	p.register(t, p.request("c"))
	p.takeOff(t, "c")
	p.wantOnMember(t,
		"ClusterRole projectsveltos", "ClusterRoleBinding projectsveltos", "ClusterRoleBinding projectsveltos:projectsveltos:other",
		"ServiceAccount other", "ServiceAccount projectsveltos", "Secret projectsveltos")
	// A Secret of that name that holds something else is left alone.
	member := p.memberClient(t)
	taken := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Data: map[string][]byte{"a": []byte("b")}}
	if _, err := member.CoreV1().Secrets("projectsveltos").Create(t.Context(), taken, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = join.GenerateKubeconfig(t.Context(), p.member.Config, join.GenerateRequest{ServiceAccount: "other", ServiceAccountToken: true})
	wantText(t, err, "it exists and holds no token of ServiceAccount projectsveltos/other")
	if _, err := member.CoreV1().Secrets("projectsveltos").Get(t.Context(), "other", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

func generateIsUndone(t *testing.T, p push) {
	attempts := 0
	everyInterruption(t, func(ctx context.Context, disturb func(*rest.Config) *rest.Config) error {
		attempts++
		_, err := join.GenerateKubeconfig(ctx, disturb(p.member.Config), join.GenerateRequest{Create: true, ServiceAccountToken: attempts%2 == 0})
		if err == nil {
			p.clear(t)
		}
		return err
	}, func(what string) { p.wantNothing(t, what) })
}

func TestRequestsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	unsafe := &rest.Config{Host: "https://127.0.0.1:1", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	cluster := join.Request{Namespace: "n", Name: "c"}
	for name, test := range map[string]struct {
		request interface{ Validate() error }
		want    string
	}{
		"no check of the cluster": {
			join.PushRequest{Request: cluster, Member: unsafe}, "--fleet-cluster-context: the context does not verify",
		},
		"a life too short":      {join.GenerateRequest{ExpirationSeconds: 599}, "--expirationSeconds: 599 is less than 600"},
		"a life without end":    {join.GenerateRequest{ExpirationSeconds: int64(time.Hour / time.Second), ServiceAccountToken: true}, "does not expire"},
		"an impossible name":    {join.GenerateRequest{ServiceAccount: "A/B"}, "--serviceaccount"},
		"an impossible address": {join.GenerateRequest{Namespace: "a.b"}, "--namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantText(t, test.request.Validate(), test.want)
		})
	}
	_, err := join.GenerateKubeconfig(t.Context(), unsafe, join.GenerateRequest{})
	wantText(t, err, "does not verify the cluster's certificate")
}
