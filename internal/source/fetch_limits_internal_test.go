package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// TestSlowFetchMakesRoom uses a repository that stops in the middle of its index. Another repository gets the memory of
// this fetch.
func TestSlowFetchMakesRoom(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/slow") {
			_, _ = w.Write(bytes.Repeat([]byte(" "), 700<<10))
			_ = http.NewResponseController(w).Flush()
			<-release
			return
		}
		_, _ = w.Write([]byte("entries: {}\n" + strings.Repeat(" ", 500<<10)))
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(release) })
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	charts.limits.total, charts.limits.maxBlocking = 1<<20, time.Second
	fetch := func(repository string) string {
		chart := configv1beta1.HelmChart{RepositoryURL: server.URL + "/" + repository, RepositoryName: repository, ChartName: "a", ChartVersion: "1.0.0"}
		if _, err := charts.Fetch(t.Context(), chart, Login{}, Verification{}, nil); err != nil {
			return err.Error()
		}
		return ""
	}
	eventually := func(what string, condition func() bool) {
		err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return condition(), nil })
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	_ = fetch("slow")
	eventually("the slow repository has memory", func() bool { return charts.limits.used.Load() >= 700<<10 })
	eventually("the other repository gets it", func() bool { return strings.Contains(fetch("other"), "does not exist") })
	eventually("the reason", func() bool { return strings.Contains(fetch("slow"), "others need its memory") })
}

func TestContentOfAllURLsIsBounded(t *testing.T) {
	t.Parallel()
	server := handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(bytes.Repeat([]byte("a"), 1<<20)) })
	f := NewRemoteFetcher(nil, clock.RealClock{})
	f.limits.total = 4<<20 + 1<<19 // for four files, of which one namespace has three
	fetch := func(path string, users ...string) *remoteSource {
		s := &remoteSource{reference: Reference{Kind: KindURL, URL: server + path}, users: newRemoteUsers(), stop: make(chan struct{})}
		for _, user := range users {
			s.users.set(user, time.Hour)
		}
		f.byReference[s.reference] = s
		f.fetchAndReport(t.Context(), s)
		return s
	}
	want := func(s *remoteSource, want string) {
		t.Helper()
		if got := errorText(s.failure.err); !strings.HasSuffix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", s.reference.URL, got, want)
		}
	}
	for i := range 3 {
		want(fetch(fmt.Sprintf("/%d", i), "eu/a", "eu/b"), "")
	}
	want(fetch("/3", "eu/c"), "the URLs of namespace eu need more than the 3 MiB that one namespace may use")
	shared := fetch("/shared", "eu/a", "us/a")
	want(shared, "")
	want(fetch("/4", "us/a"), "the content of all URLs has more than 4 MiB")
	shared.users.clear()
	f.removeIfUnused(shared)
	want(fetch("/5", "us/a"), "")
	// Another namespace uses the content of a file, so its size counts for that namespace.
	file := RemoteUse{Reference: Reference{Kind: KindURL, URL: server + "/0"}, Interval: time.Hour}
	f.byUser["eu/a"], f.byUser["eu/b"] = []RemoteUse{file}, []RemoteUse{file}
	for _, change := range []struct {
		user string
		uses []RemoteUse
		eu   int64
	}{{"eu/a", nil, 3}, {"us/b", []RemoteUse{file}, 2}, {"eu/b", nil, 2}} {
		if added := f.replaceUses(change.user, change.uses); len(added) > 0 || f.shares["eu"].used.Load()>>20 != change.eu {
			t.Errorf("%s: %d new sources, %d bytes of namespace eu, want %d MiB", change.user, len(added), f.shares["eu"].used.Load(), change.eu)
		}
	}
	if got := f.shares["us"].used.Load() >> 20; got != 2 {
		t.Errorf("%d MiB of namespace us, want 2", got)
	}
	for _, s := range f.byReference {
		s.users.clear()
		f.removeIfUnused(s)
	}
	for namespace, share := range f.shares {
		if used := share.used.Load(); used != 0 || f.Size() != 0 {
			t.Errorf("%d bytes of namespace %q are not freed, %d in total", used, namespace, f.Size())
		}
	}
}

