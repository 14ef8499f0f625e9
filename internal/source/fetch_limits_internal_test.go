package source

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// TestSlowFetchMakesRoom has a repository that sends a part of its index, and then nothing. It does not keep the memory
// of all fetches from another one.
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
