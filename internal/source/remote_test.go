package source_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

// remoteTimeout is longer than any correct fetch from the same machine.
const remoteTimeout = 30 * time.Second

// secretReader reads Secrets by name.
type secretReader struct {
	client.Reader

	mu      sync.Mutex // guards secrets
	secrets map[string]map[string]string
	// secretType is the type of all Secrets. Default: libv1beta1.ProfileSecretType.
	secretType corev1.SecretType
}

func (r *secretReader) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	data, ok := r.secrets[key.Name]
	if !ok {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, key.Name)
	}
	found := obj.(*corev1.Secret)
	found.Namespace, found.Name, found.Data = key.Namespace, key.Name, map[string][]byte{}
	if found.Type = r.secretType; found.Type == "" {
		found.Type = libv1beta1.ProfileSecretType
	}
	for name, value := range data {
		found.Data[name] = []byte(value)
	}
	return nil
}

func (r *secretReader) set(name string, data map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.secrets[name] = data
}

// remoteRun is a running RemoteFetcher.
type remoteRun struct {
	t        *testing.T
	clock    *clocktesting.FakeClock
	secrets  *secretReader
	fetcher  *source.RemoteFetcher
	contents *source.Contents
	tmplCtx  source.TemplateContext
}

func newRemoteRun(t *testing.T) *remoteRun {
	t.Helper()
	r := &remoteRun{t: t, clock: clocktesting.NewFakeClock(time.Now()), secrets: &secretReader{secrets: map[string]map[string]string{}}, tmplCtx: templateContext()}
	r.fetcher = source.NewRemoteFetcher(r.secrets, r.clock)
	r.contents = &source.Contents{Hub: r.secrets, Remote: r.fetcher}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.fetcher.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r
}

func remoteRef(address string) libv1beta1.PolicyRef {
	return libv1beta1.PolicyRef{RemoteURL: &libv1beta1.RemoteURL{RemoteSource: libv1beta1.RemoteSource{URL: address}}}
}

func withSecret(ref libv1beta1.PolicyRef, name string) libv1beta1.PolicyRef {
	ref.RemoteURL.SecretRef = &corev1.SecretReference{Name: name}
	return ref
}

func withInterval(ref libv1beta1.PolicyRef, interval time.Duration) libv1beta1.PolicyRef {
	ref.RemoteURL.Interval = &metav1.Duration{Duration: interval}
	return ref
}

// use sets refs as the used URLs of user.
func (r *remoteRun) use(user string, refs ...libv1beta1.PolicyRef) {
	r.t.Helper()
	var uses []source.RemoteUse
	for _, ref := range refs {
		use, err := source.ResolveRemoteUse(ref.RemoteURL.RemoteSource, r.tmplCtx)
		if err != nil {
			r.t.Fatal(err)
		}
		uses = append(uses, use)
	}
	if err := r.fetcher.SetUses(r.t.Context(), user, uses); err != nil {
		r.t.Fatal(err)
	}
}

// awaitChange waits for a change of a URL.
func (r *remoteRun) awaitChange() {
	r.t.Helper()
	select {
	case <-r.fetcher.Changes():
	case <-time.After(remoteTimeout):
		r.t.Fatal("no change was reported")
	}
}

// advance waits until all sources wait for the clock, and advances the clock.
func (r *remoteRun) advance(d time.Duration) {
	r.t.Helper()
	eventually(r.t, r.clock.HasWaiters)
	r.clock.Step(d)
}

// eventually waits until check returns true.
func eventually(t *testing.T, check func() bool) {
	t.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	timeout := time.After(remoteTimeout)
	for !check() {
		select {
		case <-ticker.C:
		case <-timeout:
			t.Fatal("the condition was not true in time")
		}
	}
}

// read uses ref, waits for the first fetch, and returns the content.
func (r *remoteRun) read(ref libv1beta1.PolicyRef) (source.Content, error) {
	r.t.Helper()
	r.use("reader", ref)
	r.awaitChange()
	return r.contents.Manifests(r.t.Context(), ref, r.tmplCtx)
}

// filesOf returns the files as text.
func filesOf(content source.Content) map[string]string {
	files := map[string]string{}
	for _, file := range content.Files {
		files[file.Name] = string(file.Data)
	}
	return files
}