// TestSlowFetchOfURLIsCanceled uses a server that stops in the middle of a file. Its fetch is canceled when another
// fetch needs the memory, for the same namespace or another namespace.
func TestSlowFetchOfURLIsCanceled(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	server := handle(t, func(w http.ResponseWriter, r *http.Request) {
		size := map[string]int{"/slow": 600 << 10, "/other": 500 << 10}[r.URL.Path]
		_, _ = w.Write(bytes.Repeat([]byte("a"), size))
		if r.URL.Path == "/slow" {
			_ = http.NewResponseController(w).Flush()
			<-end
		}
	})
	t.Cleanup(func() { close(end) })
	for name, namespaces := range map[string][2]string{"no namespace": {"", ""}, "one": {"eu", "eu"}, "two": {"eu", "us"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := NewRemoteFetcher(nil, clock.RealClock{})
			f.limits.total, f.limits.maxBlocking = 1<<20, time.Second
			shares := map[string]*fetchShare{}
			for _, namespace := range namespaces {
				shares[namespace] = &fetchShare{limits: f.limits, namespace: namespace}
			}
			fetch := func(path, namespace string) error {
				awaitResult, err := f.fetch(t.Context(), shares[namespace], Reference{Kind: KindURL, URL: server + path}, remoteLogin{}, remoteRevision{})
				awaitResult.free()
				return err
			}
			slow := make(chan error, 1)
			go func() { slow <- fetch("/slow", namespaces[0]) }()
			waitFor := func(what string, condition func() bool) {
				err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return condition(), nil })
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
			}
			waitFor("the slow fetch has memory", func() bool { return f.Size() >= 600<<10 })
			waitFor("the other fetch gets the memory", func() bool { return fetch("/other", namespaces[1]) == nil })
			if err := <-slow; !errors.Is(err, errSlowFetch) {
				t.Errorf("the slow fetch ends with %v", err)
			}
		})
	}
}

// TestSlowFetchesDoNotCancelEachOther runs two slow fetches that need more memory. Only the second is canceled.
func TestSlowFetchesDoNotCancelEachOther(t *testing.T) {
	t.Parallel()
	limits := newFetchLimits("the content of all URLs has", 10)
	limits.maxBlocking = 0
	share := &fetchShare{limits: limits}
	first, second := &meteredDownload{share: share, maxSize: 100}, &meteredDownload{share: share, maxSize: 100}
	firstContext, releaseFirst := limits.register(t.Context(), first)
	defer releaseFirst()
	secondContext, releaseSecond := limits.register(t.Context(), second)
	for _, download := range []*meteredDownload{first, second} {
		if err := download.add(5); err != nil {
			t.Fatal(err)
		}
	}
	added := make(chan error, 1)
	go func() { added <- first.add(1) }()
	<-secondContext.Done()
	if err := second.add(1); err == nil {
		t.Error("the canceled fetch gets memory")
	}
	second.close()
	releaseSecond()
	if err := <-added; err != nil || firstContext.Err() != nil {
		t.Errorf("the first fetch: %v, its context: %v", err, firstContext.Err())
	}
}

// TestCanceledFetchDoesNotWaitForOthers cancels a fetch while the maximum number of archives is being unpacked.
func TestCanceledFetchDoesNotWaitForOthers(t *testing.T) {
	t.Parallel()
	const magic = "\x1f\x8b" // of gzip
	server := handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(magic)) })
	f := NewRemoteFetcher(nil, clock.RealClock{})
	for range maxUnpacking {
		f.limits.unpacking <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.fetch(ctx, &fetchShare{limits: f.limits}, Reference{Kind: KindURL, URL: server}, remoteLogin{}, remoteRevision{})
		ended <- err
	}()
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		return f.Size() == int64(len(magic)), nil
	})
	if err != nil {
		t.Fatal("the archive is not fetched")
	}
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the fetch ends with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the canceled fetch waits for other archives")
	}
}
