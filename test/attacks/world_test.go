package attacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// waitTimeout bounds every wait. It is loose: a slow machine must pass, a hang must fail.
const waitTimeout = 2 * time.Minute

// deniedAddress is an address to which the hub of the tests must not connect.
const deniedAddress = "127.0.0.3"

// The clusters of cloudNamespace and otherCloudNamespace may use the cloud identity of the hub.
const cloudNamespace, otherCloudNamespace = "cloud", "other-cloud"

// TestMain also runs as the child process in which the hub expands templates, as the child of TestExploitedSandbox, and
// as the hub of TestTenantFillsTheMemory.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "sandbox" {
		if code := cli.Run(context.Background(), []string{"towline", "sandbox"}, command.Streams{Out: os.Stdout, Err: os.Stderr}); code != 0 {
			panic(code)
		}
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "hub" {
		ctx, cancel := context.WithCancel(context.Background())
		go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
		config, err := clientcmd.BuildConfigFromFlags("", os.Args[2])
		if err == nil {
			err = runHub(ctx, config, os.Args[0])
		}
		if err != nil {
			panic(err)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == childArgument {
		if err := serveExploited(); err != nil {
			panic(err)
		}
		return
	}
	ctrl.SetLogger(logr.Discard())
	m.Run()
}

// sharedHub starts the hub of all tests. It runs until the test binary ends.
var sharedHub = sync.OnceValues(func() (*localkube.Plane, error) {
	ctx := context.Background()
	debug.SetMemoryLimit(hubMemory)
	plane, err := localkube.Start(ctx, localkube.Options{Name: "hub"})
	if err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// The cloud identity of the hub. No request to AWS is needed for a token.
	for name, value := range map[string]string{"AWS_ACCESS_KEY_ID": "hub", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1"} {
		if err := os.Setenv(name, value); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(hub.InstallCRDs(ctx, plane.Config), hub.EnsureAdmissionPolicies(ctx, plane.Config)); err != nil {
		return nil, err
	}
	go func() {
		config := rest.CopyConfig(plane.Config)
		config.Wrap(hubRequests.wrap)
		if err := runHub(ctx, config, program); err != nil {
			panic(err)
		}
	}()
	return plane, nil
})

// runHub runs the hub of the tests until ctx ends. program is the path of this program.
func runHub(ctx context.Context, config *rest.Config, program string) error {
	policy, err := egress.New(nil, append(egress.DefaultDenied(), deniedAddress+"/32"))
	if err != nil {
		return err
	}
	return hub.Run(ctx, config, hub.Options{
		Egress:         policy,
		Identity:       fleet.IdentityPolicy{Namespaces: []string{cloudNamespace, otherCloudNamespace}, Hosts: []string{"127.0.0.1"}},
		SandboxCommand: []string{program, "sandbox"},
		// The tests report only once for the agents of clusters in pull mode.
		HeartbeatLimits: map[fleet.Type]time.Duration{fleet.TypeSveltos: time.Hour},
	})
}

// hubRequests counts the requests of the hub.
var hubRequests = &requestCounter{byPath: map[string]int{}}

// requestCounter counts requests by method and path.
type requestCounter struct {
	mu     sync.Mutex // guards byPath
	byPath map[string]int
}

func (c *requestCounter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		c.mu.Lock()
		c.byPath[r.Method+" "+r.URL.Path]++
		c.mu.Unlock()
		return next.RoundTrip(r)
	})
}

// count returns the number of requests with a method and a path.
func (c *requestCounter) count(method, path string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byPath[method+" "+path]
}

// roundTripper is a function as a http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// world is the hub from its administrator's view, with a namespace for the test.
type world struct {
	testing.TB
	client.Client
	hub *localkube.Plane
	ns  string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	plane, err := sharedHub()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{TB: t, hub: plane, ns: plane.Namespace(t, "tenant")}
	w.Client = w.clientFor(plane.Config)
	return w
}

func (w *world) clientFor(config *rest.Config) client.Client {
	w.Helper()
	c, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	w.noError(err)
	return c
}

func (w *world) noError(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// eventually waits until check returns nil.
func (w *world) eventually(what string, check func() error) {
	w.Helper()
	w.eventuallyWithin(waitTimeout, what, check)
}

// eventuallyWithin is eventually with a timeout.
func (w *world) eventuallyWithin(timeout time.Duration, what string, check func() error) {
	w.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.Context(), 50*time.Millisecond, timeout, true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	if err != nil {
		w.Fatalf("%s: %v", what, last)
	}
}

// tenant returns a client with all rights on Towline's kinds and on ConfigMaps in the namespace of the test.
func (w *world) tenant() client.Client {
	w.Helper()
	return w.account("tenant",
		rbacv1.PolicyRule{APIGroups: []string{configv1beta1.GroupVersion.Group, libv1beta1.GroupVersion.Group}, Resources: []string{"*"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"*"}})
}

// clusterOwner returns a client with all rights on Towline's kinds and on Secrets in the namespace of the test.
func (w *world) clusterOwner() client.Client {
	w.Helper()
	return w.account("cluster-owner",
		rbacv1.PolicyRule{APIGroups: []string{configv1beta1.GroupVersion.Group, libv1beta1.GroupVersion.Group}, Resources: []string{"*"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"*"}})
}

// account returns a client with the token of a new ServiceAccount that has rights in the namespace of the test.
func (w *world) account(name string, rules ...rbacv1.PolicyRule) client.Client {
	w.Helper()
	w.noError(w.Create(w.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Rules: rules}))
	return w.accountWithBinding(name, &rbacv1.RoleBinding{RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}})
}