// tarGz returns a tar.gz archive with files.
func tarGz(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var raw bytes.Buffer
	zipped := gzip.NewWriter(&raw)
	archived := tar.NewWriter(zipped)
	for name, text := range files {
		if err := archived.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := archived.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(archived.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}

func zipped(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var raw bytes.Buffer
	archived := zip.NewWriter(&raw)
	for name, text := range files {
		file, err := archived.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archived.Close(); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}

// serveFunc starts a server with handler.
func serveFunc(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

// TestRemoteRefusesABodyWithoutAnEnd uses a server that ends a response by closing the connection, like a server that
// was killed, and a server that returns an empty response.
func TestRemoteRefusesABodyWithoutAnEnd(t *testing.T) {
	t.Parallel()
	endless := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) {
		connection, buffer, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = buffer.WriteString("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\na: b\n") // the client reports an error
		_ = buffer.Flush()
		_ = connection.Close()
	})
	empty := serveFunc(t, func(http.ResponseWriter, *http.Request) {})
	for server, want := range map[*httptest.Server]string{endless: "does not send the length of its response", empty: "the server returned no content"} {
		if _, err := newRemoteRun(t).read(remoteRef(server.URL)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestRemoteReadsFilesAndArchives(t *testing.T) {
	t.Parallel()
	tree := map[string]string{"b/two.yml": "two", "a.json": "{}", "README.md": "text", "./c.yaml": "three"}
	manifests := map[string]string{"b/two.yml": "two", "a.json": "{}", "c.yaml": "three"}
	for name, test := range map[string]struct {
		path string
		body []byte
		want map[string]string
	}{
		"a file":            {path: "/deep/web.yaml", body: []byte("kind: A"), want: map[string]string{"web.yaml": "kind: A"}},
		"without extension": {path: "/raw?token=abc", body: []byte("kind: A"), want: map[string]string{"raw.yaml": "kind: A"}},
		"the root":          {path: "/", body: []byte("kind: A"), want: map[string]string{"manifest.yaml": "kind: A"}},
		"tar.gz":            {path: "/all.tgz", body: tarGz(t, tree), want: manifests},
		"zip":               {path: "/all", body: zipped(t, tree), want: manifests},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(test.body) })
			got, err := newRemoteRun(t).read(remoteRef(server.URL + test.path))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, filesOf(got)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
			if got.Sensitive || got.Template {
				t.Errorf("sensitive: %t, template: %t, want neither", got.Sensitive, got.Template)
			}
		})
	}
}

func TestRemoteIsFetchedOnceForAllUsers(t *testing.T) {
	t.Parallel()
	var requests, bodies atomic.Int64
	var version atomic.Int64
	server := serveFunc(t, func(w http.ResponseWriter, in *http.Request) {
		requests.Add(1)
		etag := fmt.Sprintf(`"%d"`, version.Load())
		w.Header().Set("ETag", etag)
		if in.Header.Get("If-None-Match") == etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		bodies.Add(1)
		_, _ = fmt.Fprintf(w, "version: %d", version.Load())
	})
	r := newRemoteRun(t)
	ref := withInterval(remoteRef(server.URL), time.Hour)
	for i := range 50 {
		r.use(fmt.Sprint(i), ref)
	}
	r.awaitChange()
	for range 50 {
		if _, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err != nil {
			t.Fatal(err)
		}
	}
	if requests.Load() != 1 {
		t.Fatalf("%d requests, want 1", requests.Load())
	}
	// The shortest interval is used, also of a later user.
	eventually(t, r.clock.HasWaiters)
	r.use("impatient", withInterval(ref, time.Minute))
	eventually(t, func() bool { return requests.Load() == 2 && r.clock.HasWaiters() })
	r.advance(time.Minute)
	eventually(t, func() bool { return requests.Load() == 3 })
	if bodies.Load() != 1 || len(r.fetcher.Changes()) != 0 {
		t.Errorf("unchanged content: %d bodies were served, want 1; %d changes were reported, want 0", bodies.Load(), len(r.fetcher.Changes()))
	}
	version.Store(1)
	r.advance(time.Minute)
	r.awaitChange()
	got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if err != nil {
		t.Fatal(err)
	}
	if text := string(got.Files[0].Data); text != "version: 1" || bodies.Load() != 2 {
		t.Errorf("got %q after %d bodies", text, bodies.Load())
	}
}

func TestRemoteIsForgottenAfterTheLastUser(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	server := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) { requests.Add(1); _, _ = w.Write([]byte("a: b")) })
	r := newRemoteRun(t)
	ref := remoteRef(server.URL)
	r.use("a", ref)
	r.use("b", ref)
	r.awaitChange()
	r.use("a")
	if _, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err != nil {
		t.Fatalf("with another user: %v", err)
	}
	eventually(t, r.clock.HasWaiters)
	r.use("b")
	if _, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err == nil {
		t.Error("the content is still in memory")
	}
	if held := r.fetcher.Size(); held != 0 {
		t.Errorf("%d bytes are not freed", held)
	}
	before := requests.Load()
	r.use("c", ref) // the hub fetches the content again
	r.awaitChange()
	r.clock.Step(defaultInterval)
	eventually(t, func() bool { return requests.Load() >= before+2 })
	if got := requests.Load(); got != before+2 {
		t.Errorf("%d requests, want 2: the first source is still polled", got-before)
	}
}

// defaultInterval is the default of remoteURL.interval.
const defaultInterval = 5 * time.Minute

