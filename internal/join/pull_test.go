package join_test

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

var update = flag.Bool("update", false, "write golden files anew")

// fields of the manifest that differ from run to run.
var credentials = regexp.MustCompile(`(?m)^  kubeconfig: .*$`)

func TestRegisterPullPrintsTheManifest(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	// The names are in the golden file, so that the namespace cannot be a generated one.
	manifest := registered(t, plane, pullRequest("rke2", "cluster01"))
	got := credentials.ReplaceAllString(string(manifest), "  kubeconfig: <kubeconfig>")
	golden := filepath.Join("testdata", "manifest.yaml")
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("manifest (-want +got):\n%s", diff)
	}
	config, delivery := agentConfig(t, manifest)
	if config.Host != plane.Config.Host || delivery != "rke2" {
		t.Errorf("kubeconfig: got %s and %s, want %s and rke2", config.Host, delivery, plane.Config.Host)
	}
}

func TestRegisterPullKeepsNoCredentialOnTheHub(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "nosecret")
	registered(t, plane, pullRequest(namespace, "c"))
	secrets := &corev1.SecretList{}
	if err := hubClient.List(t.Context(), secrets, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, secret := range secrets.Items {
		names = append(names, secret.Name)
		if len(secret.Data) > 0 {
			t.Errorf("secret %s: got %d keys, want none", secret.Name, len(secret.Data))
		}
	}
	if diff := cmp.Diff([]string{join.AnchorSecret("c"), join.RegistrationSecret("c")}, names); diff != "" {
		t.Errorf("secrets (-want +got):\n%s", diff)
	}
}

func TestRegisterPullUsesTheGivenAddress(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	r := pullRequest(plane.Namespace(t, "address"), "c")
	r.Options.HubURL = "https://hub.example.com:6443"
	config, _ := agentConfig(t, registered(t, plane, r))
	if config.Host != r.Options.HubURL {
		t.Errorf("host: got %s, want %s", config.Host, r.Options.HubURL)
	}
	if len(config.CAData) == 0 {
		t.Error("the hub's certificate authority is missing")
	}
}

func TestRegisterAgainAddsLabelsAndRepairs(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "again"), "c")
	r.Labels = map[string]string{"env": "test", "tier": "one"}
	registered(t, plane, r)
	key := client.ObjectKey{Namespace: r.Namespace, Name: r.Name}
	broken := &rbacv1.Role{}
	if err := hubClient.Get(t.Context(), key, broken); err != nil {
		t.Fatal(err)
	}
	broken.Rules = nil
	if err := hubClient.Update(t.Context(), broken); err != nil {
		t.Fatal(err)
	}

	r.Labels = map[string]string{"env": "prod"}
	config, _ := agentConfig(t, registered(t, plane, r))

	cluster := &libv1beta1.SveltosCluster{}
	if err := hubClient.Get(t.Context(), key, cluster); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"env": "prod", "tier": "one"}, cluster.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if !cluster.Spec.PullMode {
		t.Error("the cluster is not in pull mode")
	}
	if !allowed(t, config, "list lib.projectsveltos.io/configurationgroups "+r.Namespace) {
		t.Error("the Role was not repaired")
	}
}

// allowed asks the hub whether the owner of config may do "verb group/resource[/subresource] namespace[/name]".
func allowed(t *testing.T, config *rest.Config, what string) bool {
	t.Helper()
	words := strings.Split(what, " ")
	attributes := &authorizationv1.ResourceAttributes{Verb: words[0]}
	var resource string
	attributes.Group, resource, _ = strings.Cut(words[1], "/")
	attributes.Resource, attributes.Subresource, _ = strings.Cut(resource, "/")
	attributes.Namespace, attributes.Name, _ = strings.Cut(words[2], "/")
	review, err := kubernetes.NewForConfigOrDie(config).AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(),
		&authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return review.Status.Allowed
}

