package hub_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// requestRecorder records the requests of a hub.
type requestRecorder struct {
	mu   sync.Mutex // guards seen
	seen []string
}

// on returns a copy of config whose requests are recorded.
func (r *requestRecorder) on(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			// The health check of the hub reads this namespace periodically.
			if request.URL.Path != "/api/v1/namespaces/kube-system" {
				r.mu.Lock()
				r.seen = append(r.seen, request.Method+" "+request.URL.RequestURI())
				r.mu.Unlock()
			}
			return next.RoundTrip(request)
		})
	})
	return config
}

// take returns the requests since the last call of take.
func (r *requestRecorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = nil
	return seen
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// newRecordedWorld starts a hub on a private control plane, and records its requests.
func newRecordedWorld(t *testing.T, name string) (*world, *requestRecorder) {
	t.Helper()
	w := newWorldOn(t, localkube.ForTest(t, localkube.Named(name)))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	own := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	requests := &requestRecorder{}
	w.start(requests.on(w.plane.Config), hub.Options{Transports: map[fleet.Mode]deliver.Transport{fleet.Push: own, fleet.Pull: own}})
	w.createConfigMap("manifests", manifest("a"))
	return w, requests
}

func TestHeartbeatsCauseNoHubRequests(t *testing.T) {
	t.Parallel()
	w, requests := newRecordedWorld(t, "beats")
	one := w.createReadyMember("one", w.prodLabels())
	w.wantProvisioned(w.createProfile(nil), "one")
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionHealthy
	})

	const quiet, beats = 2 * time.Second, 20
	w.eventually("the hub has nothing to do", func() error {
		requests.take()
		return w.checkNoRequests(requests, quiet)
	})
	for range beats {
		lease := &coordinationv1.Lease{}
		lease.Namespace, lease.Name = w.ns, one.Name
		update(w, lease, func(l *coordinationv1.Lease) { l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()} })
	}
	// Agents also report in the status of the cluster every few minutes.
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), one))
	before := one.DeepCopy()
	one.Status.AgentLastReportTime = &metav1.Time{Time: time.Now()}
	w.must(w.Status().Patch(t.Context(), one, client.MergeFrom(before)))
	if err := w.checkNoRequests(requests, quiet); err != nil {
		t.Errorf("%d heartbeats caused requests: %v", beats, err)
	}
}

// TestSummariesOfANewClusterReadNoInventory registers a cluster while the hub runs.
func TestSummariesOfANewClusterReadNoInventory(t *testing.T) {
	t.Parallel()
	w, requests := newRecordedWorld(t, "inventory")
	w.createReadyMember("one", w.prodLabels())
	for range 3 {
		w.wantSummary(w.createProfile(nil), "one", func(s configv1beta1.ClusterSummaryStatus) bool { return len(s.FeatureSummaries) > 0 })
	}
	lists := 0
	for _, request := range requests.take() {
		if strings.HasPrefix(request, "GET /api/v1/namespaces/projectsveltos/secrets/towline-record-") {
			t.Errorf("read of a record that does not exist: %s", request)
		}
		if strings.HasPrefix(request, "GET /api/v1/namespaces/projectsveltos/secrets?") && !strings.Contains(request, "watch=true") {
			lists++
		}
	}
	if lists > 2 {
		t.Errorf("%d lists of records, want at most one for the hub and one for the cluster", lists)
	}
}

