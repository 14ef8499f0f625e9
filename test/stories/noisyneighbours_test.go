package stories

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// hangingClusters is the number of push clusters that accept connections and never answer, and hangingProfiles the
// number of profiles that select them: content and four others. Their summaries are more than all workers of the hub
// for push clusters.
const (
	hangingClusters = 25
	hangingProfiles = 5
)

// TestNoisyNeighbours has push clusters, a chart repository and a Git server that never respond, and templates that do
// not end. Healthy members get changes as fast as before, and the others recover.
func TestNoisyNeighbours(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(examples.Chart{Name: "endless", Version: "0.1.0", Files: map[string]string{
		"templates/endless.yaml": "{{ range 1000000000000 }}{{ end }}",
	}}, examples.Chart{Name: "endless", Version: "0.2.0"})
	repository := newHangingRepository(t)
	pushed := w.pushMember("fleet", "pushed", "mode=healthy")
	pulled := w.pullMember("fleet", "pulled", "mode=healthy")
	proxy := newHangingProxy(t, pushed)
	healthy := map[string]*localkube.Plane{"pushed": pushed, "pulled": pulled}
	var hanging []string
	for i := range hangingClusters {
		name := fmt.Sprintf("hanging-%d", i)
		hanging = append(hanging, name)
		w.apply(w.hub, hangingCluster(t, name, proxy, pushed))
	}
	for _, name := range hanging {
		w.awaitReady("fleet", name)
	}
	w.apply(w.hub, neighbourContent("one"))
	w.apply(w.hub, neighbourProfile("content", "content", "matchExpressions: [{key: mode, operator: Exists}]"))
	for i := range hangingProfiles - 1 {
		w.apply(w.hub, neighbourProfile(hangingProfile(i), hangingProfile(i), "matchLabels: {mode: hanging}"))
	}
	for _, name := range append(hanging, "pushed", "pulled") {
		w.awaitProvisioned("fleet", "content-sveltos-"+name)
	}

	proxy.hang()
	w.apply(w.hub, endlessContent)
	w.apply(w.hub, neighbourProfile("endless-text", "endless-text", "matchLabels: {mode: healthy}"))
	endless := w.chartProfile("endless", w.Charts, "endless", "0.1.0")
	silent := w.chartProfile("silent", strings.Replace(repository.URL, "http://", "http://me:s3cret@", 1), "hello", "0.1.0")
	w.apply(w.hub, endless)
	w.apply(w.hub, silent)
	git := "git+" + repository.URL + "/repo.git"
	w.apply(w.hub, fmt.Sprintf(gitProfile, git))
	w.measureChange("while the others begin to hang", "two", healthy)
	for _, cluster := range []string{"pushed", "pulled"} {
		w.awaitFailedSummary("endless-text-sveltos-"+cluster, "ConfigMap default/endless-text, key a.yaml: it took longer than 10s")
		w.awaitFailedSummary("endless-sveltos-"+cluster, "render chart endless 0.1.0: it took longer than 30s")
		w.awaitFailedSummary("silent-sveltos-"+cluster, "chart stories/hello 0.1.0 in "+repository.URL+": get "+repository.URL+"/index.yaml")
		w.awaitFailedSummary("git-sveltos-"+cluster, "URL "+git+": ")
	}
	latest := w.requireQuickChange("while the others hang", healthy)

	proxy.answer()
	repository.answer()
	w.apply(w.hub, strings.Replace(endless, "0.1.0", "0.2.0", 1))
	w.apply(w.hub, strings.Replace(silent, "releaseName: silent", "releaseName: answers", 1))
	w.kubectl(w.hub, "delete", "clusterprofile", "endless-text", "git")
	for _, cluster := range []string{"pushed", "pulled"} {
		w.awaitProvisioned("fleet", "endless-sveltos-"+cluster)
		w.awaitProvisioned("fleet", "silent-sveltos-"+cluster)
	}
	for _, name := range hanging {
		w.eventually(name+" gets the change", func() error { return w.hasContent(pushed, name, latest) })
		w.awaitProvisioned("fleet", "content-sveltos-"+name)
	}
}

