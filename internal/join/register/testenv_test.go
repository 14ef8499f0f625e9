package register_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
	"github.com/towline/towline/internal/localkube/faults"
)

// eventuallyTimeout limits the waits of eventually.
const eventuallyTimeout = 30 * time.Second

// hubSetUp creates the objects of a hub on the control plane that the tests share, once.
type hubSetUp struct {
	once sync.Once
	err  error
}

var shared hubSetUp

// testEnv is one control plane that is a hub, and also every cluster that registers with it: each has a uid and a
// namespace of its own.
type testEnv struct {
	plane *localkube.Plane
	admin client.Client
}

func newTestEnv(t *testing.T) testEnv {
	t.Helper()
	plane := localkube.Shared(t)
	admin, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	shared.once.Do(func() { shared.err = startHub(plane.Config, admin) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return testEnv{plane: plane, admin: admin}
}

func startHub(config *rest.Config, admin client.Client) error {
	ctx := context.Background()
	ctrllog.SetLogger(logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err := crds.Install(ctx, admin); err != nil {
		return err
	}
	for _, name := range []string{fleet.DefaultClusterNamespace, kube.AgentNamespace} {
		if err := admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			return err
		}
	}
	if err := bootstrap.EnsureHubObjects(ctx, config, join.HubAddress{Server: config.Host, CA: config.CAData}); err != nil {
		return err
	}
	kind, cached := approvals.CacheOptions()
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: kube.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{kind: cached}},
	})
	if err != nil {
		return err
	}
	c := &approvals.Controller{Hub: mgr.GetClient(), Live: admin, Events: mgr.GetEventRecorder("towline"), Clock: clock.RealClock{}}
	if err := c.Setup(ctx, mgr); err != nil {
		return err
	}
	go func() { _ = mgr.Start(ctx) }()
	return nil
}

// token makes a bootstrap token.
func (w testEnv) token(t *testing.T, o bootstrap.TokenOptions) string {
	t.Helper()
	token, err := bootstrap.CreateToken(t.Context(), w.admin, o)
	if err != nil {
		t.Fatal(err)
	}
	return token.String()
}

// configWithID returns a config with which the control plane has another id.
func (w testEnv) configWithID(id string) *rest.Config {
	return faults.Wrap(w.plane.Config, func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		if request.Method != http.MethodGet || request.URL.Path != "/api/v1/namespaces/kube-system" {
			return next.RoundTrip(request)
		}
		request = request.Clone(request.Context())
		request.Header.Set("Accept", "application/json")
		answer, err := next.RoundTrip(request)
		if err != nil {
			return nil, err
		}
		defer answer.Body.Close()
		namespace := map[string]any{}
		if err := json.NewDecoder(answer.Body).Decode(&namespace); err != nil {
			return nil, err
		}
		namespace["metadata"].(map[string]any)["uid"] = id
		body, err := json.Marshal(namespace)
		if err != nil {
			return nil, err
		}
		answer.Header.Del("Content-Length")
		answer.Header.Set("Content-Type", "application/json")
		answer.ContentLength, answer.Body = int64(len(body)), io.NopCloser(bytes.NewReader(body))
		return answer, nil
	})
}

// lines collects the output of a run.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, line)
}

func (l *lines) get() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// contains returns whether a line contains text.
func (l *lines) contains(text string) bool {
	return slices.ContainsFunc(l.get(), func(line string) bool { return strings.Contains(line, text) })
}

