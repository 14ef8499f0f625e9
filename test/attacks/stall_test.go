package attacks

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

const (
	// stallTime is the time before a stalling member ends a response: less than the time limit of a request.
	stallTime = 50 * time.Second
	// maxDelay is the maximum delay of a change of another tenant during an attack.
	maxDelay = time.Minute
)

// stallingMember serves the version and the discovery of a cluster at once, and each other response after stallTime.
// reads is the number of inventory requests that wait. The hub sends one in each reconcile.
func (w *world) stallingMember() (cluster clientcmdapi.Cluster, reads *atomic.Int64) {
	w.Helper()
	reads = &atomic.Int64{}
	replies, ended := discoveryReplies(), make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if reply, ok := replies[r.URL.Path]; ok {
			rw.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprint(rw, reply) // the hub may have closed the connection
			return
		}
		if r.Method == http.MethodGet && !r.URL.Query().Has("labelSelector") {
			reads.Add(1)
			defer reads.Add(-1)
		}
		select {
		case <-time.After(stallTime):
		case <-r.Context().Done():
		case <-ended:
		}
		rw.WriteHeader(http.StatusServiceUnavailable)
	}))
	w.Cleanup(func() { close(ended); server.Close() })
	return clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: certificateOf(server)}, reads
}

// configMap is a content with one ConfigMap in a namespace. The ConfigMap has a text.
func configMap(namespace, text string) map[string]string {
	return map[string]string{"objects.yaml": fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: delivered}\ndata: {text: %q}\n", namespace, text)}
}

// createContentProfile has the tenant create a Profile that delivers the ConfigMap content to clusters of the test.
func (w *world) createContentProfile(tenant client.Client, name string, clusters ...string) {
	w.Helper()
	w.createProfile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
		spec.ClusterSelector = metav1.LabelSelector{}
		spec.ClusterRefs = w.references(clusters...)
		spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}}
	})
}

// awaitDelivered waits until the ConfigMap of a content with a text is in the namespace of the test, on the hub. It
// fails the test if that takes longer than within.
func (w *world) awaitDelivered(text string, within time.Duration) {
	w.Helper()
	from, found := time.Now(), &corev1.ConfigMap{}
	w.eventually("text "+text+" is delivered", func() error {
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: "delivered"}, found); err != nil {
			return err
		}
		return wantText(found.Data["text"], text)
	})
	if took := time.Since(from); took > within {
		w.Errorf("the delivery of text %s took %s", text, took)
	}
}

// TestPushMembersThatStall: a tenant has more push members than the hub has workers for them, and two profiles. Their
// API servers respond just within the time limit of a request. Meanwhile the changes for the push member of another
// namespace are delivered.
func TestPushMembersThatStall(t *testing.T) {
	w := newWorld(t)
	other := &world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(t, "other")}
	victim, attacker, owner := other.tenant(), w.tenant(), w.clusterOwner() // the attacker has two accounts
	other.registerPushCluster("healthy", w.hub)
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: other.ns, Name: "content"}, Data: configMap(other.ns, "first")}
	w.noError(victim.Create(t.Context(), content))
	other.createContentProfile(victim, "web", "healthy")
	other.awaitDelivered("first", waitTimeout)

	server, reads := w.stallingMember()
	var members []string
	for i := range 110 {
		members = append(members, w.pushCluster(owner, fmt.Sprint("stalling-", i), libv1beta1.SveltosClusterSpec{}, server).Name)
	}
	for _, name := range members {
		w.awaitReady(name)
	}
	w.noError(attacker.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"}, Data: configMap("default", "hostile")}))
	for _, name := range []string{"one", "two"} {
		w.createContentProfile(attacker, name, members...)
	}
	// The attacker gets 80 of the workers, minus the ones for the members of other tests.
	const occupied = 70
	w.eventually("the members have all workers that they can have", func() error {
		if n := reads.Load(); n < occupied {
			return fmt.Errorf("%d requests wait", n)
		}
		return nil
	})
	for _, text := range []string{"second", "third", "fourth"} {
		content.Data = configMap(other.ns, text)
		w.noError(victim.Update(t.Context(), content))
		other.awaitDelivered(text, maxDelay)
	}
}
