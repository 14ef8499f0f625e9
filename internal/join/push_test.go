package join_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func pushRequest(namespace string, kubeconfig []byte) join.PushRequest {
	return join.PushRequest{Request: join.Request{Namespace: namespace, Name: "c"}, Kubeconfig: kubeconfig}
}

func TestRegisterPushKeepsTheKubeconfig(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	loaded, err := clientcmd.LoadFromFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	own, err := clientcmd.Write(*loaded)
	if err != nil {
		t.Fatal(err)
	}
	// What else the file knows stays where it is.
	loaded.Clusters["other"] = &clientcmdapi.Cluster{Server: "https://other"}
	loaded.AuthInfos["other"] = &clientcmdapi.AuthInfo{Token: "secret"}
	loaded.Contexts["other"] = &clientcmdapi.Context{Cluster: "other", AuthInfo: "other"}
	kubeconfig, err := clientcmd.Write(*loaded)
	if err != nil {
		t.Fatal(err)
	}
	r := pushRequest(plane.Namespace(t, "push"), kubeconfig)
	for _, labels := range []map[string]string{{"env": "test"}, {"tier": "two"}} {
		r.Labels = labels
		if err := join.RegisterPush(t.Context(), plane.Config, r); err != nil {
			t.Fatal(err)
		}
	}
	cluster, secret := &libv1beta1.SveltosCluster{}, &corev1.Secret{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: "c"}, cluster); err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: "c-sveltos-kubeconfig"}, secret); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"env": "test", "tier": "two"}, cluster.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if cluster.Spec.PullMode || cluster.Spec.KubeconfigKeyName != "kubeconfig" {
		t.Errorf("spec: got %+v", cluster.Spec)
	}
	if diff := cmp.Diff(map[string][]byte{"kubeconfig": own}, secret.Data); diff != "" {
		t.Errorf("secret (-want +got):\n%s", diff)
	}
	if want := uidOf(t, hubClient); cluster.Annotations[kube.AnnotationMember] != want {
		t.Errorf("annotations are %v, want the member %s", cluster.Annotations, want)
	}
}

func uidOf(t *testing.T, reader client.Reader) string {
	t.Helper()
	uid, err := join.ClusterUID(t.Context(), reader)
	if err != nil {
		t.Fatal(err)
	}
	return uid
}

// kubeconfigOf returns the plane's kubeconfig after change.
func kubeconfigOf(t *testing.T, plane *localkube.Plane, change func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo)) []byte {
	t.Helper()
	loaded, err := clientcmd.LoadFromFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	current := loaded.Contexts[loaded.CurrentContext]
	change(loaded.Clusters[current.Cluster], loaded.AuthInfos[current.AuthInfo])
	out, err := clientcmd.Write(*loaded)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestRegisterPushRefusesAKubeconfigThatIsNotSelfContained(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	nowhere := &rest.Config{Host: "https://127.0.0.1:1"}
	for name, test := range map[string]struct {
		change func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo)
		want   string
	}{
		"exec plugin": {func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) {
			user.Exec = &clientcmdapi.ExecConfig{Command: "aws", APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: "Never"}
		}, `runs the program "aws"`},
		"auth provider": {func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) {
			user.AuthProvider = &clientcmdapi.AuthProviderConfig{Name: "gcp"}
		}, `auth provider "gcp"`},
		"ca file": {func(cluster *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			cluster.CertificateAuthority = "/etc/ca.crt"
		}, `certificate-authority is the file "/etc/ca.crt"`},
		"token file": {func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) { user.TokenFile = "/token" }, `tokenFile is the file`},
		"insecure": {func(cluster *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			cluster.InsecureSkipTLSVerify = true
		}, "does not verify the server's certificate"},
		"proxy": {func(cluster *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			cluster.ProxyURL = "http://me:se cret@proxy:3128"
		}, "its proxy-url is not an http://, https:// or socks5:// address"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := join.RegisterPush(t.Context(), nowhere, pushRequest("n", kubeconfigOf(t, plane, test.change)))
			wantText(t, err, "--kubeconfig: ")
			wantText(t, err, test.want)
		})
	}
	wantText(t, join.RegisterPush(t.Context(), nowhere, pushRequest("n", []byte("{"))), "--kubeconfig: it is not a kubeconfig")
	wantText(t, join.RegisterPush(t.Context(), nowhere, pushRequest("n", []byte("{}"))), `--kubeconfig: its current-context "" is not among its contexts`)
}

