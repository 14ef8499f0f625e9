package join_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube/faults"
)

// refuseWrites makes every writing request to a path with this end fail.
func refuseWrites(config *rest.Config, suffix string) *rest.Config {
	refusing := rest.CopyConfig(config)
	refusing.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method == http.MethodPatch && strings.HasSuffix(request.URL.Path, suffix) {
				return nil, errors.New("the line is cut")
			}
			return next.RoundTrip(request)
		})
	})
	return refusing
}

func labelsOf(t *testing.T, hubClient client.Client, r join.Request) map[string]string {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: r.Name}, cluster); err != nil {
		t.Fatal(err)
	}
	return cluster.Labels
}

func TestFailedReRegistrationPutsLabelsBack(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "labels"), "c")
	r.Labels = map[string]string{"env": "test"}
	config, _ := agentConfig(t, registered(t, plane, r))
	again := r
	again.Labels = map[string]string{"env": "prod", "tier": "new"}
	wantText(t, join.RegisterPull(t.Context(), plane.Config, again, failing{errors.New("broken pipe")}), "broken pipe")
	if diff := cmp.Diff(r.Labels, labelsOf(t, hubClient, r.Request)); diff != "" {
		t.Errorf("labels (-before +after):\n%s", diff)
	}
	if !allowed(t, config, "list lib.projectsveltos.io/configurationgroups "+r.Namespace) {
		t.Error("the first registration's agent lost its access")
	}
}

func TestFailedReRegistrationPutsTheKubeconfigBack(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	r := pushRequest(plane.Namespace(t, "back"), kubeconfig)
	if err := join.RegisterPush(t.Context(), plane.Config, r); err != nil {
		t.Fatal(err)
	}
	again := r
	again.Kubeconfig = append(slices.Clone(kubeconfig), "\n# another\n"...)
	wantText(t, join.RegisterPush(t.Context(), refuseWrites(plane.Config, "/sveltosclusters/c"), again), "the line is cut")
	secret := &corev1.Secret{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: "c-sveltos-kubeconfig"}, secret); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(kubeconfig), string(secret.Data["kubeconfig"])); diff != "" {
		t.Errorf("kubeconfig (-before +after):\n%s", diff)
	}
}

// overtaken is an output that fails after another registration of the same cluster has succeeded.
type overtaken struct{ register func() error }

func (o overtaken) Write([]byte) (int, error) {
	return 0, errors.Join(errors.New("broken pipe"), o.register())
}

func TestFailedRegistrationKeepsForeignObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "race"), "c")
	var config *rest.Config
	out := overtaken{register: func() error {
		config, _ = agentConfig(t, registered(t, plane, r))
		return nil
	}}
	wantText(t, join.RegisterPull(t.Context(), plane.Config, r, out), "broken pipe")
	if diff := cmp.Diff([]string{"c", "c-sveltos-agent", "c-sveltos-registration", "c", "c", "c", "c"}, inNamespace(t, hubClient, r.Namespace)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	namespace := &corev1.Namespace{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Name: r.Namespace}, namespace); err != nil {
		t.Fatal(err)
	}
	if got := namespace.Annotations["towline.dev/delivery-cluster"]; got != "c" {
		t.Errorf("claim of the namespace: got %q, want c", got)
	}
	if !allowed(t, config, "list lib.projectsveltos.io/configurationgroups "+r.Namespace) {
		t.Error("the other registration's agent has no access")
	}
}

func TestRegisterPushWritesTheSecretThatTheClusterNames(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	r := pushRequest(plane.Namespace(t, "named"), kubeconfig)
	for _, obj := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: "own"}, Data: map[string][]byte{"value": []byte("old"), "other": []byte("kept")}},
		&libv1beta1.SveltosCluster{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: "c"},
			Spec:       libv1beta1.SveltosClusterSpec{KubeconfigName: "own", KubeconfigKeyName: "value"},
		},
	} {
		if err := hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	if err := join.RegisterPush(t.Context(), plane.Config, r); err != nil {
		t.Fatal(err)
	}
	secrets := &corev1.SecretList{}
	if err := hubClient.List(t.Context(), secrets, client.InNamespace(r.Namespace)); err != nil {
		t.Fatal(err)
	}
	if len(secrets.Items) != 1 {
		t.Fatalf("secrets: got %d, want the one that was there", len(secrets.Items))
	}
	if diff := cmp.Diff(map[string][]byte{"value": kubeconfig, "other": []byte("kept")}, secrets.Items[0].Data); diff != "" {
		t.Errorf("secret (-want +got):\n%s", diff)
	}
}

func TestIdentityGoesWithTheSveltosCluster(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "owned")
	configs := map[string]*rest.Config{}
	for _, name := range []string{"first", "second"} {
		configs[name], _ = agentConfig(t, registered(t, plane, pullRequest(n, name)))
	}
	for name, config := range configs {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: name}}
		if err := hubClient.Delete(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the token of "+name+" is worth nothing", func() bool {
			agent, err := client.New(config, client.Options{Scheme: hubClient.Scheme()})
			return err != nil || agent.Get(t.Context(), client.ObjectKeyFromObject(cluster), &libv1beta1.SveltosCluster{}) != nil
		})
	}
	eventually(t, "nothing is left in the namespace", func() bool { return len(inNamespace(t, hubClient, n)) == 0 })
}

func TestRefusedRegistrationKeepsAnEarlierKubeconfig(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	r := pushRequest(plane.Namespace(t, "refused"), kubeconfig)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: "c-sveltos-kubeconfig", Labels: map[string]string{"towline.dev/registration": "c"}},
		Data:       map[string][]byte{"kubeconfig": []byte("earlier")},
	}
	if err := hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	for _, meddle := range []func(*http.Request, http.RoundTripper) (*http.Response, error){refuse, loseAnswer} {
		wantText(t, join.RegisterPush(t.Context(), interceptRequests(plane.Config, "/sveltosclusters", meddle), r), "the line is cut")
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil || string(secret.Data["kubeconfig"]) != "earlier" {
			t.Errorf("earlier kubeconfig: got %q and error %v", secret.Data["kubeconfig"], err)
		}
	}
}

func TestFailedReRegistrationDeletesItsRegistrationSecret(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "secret"), "c")
	registered(t, plane, r)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: join.RegistrationSecret("c")}}
	// The hub deletes it when the agent has exchanged the token.
	if err := hubClient.Delete(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	before := inNamespace(t, hubClient, r.Namespace)
	wantText(t, join.RegisterPull(t.Context(), plane.Config, r, failing{errors.New("broken pipe")}), "broken pipe")
	if diff := cmp.Diff(before, inNamespace(t, hubClient, r.Namespace)); diff != "" {
		t.Errorf("failed: objects (-before +after):\n%s", diff)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	config := rest.CopyConfig(plane.Config)
	config.Wrap(cancelOn(cancel, "/token"))
	err := join.RegisterPull(ctx, config, r, io.Discard)
	wantText(t, err, "; the changes were taken back, but repairs of the agent's identity on the hub stay")
	if diff := cmp.Diff(before, inNamespace(t, hubClient, r.Namespace)); diff != "" {
		t.Errorf("interrupted: objects (-before +after):\n%s", diff)
	}
}
