package credentials_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// credentialFixture registers a cluster and puts its kubeconfig where its manifest would, on the same control plane.
func credentialFixture(t *testing.T, plane *localkube.Plane) (credentials.Options, []byte) {
	t.Helper()
	namespace := plane.Namespace(t, "cred")
	manifest := registered(t, plane, pullRequest(namespace, "c"))
	docs := documents(t, manifest)
	encoded := docs[6]["data"].(document)[join.KubeconfigKey].(string)
	kubeconfig := decode(t, encoded)
	secrets := kubernetes.NewForConfigOrDie(plane.Config).CoreV1().Secrets(kube.AgentNamespace)
	name := namespace + "-sveltos-kubeconfig"
	_, err := secrets.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{join.KubeconfigKey: kubeconfig},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return credentials.Options{Secrets: secrets, Secret: name, Namespace: namespace, Name: "c", Life: 10 * time.Minute}, kubeconfig
}

// works returns whether the hub accepts the token of config.
func works(t *testing.T, config *rest.Config, o credentials.Options) bool {
	t.Helper()
	_, err := kubernetes.NewForConfigOrDie(config).CoordinationV1().Leases(o.Namespace).Get(t.Context(), o.Name, metav1.GetOptions{})
	if err != nil && !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
	return err == nil
}

func stored(t *testing.T, o credentials.Options) []byte {
	t.Helper()
	secret, err := o.Secrets.Get(t.Context(), o.Secret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return secret.Data[join.KubeconfigKey]
}

func TestCredentialIsExchangedAtOnceAndRenewedInPlace(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, fromManifest := credentialFixture(t, plane)
	clock := clocktesting.NewFakeClock(time.Now())
	o.Clock = clock
	credential, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	hubConfig := credential.Config()
	finished := make(chan error, 1)
	go func() { finished <- credential.Run(t.Context()) }()

	eventually(t, "the manifest's token is exchanged", func() bool { return !bytes.Equal(stored(t, o), fromManifest) })
	eventually(t, "Run waits", clock.HasWaiters)
	if life := time.Until(credential.Expires()); life > 11*time.Minute {
		t.Errorf("life of the exchanged token: got %s, want ten minutes", life)
	}
	first := stored(t, o)
	if !works(t, hubConfig, o) {
		t.Error("a client from before the exchange stopped working")
	}

	for range 9 { // 80 % of ten minutes is eight; Run wakes every minute
		clock.Step(time.Minute)
		eventually(t, "Run waits", clock.HasWaiters)
	}
	eventually(t, "the token is renewed", func() bool { return !bytes.Equal(stored(t, o), first) })
	if !works(t, hubConfig, o) {
		t.Error("a client from before the renewal stopped working")
	}
	again, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !works(t, again.Config(), o) {
		t.Error("the kept token does not work after a restart")
	}
	if again.DeliveryNamespace() != o.Namespace {
		t.Errorf("delivery namespace: got %s, want %s", again.DeliveryNamespace(), o.Namespace)
	}
}

func TestCredentialSurvivesTheManifestAppliedTwice(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, fromManifest := credentialFixture(t, plane)
	credential, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the next second", func() bool { return time.Since(credential.Expires().Add(-join.ManifestTokenLife)) > time.Second })
	if err := credential.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	put(t, o, fromManifest)
	again, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !again.Expires().Equal(credential.Expires()) {
		t.Errorf("token in use: got one that expires %s, want the renewed one, which expires %s", again.Expires(), credential.Expires())
	}
}

func TestCredentialStopsWhenTheClusterIsRegisteredAgain(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, _ := credentialFixture(t, plane)
	clock := clocktesting.NewFakeClock(time.Now())
	o.Clock = clock
	credential, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	finished := make(chan error, 1)
	go func() { finished <- credential.Run(t.Context()) }()
	eventually(t, "Run waits", clock.HasWaiters)
	eventually(t, "the next second", func() bool { return time.Since(credential.Expires().Add(-o.Life)) > time.Second })
	docs := documents(t, registered(t, plane, pullRequest(o.Namespace, "c")))
	put(t, o, decode(t, docs[6]["data"].(document)[join.KubeconfigKey].(string)))
	clock.Step(time.Minute)
	select {
	case err := <-finished:
		if !errors.Is(err, credentials.ErrSuperseded) {
			t.Errorf("got %v, want ErrSuperseded", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("Run did not notice")
	}
}

func TestOpenNamesTheMissingSecretAndKey(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, _ := credentialFixture(t, plane)
	put(t, o, nil)
	_, err := credentials.Open(t.Context(), o)
	wantText(t, err, "read key kubeconfig of Secret projectsveltos/"+o.Secret)
	o.Secret = "missing"
	_, err = credentials.Open(t.Context(), o)
	wantText(t, err, "read Secret projectsveltos/missing with the kubeconfig for the hub")
}

// TestOpenRejectsKubeconfigsWithFilesAndPrograms opens kubeconfigs that the administrator of a member has changed.
func TestOpenRejectsKubeconfigsWithFilesAndPrograms(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, kubeconfig := credentialFixture(t, plane)
	trace := filepath.Join(t.TempDir(), "trace")
	for want, change := range map[string]func(*clientcmdapi.AuthInfo){
		"exec plugins are not supported": func(user *clientcmdapi.AuthInfo) {
			user.Exec = &clientcmdapi.ExecConfig{
				APIVersion: "client.authentication.k8s.io/v1", Command: "touch", Args: []string{trace}, InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
			}
		},
		"tokenFile is the file": func(user *clientcmdapi.AuthInfo) { user.TokenFile = "/etc/passwd" },
	} {
		config, err := clientcmd.Load(kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		for _, user := range config.AuthInfos {
			change(user)
		}
		changed, err := clientcmd.Write(*config)
		if err != nil {
			t.Fatal(err)
		}
		put(t, o, changed)
		_, err = credentials.Open(t.Context(), o)
		wantText(t, err, want)
	}
	if _, err := os.Stat(trace); err == nil {
		t.Error("the kubeconfig has run a program")
	}
}