func TestRemoteFailuresAreReportedAndPausesGrow(t *testing.T) {
	t.Parallel()
	var status, requests atomic.Int64
	server := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		if code := int(status.Load()); code != 0 {
			w.WriteHeader(code)
			_, _ = w.Write([]byte("text of the server"))
			return
		}
		_, _ = w.Write([]byte("a: b"))
	})
	r := newRemoteRun(t)
	ref := remoteRef(server.URL + "/web.yaml?token=secret")
	if _, err := r.read(ref); err != nil {
		t.Fatal(err)
	}
	status.Store(http.StatusInternalServerError)
	r.advance(defaultInterval)
	eventually(t, func() bool { return requests.Load() == 2 && r.clock.HasWaiters() })
	if _, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err != nil {
		t.Errorf("after one failure: %v", err)
	}
	r.advance(10 * time.Second)
	r.awaitChange()
	_, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	want := "URL " + server.URL + "/web.yaml: the server returned 500 Internal Server Error"
	if err == nil || err.Error() != want {
		t.Errorf("after two failures: got %v, want %s", err, want)
	}
	// The next pause is twice as long.
	r.advance(19 * time.Second)
	if got := requests.Load(); got != 3 {
		t.Errorf("%d requests, want 3", got)
	}
	status.Store(0)
	r.clock.Step(time.Second)
	r.awaitChange()
	if _, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err != nil {
		t.Errorf("after the recovery: %v", err)
	}
}

func TestHangingRemoteDelaysNoOtherRemote(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	hanging := serveFunc(t, func(http.ResponseWriter, *http.Request) { <-release })
	t.Cleanup(func() { close(release) })
	server := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("a: b")) })
	r := newRemoteRun(t)
	for i := range 100 {
		r.use(fmt.Sprint("hanging", i), remoteRef(fmt.Sprintf("%s/%d", hanging.URL, i)))
	}
	if _, err := r.read(remoteRef(server.URL)); err != nil {
		t.Error(err)
	}
	_, err := r.contents.Manifests(t.Context(), remoteRef(hanging.URL+"/1"), r.tmplCtx)
	if pending, ok := errors.AsType[*source.PendingError](err); !ok || pending.After <= 0 || !strings.Contains(err.Error(), hanging.URL+"/1") {
		t.Errorf("got %v, want a PendingError", err)
	}
}

func TestRemoteIsFetchedWithAChangedSecret(t *testing.T) {
	t.Parallel()
	server := serveFunc(t, func(w http.ResponseWriter, in *http.Request) {
		_, _ = w.Write([]byte("for: " + in.Header.Get("Authorization")))
	})
	r := newRemoteRun(t)
	r.secrets.set("login", map[string]string{"token": "one"})
	ref := withSecret(remoteRef(server.URL), "login")
	if _, err := r.read(ref); err != nil {
		t.Fatal(err)
	}
	r.secrets.set("login", map[string]string{"token": "two"})
	_, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if _, ok := errors.AsType[*source.PendingError](err); !ok {
		t.Errorf("got %v, want a PendingError: content of the former login", err)
	}
	r.awaitChange()
	got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if err != nil || string(got.Files[0].Data) != "for: Bearer two" {
		t.Errorf("got %v %v", got.Files, err)
	}
}

func TestRemoteReference(t *testing.T) {
	t.Parallel()
	restricted := templateContext()
	restricted.RestrictedNamespace = "eu"
	for name, test := range map[string]struct {
		remote libv1beta1.RemoteSource
		want   string
	}{
		"no host":             {remote: libv1beta1.RemoteSource{URL: "https:///x"}, want: "not a URL with a host"},
		"another scheme":      {remote: libv1beta1.RemoteSource{URL: "ftp://host/x"}, want: "its scheme is none of"},
		"credentials":         {remote: libv1beta1.RemoteSource{URL: "https://me:secret@host/x"}, want: "it has credentials"},
		"plain https":         {remote: libv1beta1.RemoteSource{URL: "https://host/x", PlainHTTP: true}, want: "plainHTTP"},
		"ssh without key":     {remote: libv1beta1.RemoteSource{URL: "git+ssh://git@host/x"}, want: "secretRef is required"},
		"unverified ssh":      {remote: libv1beta1.RemoteSource{URL: "git+ssh://git@host/x", InsecureSkipTLSVerify: true}, want: "insecureSkipTLSVerify"},
		"unknown parameter":   {remote: libv1beta1.RemoteSource{URL: "git+https://host/x?branch=main"}, want: "can only be ref and path"},
		"path leaves":         {remote: libv1beta1.RemoteSource{URL: "git+https://host/x?path=../y"}, want: "not a path below the root"},
		"Secret of others":    {remote: libv1beta1.RemoteSource{URL: "https://host/x", SecretRef: &corev1.SecretReference{Namespace: "us", Name: "s"}}, want: "reads its own namespace eu only"},
		"Secret without name": {remote: libv1beta1.RemoteSource{URL: "https://host/x", SecretRef: &corev1.SecretReference{}}, want: "has no name"},
	} {
		_, err := source.ResolveRemoteSource(test.remote, restricted)
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "secret@") {
			t.Errorf("%s: got %v, want %s", name, err, test.want)
		}
	}
	got, err := source.ResolveRemoteSource(libv1beta1.RemoteSource{URL: "git+https://host/{{ .ClusterName }}?path=/a/&ref=v1"}, restricted)
	if err != nil || got.String() != "URL git+https://host/eu-1?path=%2Fa%2F&ref=v1" {
		t.Errorf("got %s %v", got, err)
	}
}
