package attacks

import (
	"crypto/ed25519"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// internalText is the response of a server that is not meant for users.
const internalText = "internal-secret"

// TestServerSideRequestForgery: the author of a Profile wants the hub to send requests to internal addresses, and to
// return the responses. The hub of the tests denies 127.0.0.3, which stands for them.
func TestServerSideRequestForgery(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "mine")
	var reached atomic.Int32
	denied := w.serveAt(deniedAddress, func(http.ResponseWriter, *http.Request) { reached.Add(1) })
	redirecting := w.startListener(func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, denied.URL+"/metadata", http.StatusFound)
	})
	host := strings.TrimPrefix(denied.URL, "http://")
	for name, address := range map[string]string{
		"metadata": "http://169.254.169.254/latest", "in-v6": "http://[::ffff:169.254.169.254]/latest", "direct": denied.URL, "redirect": redirecting.URL,
	} {
		w.createProfile(tenant, "chart-"+name, chartFrom(address, ""))
		w.createProfile(tenant, "file-"+name, remoteFrom(address, ""))
		w.awaitFailure("chart-"+name, hasTexts("does not connect to this address"))
		w.awaitFailure("file-"+name, hasTexts("does not connect to this address"))
	}
	w.noError(w.Create(t.Context(), w.loginBySSH(host)))
	for name, remote := range map[string]struct{ address, secret string }{
		"git": {"git+http://" + host + "/x.git", ""}, "ssh": {"git+ssh://" + host + "/x.git", "ssh"}, "oci": {"oci://" + host + "/x:1", ""},
	} {
		w.createProfile(tenant, "remote-"+name, remoteFrom(remote.address, remote.secret))
		w.awaitFailure("remote-"+name, hasTexts("does not connect to this address"))
	}
	if n := reached.Load(); n > 0 {
		t.Errorf("the denied server got %d requests", n)
	}
}

// loginBySSH returns a valid Secret for a Git repository on the host.
func (w *world) loginBySSH(host string) *corev1.Secret {
	w.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	w.noError(err)
	signer, err := ssh.NewSignerFromKey(key)
	w.noError(err)
	identity, err := ssh.MarshalPrivateKey(key, "")
	w.noError(err)
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "ssh"}, Type: libv1beta1.ProfileSecretType,
		Data: map[string][]byte{"identity": pem.EncodeToMemory(identity), "known_hosts": []byte(knownhosts.Line([]string{host}, signer.PublicKey()))},
	}
}

// TestResponsesAreNotRepeated: a server that users cannot reach is allowed for the hub. Its responses are not in a
// status.
func TestResponsesAreNotRepeated(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "mine")
	for name, handler := range map[string]http.HandlerFunc{
		"text": func(rw http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(rw, internalText) },
		"yaml": func(rw http.ResponseWriter, _ *http.Request) {
			_, _ = fmt.Fprintf(rw, "entries: {%q: %q}\n", internalText, internalText)
		},
		"error": func(rw http.ResponseWriter, _ *http.Request) {
			http.Error(rw, `{"errors":[{"code":"DENIED","message":"`+internalText+`"}]}`, http.StatusForbidden)
		},
		"no-http":     rawResponse("-ERR " + internalText + "\r\n"),
		"status-code": rawResponse("HTTP/1.1 " + internalText + "\r\n\r\n"),
		"location":    rawResponse("HTTP/1.1 302 Found\r\nLocation: http://%zz" + internalText + "\r\nContent-Length: 0\r\n\r\n"),
	} {
		server := w.startListener(handler)
		host := strings.TrimPrefix(server.URL, "http://")
		w.createProfile(tenant, name+"-chart", chartFrom(server.URL, ""))
		w.createProfile(tenant, name+"-registry", chartFrom("oci://"+host, ""))
		w.createProfile(tenant, name+"-file", remoteFrom(server.URL+"/x.yaml", ""))
		for _, kind := range []string{"chart", "registry", "file"} {
			if message := w.awaitFailure(name+"-"+kind, nil); strings.Contains(message, internalText) {
				t.Errorf("%s %s: the status has the response: %s", name, kind, message)
			}
		}
	}
}

// rawResponse returns a handler that writes a response without HTTP.
func rawResponse(answer string) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		if connection, _, err := http.NewResponseController(rw).Hijack(); err == nil {
			_, _ = connection.Write([]byte(answer))
			_ = connection.Close()
		}
	}
}