func TestAgentMayDoItsWorkAndNothingElse(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	n := plane.Namespace(t, "least")
	config, delivery := agentConfig(t, registered(t, plane, pullRequest(n, "c")))
	other, derived := agentConfig(t, registered(t, plane, pullRequest(n, "d")))
	if delivery != n || derived != n+"--d" {
		t.Fatalf("delivery namespaces: got %s and %s, want %s and %s--d", delivery, derived, n, n)
	}
	lib := "lib.projectsveltos.io/"
	for what, want := range map[string]bool{
		"get " + lib + "configurationgroups " + n:               true,
		"list " + lib + "configurationgroups " + n:              true,
		"watch " + lib + "configurationgroups " + n:             true,
		"patch " + lib + "configurationgroups/status " + n:      true,
		"get " + lib + "configurationbundles " + n + "/x":       true,
		"get " + lib + "configurationbundles projectsveltos/x":  true,
		"get " + lib + "sveltosclusters " + n + "/c":            true,
		"watch " + lib + "sveltosclusters " + n + "/c":          true,
		"patch " + lib + "sveltosclusters/status " + n + "/c":   true,
		"create /serviceaccounts/token " + n + "/c":             true,
		"patch coordination.k8s.io/leases " + n + "/c":          true,
		"get /secrets " + n + "/" + fleet.ContentKeySecret("c"): true,

		"update " + lib + "configurationgroups " + n:                  false,
		"patch " + lib + "configurationgroups " + n:                   false,
		"list " + lib + "configurationbundles " + n:                   false,
		"watch " + lib + "configurationbundles " + n:                  false,
		"list " + lib + "configurationbundles projectsveltos":         false,
		"list " + lib + "configurationgroups projectsveltos":          false,
		"get " + lib + "configurationgroups " + derived:               false,
		"get " + lib + "configurationbundles " + derived + "/x":       false,
		"list " + lib + "sveltosclusters " + n:                        false,
		"get " + lib + "sveltosclusters " + n + "/d":                  false,
		"patch " + lib + "sveltosclusters " + n + "/c":                false,
		"patch " + lib + "sveltosclusters/status " + n + "/d":         false,
		"create /serviceaccounts/token " + n + "/d":                   false,
		"patch coordination.k8s.io/leases " + n + "/d":                false,
		"create coordination.k8s.io/leases " + n:                      false,
		"delete coordination.k8s.io/leases " + n + "/c":               false,
		"get /secrets " + n:                                           false,
		"get /secrets " + n + "/" + fleet.ContentKeySecret("d"):       false,
		"get /secrets " + derived + "/" + fleet.ContentKeySecret("d"): false,
		"list /secrets " + n:                                          false,
		"update /secrets " + n + "/" + fleet.ContentKeySecret("c"):    false,
		"get /secrets projectsveltos":                                 false,
		"get /configmaps " + n:                                        false,
		"list config.projectsveltos.io/clustersummaries " + n:         false,
		"patch config.projectsveltos.io/clustersummaries " + n:        false,
	} {
		if got := allowed(t, config, what); got != want {
			t.Errorf("first cluster may %s: got %t, want %t", what, got, want)
		}
	}
	for what, want := range map[string]bool{
		"list " + lib + "configurationgroups " + derived:      true,
		"patch coordination.k8s.io/leases " + derived + "/d":  true,
		"patch " + lib + "sveltosclusters/status " + n + "/d": true,
		"list " + lib + "configurationgroups " + n:            false,
		"get " + lib + "configurationbundles " + n + "/x":     false,
		"patch " + lib + "sveltosclusters/status " + n + "/c": false,
		"patch " + lib + "configurationgroups/status " + n:    false,
		"create /serviceaccounts/token " + n + "/c":           false,
	} {
		if got := allowed(t, other, what); got != want {
			t.Errorf("second cluster may %s: got %t, want %t", what, got, want)
		}
	}
}

// inNamespace lists the objects that a registration could leave in a namespace, as Kind/name.
func inNamespace(t *testing.T, hubClient client.Client, namespace string) []string {
	t.Helper()
	found := []string{}
	for _, list := range []client.ObjectList{
		&corev1.ServiceAccountList{}, &corev1.SecretList{}, &rbacv1.RoleList{}, &rbacv1.RoleBindingList{}, &coordinationv1.LeaseList{}, &libv1beta1.SveltosClusterList{},
	} {
		if err := hubClient.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
			t.Fatal(err)
		}
		for _, obj := range items(t, list) {
			if name := obj.GetName(); name != "default" && (namespace != kube.AgentNamespace || strings.Contains(name, ":")) {
				found = append(found, name)
			}
		}
	}
	return found
}

