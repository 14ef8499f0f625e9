package join_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// waiting is an established cluster whose agent has never connected, with the Manifests that keep its manifest.
type waiting struct {
	plane     *localkube.Plane
	hubClient client.Client
	cluster   *libv1beta1.SveltosCluster
	clock     *clocktesting.FakeClock
	manifests join.Manifests
}

func newWaiting(t *testing.T) *waiting {
	t.Helper()
	plane, hubClient := hub(t)
	w := &waiting{plane: plane, hubClient: hubClient, clock: clocktesting.NewFakeClock(time.Now())}
	w.cluster = declared(t, hubClient, newNamespace(t, hubClient, "keep"), "c")
	established(t, hubClient, w.cluster)
	w.manifests = join.Manifests{
		Hub: hubClient, Cache: hubClient, Address: join.HubAddress{Server: plane.Config.Host, CA: plane.Config.CAData}, Version: "v1.2.3", Clock: w.clock,
	}
	return w
}

func (w *waiting) keep(t *testing.T) time.Duration {
	t.Helper()
	again, err := w.manifests.Reconcile(t.Context(), w.cluster)
	if err != nil {
		t.Fatal(err)
	}
	return again
}

// manifest returns the manifest in the registration Secret, or nil.
func (w *waiting) manifest(t *testing.T) []byte {
	t.Helper()
	secret := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c"))
	if secret == nil {
		return nil
	}
	return secret.Data[join.ManifestKey]
}