// quickChange is the maximum time of a change to a healthy member, with and without the hanging clusters.
const quickChange = 2 * time.Second

// requireQuickChange changes the content several times, and requires that half of the changes are on all members within
// quickChange. Other tests can delay some changes; a hub whose workers wait for the others delays all. It returns the
// last version.
func (w *world) requireQuickChange(when string, members map[string]*localkube.Plane) (version string) {
	w.t.Helper()
	const changes = 10
	quick := 0
	for i := range changes {
		version = fmt.Sprintf("quick-%d", i)
		if w.measureChange(when, version, members) <= quickChange {
			quick++
		}
	}
	if quick < changes/2 {
		w.t.Errorf("%s: %d of %d changes arrived within %s", when, quick, changes, quickChange)
	}
	return version
}

// measureChange changes the content, and logs and returns the time until it is on the healthy members.
func (w *world) measureChange(when, version string, members map[string]*localkube.Plane) time.Duration {
	w.t.Helper()
	began := time.Now()
	w.apply(w.hub, neighbourContent(version))
	var all sync.WaitGroup
	for name, plane := range members {
		all.Go(func() {
			for w.hasContent(plane, name, version) != nil && time.Since(began) < waitTimeout {
				select {
				case <-w.t.Context().Done():
				case <-time.After(20 * time.Millisecond):
				}
			}
			took := time.Since(began)
			w.t.Logf("%s: a change on the hub is on the member %s after %s, with kubectl", when, name, took.Round(time.Millisecond))
			// The limit is loose, for busy machines, and no more than the time that a chart may take.
			if took > 30*time.Second {
				w.t.Errorf("%s: the change is on %s after %s", when, name, took)
			}
		})
	}
	all.Wait()
	return time.Since(began)
}

// hasContent returns an error unless a cluster has a version of the content.
func (w *world) hasContent(plane *localkube.Plane, cluster, version string) error {
	found := &corev1.ConfigMap{}
	err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: "default", Name: "content-" + cluster}, found)
	if err == nil && found.Data["version"] != version {
		err = fmt.Errorf("%s has version %s, want %s", cluster, found.Data["version"], version)
	}
	return err
}

// awaitFailedSummary waits until the message of a failed summary has text and no password.
func (w *world) awaitFailedSummary(summary, text string) {
	w.t.Helper()
	w.eventually(summary+" fails", func() error {
		out, err := w.try(w.hub, "kubectl", "get", "clustersummary", summary, "-n", "fleet", "-o",
			`jsonpath={range .status.featureSummaries[*]}{.status}: {.failureMessage}{"\n"}{end}`)
		if strings.Contains(out, "s3cret") {
			w.t.Errorf("the message has the password: %s", out)
		}
		if err == nil && (!strings.HasPrefix(out, "Failed") || !strings.Contains(out, text)) {
			err = fmt.Errorf("got %q, want a failure with %q", out, text)
		}
		return err
	})
}

// neighbourContent returns the contents of the profiles of the hanging clusters, with an object for each cluster.
func neighbourContent(version string) string {
	names := []string{"content"}
	for i := range hangingProfiles - 1 {
		names = append(names, hangingProfile(i))
	}
	var text strings.Builder
	for _, name := range names {
		fmt.Fprintf(&text, `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s, annotations: {projectsveltos.io/template: "ok"}}
data:
  a.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: "%[1]s-{{ .ClusterName }}"}
    data: {version: %[2]q}
`, name, version)
	}
	return text.String()
}

const endlessContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: endless-text, annotations: {projectsveltos.io/template: "ok"}}
data:
  a.yaml: "{{ range 1000000000000 }}{{ end }}"
`

const gitProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: git}
spec:
  clusterSelector: {matchLabels: {mode: healthy}}
  policyRefs: [{remoteURL: {url: %q}}]
`

