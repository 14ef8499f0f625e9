package executionnamespaces_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// testEnv is a hub whose controller runs during all tests, and a member.
type testEnv struct {
	hub, member             *localkube.Plane
	hubClient, memberClient client.Client

	// requests counts the uncached requests of the controller by method and path.
	requests sync.Map
}

var startEnv = sync.OnceValues(func() (*testEnv, error) {
	log.SetLogger(logr.Discard())
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	w := &testEnv{}
	var err error
	if w.member, err = localkube.Start(ctx, localkube.Options{Name: "member"}); err != nil {
		return nil, err
	}
	if w.hub, err = localkube.Start(ctx, localkube.Options{Name: "hub"}); err != nil {
		return nil, err
	}
	if err := hub.InstallCRDs(ctx, w.hub.Config); err != nil {
		return nil, err
	}
	if w.memberClient, err = client.New(w.member.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return nil, err
	}
	if w.hubClient, err = client.New(w.hub.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
		return nil, err
	}
	// The hub creates the namespace when it starts.
	if err := w.hubClient.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}); err != nil {
		return nil, err
	}
	// The objects of a Cluster that was deleted while no hub was running.
	for _, leftover := range []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "forgotten"}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: karmada.AgentRoleName("forgotten")}},
	} {
		karmada.SetOwnerLabels(leftover, "forgotten")
		if err := w.hubClient.Create(ctx, leftover); err != nil {
			return nil, err
		}
	}
	return w, w.startController("", fastClock{time.Now()})
})

// sharedEnv returns the environment that all tests share. The control planes stop with the test binary.
func sharedEnv(t *testing.T) *testEnv {
	t.Helper()
	w, err := startEnv()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// startController starts the controller of a shard. It loses some responses of the API server.
func (w *testEnv) startController(shard fleet.Shard, hubClock clock.PassiveClock) error {
	mgr, err := ctrl.NewManager(w.hub.Config, ctrl.Options{
		Scheme: kube.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{
			SkipNameValidation: ptr.To(true),
			// The priority queue of controller-runtime 0.24.1 can deadlock if it shuts down while items are ready.
			UsePriorityQueue: ptr.To(false),
		},
	})
	if err != nil {
		return err
	}
	counted := withLostResponses(w.hub.Config)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			w.requestCounter(request.Method, request.URL.Path).Add(1)
			return next.RoundTrip(request)
		})
	})
	live, err := client.New(counted, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return err
	}
	members := fleet.NewClients(fleet.SecretReaders{Live: w.hubClient}, w.hub.Config, fleet.IdentityPolicy{}, nil)
	c := &executionnamespaces.Controller{
		Heartbeats: &heartbeats.Monitor{Clock: hubClock},
		Hub:        mgr.GetClient(), Live: live, Shard: shard, Config: members.Config, Forget: members.Forget, Events: mgr.GetEventRecorder("test"), Clock: hubClock,
	}
	if err := c.Setup(context.Background(), mgr); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- mgr.Start(context.Background()) }()
	if !mgr.GetCache().WaitForCacheSync(context.Background()) {
		return <-failed
	}
	return nil
}

// requestCounter returns the number of requests with a method and a path.
func (w *testEnv) requestCounter(method, path string) *atomic.Int32 {
	counter, _ := w.requests.LoadOrStore(method+" "+path, &atomic.Int32{})
	return counter.(*atomic.Int32)
}

// fastClock runs ten times as fast as real time.
type fastClock struct{ start time.Time }

var _ clock.PassiveClock = fastClock{}

func (f fastClock) Now() time.Time                  { return f.start.Add(10 * time.Since(f.start)) }
func (f fastClock) Since(t time.Time) time.Duration { return f.Now().Sub(t) }

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// withLostResponses returns config with a transport that drops the response to the first write request of every third
// path.
func withLostResponses(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	var (
		seen  sync.Map
		paths atomic.Int64
	)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			response, err := next.RoundTrip(request)
			if err != nil || request.Method == http.MethodGet {
				return response, err
			}
			if _, again := seen.LoadOrStore(request.Method+request.URL.Path, true); !again && paths.Add(1)%3 == 0 {
				response.Body.Close()
				return nil, errors.New("connection lost")
			}
			return response, nil
		})
	})
	return config
}

// eventually waits until check returns true. Kubernetes may need half a minute to delete a namespace on a busy machine.
func eventually(t *testing.T, description string, check func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 2*time.Minute, true, func(context.Context) (bool, error) { return check(), nil })
	if err != nil {
		t.Fatalf("%s: not within 2 min", description)
	}
}
