package fleet_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

func TestFromSveltosCluster(t *testing.T) {
	t.Parallel()
	meta := metav1.ObjectMeta{Namespace: "eu", Name: "one"}
	tests := map[string]struct {
		cluster libv1beta1.SveltosCluster
		want    fleet.Member
	}{
		"push reads the default Secret": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Push, KubeconfigSecret: "one-sveltos-kubeconfig"},
		},
		"push reads the named Secret": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta, Spec: libv1beta1.SveltosClusterSpec{KubeconfigName: "k", KubeconfigKeyName: "v"}},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Push, KubeconfigSecret: "k", KubeconfigKey: "v"},
		},
		"pull is delivered to in its own namespace": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu"},
		},
		"pull is delivered to where the annotation says": {
			cluster: libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "one", Annotations: map[string]string{"towline.dev/delivery-namespace": "eu--one"}},
				Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
				Status:     libv1beta1.SveltosClusterStatus{Ready: true, ConnectionStatus: libv1beta1.ConnectionDown, FailureMessage: "silent", Version: "v1.2.3"},
			},
			want: fleet.Member{
				Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu--one",
				Ready: true, Down: true, DownMessage: "silent", KubernetesVersion: "v1.2.3",
			},
		},
		"pull is refused where the annotation names the namespace of others": {
			cluster: libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "prod", Annotations: map[string]string{"towline.dev/delivery-namespace": "b--prod"}},
				Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
			},
			want: fleet.Member{
				Type: fleet.TypeSveltos, Namespace: "a", Name: "prod", Mode: fleet.Pull, DeliveryNamespace: "a",
				Refused: "annotation towline.dev/delivery-namespace names a namespace that is not the cluster's",
			},
		},
		"an identity instead of a kubeconfig": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta, Spec: libv1beta1.SveltosClusterSpec{WorkloadIdentity: &libv1beta1.WorkloadIdentity{Provider: "GCP"}}},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Push, Identity: &libv1beta1.WorkloadIdentity{Provider: "GCP"}},
		},
		"an identity in pull mode is refused": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta, Spec: libv1beta1.SveltosClusterSpec{PullMode: true, WorkloadIdentity: &libv1beta1.WorkloadIdentity{}}},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu", Refused: "spec.workloadIdentity in pull mode is not supported yet"},
		},
		"an identity that is not acted on is named": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: meta, Spec: libv1beta1.SveltosClusterSpec{WorkloadIdentity: &libv1beta1.WorkloadIdentity{Provider: "OIDC"}}},
			want: fleet.Member{
				Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Push, Identity: &libv1beta1.WorkloadIdentity{Provider: "OIDC"},
				Refused: "spec.workloadIdentity.provider OIDC is not supported yet",
			},
		},
		"a shard": {
			cluster: libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "one", Annotations: map[string]string{"sharding.projectsveltos.io/key": "s1"}},
				Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
			},
			want: fleet.Member{
				Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu",
				Shard: "s1", CacheMayLackObjects: true,
			},
		},
		"patches for an agent that we do not have are refused": {
			cluster: libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "eu", Name: "one", Annotations: map[string]string{"driftdetection.projectsveltos.io/config-override-ref": "eu/patches", "other": "x"},
				},
				Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
			},
			want: fleet.Member{
				Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu",
				Refused: "annotation driftdetection.projectsveltos.io/config-override-ref is not supported yet",
			},
		},
		"patches for our agent are not": {
			cluster: libv1beta1.SveltosCluster{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "eu", Name: "one", Annotations: map[string]string{"sveltosapplier.projectsveltos.io/config-override-ref": "eu/patches"},
				},
				Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
			},
			want: fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "eu"},
		},
		"the hub needs no Secret": {
			cluster: libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "mgmt", Name: "mgmt"}},
			want:    fleet.Member{Type: fleet.TypeSveltos, Namespace: "mgmt", Name: "mgmt", Mode: fleet.Push},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.want.MemberNamespace = "projectsveltos"
			if diff := cmp.Diff(tc.want, fleet.FromSveltosCluster(&tc.cluster)); diff != "" {
				t.Errorf("FromSveltosCluster() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPullNameIsBounded(t *testing.T) {
	t.Parallel()
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: strings.Repeat("a", 64)}}
	if got := fleet.FromSveltosCluster(cluster).Refused; got != "" {
		t.Errorf("in push mode: refused for %q", got)
	}
	cluster.Spec.PullMode = true
	if got := fleet.FromSveltosCluster(cluster).Refused; got != "metadata.name: the name of a cluster in pull mode may have 63 characters at most" {
		t.Errorf("in pull mode: refused for %q", got)
	}
}

func TestDerivedNamespaceIsUnique(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 63)
	seen := map[string]string{}
	for _, pair := range [][2]string{{"a", "b"}, {"a", "b--c"}, {"a--b", "c"}, {"a", long}, {long, "a"}, {"a", "b.c"}, {"a", "b-c"}} {
		got := fleet.DerivedNamespace(pair[0], pair[1])
		if problems := validation.IsDNS1123Label(got); len(problems) > 0 {
			t.Errorf("DerivedNamespace(%q): %q: %v", pair, got, problems)
		}
		if other, taken := seen[got]; taken {
			t.Errorf("DerivedNamespace(%q) = %q, as for %s", pair, got, other)
		}
		seen[got] = pair[0] + "/" + pair[1]
	}
}

func TestPlainVersion(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"v1.31.6+k3s1": "v1.31.6", "v1.32.5-rc.1+rke2r1": "v1.32.5", "v1.30.5": "v1.30.5", "": "", "odd": ""} {
		if got := fleet.PlainVersion(in); got != want {
			t.Errorf("PlainVersion(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseKubeconfigRejectsExternalReferences(t *testing.T) {
	t.Parallel()
	config := func(cluster, user string) string {
		return `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"k","user":"u"}}],` +
			`"clusters":[{"name":"k","cluster":{"server":"https://127.0.0.1:1"` + cluster + `}}],"users":[{"name":"u","user":{` + user + `}}]}`
	}
	tests := map[string]struct{ raw, wantErr string }{
		"a token is fine":  {raw: config("", `"token":"t"`)},
		"a program":        {raw: config("", `"exec":{"apiVersion":"client.authentication.k8s.io/v1","command":"sh"}`), wantErr: `user "u": exec plugins`},
		"a token file":     {raw: config("", `"tokenFile":"/etc/passwd"`), wantErr: "files are not read; embed the content with: kubectl config view"},
		"a CA file":        {raw: config(`,"certificate-authority":"/etc/passwd"`, ""), wantErr: `cluster "k": it refers to a file`},
		"an unchecked TLS": {raw: config(`,"insecure-skip-tls-verify":true`, ""), wantErr: "insecure-skip-tls-verify"},
		"no kubeconfig":    {raw: "{", wantErr: "parse kubeconfig"},
		"an empty one":     {raw: "", wantErr: "parse kubeconfig"},
		"aliases": {
			raw:     "apiVersion: v1\nkind: Config\npreferences: &a " + strings.Repeat("x", 50<<10) + "\nextensions: [" + strings.Repeat("*a, ", 500) + "]\n",
			wantErr: "parse kubeconfig: aliases make it too large",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := fleet.ParseKubeconfig([]byte(tc.raw))
			if tc.wantErr == "" {
				if err != nil || got.BearerToken != "t" {
					t.Errorf("ParseKubeconfig() = %v, %v", got, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
				t.Errorf("ParseKubeconfig() error = %v, want %q", err, tc.wantErr)
			}
		})
	}
}