func neighbourProfile(name, content, selector string) string {
	return fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %s}
spec:
  clusterSelector: {%s}
  policyRefs: [{kind: ConfigMap, namespace: default, name: %s}]
`, name, selector, content)
}

// hangingProfile returns the name of a profile of the hanging clusters, and of its content.
func hangingProfile(i int) string { return fmt.Sprintf("more-%d", i) }

// chartProfile deploys a chart to the healthy members.
func (w *world) chartProfile(name, repository, chart, version string) string {
	return fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {mode: healthy}}
  helmCharts:
  - {repositoryURL: %[2]q, repositoryName: stories, chartName: stories/%[3]s, chartVersion: %[4]s, releaseName: %[1]s, releaseNamespace: %[1]s}
`, name, repository, chart, version)
}

// hangingCluster returns a push cluster that is reached through the proxy.
func hangingCluster(t *testing.T, name string, proxy *hangingProxy, plane *localkube.Plane) string {
	t.Helper()
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	throughProxy := strings.ReplaceAll(string(kubeconfig), plane.Config.Host, "https://"+proxy.Addr().String())
	if throughProxy == string(kubeconfig) {
		t.Fatalf("the kubeconfig does not name %s", plane.Config.Host)
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {namespace: fleet, name: %[1]s-sveltos-kubeconfig}
data: {kubeconfig: %[2]s}
---
apiVersion: lib.projectsveltos.io/v1beta1
kind: SveltosCluster
metadata: {namespace: fleet, name: %[1]s, labels: {mode: hanging}}
`, name, base64.StdEncoding.EncodeToString([]byte(throughProxy)))
}

// hangingProxy forwards connections to an API server. While it hangs, it accepts connections and never answers.
type hangingProxy struct {
	net.Listener
	upstream string

	// mu guards the fields below.
	mu          sync.Mutex
	hangs       bool
	connections []net.Conn
}

func newHangingProxy(t *testing.T, plane *localkube.Plane) *hangingProxy {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &hangingProxy{Listener: listener, upstream: strings.TrimPrefix(plane.Config.Host, "https://")}
	ctx := context.WithoutCancel(t.Context())
	go func() {
		for {
			accepted, err := listener.Accept()
			if err != nil {
				return
			}
			p.serve(ctx, accepted)
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close() // it may be closed already
		p.set(true)
	})
	return p
}

// serve forwards a connection unless the proxy hangs.
func (p *hangingProxy) serve(ctx context.Context, accepted net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.connections = append(p.connections, accepted)
	if p.hangs {
		return
	}
	upstream, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.upstream)
	if err != nil {
		_ = accepted.Close() // it may be closed already
		return
	}
	p.connections = append(p.connections, upstream)
	for from, to := range map[net.Conn]net.Conn{accepted: upstream, upstream: accepted} {
		go func() {
			_, err := io.Copy(to, from)
			if !errors.Is(err, net.ErrClosed) {
				_ = to.Close() // it may be closed already
			}
		}()
	}
}

func (p *hangingProxy) hang() { p.set(true) }

func (p *hangingProxy) answer() { p.set(false) }

// set closes the connections.
func (p *hangingProxy) set(hangs bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hangs = hangs
	for _, connection := range p.connections {
		_ = connection.Close() // it may be closed already
	}
	p.connections = nil
}

// hangingRepository is a chart repository and a Git server that do not respond until answer is called.
type hangingRepository struct {
	*httptest.Server
	answered chan struct{}
	once     sync.Once
}

func newHangingRepository(t *testing.T) *hangingRepository {
	t.Helper()
	charts, err := examples.Repository()
	if err != nil {
		t.Fatal(err)
	}
	g := &hangingRepository{answered: make(chan struct{})}
	g.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		select {
		case <-g.answered:
			charts.ServeHTTP(rw, r)
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(g.Close)
	t.Cleanup(g.answer)
	return g
}

func (g *hangingRepository) answer() { g.once.Do(func() { close(g.answered) }) }