// connect makes the agent connect and report the Secret whose token it has exchanged.
func (w *waiting) connect(t *testing.T, exchanged types.UID) {
	t.Helper()
	w.cluster.Status.Ready, w.cluster.Status.ConnectionStatus = true, libv1beta1.ConnectionHealthy
	lease := &coordinationv1.Lease{}
	key := client.ObjectKeyFromObject(w.cluster)
	if err := w.hubClient.Get(t.Context(), key, lease); err != nil {
		t.Fatal(err)
	}
	before := lease.DeepCopy()
	metav1.SetMetaDataAnnotation(&lease.ObjectMeta, kube.AnnotationExchanged, string(exchanged))
	if err := w.hubClient.Patch(t.Context(), lease, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// beat renews the agent's Lease.
func (w *waiting) beat(t *testing.T, at time.Time) {
	t.Helper()
	lease := &coordinationv1.Lease{}
	if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(w.cluster), lease); err != nil {
		t.Fatal(err)
	}
	lease.Spec.RenewTime = &metav1.MicroTime{Time: at}
	if err := w.hubClient.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
}

// accepted returns whether the hub accepts the credential of config, which belongs to the agent of cluster namespace/c.
func accepted(t *testing.T, config *rest.Config, namespace string) bool {
	t.Helper()
	_, err := kubernetes.NewForConfigOrDie(config).CoordinationV1().Leases(namespace).Get(t.Context(), "c", metav1.GetOptions{})
	if err != nil && !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
	return err == nil
}

func TestReconcileRenewsAtFourFifthsOfTheTokensLife(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	if again := w.keep(t); again != 48*time.Minute {
		t.Errorf("again: got %s, want 48m", again)
	}
	first := w.manifest(t)
	config, _ := agentConfig(t, first)
	if !accepted(t, config, w.cluster.Namespace) {
		t.Error("the manifest's token is not accepted")
	}
	w.clock.Step(47 * time.Minute)
	if again := w.keep(t); again <= 0 || again > time.Minute+5*time.Second {
		t.Errorf("again after 47 minutes: got %s, want about a minute", again)
	}
	if !bytes.Equal(first, w.manifest(t)) {
		t.Error("the manifest was renewed too early")
	}
	w.clock.Step(2 * time.Minute)
	w.keep(t)
	if bytes.Equal(first, w.manifest(t)) {
		t.Error("the manifest was not renewed")
	}
	if config, _ = agentConfig(t, w.manifest(t)); !accepted(t, config, w.cluster.Namespace) {
		t.Error("the renewed manifest's token is not accepted")
	}
}

// TestReconcileCompletesTheSecretOfAnEarlierVersion has a Secret with a manifest and without its token.
func TestReconcileCompletesTheSecretOfAnEarlierVersion(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	secret := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c"))
	delete(secret.Data, "token")
	if err := w.hubClient.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	var versions []string
	for range 2 {
		w.keep(t)
		versions = append(versions, secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c")).ResourceVersion)
	}
	if versions[0] == secret.ResourceVersion || versions[1] != versions[0] {
		t.Errorf("got versions %q after %s, want one write", versions, secret.ResourceVersion)
	}
}

func TestReconcileFollowsTheOptions(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	w.cluster.Annotations = map[string]string{kube.AnnotationAgentOptions: `{"image":"registry.example.com/towline:v2","tokenLifetime":"10m"}`}
	if again := w.keep(t); again != 8*time.Minute {
		t.Errorf("again: got %s, want 8m", again)
	}
	if !strings.Contains(string(w.manifest(t)), "image: registry.example.com/towline:v2") {
		t.Errorf("the manifest has another image:\n%s", w.manifest(t))
	}
	w.cluster.Annotations[kube.AnnotationAgentOptions] = `{"imgae":"x"}`
	_, err := w.manifests.Reconcile(t.Context(), w.cluster)
	wantText(t, err, `unknown field "imgae"`)
}

func TestReconcileNeedsAnAddress(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.manifests.Address = join.HubAddress{}
	if _, err := w.manifests.Reconcile(t.Context(), w.cluster); !errors.Is(err, join.ErrNoHubAddress) {
		t.Errorf("got error %v, want ErrNoHubAddress", err)
	}
	w.cluster.Annotations = map[string]string{kube.AnnotationAgentOptions: `{"hubURL":"https://hub.example.com"}`}
	w.keep(t)
	if config, _ := agentConfig(t, w.manifest(t)); config.Host != "https://hub.example.com" {
		t.Errorf("host: got %s", config.Host)
	}
}

func TestReconcileDeletesTheExchangedSecret(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	copied, _ := agentConfig(t, w.manifest(t))
	if !accepted(t, copied, w.cluster.Namespace) {
		t.Fatal("the manifest's token is not accepted")
	}
	// A printed one is another matter than the hub's own.
	registered(t, w.plane, pullRequest(w.cluster.Namespace, "c"))
	uid := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c")).UID
	w.connect(t, uid)
	if again := w.keep(t); again != 0 {
		t.Errorf("again after the exchange: got %s, want none", again)
	}
	if w.manifest(t) != nil {
		t.Error("the manifest is still there")
	}
	eventually(t, "the manifest's token is worthless", func() bool { return !accepted(t, copied, w.cluster.Namespace) })
	w.keep(t)
	if w.manifest(t) != nil {
		t.Error("a connected cluster got a manifest")
	}
	w.cluster.Status.ConnectionStatus = libv1beta1.ConnectionDown
	w.keep(t)
	if w.manifest(t) != nil {
		t.Error("a cluster that is Down got a manifest")
	}
}

// The agent may have connected with a credential that is not from this manifest, for example after a restore.
func TestReconcileDeletesTheManifestOfAConnectedCluster(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	w.connect(t, "")
	w.keep(t)
	if w.manifest(t) != nil {
		t.Error("the manifest is still there")
	}
}

func TestReconcileKeepsAPrintedManifest(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	config, _ := agentConfig(t, registered(t, w.plane, pullRequest(w.cluster.Namespace, "c")))
	w.connect(t, "")
	if again := w.keep(t); again != 0 {
		t.Errorf("again: got %s, want none", again)
	}
	if !accepted(t, config, w.cluster.Namespace) {
		t.Error("the printed manifest's token is not accepted")
	}
}

// The hub may be down between the exchange and the next registration, and delete the exchanged manifest only
// afterwards.
func TestPrintedManifestStaysValidAfterExchange(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	copied, _ := agentConfig(t, w.manifest(t))
	w.connect(t, secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c")).UID)
	config, _ := agentConfig(t, registered(t, w.plane, pullRequest(w.cluster.Namespace, "c")))
	w.keep(t)
	eventually(t, "the exchanged manifest is worthless", func() bool { return !accepted(t, copied, w.cluster.Namespace) })
	if !accepted(t, config, w.cluster.Namespace) {
		t.Error("the printed manifest's token is not accepted")
	}
}

func TestReconcileRenewsNoManifestForAnAgentThatHasJustConnected(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	w.connect(t, secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c")).UID)
	w.cluster.Status = libv1beta1.SveltosClusterStatus{} // it has not reported yet
	w.beat(t, w.clock.Now())
	if again := w.keep(t); again != 0 {
		t.Errorf("again: got %s, want none", again)
	}
	if w.manifest(t) != nil {
		t.Error("the exchanged manifest is still there")
	}
}

func TestReconcileRenewsARestoredManifest(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.keep(t)
	secret := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c"))
	if err := w.hubClient.Delete(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	secret.UID, secret.ResourceVersion = "", ""
	if err := w.hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	w.keep(t)
	if config, _ := agentConfig(t, w.manifest(t)); !accepted(t, config, w.cluster.Namespace) {
		t.Error("the manifest's token is not accepted")
	}
}
