package stories

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

// remoteToken is the token of the file server. No message may have it.
const remoteToken = "correct-horse-battery-staple"

// fileServer serves files by https to clients with a token.
type fileServer struct {
	*httptest.Server

	release chan struct{} // closed at the end, for requests that hang

	mu       sync.Mutex // guards the fields below
	files    map[string][]byte
	status   int            // of all responses, 0 for the files
	requests map[string]int // by path
	bodies   map[string]int // files that were sent, by path
}

func newFileServer(t *testing.T) *fileServer {
	t.Helper()
	s := &fileServer{release: make(chan struct{}), files: map[string][]byte{}, requests: map[string]int{}, bodies: map[string]int{}}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(s.serve))
	t.Cleanup(s.Close)
	t.Cleanup(func() { close(s.release) })
	return s
}

func (s *fileServer) serve(w http.ResponseWriter, in *http.Request) {
	if in.URL.Path == "/hangs" {
		<-s.release
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests[in.URL.Path]++
	content, ok := s.files[in.URL.Path]
	etag := fmt.Sprintf(`"%x"`, sha256.Sum256(content))
	switch {
	case in.Header.Get("Authorization") != "Bearer "+remoteToken:
		w.WriteHeader(http.StatusUnauthorized)
	case s.status != 0:
		http.Error(w, "text of the server", s.status)
	case !ok:
		w.WriteHeader(http.StatusNotFound)
	case in.Header.Get("If-None-Match") == etag:
		w.WriteHeader(http.StatusNotModified)
	default:
		s.bodies[in.URL.Path]++
		w.Header().Set("ETag", etag)
		_, _ = w.Write(content)
	}
}

func (s *fileServer) put(path string, content []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[path] = content
}

func (s *fileServer) setStatus(code int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = code
}

// counts returns the requests for a path, and the bodies that were sent.
func (s *fileServer) counts(path string) (requests, bodies int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[path], s.bodies[path]
}

// certificatePEM returns the certificate of a server in PEM.
func certificatePEM(server *httptest.Server) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
}

// createSecret creates a Secret in the namespace default on the hub.
func (w *world) createSecret(name string, data map[string]string) {
	w.t.Helper()
	text := "apiVersion: v1\nkind: Secret\nmetadata: {namespace: default, name: " + name + "}\ntype: addons.projectsveltos.io/cluster-profile\nstringData:\n"
	for key, value := range data {
		text += fmt.Sprintf("  %s: %q\n", key, value)
	}
	w.apply(w.hub, text)
}

// createRemoteProfile creates a ClusterProfile with one URL. options are further fields of remoteURL.
func (w *world) createRemoteProfile(name, address, options string) {
	w.t.Helper()
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %s}
spec:
  clusterSelector: {matchLabels: {env: remote}}
  policyRefs:
  - remoteURL: {url: %q, interval: 1s%s}
`, name, address, options))
}

// remoteMap returns a ConfigMap in the namespace remote.
func remoteMap(name, text string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: remote, name: %s}\ndata: {text: %q}\n", name, text)
}

// archiveFile returns a tar.gz archive with one file.
func archiveFile(t *testing.T, name, text string) []byte {
	t.Helper()
	var raw bytes.Buffer
	zipped := gzip.NewWriter(&raw)
	files := tar.NewWriter(zipped)
	if err := files.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(files.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}

// remoteMembers are the clusters with the label env=remote, by their namespace and name.
type remoteMembers map[string]*localkube.Plane

func (w *world) startRemoteMembers() remoteMembers {
	return remoteMembers{"edge/pull-1": w.pullMember("edge", "pull-1", "env=remote"), "cloud/push-1": w.pushMember("cloud", "push-1", "env=remote")}
}

// awaitRemoteText waits until a ConfigMap in the namespace remote of all members has a text.
func (w *world) awaitRemoteText(members remoteMembers, name, text string) {
	w.t.Helper()
	for cluster, plane := range members {
		w.eventually(cluster+" has the text of "+name, func() error {
			data, err := w.data(plane, "remote", name)
			if err == nil && data["text"] != text {
				err = fmt.Errorf("the text is %q, want %q", data["text"], text)
			}
			return err
		})
	}
}

// awaitAllProvisioned waits until a profile is deployed on all members.
func (w *world) awaitAllProvisioned(members remoteMembers, profile string) {
	w.t.Helper()
	for cluster := range members {
		namespace, name, _ := strings.Cut(cluster, "/")
		w.awaitProvisioned(namespace, profile+"-sveltos-"+name)
	}
}

// awaitFailures waits until the summaries of a profile have a message with all texts, and without secrets.
func (w *world) awaitFailures(members remoteMembers, profile string, texts ...string) {
	w.t.Helper()
	for cluster := range members {
		namespace, name, _ := strings.Cut(cluster, "/")
		message := ""
		w.eventually(profile+" on "+cluster+" names the problem", func() error {
			var summary configv1beta1.ClusterSummary
			err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: profile + "-sveltos-" + name}, &summary)
			if err != nil {
				return err
			}
			message = failureMessage(summary)
			return wantTexts(message, texts)
		})
		if strings.Contains(message, remoteToken) || strings.Contains(message, "text of the server") {
			w.t.Errorf("the message has a secret: %s", message)
		}
	}
}

// remoteFingerprints returns the fingerprints of the objects in the namespace remote of all members.
func (w *world) remoteFingerprints(members remoteMembers) map[string]map[string]fingerprint {
	w.t.Helper()
	all := map[string]map[string]fingerprint{}
	for cluster, plane := range members {
		all[cluster] = w.fingerprints(plane, "remote")
	}
	return all
}

// TestRemoteURL deploys files, an archive and an OCI artifact from servers, in push and in pull mode. A change is
// deployed, unchanged content is not sent again, and a failing server changes no deployed object.
func TestRemoteURL(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := w.startRemoteMembers()
	server, artifacts := newFileServer(t), newCosignedRegistry(t, "web")
	const login = ", secretRef: {namespace: default, name: file-login}"
	w.createSecret("file-login", map[string]string{"token": remoteToken, "caFile": certificatePEM(server.Server)})
	server.put("/app.yaml", []byte(remoteMap("app", "one")))
	server.put("/all.tgz", archiveFile(t, "deep/all.yml", remoteMap("all", "one")))
	for cluster := range members {
		_, name, _ := strings.Cut(cluster, "/")
		server.put("/"+name+".yaml", []byte(strings.ReplaceAll(remoteMap("own", "%"), "%", "{{ .ClusterName }}")))
	}
	artifacts.push("stable", "application/vnd.cncf.flux.content.v1.tar+gzip", archiveFile(t, "web.yaml", remoteMap("web", "one")), nil)
	artifact := "oci://" + artifacts.host + "/charts/web:stable"
	w.createRemoteProfile("hangs", server.URL+"/hangs", login)
	w.createRemoteProfile("app", server.URL+"/app.yaml?token="+remoteToken, login)
	w.createRemoteProfile("all", server.URL+"/all.tgz", login)
	w.createRemoteProfile("own", server.URL+"/{{ .ClusterName }}.yaml", login+", template: true")
	w.createRemoteProfile("web", artifact, ", plainHTTP: true")
	w.remoteKustomizations(server, artifacts, login)
	for _, name := range []string{"app", "all", "web", "tgz-built", "oci-built"} {
		w.awaitRemoteText(members, name, "one")
	}
	for cluster, plane := range members {
		_, name, _ := strings.Cut(cluster, "/")
		w.awaitRemoteText(remoteMembers{cluster: plane}, "own", name)
	}
	for _, name := range []string{"app", "all", "own", "web", "built"} {
		w.awaitAllProvisioned(members, name)
	}

	requested, _ := server.counts("/app.yaml")
	w.eventually("the file is requested again and again", func() error {
		if requests, _ := server.counts("/app.yaml"); requests < requested+3 {
			return fmt.Errorf("there were %d requests", requests)
		}
		return nil
	})
	server.put("/app.yaml", []byte(remoteMap("app", "two")))
	artifacts.push("stable", "application/vnd.cncf.flux.content.v1.tar+gzip", archiveFile(t, "web.yaml", remoteMap("web", "two")), nil)
	w.awaitRemoteText(members, "app", "two")
	w.awaitRemoteText(members, "web", "two")
	if _, bodies := server.counts("/app.yaml"); bodies != 2 {
		t.Errorf("the file was sent %d times, want 2: once for each version, for all clusters", bodies)
	}

	w.remoteBadInput(members, server, login)
	w.awaitFailures(members, "hangs", "URL "+server.URL+"/hangs", "no response in time")
	w.remoteOutage(members, server, artifacts)
}

// remoteKustomizations creates a profile with two kustomizations: a directory of an archive, and an artifact.
func (w *world) remoteKustomizations(server *fileServer, artifacts *cosignedRegistry, login string) {
	w.t.Helper()
	files := func(prefix string) map[string]string {
		return map[string]string{
			"base/kustomization.yaml": "resources: [built.yaml]\n", "base/built.yaml": remoteMap("built", "one"),
			"overlay/kustomization.yaml": "resources: [../base]\nnamePrefix: " + prefix + "-\n",
			"kustomization.yaml":         "resources: [overlay]\n",
		}
	}
	archive := files("tgz")
	delete(archive, "kustomization.yaml")
	server.put("/built.tgz", w.tarball(archive))
	artifacts.push("built", "application/vnd.cncf.flux.content.v1.tar+gzip", w.tarball(files("oci")), nil)
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: built}
spec:
  clusterSelector: {matchLabels: {env: remote}}
  kustomizationRefs:
  - {path: overlay, remoteURL: {url: %q, interval: 1s%s}}
  - {remoteURL: {url: %q, plainHTTP: true}}
`, server.URL+"/built.tgz", login, "oci://"+artifacts.host+"/charts/web:built"))
}

// remoteBadInput makes mistakes in profiles. Each mistake is reported by name.
func (w *world) remoteBadInput(members remoteMembers, server *fileServer, login string) {
	w.t.Helper()
	server.put("/page", []byte("<!DOCTYPE html><p>text of the server"))
	server.put("/broken.yaml", []byte("kind: [ConfigMap"))
	server.put("/readme.tgz", archiveFile(w.t, "README.md", "text"))
	server.put("/laughs.yaml", billionLaughs())
	for name, test := range map[string]struct {
		path, options string
		names         []string
	}{
		"missing":   {"/missing", login, []string{"404 Not Found, which is also the response of many servers to credentials that are not accepted"}},
		"html":      {"/page", login, []string{"the server returned HTML"}},
		"broken":    {"/broken.yaml", login, []string{"key broken.yaml", "line 1"}},
		"readme":    {"/readme.tgz", login, []string{"no file that ends in .yaml, .yml or .json"}},
		"laughs":    {"/laughs.yaml", login, []string{"laughs.yaml"}},
		"anonymous": {"/app.yaml", ", insecureSkipTLSVerify: true", []string{"401 Unauthorized"}},
		"no-ca":     {"/app.yaml", "", []string{"certificate signed by unknown authority"}},
		"no-secret": {"/app.yaml", ", secretRef: {namespace: default, name: nobody-made-this}", []string{"default/nobody-made-this"}},
	} {
		w.createRemoteProfile(name, server.URL+test.path, test.options)
		w.awaitFailures(members, name, append(test.names, server.URL+test.path)...)
	}
	w.remoteOptional(members, server, login)
	refused := fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: refused}
spec:
  policyRefs:
  - remoteURL: {url: %q}
`, "file:///etc/passwd")
	if _, err := w.try(w.hub, "kubectl", "apply", "-f", w.save("refused.yaml", refused)); err == nil || !strings.Contains(err.Error(), "remoteURL.url") {
		w.t.Errorf("the API server accepts file:///etc/passwd: %v", err)
	}
}

// remoteOptional has optional URLs that do not exist yet. The hub concludes that only from a request without
// credentials.
func (w *world) remoteOptional(members remoteMembers, server *fileServer, login string) {
	w.t.Helper()
	var isPublished atomic.Bool
	public := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, in *http.Request) {
		if !isPublished.Load() {
			http.NotFound(rw, in)
			return
		}
		_, _ = rw.Write([]byte(remoteMap("public", "one")))
	}))
	w.t.Cleanup(public.Close)
	profile := `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %s}
spec:
  clusterSelector: {matchLabels: {env: remote}}
  policyRefs:
  - {optional: true, remoteURL: {url: %q, interval: 1s%s}}
`
	w.apply(w.hub, fmt.Sprintf(profile, "public", public.URL+"/public.yaml", ""))
	w.apply(w.hub, fmt.Sprintf(profile, "optional", server.URL+"/optional.yaml", login))
	w.awaitAllProvisioned(members, "public")
	w.awaitFailures(members, "optional", "404 Not Found", server.URL+"/optional.yaml")
	isPublished.Store(true)
	server.put("/optional.yaml", []byte(remoteMap("optional", "one")))
	w.awaitRemoteText(members, "public", "one")
	w.awaitRemoteText(members, "optional", "one")
}

// billionLaughs returns YAML that is much larger when its aliases are expanded.
func billionLaughs() []byte {
	text := "a0: &a0 [laugh, laugh, laugh, laugh, laugh, laugh, laugh, laugh, laugh]\n"
	for i := range 9 {
		text += fmt.Sprintf("a%[2]d: &a%[2]d [%[1]s]\n", strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i), 9), ", "), i+1)
	}
	return []byte(text)
}

// remoteOutage stops the file server in two ways. The deployed objects stay, and content of another source is deployed.
func (w *world) remoteOutage(members remoteMembers, server *fileServer, artifacts *cosignedRegistry) {
	w.t.Helper()
	before := w.remoteFingerprints(members)
	server.setStatus(http.StatusInternalServerError)
	w.awaitFailures(members, "app", "URL "+server.URL+"/app.yaml: the server returned 500 Internal Server Error")
	if diff := cmp.Diff(before, w.remoteFingerprints(members)); diff != "" {
		w.t.Errorf("deployed objects (-before +after):\n%s", diff)
	}
	artifacts.push("stable", "application/vnd.cncf.flux.content.v1.tar+gzip", archiveFile(w.t, "web.yaml", remoteMap("web", "three")), nil)
	w.awaitRemoteText(members, "web", "three")
	server.setStatus(0)
	server.put("/app.yaml", []byte(remoteMap("app", "four")))
	w.awaitRemoteText(members, "app", "four")
	w.awaitAllProvisioned(members, "app")

	before = w.remoteFingerprints(members)
	if err := server.Listener.Close(); err != nil {
		w.t.Fatal(err)
	}
	server.CloseClientConnections()
	w.awaitFailures(members, "app", "URL "+server.URL+"/app.yaml")
	if diff := cmp.Diff(before, w.remoteFingerprints(members)); diff != "" {
		w.t.Errorf("deployed objects (-before +after):\n%s", diff)
	}
}