// accountWithBinding returns a client with the token of a new ServiceAccount, to which binding gives its role.
func (w *world) accountWithBinding(name string, binding *rbacv1.RoleBinding) client.Client {
	w.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
	binding.ObjectMeta = account.ObjectMeta
	binding.Subjects = []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.ns, Name: name}}
	w.noError(w.Create(w.Context(), account))
	w.noError(w.Create(w.Context(), binding))
	return w.accountClient(account)
}

// accountClient returns a client with a token of a ServiceAccount.
func (w *world) accountClient(account *corev1.ServiceAccount) client.Client {
	w.Helper()
	request := &authenticationv1.TokenRequest{}
	w.noError(w.SubResource("token").Create(w.Context(), account, request))
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken = request.Status.Token
	return w.clientFor(config)
}

// agentClient returns a client with a token of the identity that the hub has created for the agent of a cluster in pull
// mode. It waits until the rights of this identity apply.
func (w *world) agentClient(m fleet.Member) client.Client {
	w.Helper()
	agent := w.accountClient(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}})
	w.eventually("the agent of "+m.Name+" has its rights", func() error {
		return errors.Join(
			agent.Get(w.Context(), client.ObjectKey{Namespace: m.Namespace, Name: m.Name}, &libv1beta1.SveltosCluster{}),
			agent.Get(w.Context(), client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}, &coordinationv1.Lease{}))
	})
	return agent
}

// pullCluster has the tenant create a cluster in pull mode, and reports for its agent.
func (w *world) pullCluster(tenant client.Client, name string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: w.labels()}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.noError(tenant.Create(w.Context(), cluster))
	w.eventually("heartbeat of "+name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		lease := &coordinationv1.Lease{}
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: fleet.FromSveltosCluster(cluster).DeliveryNamespace, Name: name}, lease); err != nil {
			return err
		}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		lease.Spec.HolderIdentity = ptr.To("pod")
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, kube.AnnotationDecrypts, "pod")
		return w.Update(w.Context(), lease)
	})
	before := cluster.DeepCopy()
	cluster.Status.Ready, cluster.Status.Version = true, "v1.34.0"
	w.noError(w.Status().Patch(w.Context(), cluster, client.MergeFrom(before)))
	return cluster
}

// labels are the labels of the clusters of the test.
func (w *world) labels() map[string]string { return map[string]string{"test": w.ns} }

// createProfile has the tenant create a Profile for the clusters of the test.
func (w *world) createProfile(tenant client.Client, name string, change func(*configv1beta1.ProfileSpec)) *configv1beta1.Profile {
	w.Helper()
	profile := &configv1beta1.Profile{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
		Spec:       configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{MatchLabels: w.labels()}},
	}
	change(&profile.Spec)
	for i := range profile.Spec.HelmCharts {
		profile.Spec.HelmCharts[i].ReleaseName = name
	}
	w.noError(tenant.Create(w.Context(), profile))
	return profile
}

// awaitFailure waits until a feature of a summary of the profile fails, and returns its message. isWanted may be nil.
func (w *world) awaitFailure(profile string, isWanted func(message string) bool) string {
	w.Helper()
	var message string
	w.eventually("profile "+profile+" fails", func() error {
		summaries := &configv1beta1.ClusterSummaryList{}
		if err := w.List(w.Context(), summaries, client.InNamespace(w.ns), client.MatchingLabels{configv1beta1.ProfileNameLabel: profile}); err != nil {
			return err
		}
		var features []configv1beta1.FeatureSummary
		for _, summary := range summaries.Items {
			features = append(features, summary.Status.FeatureSummaries...)
		}
		at := slices.IndexFunc(features, func(f configv1beta1.FeatureSummary) bool {
			return f.FailureMessage != "" && (isWanted == nil || isWanted(f.FailureMessage))
		})
		if at < 0 {
			return fmt.Errorf("its features are %+v", features)
		}
		message = features[at].FailureMessage
		return nil
	})
	return message
}

// wantText returns an error unless message has the text.
func wantText(message, text string) error {
	if !strings.Contains(message, text) {
		return fmt.Errorf("the message is %q, want %q", message, text)
	}
	return nil
}

// hasTexts returns a function for awaitFailure that requires all texts in the message.
func hasTexts(texts ...string) func(string) bool {
	return func(message string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(message, text) })
	}
}

// listener is an attacker's server. It records the credentials of requests.
type listener struct {
	*httptest.Server

	mu          sync.Mutex // guards the fields below
	requests    int
	credentials []string
}

// startListener starts a server, which responds with handler.
func (w *world) startListener(handler http.HandlerFunc) *listener {
	w.Helper()
	l := newListener(handler)
	l.Start()
	w.Cleanup(l.Close)
	return l
}

// newListener returns a server that is not started.
func newListener(handler http.HandlerFunc) *listener {
	l := &listener{}
	l.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		l.requests++
		if sent := r.Header.Get("Authorization"); sent != "" {
			l.credentials = append(l.credentials, sent)
		}
		l.mu.Unlock()
		handler(rw, r)
	}))
	return l
}

func (l *listener) received() (requests int, credentials []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.requests, slices.Clone(l.credentials)
}