func TestRegistrationReadsOnlyThePolicy(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, localkube.ForTest(t, localkube.Named("traffic")))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	own := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	requests := &requestRecorder{}
	w.start(requests.on(w.plane.Config), hub.Options{Transports: map[fleet.Mode]deliver.Transport{fleet.Push: own, fleet.Pull: own}})
	const quiet = time.Second
	// The hub also reads kube-public/cluster-info if it does not exist.
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespacePublic, Name: "cluster-info"}})
	first := w.createMember("first", nil)
	w.awaitManifest(first.Name)
	// The hub reads the shared objects of all agents once.
	for _, request := range requests.take() {
		if strings.HasPrefix(request, http.MethodGet) && strings.Contains(request, "/"+w.ns+"/") && !strings.Contains(request, "watch=true") {
			t.Errorf("read for the first cluster: %s", request)
		}
	}
	w.must(w.Delete(t.Context(), first))
	w.wantClusterDeleted(first.Name)
	w.eventually("the hub has nothing to do", func() error {
		requests.take()
		return w.checkNoRequests(requests, quiet)
	})

	one := w.createMember("one", nil)
	secret := w.awaitManifest(one.Name)
	seen := requests.take()
	// The policy for tokens and its binding are read.
	if got, want := methods(seen), (map[string]int{http.MethodGet: 2, http.MethodPatch: 3, http.MethodPost: 8}); !maps.Equal(got, want) {
		t.Errorf("requests for a manifest: got %v, want %v: %q", got, want, seen)
	}
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = w.ns, one.Name
	update(w, lease, func(l *coordinationv1.Lease) {
		metav1.SetMetaDataAnnotation(&l.ObjectMeta, kube.AnnotationExchanged, string(secret.UID))
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	})
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(one), one))
	w.setReady(one)
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionHealthy
	})
	w.eventually("the manifest is deleted", func() error { return w.checkNotFound(&corev1.Secret{}, w.ns, secret.Name) })
	seen = slices.DeleteFunc(requests.take(), func(request string) bool {
		return strings.Contains(request, "record-partition") // the one list of the cluster's records, see TestSummariesOfANewClusterReadNoInventory
	})
	if methods(seen)[http.MethodGet] > 0 {
		t.Errorf("requests while the agent connects: %q", seen)
	}
}

// TestRestartReadsNoIdentityAlone restarts the hub while one of several identities is damaged.
func TestRestartReadsNoIdentityAlone(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, localkube.ForTest(t, localkube.Named("restart")))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	own := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	opts := hub.Options{Transports: map[fleet.Mode]deliver.Transport{fleet.Push: own, fleet.Pull: own}}
	stop := w.start(w.plane.Config, opts)
	const clusters = 5
	for i := range clusters {
		w.createMember(fmt.Sprint("c", i), nil)
		w.awaitManifest(fmt.Sprint("c", i))
	}
	stop()
	damaged := &rbacv1.Role{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "c0"}, damaged))
	update(w, damaged, func(r *rbacv1.Role) { r.Rules = nil })

	requests := &requestRecorder{}
	w.start(requests.on(w.plane.Config), opts)
	w.eventually("the Role is repaired", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(damaged), damaged); err != nil || len(damaged.Rules) == 0 {
			return fmt.Errorf("rules %v: %w", damaged.Rules, err)
		}
		return nil
	})
	// The manifest of a cluster is read after its identity has been checked.
	var manifests, identities, lists []string
	w.eventually("all clusters are checked", func() error {
		for _, request := range requests.take() {
			method, url, _ := strings.Cut(request, " ")
			path, query, _ := strings.Cut(url, "?")
			switch {
			case method != http.MethodGet:
			case strings.Contains(query, "labelSelector=towline.dev%2Fregistration"):
				lists = append(lists, path)
			case !strings.Contains(path, "/"+w.ns+"/"):
			case strings.HasSuffix(path, join.RegistrationSecret("")):
				manifests = append(manifests, path)
			default:
				identities = append(identities, path)
			}
		}
		if len(manifests) < clusters {
			return fmt.Errorf("manifests: %q", manifests)
		}
		return nil
	})
	if len(lists) != 3 {
		t.Errorf("got lists %q, want 3", lists)
	}
	for _, path := range identities {
		if name := strings.TrimPrefix(path[strings.LastIndex(path, "/")+1:], w.ns+":"); !strings.HasPrefix(name, "c0") {
			t.Errorf("read of an unchanged identity: %s", path)
		}
	}
}

// methods counts requests, without watches, by method.
func methods(seen []string) map[string]int {
	counts := map[string]int{}
	for _, request := range seen {
		if method, url, _ := strings.Cut(request, " "); !strings.Contains(url, "watch=true") {
			counts[method]++
		}
	}
	return counts
}

// checkNoRequests returns an error if the hub has sent requests, or sends requests within a time.
func (w *world) checkNoRequests(requests *requestRecorder, within time.Duration) error {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.Context().Done():
		return w.Context().Err()
	}
	return checkEqual([]string(nil), requests.take())
}
