package cli_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
)

func TestWrongArgumentsForWorkloadIdentitiesFailBeforeConnecting(t *testing.T) {
	t.Setenv("KUBECONFIG", "/does/not/exist")
	broken := filepath.Join(t.TempDir(), "broken.crt")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	const (
		who = " --namespace=n --cluster=c --endpoint=https://e"
		eks = "sveltosctl register cluster-eks" + who + " --eks-cluster-name=k"
		gke = "sveltosctl register cluster-gke" + who + " --project-id=p --gke-cluster-name=k --location=l"
		aks = "sveltosctl register cluster-aks" + who + " --tenant-id=t --client-id=c"
	)
	without := func(command, flag string) string {
		var kept []string
		for _, word := range strings.Fields(command) {
			if !strings.HasPrefix(word, flag+"=") {
				kept = append(kept, word)
			}
		}
		return strings.Join(kept, " ")
	}
	wants := map[string]string{
		eks + " --endpoint=http://e":             `--endpoint: "http://e" is not an https address`,
		eks + " --region=a.b":                    `"a.b" is not a region`,
		eks + " --ca-file=/missing":              "--ca-file: open /missing: no such file or directory",
		eks + " --ca-file=" + broken:             "--ca-file: ",
		gke + " --labels=x":                      "--labels: invalid key-value pair format: x",
		aks + " --shard=a/b":                     `--shard: "a/b" is not a key`,
		eks + " --project-id=p":                  "unknown flag: --project-id",
		eks + " --role-arn=r --region=eu-west-1": "no kubeconfig for the hub found",
		gke + " --verbose":                       "no kubeconfig for the hub found",
		aks + " --subscription-id=s --resource-group=r --aks-cluster-name=a --labels=k=v --shard=s": "no kubeconfig for the hub found",
	}
	for command, flags := range map[string][]string{
		eks: {"--namespace", "--cluster", "--endpoint", "--eks-cluster-name"},
		gke: {"--namespace", "--cluster", "--endpoint", "--project-id", "--gke-cluster-name", "--location"},
		aks: {"--namespace", "--cluster", "--endpoint", "--tenant-id", "--client-id"},
	} {
		for _, flag := range flags {
			wants[without(command, flag)] = flag + " is required"
		}
	}
	for args, want := range wants {
		got := run(t, strings.Fields(args)...)
		if got.code != 1 || got.out != "" || !strings.HasPrefix(got.err, "error: ") || !strings.Contains(got.err, want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%s: got %+v, want code 1 and one line with %q", args, got, want)
		}
	}
}

// serveGoogleTokens serves the token endpoint of Google. Without a stored token it responds with an error.
func serveGoogleTokens(t *testing.T) *atomic.Value {
	t.Helper()
	answer := &atomic.Value{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		token := answer.Load()
		if token == nil {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = fmt.Fprint(w, `{"error":"invalid_grant","error_description":"account disabled"}`)
			return
		}
		_, _ = fmt.Fprintf(w, `{"access_token":%q,"token_type":"Bearer","expires_in":3600}`, token)
	}))
	t.Cleanup(server.Close)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	credentials, err := json.Marshal(map[string]string{
		"type": "service_account", "client_email": "hub@example.iam.gserviceaccount.com", "token_uri": server.URL,
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "credentials.json")
	if err := os.WriteFile(file, credentials, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
	return answer
}

// createAdminToken creates a ServiceAccount with full permissions on the member, and returns its token.
func (w *hubAndMember) createAdminToken(t *testing.T) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cloud"}}
	request := &authenticationv1.TokenRequest{}
	for _, err := range []error{
		w.member.Create(t.Context(), account),
		w.member.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "cloud"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "cloud"}},
		}),
		w.member.SubResource("token").Create(t.Context(), account, request),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return request.Status.Token
}

func waitUntil(t *testing.T, condition string, check func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("wait until %s: %v", condition, last)
	}
}

// TestClusterWithoutAKubeconfig shows a member that the hub connects to with its own cloud identity.
func TestClusterWithoutAKubeconfig(t *testing.T) {
	w, answer := startHubAndMember(t), serveGoogleTokens(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- hub.Run(ctx, w.hubPlane.Config, hub.Options{
			CacheDir: t.TempDir(), Identity: fleet.IdentityPolicy{Namespaces: []string{"gcp"}, Hosts: []string{"127.0.0.1"}},
		})
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("hub: %v", err)
		}
	}()
	ca := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(ca, w.memberPlane.Config.CAData, 0o600); err != nil {
		t.Fatal(err)
	}
	got := run(t, "sveltosctl", "register", "cluster-gke", "--namespace=gcp", "--cluster=prod", "--endpoint="+w.memberPlane.Config.Host, "--ca-file="+ca,
		"--project-id=shop", "--gke-cluster-name=prod", "--location=europe-west1", "--labels=env=test")
	if want := (result{out: "cluster prod successfully registered/updated in namespace gcp.\n"}); got != want {
		t.Fatalf("register: got %+v, want %+v", got, want)
	}
	cluster := &libv1beta1.SveltosCluster{}
	waitUntil(t, "the hub reports why there is no token", func(ctx context.Context) error {
		if err := w.hub.Get(ctx, client.ObjectKey{Namespace: "gcp", Name: "prod"}, cluster); err != nil {
			return err
		}
		if message := cluster.Status.FailureMessage; !strings.Contains(message, "workload identity: get a token from GCP: 127.0.0.1:") ||
			!strings.Contains(message, "answered 400 Bad Request: invalid_grant: account disabled") || strings.Contains(message, "\n") {
			return fmt.Errorf("failureMessage is %q", message)
		}
		return nil
	})
	answer.Store(w.createAdminToken(t))
	began := time.Now()
	waitUntil(t, "the cluster is ready", func(ctx context.Context) error {
		// A change makes the hub retry at once instead of after a minute.
		touch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"data":{"touch":"%.0f"}}}`, time.Since(began).Seconds()))
		if err := w.hub.Patch(ctx, cluster, touch); err != nil || !cluster.Status.Ready {
			return fmt.Errorf("status is %+v, error %w", cluster.Status, err)
		}
		return nil
	})
	for _, obj := range []client.Object{
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "gcp", Name: "content"}, Data: map[string]string{
			"welcome.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: welcome\n  namespace: default\n",
		}},
		&configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: "welcome"}, Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "test"}},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "gcp", Name: "content"}},
		}},
	} {
		if err := w.hub.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	welcome := client.ObjectKey{Namespace: "default", Name: "welcome"}
	waitUntil(t, "the content is on the member", func(ctx context.Context) error {
		return w.member.Get(ctx, welcome, &corev1.ConfigMap{})
	})
	if err := w.hub.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil || !cluster.Status.Ready || cluster.Status.FailureMessage != "" {
		t.Errorf("status is %+v, error %v", cluster.Status, err)
	}
	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=gcp", "--cluster=prod")
	want := "Successfully deregistered cluster gcp/prod\n\nDeleted resources:\n  - SveltosCluster/gcp/prod\n  - Secret/gcp/prod-sveltos-ca\n"
	if got.code != 0 || got.out != want {
		t.Errorf("deregister: got %+v, want output %q", got, want)
	}
	if err := w.member.Get(t.Context(), welcome, &corev1.ConfigMap{}); !apierrors.IsNotFound(err) {
		t.Errorf("the content after the cluster has left: error %v", err)
	}
}