func TestRegisterPushRefusesAKubeconfigThatDoesNotWork(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "wrong")
	powerless, _ := agentConfig(t, registered(t, plane, pullRequest(namespace, "powerless")))
	before := inNamespace(t, hubClient, namespace)
	for name, test := range map[string]struct {
		change func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo)
		want   string
	}{
		"nobody there": {func(cluster *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) {
			cluster.Server = "https://127.0.0.1:1"
		}, "the server https://127.0.0.1:1 cannot be reached"},
		"credentials unknown": {func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) {
			*user = clientcmdapi.AuthInfo{Token: "nonsense"}
		}, "does not accept its credentials"},
		"no rights": {func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) {
			*user = clientcmdapi.AuthInfo{Token: powerless.BearerToken}
		}, "it may not create Secrets in namespace projectsveltos"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantText(t, join.RegisterPush(t.Context(), plane.Config, pushRequest(namespace, kubeconfigOf(t, plane, test.change))), test.want)
			if diff := cmp.Diff(before, inNamespace(t, hubClient, namespace)); diff != "" {
				t.Errorf("objects (-before +after):\n%s", diff)
			}
		})
	}
}

func TestAClusterKeepsItsMode(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	pulled, pushed := plane.Namespace(t, "pulled"), plane.Namespace(t, "pushed")
	registered(t, plane, pullRequest(pulled, "c"))
	wantText(t, join.RegisterPush(t.Context(), plane.Config, pushRequest(pulled, kubeconfig)), "it is registered in pull mode already")
	if err := join.RegisterPush(t.Context(), plane.Config, pushRequest(pushed, kubeconfig)); err != nil {
		t.Fatal(err)
	}
	wantText(t, join.RegisterPull(t.Context(), plane.Config, pullRequest(pushed, "c"), failing{}), "it is registered in push mode already")
}

func TestDeregisterLeavesNothing(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	n := plane.Namespace(t, "leave")
	registered(t, plane, pullRequest(n, "first"))
	registered(t, plane, pullRequest(n, "second"))
	if err := join.RegisterPush(t.Context(), plane.Config, pushRequest(n, kubeconfig)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{
		"c": {"SveltosCluster/{n}/c", "Secret/{n}/c-sveltos-kubeconfig"},
		"first": {
			"SveltosCluster/{n}/first", "RoleBinding/projectsveltos/{n}:first", "Lease/{n}/first", "RoleBinding/{n}/first", "Role/{n}/first",
			"Secret/{n}/first-sveltos-registration", "Secret/{n}/first-sveltos-agent", "ServiceAccount/{n}/first",
		},
		"second": {
			"SveltosCluster/{n}/second", "RoleBinding/projectsveltos/{n}:second", "Lease/{n}--second/second",
			"RoleBinding/{n}--second/second", "Role/{n}--second/second", "RoleBinding/{n}/second", "Role/{n}/second",
			"Secret/{n}/second-sveltos-registration", "Secret/{n}/second-sveltos-agent", "ServiceAccount/{n}/second", "Namespace//{n}--second",
		},
	} {
		departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: name}})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, ref := range departure.Deleted {
			got = append(got, fmt.Sprintf("%s/%s/%s", ref.Kind, ref.Namespace, ref.Name))
		}
		if diff := cmp.Diff(strings.Split(strings.ReplaceAll(strings.Join(want, " "), "{n}", n), " "), got); diff != "" {
			t.Errorf("deleted of %s (-want +got):\n%s", name, diff)
		}
	}
	if left := inNamespace(t, hubClient, n); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	_, err = join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "first"}})
	wantText(t, err, join.ErrNotRegistered.Error())
	// The namespace is free for the next cluster.
	if _, delivery := agentConfig(t, registered(t, plane, pullRequest(n, "next"))); delivery != n {
		t.Errorf("delivery namespace of the next cluster: got %s, want %s", delivery, n)
	}
}

func TestDeregisterCompletesAnInterruptedRun(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "cutoff")
	registered(t, plane, pullRequest(n, "first"))
	registered(t, plane, pullRequest(n, "second"))
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "second"}}
	if err := hubClient.Delete(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	if _, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "second"}}); err != nil {
		t.Fatal(err)
	}
	// The objects in the cluster's namespace may be deleted already; the others are deleted now.
	for _, left := range inNamespace(t, hubClient, kube.AgentNamespace) {
		if left == n+":second" {
			t.Errorf("left: %s", left)
		}
	}
	namespace := &corev1.Namespace{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Name: n + "--second"}, namespace); err == nil && namespace.DeletionTimestamp == nil {
		t.Errorf("left: namespace %s", namespace.Name)
	}
}
