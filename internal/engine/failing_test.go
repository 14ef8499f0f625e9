package engine_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

// invalidConfigMap returns a ConfigMap that the API server refuses as invalid.
func (c *cluster) invalidConfigMap(name string) *unstructured.Unstructured {
	obj := c.configMap(name, "1")
	obj.Object["data"] = map[string]any{"not a valid key": "1"}
	return obj
}

// wantTerminalError converges b, and fails the test unless the error is terminal.
func wantTerminalError(t *testing.T, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.Converge(t.Context(), b)
	if _, isTerminal := errors.AsType[*bundle.TerminalError](err); !isTerminal || report.State != bundle.StateFailed || report.Message == "" {
		t.Fatalf("got state %s, message %q, error %v; want a terminal failure", report.State, report.Message, err)
	}
	return report
}

// startRun returns an engine whose Run has begun: it has corrected drift.
func (c *cluster) startRun(t *testing.T, m *meter, change ...func(*engine.Options)) *runningEngine {
	t.Helper()
	h := c.runEngine(t, m, change...)
	sentinel := c.bundle("sentinel", c.configMap("sentinel", "1"))
	converge(t, h.Engine, sentinel)
	c.delete(configMaps, "sentinel")
	eventually(t, "corrected", func() bool { return c.value("sentinel") == "1" && h.countCorrections() > 0 })
	return h
}

// writes returns the requests that write objects, as method and name.
func (c *cluster) writes(m *meter) (writes []string) {
	for _, line := range m.take() {
		method, uri, _ := strings.Cut(line, " ")
		if path, ok := strings.CutPrefix(uri, "/api/v1/namespaces/"+c.ns+"/configmaps/"); ok && method != "GET" {
			name, _, _ := strings.Cut(path, "?")
			writes = append(writes, method+" "+name)
		}
	}
	return writes
}

func TestBundleWithTheSameObjectTwiceIsPlannedOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := &meter{}
	h := c.startRun(t, m)
	converge(t, h.Engine, c.bundle("one", c.configMap("a", "1")))
	twice := c.bundle("one", c.configMap("a", "2"), c.configMap("a", "3"))
	first := wantTerminalError(t, h.Engine, twice)
	m.take()
	again := wantTerminalError(t, h.Engine, twice)
	if requests := m.take(); len(requests) > 0 {
		t.Errorf("another delivery of the same bundle sends %v", requests)
	}
	digest, err := twice.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if report, ok := h.Failure(twice.ID, digest); !ok || report.Message != first.Message || again.Message != first.Message || !strings.Contains(first.Message, "listed twice") {
		t.Errorf("got the messages %q, %q and %q", first.Message, again.Message, report.Message)
	}
	c.patch(configMaps, "a", `{"data":{"key":"edited"}}`)
	eventually(t, "drift of the former bundle is corrected", func() bool { return c.value("a") == "1" })
	if got := h.countReports(); got != 0 {
		t.Errorf("%d new reports, want none", got)
	}
	converge(t, h.Engine, c.bundle("one", c.configMap("a", "2")))
}

// TestDriftOfBundleWithRefusedObject corrects drift of a failed bundle without another run of the whole bundle.
func TestDriftOfBundleWithRefusedObject(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := &meter{}
	h := c.startRun(t, m)
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"), c.invalidConfigMap("refused"))
	b.Options.ContinueOnError = true
	report := wantTerminalError(t, h.Engine, b)
	m.take()
	c.patch(configMaps, "a", `{"data":{"key":"edited"}}`)
	eventually(t, "the edit is reverted", func() bool { return c.value("a") == "1" })
	c.delete(configMaps, "b")
	eventually(t, "the deletion is reverted", func() bool { return c.value("b") == "1" })
	eventually(t, "the corrections are recorded", func() bool { return h.countCorrections() >= 3 })
	if again := wantTerminalError(t, h.Engine, b); again.Message != report.Message {
		t.Errorf("the message changes from %q to %q", report.Message, again.Message)
	}
	if found, ok, err := h.FindDeployed(t.Context(), b.ID); err != nil || !ok || found.Report.State != bundle.StateFailed || found.Report.Message != report.Message {
		t.Errorf("the record has %+v, %t, %v; want the failure", found.Report, ok, err)
	}
	if writes := c.writes(m); strings.Join(writes, ", ") != "PATCH a, PATCH b" {
		t.Errorf("writes: %v, want the writes of the two corrections", writes)
	}
	if got := h.countReports(); got != 0 {
		t.Errorf("%d new reports, want none", got)
	}
	b.Items[0].Objects = b.Items[0].Objects[:2]
	converge(t, h.Engine, b)
}

// TestRefusedObjectIsRetriedAfterFiveMinutes steps the clock of the engine to one second before the next attempt,
// and then to the attempt.
func TestRefusedObjectIsRetriedAfterFiveMinutes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m, clock := &meter{}, clocktesting.NewFakeClock(time.Now())
	h := c.startRun(t, m, func(o *engine.Options) { o.Clock = clock })
	b := c.bundle("one", c.configMap("a", "1"), c.invalidConfigMap("refused"))
	b.Options.ContinueOnError = true
	wantTerminalError(t, h.Engine, b)
	m.take()
	corrections := h.countCorrections()
	clock.Step(5*time.Minute - time.Second)
	// The correction of another object shows that the engine has processed the bundle again.
	c.patch(configMaps, "a", `{"data":{"key":"edited"}}`)
	eventually(t, "the edit is reverted", func() bool { return c.value("a") == "1" && h.countCorrections() > corrections })
	if writes := c.writes(m); !slices.Equal(writes, []string{"PATCH a"}) {
		t.Errorf("writes within five minutes: %v, want the write of the correction", writes)
	}
	clock.Step(time.Second)
	eventually(t, "the refused object is tried again", func() bool { return slices.Contains(c.writes(m), "PATCH refused") })
}

// TestFailedBundleIsRetriedSlowlyDuringAnOutage cuts the connection while the retry of a failed bundle is due.
func TestFailedBundleIsRetriedSlowlyDuringAnOutage(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := &meter{}
	h := c.startRun(t, m)
	homeless := c.configMap("a", "1")
	homeless.SetNamespace(c.ns + "-missing")
	b := c.bundle("one", homeless)
	b.Items[0].SkipNamespaceCreation = true
	wantTerminalError(t, h.Engine, b)
	m.cutAfter(0)
	eventually(t, "the retry is due", func() bool { return m.refused() > 0 })
	before := m.refused()
	<-time.After(3 * time.Second)
	if got := m.refused() - before; got > 50 {
		t.Errorf("%d requests within 3 s, want pauses between them", got)
	}
}

// TestDeletionOfARefusedObjectEndsTheFailure deletes an object whose immutable field differs. Then the engine can apply
// the bundle.
func TestDeletionOfARefusedObjectEndsTheFailure(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.startRun(t, nil)
	immutable := func(value string) *unstructured.Unstructured {
		obj := c.configMap("immutable", value)
		obj.Object["immutable"] = true
		return obj
	}
	converge(t, h.Engine, c.bundle("one", immutable("1")))
	b := c.bundle("one", immutable("2"))
	wantTerminalError(t, h.Engine, b)
	c.delete(configMaps, "immutable")
	eventually(t, "the new report", func() bool {
		found, ok, err := h.FindDeployed(t.Context(), b.ID)
		return err == nil && ok && found.Report.State == bundle.StateApplied && h.countReports() == 1
	})
	if got := c.value("immutable"); got != "2" {
		t.Errorf("got value %q, want 2", got)
	}
}