// TestEndpointsOfClusters: an attacker who may create SveltosClusters and their Secrets wants the hub to send requests
// to internal addresses, as if they were API servers.
func TestEndpointsOfClusters(t *testing.T) {
	w := newWorld(t)
	owner := w.clusterOwner()
	var reached atomic.Int32
	denied := w.serveAt(deniedAddress, func(http.ResponseWriter, *http.Request) { reached.Add(1) })
	internal := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		rw.WriteHeader(http.StatusInternalServerError)
		_, _ = fmt.Fprintf(rw, `{"error": %q}`, internalText)
	}))
	t.Cleanup(internal.Close)
	ca := certificateOf(internal)
	banner, refusing := w.startListener(rawResponse("-ERR "+internalText+"\r\n")), w.startListener(rawResponse("HTTP/1.1 407 "+internalText+"\r\nContent-Length: 0\r\n\r\n"))
	redirecting := httptest.NewTLSServer(http.RedirectHandler(internal.URL+"/"+internalText, http.StatusFound))
	t.Cleanup(redirecting.Close)
	for name, test := range map[string]struct {
		cluster clientcmdapi.Cluster
		want    string
	}{
		"plain":         {clientcmdapi.Cluster{Server: denied.URL}, "its server is not an https address"},
		"no-scheme":     {clientcmdapi.Cluster{Server: strings.TrimPrefix(denied.URL, "http://")}, "its server is not an https address"},
		"denied":        {clientcmdapi.Cluster{Server: strings.Replace(denied.URL, "http", "https", 1)}, "does not connect to this address"},
		"metadata":      {clientcmdapi.Cluster{Server: "https://169.254.169.254"}, "does not connect to this address"},
		"by-a-proxy":    {clientcmdapi.Cluster{Server: "https://example.com", ProxyURL: denied.URL}, "does not connect to this address"},
		"their-banner":  {clientcmdapi.Cluster{Server: "https://192.0.2.1", ProxyURL: banner.URL}, "invalid response"},
		"their-reason":  {clientcmdapi.Cluster{Server: "https://192.0.2.1", ProxyURL: refusing.URL}, "the proxy returned 407"},
		"redirected":    {clientcmdapi.Cluster{Server: redirecting.URL, CertificateAuthorityData: certificateOf(redirecting)}, "it redirects"},
		"their-service": {clientcmdapi.Cluster{Server: internal.URL, CertificateAuthorityData: ca}, "an error on the server"},
	} {
		cluster := w.pushCluster(owner, name, libv1beta1.SveltosClusterSpec{}, test.cluster)
		var message string
		w.eventually("cluster "+name+" fails", func() error {
			if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
				return err
			}
			if message = cluster.Status.FailureMessage; !strings.Contains(message, test.want) {
				return fmt.Errorf("its message is %q, want %q", message, test.want)
			}
			return nil
		})
		if strings.Contains(message, internalText) {
			t.Errorf("%s: the status has the response: %s", name, message)
		}
	}
	if n := reached.Load(); n > 0 {
		t.Errorf("the denied server got %d requests", n)
	}
}

// TestResponsesOfMembersAreNotRepeated: a cluster answers the discovery, and redirects all other requests to a server
// that is not meant for users. Or that server is the cluster, and returns JSON for all paths.
func TestResponsesOfMembersAreNotRepeated(t *testing.T) {
	w := newWorld(t)
	owner, tenant := w.clusterOwner(), w.tenant()
	internal := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(rw, `{"password": %q}`, internalText)
	}))
	t.Cleanup(internal.Close)
	discovery := map[string]string{
		"/version": `{"gitVersion":"v1.34.0"}`,
		"/api":     `{"kind":"APIVersions","versions":["v1"]}`,
		"/apis":    `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`,
		"/api/v1":  `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"configmaps","namespaced":true,"kind":"ConfigMap","verbs":["list","get","patch"]}]}`,
	}
	w.noError(tenant.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"},
		Data:       map[string]string{"a": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: default}\n"},
	}))
	for name, test := range map[string]struct {
		other http.Handler
		want  string
	}{
		"redirecting": {http.RedirectHandler(internal.URL+"/config", http.StatusFound), "it redirects"},
		"direct":      {internal.Config.Handler, "something other than an object"},
	} {
		server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if reply, ok := discovery[r.URL.Path]; ok {
				rw.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprint(rw, reply)
				return
			}
			test.other.ServeHTTP(rw, r)
		}))
		t.Cleanup(server.Close)
		cluster := w.pushCluster(owner, name, libv1beta1.SveltosClusterSpec{}, clientcmdapi.Cluster{Server: server.URL, CertificateAuthorityData: certificateOf(server)})
		before := cluster.DeepCopy()
		cluster.Labels = map[string]string{"test": w.ns + name}
		w.noError(owner.Patch(t.Context(), cluster, client.MergeFrom(before)))
		w.createProfile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
			spec.ClusterSelector.MatchLabels = cluster.Labels
			spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}}
		})
		if message := w.awaitFailure(name, hasTexts(test.want)); strings.Contains(message, internalText) {
			t.Errorf("%s: the status has the response: %s", name, message)
		}
	}
}

// pushCluster has the owner create a cluster in push mode with a kubeconfig.
func (w *world) pushCluster(owner client.Client, name string, spec libv1beta1.SveltosClusterSpec, server clientcmdapi.Cluster) *libv1beta1.SveltosCluster {
	w.Helper()
	raw, err := clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": &server}, AuthInfos: map[string]*clientcmdapi.AuthInfo{"c": {Token: "t"}},
		Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "c"}}, CurrentContext: "c",
	})
	w.noError(err)
	w.noError(owner.Create(w.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name + "-sveltos-kubeconfig"}, Data: map[string][]byte{"kubeconfig": raw},
	}))
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Spec: spec}
	w.noError(owner.Create(w.Context(), cluster))
	return cluster
}

// serveAt starts a server at an address.
func (w *world) serveAt(address string, handler http.HandlerFunc) *httptest.Server {
	w.Helper()
	listener, err := (&net.ListenConfig{}).Listen(w.Context(), "tcp", net.JoinHostPort(address, "0"))
	w.noError(err)
	server := httptest.NewUnstartedServer(handler)
	_ = server.Listener.Close()
	server.Listener = listener
	server.Start()
	w.Cleanup(server.Close)
	return server
}