func TestFailedRegistrationLeavesNothing(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	full := errors.New("no space left on device")
	tests := map[string]func(namespace string) error{
		"output fails": func(namespace string) error {
			return join.RegisterPull(t.Context(), plane.Config, pullRequest(namespace, "c"), failing{full})
		},
		"interrupted": func(namespace string) error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			config := rest.CopyConfig(plane.Config)
			config.Wrap(cancelOn(cancel, "/token"))
			return join.RegisterPull(ctx, config, pullRequest(namespace, "c"), io.Discard)
		},
	}
	for name, register := range tests {
		t.Run(name, func(t *testing.T) {
			namespace := "left-" + strings.ReplaceAll(name, " ", "-")
			if err := register(namespace); err == nil {
				t.Fatal("got no error")
			}
			if left := inNamespace(t, hubClient, namespace); len(left) > 0 {
				t.Errorf("left in namespace: %v", left)
			}
			for _, name := range inNamespace(t, hubClient, kube.AgentNamespace) {
				if strings.HasPrefix(name, namespace+":") {
					t.Errorf("left: %s", name)
				}
			}
			made := &corev1.Namespace{}
			if err := hubClient.Get(t.Context(), client.ObjectKey{Name: namespace}, made); err == nil && made.DeletionTimestamp == nil {
				t.Error("the namespace that was made is still there")
			}
		})
	}
}

func TestFailedReRegistrationKeepsExistingObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "kept")
	r := pullRequest(namespace, "c")
	registered(t, plane, r)
	before := inNamespace(t, hubClient, namespace)
	if err := join.RegisterPull(t.Context(), plane.Config, r, failing{errors.New("broken pipe")}); err == nil {
		t.Fatal("got no error")
	}
	if diff := cmp.Diff(before, inNamespace(t, hubClient, namespace)); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
}

func TestRegisterPullRefusesAForeignServiceAccount(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "foreign")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "builder"}}
	if err := hubClient.Create(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	err := join.RegisterPull(t.Context(), plane.Config, pullRequest(namespace, "builder"), io.Discard)
	wantText(t, err, "ServiceAccount "+namespace+"/builder exists and was not made by a registration")
	if diff := cmp.Diff([]string{"builder"}, inNamespace(t, hubClient, namespace)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
}

func TestEarlierErrorsAreFoundBeforeConnecting(t *testing.T) {
	t.Parallel()
	nowhere := &rest.Config{Host: "https://127.0.0.1:1"}
	for name, test := range map[string]struct {
		change func(*join.PullRequest)
		want   string
	}{
		"no namespace":      {func(r *join.PullRequest) { r.Namespace = "" }, "--namespace is required"},
		"no name":           {func(r *join.PullRequest) { r.Name = "" }, "--cluster is required"},
		"name is no label":  {func(r *join.PullRequest) { r.Name = "Prod.One" }, `--cluster: "Prod.One" is not a DNS label`},
		"namespace is none": {func(r *join.PullRequest) { r.Namespace = "a_b" }, `--namespace: "a_b" is not a DNS label`},
		"label value":       {func(r *join.PullRequest) { r.Labels = map[string]string{"a": "-"} }, `--labels: "a=-" is not a label`},
		"shard":             {func(r *join.PullRequest) { r.Shard = "one two" }, `--shard: "one two" is not a key`},
		"token life":        {func(r *join.PullRequest) { r.Options.TokenLifetime = "5m" }, "--token-lifetime"},
		"plain http":        {func(r *join.PullRequest) { r.Options.HubURL = "http://hub" }, "--management-cluster-url"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := pullRequest("n", "c")
			test.change(&r)
			wantText(t, join.RegisterPull(t.Context(), nowhere, r, io.Discard), test.want)
		})
	}
}
