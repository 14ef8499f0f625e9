package approvals_test

import (
	"context"
	"crypto/tls"
	"errors"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// sharedHub is the shared control plane with a running controller. It starts on first use and runs until the test
// binary exits.
type sharedHub struct {
	once sync.Once
	err  error
}

var running sharedHub

// installAPIs installs the CRDs and prepares the hub.
func installAPIs(ctx context.Context, cfg *rest.Config) error {
	hubClient, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}
	if err := hubClient.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return hub.InstallCRDs(ctx, cfg)
}

func (a *sharedHub) start(cfg *rest.Config) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := errors.Join(installAPIs(ctx, cfg), bootstrap.EnsureHubObjects(ctx, cfg, join.HubAddress{Server: cfg.Host, CA: cfg.CAData})); err != nil {
		return err
	}
	object, boundCluster := approvals.CacheOptions()
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: kube.Scheme(), Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{object: boundCluster}},
		Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{
			SkipNameValidation: ptr.To(true),
			// The priority queue of controller-runtime 0.24.1 can deadlock if it shuts down while items are ready.
			UsePriorityQueue: ptr.To(false),
		},
	})
	if err != nil {
		return err
	}
	live, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return err
	}
	c := &approvals.Controller{Hub: mgr.GetClient(), Live: live, Events: mgr.GetEventRecorder("towline-hub"), Clock: clock.RealClock{}}
	if err := c.Setup(ctx, mgr); err != nil {
		return err
	}
	go func() { _ = mgr.Start(context.Background()) }()
	return nil
}

// testEnv is a hub and the objects of a test.
type testEnv struct {
	testing.TB
	client.Client
	config *rest.Config
	// cached reads the requests for a controller that the test runs itself. Default: the API server.
	cached client.Client
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	plane := localkube.Shared(t)
	running.once.Do(func() { running.err = running.start(plane.Config) })
	if running.err != nil {
		t.Fatal(running.err)
	}
	return newTestEnvOn(t, plane)
}

func newTestEnvOn(t *testing.T, plane *localkube.Plane) *testEnv {
	t.Helper()
	w := &testEnv{TB: t, config: plane.Config}
	var err error
	w.Client, err = client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	return w
}

func (w *testEnv) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// token creates a bootstrap token, for cluster only unless that is "".
func (w *testEnv) token(cluster string) bootstrap.Token {
	w.Helper()
	return w.tokenWith(bootstrap.TokenOptions{TTL: time.Hour, Cluster: cluster})
}

// tokenWith creates a bootstrap token and waits until the API server accepts it. The API server watches tokens, so a
// new one is unknown for a moment.
func (w *testEnv) tokenWith(o bootstrap.TokenOptions) bootstrap.Token {
	w.Helper()
	token, err := bootstrap.CreateToken(w.Context(), w, o)
	w.must(err)
	holder := w.agent(w.tokenConfig(token))
	w.eventually(func() string {
		if err := holder.Create(w.Context(), &authenticationv1.SelfSubjectReview{}); err != nil {
			return err.Error()
		}
		return ""
	})
	return token
}

// tokenConfig returns a client configuration with the token.
func (w *testEnv) tokenConfig(token bootstrap.Token) *rest.Config {
	cfg := rest.AnonymousClientConfig(w.config)
	cfg.BearerToken = token.String()
	return cfg
}

// certificateConfig returns a client configuration with the certificate.
func (w *testEnv) certificateConfig(certificate bootstrap.Certificate) *rest.Config {
	w.Helper()
	_, err := tls.X509KeyPair(certificate.CertPEM, certificate.KeyPEM)
	w.must(err)
	cfg := rest.AnonymousClientConfig(w.config)
	cfg.CertData, cfg.KeyData = certificate.CertPEM, certificate.KeyPEM
	return cfg
}

// request requests a certificate and waits for the answer.
func (w *testEnv) request(cfg *rest.Config, cluster, id string) (bootstrap.Certificate, error) {
	ctx, cancel := context.WithTimeout(w.Context(), 30*time.Second)
	defer cancel()
	return bootstrap.RequestCertificate(ctx, cfg, bootstrap.CertificateRequest{Cluster: cluster, ID: id, Lifetime: time.Hour})
}

// registered registers a cluster with its own token.
func (w *testEnv) registered(cluster string) (bootstrap.Token, bootstrap.Certificate) {
	w.Helper()
	token := w.token("")
	certificate, err := w.request(w.tokenConfig(token), cluster, "id-"+cluster)
	w.must(err)
	return token, certificate
}

// report sets the status of a Cluster whose agent has reported.
func (w *testEnv) report(cluster string) {
	w.Helper()
	c := w.cluster(cluster)
	c.Status.KubernetesVersion = "v1.36.3"
	w.must(w.Status().Update(w.Context(), c))
}

func (w *testEnv) cluster(name string) *clusterv1alpha1.Cluster {
	w.Helper()
	c := &clusterv1alpha1.Cluster{}
	w.must(w.Get(w.Context(), client.ObjectKey{Name: name}, c))
	return c
}

// wantNone checks that no Cluster has this name.
func (w *testEnv) wantNone(name string) {
	w.Helper()
	if err := w.Get(w.Context(), client.ObjectKey{Name: name}, &clusterv1alpha1.Cluster{}); !apierrors.IsNotFound(err) {
		w.Errorf("Cluster %s exists: %v", name, err)
	}
}

// wantDenied checks that err is a denial with this reason and, if not empty, this message.
func (w *testEnv) wantDenied(err error, reason, message string) {
	w.Helper()
	var denied *bootstrap.DeniedError
	if !errors.As(err, &denied) {
		w.Errorf("got %v, want a denial with reason %s", err, reason)
		return
	}
	if denied.Reason != reason || message != "" && denied.Message != message {
		w.Errorf("denied for %s: %q, want %s: %q", denied.Reason, denied.Message, reason, message)
	}
}

// eventually waits until check returns "", and fails with its last result otherwise.
func (w *testEnv) eventually(check func() (wrong string)) {
	w.Helper()
	last := ""
	err := wait.PollUntilContextTimeout(w.Context(), 50*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = check()
		return last == "", nil
	})
	if err != nil {
		w.Fatalf("%v: %s", err, last)
	}
}
