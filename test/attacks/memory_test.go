package attacks

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// maxEvent is the length of the events of a hostile member in bytes: it limits the memory of a hub without limits, so
// that this machine survives.
const maxEvent = 96 << 20

// The numbers of values in a response about the APIs, and in a page of a list. When they are decoded, they need 300 MiB
// and 2 GiB.
const (
	manyAPIs    = 790_000
	manyObjects = 3_900_000
)

// membersPerKind is the number of members with the same responses. The test waits for endedLists lists of objects that
// have ended.
const (
	membersPerKind = 25
	endedLists     = 5
)

// honestPages is the number of pages of a list of objects before one that waits, and objectsOfPage the number of
// objects in a page, which needs no reservation. The lists of all members need more memory than a namespace can have,
// which is enough for maxWaiting lists.
const (
	maxWaiting    = 14
	honestPages   = 100
	objectsOfPage = 150
	nameBytes     = 500
)

// nullElements returns a part of a response with n values. They need hundreds of times as much memory as their text.
func nullElements(n int) string { return strings.TrimSuffix(strings.Repeat("null,", n), ",") }

// isMetadataList returns whether a request lists objects for their watch. The Secrets of records are among them.
func isMetadataList(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata") && !strings.Contains(r.URL.Query().Get("labelSelector"), "=head")
}

// fillingMember serves a cluster that fills the memory of the hub by all its responses for one kind of request: "apis",
// "lists", "events" or "objects". It counts these requests; for "objects" only the lists that begin again after one was
// refused or has expired.
func (w *world) fillingMember(kind string) (cluster clientcmdapi.Cluster, filled *atomic.Int64) {
	w.Helper()
	filled = &atomic.Int64{}
	replies := discoveryReplies()
	replies["/api/v1"] = `{"kind":"APIResourceList","groupVersion":"v1","resources":[` +
		`{"name":"secrets","namespaced":true,"kind":"Secret","verbs":["list"]},{"name":"configmaps","namespaced":true,"kind":"ConfigMap","verbs":["list"]}]}`
	apis := `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"v1","resources":[` + nullElements(manyAPIs) + `]}`
	list := `"apiVersion":"v1","metadata":{"continue":"next"},"items":[` + nullElements(manyObjects) + `]}`
	event := strings.Repeat("x", 1<<20)
	page := strings.TrimSuffix(strings.Repeat(`{"metadata":{"name":"`+strings.Repeat("a", nameBytes)+`"}},`, objectsOfPage), ",")
	var begun, waiting atomic.Int64 // lists of objects
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		isWatch, isList := r.URL.Query().Has("watch"), r.Method == http.MethodGet && r.URL.Query().Has("labelSelector")
		switch reply, isDiscovery := replies[r.URL.Path]; {
		case kind == "apis" && r.URL.Path == "/api/v1":
			filled.Add(1)
			_, _ = fmt.Fprint(rw, apis) // here and below the hub may have closed the connection
		case isDiscovery:
			_, _ = fmt.Fprint(rw, reply)
		case kind == "events" && isWatch:
			filled.Add(1)
			_, err := fmt.Fprint(rw, `{"type":"ADDED","object":{"metadata":{"name":"`)
			for i := 0; i < maxEvent>>20 && err == nil; i++ {
				_, err = fmt.Fprint(rw, event)
			}
		case isWatch:
			http.Error(rw, "", http.StatusServiceUnavailable)
		case kind == "objects" && isList && isMetadataList(r):
			next := 1
			_, _ = fmt.Sscan(r.URL.Query().Get("continue"), &next)
			if next > honestPages {
				if n := waiting.Add(1); n == maxWaiting+1 {
					w.Errorf("more than %d lists of one namespace wait for their last page", maxWaiting)
				}
				defer waiting.Add(-1)
				select {
				case <-r.Context().Done():
				case <-w.Context().Done():
				}
				return
			}
			if next == 1 && begun.Add(1) > membersPerKind {
				filled.Add(1)
			}
			_, _ = fmt.Fprintf(rw, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"continue":"%d"},"items":[%s]}`, next+1, page)
		case kind == "lists" && isList:
			filled.Add(1)
			_, _ = fmt.Fprint(rw, `{"kind":"SecretList",`, list)
		case isList:
			_, _ = fmt.Fprint(rw, `{"kind":"SecretList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
		default:
			http.Error(rw, "", http.StatusServiceUnavailable)
		}
	}))
	w.Cleanup(server.Close)
	return clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: certificateOf(server)}, filled
}

