package engine_test

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

func TestRestoredHubUninstallsNoRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("bye", true), "pre-delete", 0, ""))
	b.Items = append(b.Items, c.releaseItem("other", bundle.ReleaseOptions{}, c.configMap("other", "1")))
	deploy(t, e, b)
	older := b
	older.Items, older.KeepObjects = b.Items[1:], true
	convergeUntilDone(t, e, older)
	c.wantHistory("1 deployed")
	c.wantAllNames(configMaps, "main", "other")
	c.wantAllNames(jobs)
}

func TestReleaseInANewBundleIsNotUninstalled(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("hangs", false), "pre-delete", 0, ""))
	b.Items = append(b.Items, c.releaseItem("other", bundle.ReleaseOptions{}, c.configMap("other", "1")))
	deploy(t, e, b)
	uid := c.get(configMaps, c.ns, "main").GetUID()
	without := b
	without.Items = b.Items[1:]
	if report, err := e.Converge(t.Context(), without); err != nil || report.State != bundle.StateApplying {
		t.Fatalf("got %s %q, %v", report.State, report.Message, err)
	}
	deploy(t, e, b)
	if now := c.get(configMaps, c.ns, "main"); now == nil || now.GetUID() != uid {
		t.Error("the object was deleted")
	}
	c.wantHistory("1 superseded", "2 deployed")
	c.wantAllNames(jobs) // the hook of the abandoned uninstallation is deleted
	done, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
	if err != nil || done {
		t.Fatalf("withdrawn: %t, %v", done, err)
	}
	deploy(t, e, b)
	if now := c.get(configMaps, c.ns, "main"); now == nil || now.GetUID() != uid {
		t.Error("the object was deleted after the withdrawal")
	}
}

func TestReleaseOfAnotherBundleIsNotChanged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	first := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("bye", true), "pre-delete", 0, ""))
	deploy(t, h.Engine, first)
	second := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "2"))
	second.ID.RequestorName, second.Owner = second.ID.RequestorName+"-winner", bundle.Owner{Kind: "ClusterProfile", Name: "winner", Tier: 50}
	deploy(t, h.Engine, second)
	// The first bundle detects that its record was changed. It must not write another record.
	<-time.After(2 * time.Second)
	c.wantHistory("1 superseded", "2 deployed")
	withdraw(t, h.Engine, bundle.Withdrawal{ID: first.ID})
	c.wantHistory("1 superseded", "2 deployed")
	c.wantAllNames(configMaps, "main")
	c.wantAllNames(jobs)
}

func TestDeploymentWithoutReleaseRecordIsUpgraded(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{Atomic: true}, c.configMap("main", "1"), asHook(c.job("install", true), "pre-install", 0, ""),
		asHook(c.job("upgrade", true), "pre-upgrade", 0, ""), asHook(withDeadline(c.job("check", false)), "post-upgrade", 0, ""))
	// The state after a deployment by a Towline version without release records.
	earlier := b
	earlier.Items = []bundle.Item{{Objects: []*unstructured.Unstructured{c.configMap("main", "0")}}}
	converge(t, e, earlier)
	report := convergeUntilDone(t, e, b)
	if report.State != bundle.StateFailed || !strings.Contains(report.Message, "it is not rolled back") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
	c.wantAllNames(configMaps, "main")
	c.wantAllNames(jobs, "check", "upgrade")
}

func TestDroppedObjectsAreDeletedBeforeTheWait(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	claim := decode(t, "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: never-bound, namespace: "+c.ns+
		"}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}")[0]
	deploy(t, e, c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), claim))
	deploy(t, e, c.chart(bundle.ReleaseOptions{Wait: true, Timeout: 5 * time.Second}, c.configMap("main", "2")))
}

func TestReleaseWithAFailedObjectIsNotDeployed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	objects := []*unstructured.Unstructured{c.configMap("main", "1"), c.invalidObject(), asHook(c.job("after", true), "post-install", 0, "")}
	b := c.chart(bundle.ReleaseOptions{}, objects...)
	b.Options.ContinueOnError = true
	b.Items = append(b.Items, c.releaseItem("other", bundle.ReleaseOptions{}, c.configMap("other", "1")))
	for range 2 {
		wantConvergeError(t, e, b)
	}
	c.wantHistory("1 failed")
	c.wantAllNames(jobs)
	if names := c.listNames(configMaps); !slices.Equal(names, []string{"main", "other"}) {
		t.Errorf("ConfigMaps: %q", names)
	}
	b.Items[0] = c.releaseItem("web", bundle.ReleaseOptions{}, objects[0], objects[2])
	deploy(t, e, b)
}

// TestUnansweredRequestUndoesNoAtomicRelease applies objects to an API server that does not respond to the request for
// one of them.
func TestUnansweredRequestUndoesNoAtomicRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var isCut atomic.Bool
	cfg := rest.CopyConfig(c.cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripFunc(func(request *http.Request) (*http.Response, error) {
			if isCut.Load() && request.Method == http.MethodPatch && strings.HasSuffix(request.URL.Path, "/configmaps/main") {
				return nil, errors.New("cut off")
			}
			return next.RoundTrip(request)
		})
	})
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		t.Fatal(err)
	}
	b := c.chart(bundle.ReleaseOptions{Atomic: true}, c.configMap("main", "1"), c.configMap("other", "1"))
	isCut.Store(true)
	for range 2 {
		if report, err := e.Converge(t.Context(), b); err == nil || report.State == bundle.StateApplied {
			t.Errorf("got %s, error %v", report.State, err)
		}
	}
	c.wantAllNames(configMaps, "other")
	isCut.Store(false)
	deploy(t, e, b)
	c.wantHistory("1 deployed")
}

// roundTripFunc is an http.RoundTripper.
type roundTripFunc func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripFunc) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }
