package stories

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// maxHubMemory is the limit for the memory of the hub and its children in bytes: the hub's container has 2 GiB. How
// many children run at the same time depends on the processor: they took 1.1 GiB on a busy machine.
const maxHubMemory = 2 << 30

// hostileKustomization refers to an archive in a ConfigMap.
const hostileKustomization = badProfile + `  kustomizationRefs:
  - {kind: ConfigMap, namespace: default, name: "%[1]s-archive"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: "%[1]s-archive"}
binaryData:
  kustomize.tar.gz: `

// hostileTemplate changes the content of a case to a template.
const hostileTemplate = `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s, annotations: {projectsveltos.io/template: "ok"}}
data:
  objects.yaml: |
    # a template
    `

// hostileLaughs is a document whose aliases stand for 10^9 texts.
const hostileLaughs = `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: %[1]s, name: laughs}
    a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]
    b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]
    c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]
    d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]
    e: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]
    f: &f [*e, *e, *e, *e, *e, *e, *e, *e, *e, *e]
    g: &g [*f, *f, *f, *f, *f, *f, *f, *f, *f, *f]
    h: &h [*g, *g, *g, *g, *g, *g, *g, *g, *g, *g]
    i: &i [*h, *h, *h, *h, *h, *h, *h, *h, *h, *h]
`

// hostileCases have content that takes too much memory or time of the hub, or accesses more than it may. %[2]s stands
// for the URL of a chart repository and %[4]s for the URL of a hostile server.
func hostileCases(t *testing.T) map[string]badCase {
	t.Helper()
	archive := func(headers ...tar.Header) string {
		return hostileKustomization + base64.StdEncoding.EncodeToString(hostileTar(t, headers...)) + "\n"
	}
	remote := func(path, more string) string {
		return badProfile + "  - {remoteURL: {url: \"%[4]s/" + path + "\"" + more + "}}\n"
	}
	const kustomization = "kustomization.yaml"
	return map[string]badCase{
		"tar-bomb":         {broken: archive(tar.Header{Name: "bomb", Size: 150 << 20}), texts: []string{"default/tar-bomb-archive", "kustomize.tar.gz", `more than 32 MiB (at "bomb")`}},
		"symbolic-link":    {broken: archive(tar.Header{Name: kustomization, Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}), texts: []string{"default/symbolic-link-archive", `"kustomization.yaml" is a link`}},
		"path-outside":     {broken: archive(tar.Header{Name: "../../etc/passwd", Size: 1}), texts: []string{"default/path-outside-archive", `"../../etc/passwd" is not a path below the root`}},
		"asks-the-network": {broken: archive(tar.Header{Name: kustomization, PAXRecords: map[string]string{"CONTENT": "resources: ['https://127.0.0.1:1/x.yaml']"}}), texts: []string{"default/asks-the-network-archive", "resources: \"https://127.0.0.1:1/x.yaml\" is remote, and a kustomization is built without a network"}},
		"zip-bomb":         {broken: remote("zip-bomb", ""), texts: []string{"/zip-bomb", `more than 100 MiB (at "bomb.yaml")`}},
		"endless-body":     {broken: remote("endless-body", ""), texts: []string{"/endless-body", "more than 64 MiB"}},
		"redirect": {
			broken: "---\napiVersion: v1\nkind: Secret\nmetadata: {namespace: default, name: token}\ntype: addons.projectsveltos.io/cluster-profile\nstringData: {token: s3cret}\n" +
				remote("redirect", ", secretRef: {namespace: default, name: token}"),
			texts: []string{"/redirect", "403 Forbidden"},
		},
		"endless-template": {broken: hostileTemplate + "{{ range 1000000000000 }}{{ end }}\n", texts: []string{"ConfigMap default/endless-template, key objects.yaml", "took longer than 10s"}},
		"endless-output":   {broken: hostileTemplate + "{{ range 1000000000000 }}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{{ end }}\n", texts: []string{"ConfigMap default/endless-output, key objects.yaml", "larger than 64 MiB"}},
		"many-objects":     {broken: badProfile + chartOf("%[2]s", "many-objects", ""), texts: []string{"many-objects", "there are more than 20000 objects"}},
		"billion-laughs":   {broken: hostileLaughs, texts: []string{"ConfigMap default/billion-laughs, key objects.yaml", "aliases make it too large"}},
	}
}

// TestHostileContent changes good profiles to hostile ones. Each is refused by name, no delivered object is changed,
// the hub stays below its memory limit, and another profile is delivered meanwhile.
func TestHostileContent(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := w.startBadMembers()
	w.serveRepository(examples.Chart{Name: "many-objects", Version: "1.0.0", Files: map[string]string{
		"templates/many.yaml": "{{ range 50000 }}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: \"c{{ . }}\"}\n{{ end }}",
	}})
	server := newHostileServer(t)
	deliveries := w.deliverGood(members, hostileCases(t), "%[2]s", w.Charts, "%[4]s", server.URL)
	w.apply(w.hub, neighbourContent("one"))
	w.apply(w.hub, neighbourProfile("content", "content", "matchLabels: {env: bad}"))
	for member := range members {
		namespace, cluster, _ := strings.Cut(member, " ")
		w.awaitProvisioned(namespace, "content-sveltos-"+cluster)
	}
	healthy := map[string]*localkube.Plane{"push-1": members["cloud push-1"], "pull-1": members["edge pull-1"]}
	memory := w.watchHubMemory()
	deliveries.makeMistakes()
	w.measureChange("while hostile content arrives", "two", healthy)
	deliveries.awaitFailureReports()
	w.measureChange("among hostile content", "three", healthy)
	if largest := memory(); largest > maxHubMemory {
		t.Errorf("the hub and its children took %d MiB", largest>>20)
	} else {
		t.Logf("the hub and its children took at most %d MiB", largest>>20)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.credentials != "Bearer s3cret" || server.visits == 0 || server.leaked != "" {
		t.Errorf("the server got the credentials %q, and the other host %d requests with %q, want them for the server only", server.credentials, server.visits, server.leaked)
	}
}

// hostileTar returns a compressed archive. A PAX record CONTENT is the content of a file, and is not written; all other
// files have zeros.
func hostileTar(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	writer := tar.NewWriter(compressed)
	for _, header := range headers {
		content := io.LimitReader(zeros{}, header.Size)
		if text, ok := header.PAXRecords["CONTENT"]; ok {
			header.Size, header.PAXRecords, content = int64(len(text)), nil, strings.NewReader(text)
		}
		header.Mode = 0o600
		if err := writer.WriteHeader(&header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(writer, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := compressed.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

type zeros struct{}

func (zeros) Read(buffer []byte) (int, error) {
	clear(buffer)
	return len(buffer), nil
}

// hostileServer serves a zip bomb and an endless body, and redirects to another host.
type hostileServer struct {
	*httptest.Server

	mu          sync.Mutex // guards the fields below
	credentials string     // of the last request that was redirected
	visits      int        // requests to the other host
	leaked      string     // credentials that the other host received
}

func newHostileServer(t *testing.T) *hostileServer {
	t.Helper()
	s := &hostileServer{}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	other := &httptest.Server{Listener: listener, Config: &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.visits++
		s.leaked += r.Header.Get("Authorization")
		http.Error(rw, "no", http.StatusForbidden)
	})}}
	other.Start()
	t.Cleanup(other.Close)
	mux := http.NewServeMux()
	bomb := hostileZip(t)
	mux.HandleFunc("/zip-bomb", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(bomb) })
	mux.HandleFunc("/endless-body", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(rw, zeros{}) })
	mux.HandleFunc("/redirect", func(rw http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.credentials = r.Header.Get("Authorization")
		http.Redirect(rw, r, other.URL+"/elsewhere", http.StatusFound)
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// hostileZip returns an archive of 512 KiB with a file of 512 MiB.
func hostileZip(t *testing.T) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := zip.NewWriter(&buffer)
	file, err := writer.Create("bomb.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(file, zeros{}, 512<<20); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// watchHubMemory samples the memory of the hub and its children. The returned function ends that and returns the
// maximum in bytes.
func (w *world) watchHubMemory() func() int64 {
	w.t.Helper()
	ended, largest := make(chan struct{}), make(chan int64)
	pid := w.hubProcess.cmd.Process.Pid
	go func() {
		most := int64(0)
		for {
			select {
			case <-ended:
				largest <- most
				return
			case <-time.After(200 * time.Millisecond):
				most = max(most, processTreeMemory(pid))
			}
		}
	}()
	return func() int64 { close(ended); return <-largest }
}

// processTreeMemory returns the private memory in bytes of a process and its children.
func processTreeMemory(pid int) int64 {
	sum := int64(0)
	all, _ := filepath.Glob("/proc/[0-9]*/status") // the pattern is valid
	for _, path := range all {
		status, _ := os.ReadFile(path) // the process may have ended
		if statusField(status, "Pid") == pid || statusField(status, "PPid") == pid {
			sum += int64(statusField(status, "RssAnon")) << 10
		}
	}
	return sum
}

// statusField returns a number in the status of a process, -1 if there is none.
func statusField(status []byte, name string) int {
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			if number, err := strconv.Atoi(strings.Fields(rest)[0]); err == nil {
				return number
			}
		}
	}
	return -1
}
