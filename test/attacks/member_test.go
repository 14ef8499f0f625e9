package attacks

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// discoveryReplies returns the version and the discovery of a cluster with pods, by path.
func discoveryReplies() map[string]string {
	return map[string]string{
		"/version": `{"gitVersion":"v1.34.0"}`,
		"/api":     `{"kind":"APIVersions","versions":["v1"]}`,
		"/apis":    `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`,
		"/api/v1":  `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"pods","namespaced":true,"kind":"Pod","verbs":["list"]}]}`,
	}
}

// hostileMember serves the version and the discovery of a cluster with pods. discovery and pods replace the responses
// about its APIs and its pods, unless they are nil. It counts the bytes of these two.
func (w *world) hostileMember(discovery, pods http.HandlerFunc) (cluster clientcmdapi.Cluster, sent *atomic.Int64) {
	w.Helper()
	sent = &atomic.Int64{}
	replies := discoveryReplies()
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		counted := countingWriter{rw, sent}
		switch {
		case strings.HasSuffix(r.URL.Path, "/pods") && pods != nil:
			pods(counted, r)
		case r.URL.Path != "/version" && discovery != nil:
			discovery(counted, r)
		default:
			_, _ = fmt.Fprint(rw, replies[r.URL.Path]) // the hub may have closed the connection
		}
	}))
	w.Cleanup(server.Close)
	return clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: certificateOf(server)}, sent
}

type countingWriter struct {
	http.ResponseWriter

	sent *atomic.Int64
}

func (c countingWriter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.sent.Add(int64(n))
	return n, err
}

// endless writes begin, and then repeated again and again until the connection ends.
func endless(begin, repeated string) http.HandlerFunc {
	block := []byte(strings.Repeat(repeated, 1+(64<<10)/len(repeated)))
	return func(rw http.ResponseWriter, _ *http.Request) {
		_, err := fmt.Fprint(rw, begin)
		for err == nil {
			_, err = rw.Write(block)
		}
	}
}

// TestEndlessMemberResponses: the administrator of a push member returns endless APIs and pages, to fill the memory of
// the hub. The hub stops reading each early, and serves another member.
func TestEndlessMemberResponses(t *testing.T) {
	w := newWorld(t)
	owner := w.clusterOwner()
	pages := func(rw http.ResponseWriter, _ *http.Request) {
		pod := fmt.Sprintf(`{"metadata":{"name":"p","annotations":{"a":%q}}}`, strings.Repeat("x", 1<<20))
		_, _ = fmt.Fprintf(rw, `{"kind":"PodList","apiVersion":"v1","metadata":{"continue":"next"},"items":[%s]}`, pod) // the hub may have closed the connection
	}
	const (
		tooLong       = "the cluster returned more than 16 MiB or 800000 values"
		tooMuchMemory = "the cluster returned data that needs too much memory: more than 128 MiB"
	)
	for name, test := range map[string]struct {
		discovery, pods http.HandlerFunc
		want            string
		maxSent         int64
	}{
		"many-apis": {endless(`{"kind":"APIGroupList","apiVersion":"v1","groups":[`, `{},`), nil, tooMuchMemory, 32 << 20},
		"binary-apis": {
			endless("k8s\x00", "\x12\x00"), nil, "the cluster returned something other than JSON objects", 32 << 20,
		},
		"long-apis":  {endless(`{"kind":"`, "x"), nil, tooLong, 64 << 20},
		"pages":      {nil, pages, "the objects have more than 16 MiB", 64 << 20},
		"many-items": {nil, endless(`{"kind":"PodList","apiVersion":"v1","items":[`, `{},`), tooMuchMemory, 64 << 20},
	} {
		server, sent := w.hostileMember(test.discovery, test.pods)
		cluster := w.pushCluster(owner, name, libv1beta1.SveltosClusterSpec{LivenessChecks: podChecks(passingScript)}, server)
		// Two requests can wait for each other's memory until both fail. The hub contacts the member again after a minute.
		w.eventuallyWithin(5*time.Minute, "the hub refuses "+name, func() error {
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
				return err
			}
			return wantText(cluster.Status.FailureMessage, test.want)
		})
		// The hub may have contacted the member several times.
		if n := sent.Load(); n > 5*test.maxSent {
			t.Errorf("%s: the hub has read %d MiB", name, n>>20)
		}
		w.noError(owner.Delete(t.Context(), cluster))
	}
	w.registerPushCluster("healthy", w.hub)
}
