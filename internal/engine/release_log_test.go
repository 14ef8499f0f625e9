package engine_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

var pods = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// podLogs is a transport that responds to requests for logs of Pods, which the simulated node does not serve.
type podLogs struct {
	mu   sync.Mutex
	seen []string // "pod?options"
}

func (l *podLogs) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		path, isLog := strings.CutSuffix(r.URL.Path, "/log")
		if !isLog {
			return next.RoundTrip(r)
		}
		name := path[strings.LastIndex(path, "/")+1:]
		l.mu.Lock()
		defer l.mu.Unlock()
		l.seen = append(l.seen, name+"?"+r.URL.RawQuery)
		body := io.NopCloser(strings.NewReader("first line of " + name + "\n\n  second   line\n"))
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: body, Request: r}, nil
	})
}

func (c *cluster) engineWithLogs(l *podLogs) *engine.Engine {
	c.t.Helper()
	config := rest.CopyConfig(c.cfg)
	config.Wrap(l.wrap)
	e, err := engine.New(config, engine.Options{Namespace: c.records})
	if err != nil {
		c.t.Fatal(err)
	}
	return e
}

// pod returns a Pod that is never scheduled, with the labels of a Pod of job unless job is "".
func (c *cluster) pod(name, job string) *unstructured.Unstructured {
	labels := map[string]any{}
	if job != "" {
		labels["batch.kubernetes.io/job-name"] = job
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name, "namespace": c.ns, "labels": labels},
		"spec": map[string]any{
			"restartPolicy": "Never", "nodeSelector": map[string]any{"no-such": "node"},
			"containers": []any{map[string]any{"name": "main", "image": "example.com/hook:1"}},
		},
	}}
}

// failPod sets the phase of a Pod to Failed, like the kubelet.
func (c *cluster) failPod(name string) {
	c.t.Helper()
	status := []byte(`{"status":{"phase":"Failed","message":"exit code 3"}}`)
	_, err := c.objects.Resource(pods).Namespace(c.ns).Patch(c.t.Context(), name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	if err != nil {
		c.t.Fatal(err)
	}
}

// TestFailedPodReportsItsLog checks that the message about a hook that is a Pod contains its log, unless the log may
// contain secrets.
func TestFailedPodReportsItsLog(t *testing.T) {
	t.Parallel()
	for name, sensitive := range map[string]bool{"public": false, "sensitive": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, logs := newCluster(t), &podLogs{}
			e := c.engineWithLogs(logs)
			b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.pod("check", ""), "pre-install", 0, ""))
			b.Items[0].Sensitive = sensitive
			if report, err := e.Converge(t.Context(), b); err != nil || report.State != bundle.StateApplying {
				t.Fatalf("got %+v, %v", report, err)
			}
			c.failPod("check")
			report := convergeUntilDone(t, e, b)
			const lines = "; its last log lines: first line of check | second line"
			want := fmt.Sprintf("pre-install hook Pod %s/check failed: ", c.ns)
			if report.State != bundle.StateFailed || !strings.Contains(report.Message, want) || strings.Contains(report.Message, lines) == sensitive {
				t.Errorf("got %s %q", report.State, report.Message)
			}
			if wantAsked := !sensitive; (len(logs.seen) > 0) != wantAsked {
				t.Errorf("requests for logs: %q", logs.seen)
			}
			c.wantAllNames(configMaps)
		})
	}
}

// TestHangingJobReportsTheLogOfItsNewestPod checks that the engine reads the last ten lines of the newest Pod's log, at
// most 2 KiB.
func TestHangingJobReportsTheLogOfItsNewestPod(t *testing.T) {
	t.Parallel()
	c, logs := newCluster(t), &podLogs{}
	e := c.engineWithLogs(logs)
	b := c.chart(bundle.ReleaseOptions{Timeout: 15 * time.Second}, asHook(c.job("hangs", false), "pre-install", 0, ""))
	if report, err := e.Converge(t.Context(), b); err != nil || report.State != bundle.StateApplying {
		t.Fatalf("got %+v, %v", report, err)
	}
	c.create(pods, c.pod("other", "another-job"))
	created := time.Now()
	eventually(t, "the next second, since creation times have seconds", func() bool { return time.Since(created) > 1100*time.Millisecond })
	c.create(pods, c.pod("newest", "hangs"))
	report := convergeUntilDone(t, e, b)
	if want := "it did not end within 15s; its last log lines: first line of newest | second line"; !strings.Contains(report.Message, want) {
		t.Errorf("got %q, want %q in it", report.Message, want)
	}
	if len(logs.seen) == 0 || !strings.Contains(logs.seen[0], "limitBytes=2048") || !strings.Contains(logs.seen[0], "tailLines=10") {
		t.Errorf("requests for logs: %q", logs.seen)
	}
}