// request asks to register a cluster of that name, whose agent is in a namespace of that name. The Cluster is deleted
// when the test ends.
func (w testEnv) request(t *testing.T, name string) (request register.Request, out, talk *lines) {
	t.Helper()
	pins, err := bootstrap.Pins(w.plane.Config.CAData)
	if err != nil {
		t.Fatal(err)
	}
	out, talk = &lines{}, &lines{}
	t.Cleanup(func() {
		cluster := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_ = w.admin.Delete(context.Background(), cluster)
	})
	return register.Request{
		Endpoint: strings.TrimPrefix(w.plane.Config.Host, "https://"), Token: w.token(t, bootstrap.TokenOptions{TTL: time.Hour}), Pins: pins,
		DiscoveryTimeout: eventuallyTimeout, Member: w.configWithID(string(uuid.NewUUID())), Namespace: name, ClusterName: name, ClusterNamespace: name + "-records",
		EnableCertRotation: true, Image: "agent:test", Replicas: 1, Out: out.add, Progress: talk.add,
	}, out, talk
}

// runAgent reports for the cluster, as an agent would, as soon as its Deployment is available, until the test ends.
func (w testEnv) runAgent(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			w.reportStatus(ctx, name)
			return false, nil
		})
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

func (w testEnv) reportStatus(ctx context.Context, name string) {
	deployment, cluster := &appsv1.Deployment{}, &clusterv1alpha1.Cluster{}
	if w.admin.Get(ctx, client.ObjectKey{Namespace: name, Name: "karmada-agent"}, deployment) != nil || deployment.Status.AvailableReplicas == 0 {
		return
	}
	if w.admin.Get(ctx, client.ObjectKey{Name: name}, cluster) != nil || cluster.Status.KubernetesVersion != "" {
		return
	}
	cluster.Status.KubernetesVersion = "v1.36.3"
	cluster.Status.Conditions = ready()
	_ = w.admin.Status().Update(ctx, cluster)
}

func ready() []metav1.Condition {
	return []metav1.Condition{{
		Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionTrue, Reason: clusterv1alpha1.ReasonClusterReady, LastTransitionTime: metav1.Now(),
	}}
}

// remaining lists the objects of a cluster on both sides, without a namespace that is being deleted.
func (w testEnv) remaining(t *testing.T, name string) []string {
	t.Helper()
	var left []string
	for what, obj := range map[string]client.Object{
		"Cluster": &clusterv1alpha1.Cluster{}, "Namespace": &corev1.Namespace{}, "Namespace-records": &corev1.Namespace{},
	} {
		_, suffix, _ := strings.Cut(what, "Namespace")
		err := w.admin.Get(t.Context(), client.ObjectKey{Name: name + suffix}, obj)
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		if err == nil && obj.GetDeletionTimestamp() == nil {
			left = append(left, what)
		}
	}
	if w.isBound(t, name) {
		left = append(left, "subject")
	}
	slices.Sort(left)
	return left
}

// isBound returns whether the agent in a namespace has a ClusterRoleBinding.
func (w testEnv) isBound(t *testing.T, namespace string) bool {
	t.Helper()
	err := w.admin.Get(t.Context(), client.ObjectKey{Name: register.AgentRole(namespace)}, &rbacv1.ClusterRoleBinding{})
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

// awaitNoObjects waits until nothing is left of a cluster.
func (w testEnv) awaitNoObjects(t *testing.T, name string) {
	t.Helper()
	eventually(t, func() string {
		if left := w.remaining(t, name); len(left) > 0 {
			return fmt.Sprintf("left: %v", left)
		}
		if err := w.admin.Get(t.Context(), client.ObjectKey{Name: name}, &corev1.Namespace{}); !apierrors.IsNotFound(err) {
			return "the namespace is still going"
		}
		return ""
	})
}

// eventually waits until look returns "".
func eventually(t *testing.T, look func() string) {
	t.Helper()
	var wrong string
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, eventuallyTimeout, true, func(context.Context) (bool, error) {
		wrong = look()
		return wrong == "", nil
	})
	if err != nil {
		t.Fatalf("%s after %s", wrong, eventuallyTimeout)
	}
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	switch {
	case err == nil && text != "":
		t.Errorf("got no error, want one with %q", text)
	case err != nil && text == "":
		t.Errorf("got error %v, want none", err)
	case err != nil && !strings.Contains(err.Error(), text):
		t.Errorf("error: got %q, want one with %q", err, text)
	}
}