// TestTenantFillsTheMemory: a tenant has many push members, whose responses at the same time need as much memory as
// possible, and contents that need as much. The hub with its children stays below the limit of its container. Meanwhile
// it delivers the changes of another tenant, and of a ClusterProfile for the clusters of both. The test is not
// parallel: other tests would wait for the processors.
func TestTenantFillsTheMemory(t *testing.T) {
	attacked := startHub(t)
	w := &world{TB: t, hub: attacked.plane, ns: attacked.plane.Namespace(t, "tenant")}
	w.Client = w.clientFor(attacked.plane.Config)
	other := &world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(t, "other")}
	victim, attacker, owner := other.tenant(), w.tenant(), w.clusterOwner()
	other.registerPushCluster("healthy", w.hub)
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: other.ns, Name: "content"}, Data: configMap(other.ns, "first")}
	w.noError(victim.Create(t.Context(), content))
	other.createContentProfile(victim, "web", "healthy")
	other.awaitDelivered("first", waitTimeout)

	stop := attacked.largestMemory()
	var members []string
	filled := map[string]*atomic.Int64{}
	for _, kind := range []string{"apis", "lists", "events", "objects"} {
		var server clientcmdapi.Cluster
		server, filled[kind] = w.fillingMember(kind)
		for i := range membersPerKind {
			members = append(members, w.pushCluster(owner, fmt.Sprint(kind, "-", i), libv1beta1.SveltosClusterSpec{}, server).Name)
		}
	}
	w.noError(attacker.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"}, Data: configMap("default", "hostile")}))
	w.createContentProfile(attacker, "hostile", members...)
	platform := other.platformProfile(append(w.references(members...), other.references("healthy")...))
	w.fillingContents(attacker)
	for kind, n := range filled {
		w.eventually("the members have returned their "+kind, func() error {
			if n := n.Load(); n < cmp.Or(map[string]int64{"objects": endedLists}[kind], membersPerKind) {
				return fmt.Errorf("%d responses", n)
			}
			return nil
		})
	}
	w.awaitResults(testedContents)
	for _, text := range []string{"second", "third"} {
		content.Data = configMap(other.ns, text)
		w.noError(victim.Update(t.Context(), content))
		other.awaitDelivered(text, waitTimeout)
		platform.update(text)
		platform.awaitDelivered(text, waitTimeout)
	}
	all, hubItself, children := stop()
	if t.Logf("at most %d MiB of memory: the hub %d, its children %d", all>>20, hubItself>>20, children>>20); all > hubMemory {
		t.Errorf("the hub and its children needed %d MiB of memory", all>>20)
	}
}

// platform is a world whose namespace has the content and the objects of a ClusterProfile.
type platform struct{ *world }

// platformProfile has the administrator create a ClusterProfile for clusters. Its content is large enough to need a
// reservation of memory.
func (w *world) platformProfile(clusters []corev1.ObjectReference) platform {
	w.Helper()
	p := platform{&world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(w.TB, "platform")}}
	p.noError(p.Create(p.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: p.ns, Name: "content"}, Data: p.content("first")}))
	p.noError(p.Create(p.Context(), &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: p.ns}, Spec: configv1beta1.ProfileSpec{
		ClusterRefs: clusters,
		PolicyRefs:  []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: p.ns, Name: "content"}},
	}}))
	return p
}

// update changes the content.
func (p platform) update(text string) {
	p.Helper()
	content := &corev1.ConfigMap{}
	p.noError(p.Get(p.Context(), client.ObjectKey{Namespace: p.ns, Name: "content"}, content))
	content.Data = p.content(text)
	p.noError(p.Update(p.Context(), content))
}

// content returns manifests with a text, and 200 KB more.
func (p platform) content(text string) map[string]string {
	data := configMap(p.ns, text)
	data["more.yaml"] = fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: more}\ndata: {more: %q}\n", p.ns, strings.Repeat("more ", 40_000))
	return data
}

// references returns references to clusters of the test.
func (w *world) references(clusters ...string) []corev1.ObjectReference {
	var all []corev1.ObjectReference
	for _, cluster := range clusters {
		all = append(all, fleet.Reference(fleet.Member{Type: fleet.TypeSveltos, Namespace: w.ns, Name: cluster}))
	}
	return all
}
