package engine_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

// runningEngine is an Engine that runs until the test ends.
type runningEngine struct {
	*engine.Engine
	mu          sync.Mutex
	corrections []bundle.ChangeSet
	// reports counts the calls of OnReport.
	reports int
}

func (h *runningEngine) countCorrections() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.corrections)
}

func (h *runningEngine) countReports() int { h.mu.Lock(); defer h.mu.Unlock(); return h.reports }

func (c *cluster) runEngine(t *testing.T, m *meter, change ...func(*engine.Options)) *runningEngine {
	t.Helper()
	h := &runningEngine{}
	h.Engine = c.engine(m, append(change, func(o *engine.Options) {
		o.OnCorrect = func(_ bundle.ID, changes bundle.ChangeSet) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.corrections = append(h.corrections, changes)
		}
		o.OnReport = func(bundle.ID) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.reports++
		}
	})...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return h
}

func (c *cluster) value(name string) string {
	obj := c.get(configMaps, c.ns, name)
	if obj == nil {
		return ""
	}
	value, _, _ := unstructured.NestedString(obj.Object, "data", "key")
	return value
}

func TestRunCorrectsChangesAndDeletions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("edited", "1"), c.configMap("deleted", "1"), c.configMap("unlabelled", "1"), c.configMap("shared", "1"))
	converge(t, c.engine(nil), b)
	c.runEngine(t, nil)
	c.patch(configMaps, "edited", `{"data":{"key":"2"}}`)
	c.delete(configMaps, "deleted")
	c.patch(configMaps, "unlabelled", `{"metadata":{"labels":null}}`)
	c.patch(configMaps, "shared", `{"data":{"theirs":"2"}}`)
	eventually(t, "corrected", func() bool {
		return c.value("edited") == "1" && c.value("deleted") == "1" && len(c.listNames(configMaps)) == 4
	})
	if theirs, _, _ := unstructured.NestedString(c.get(configMaps, c.ns, "shared").Object, "data", "theirs"); theirs != "2" {
		t.Errorf("field of another manager: got %q, want 2", theirs)
	}
	// The inventory has the UID of the recreated object, so the withdrawal deletes it.
	e := c.engine(nil)
	eventually(t, "applied", func() bool {
		_, state, _, err := e.RecordedDigest(t.Context(), b.ID)
		return err == nil && state == bundle.StateApplied
	})
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
}

func TestRunCorrectsEarlierDrift(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("edited", "1"), c.configMap("deleted", "1"))
	converge(t, c.engine(nil), b)
	c.patch(configMaps, "edited", `{"data":{"key":"2"}}`)
	c.delete(configMaps, "deleted")
	c.runEngine(t, nil)
	eventually(t, "corrected", func() bool { return c.value("edited") == "1" && c.value("deleted") == "1" })
}

// TestCorrectionOfAllObjectsIsReported corrects all objects of an applied bundle. During the correction the record has
// StateApplying, and the agent may report this state, so the final report is new.
func TestCorrectionOfAllObjectsIsReported(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("deleted", "1"), c.configMap("kept", "1"))
	var states []bundle.State
	var e *engine.Engine
	m := &meter{before: func(request *http.Request) {
		if request.Method == http.MethodPatch && strings.Contains(request.URL.Path, "/deleted") {
			found, _, err := e.FindDeployed(t.Context(), b.ID)
			if err != nil {
				t.Error(err)
			}
			states = append(states, found.Report.State)
		}
	}}
	e = c.engine(m)
	converge(t, e, b)
	for _, isDeleted := range []bool{false, true} {
		states = nil
		if isDeleted {
			c.delete(configMaps, "deleted")
		}
		result, err := e.Correct(t.Context(), b.ID)
		if err != nil || result.IsReportNew != isDeleted {
			t.Errorf("object deleted %t: IsReportNew = %t, error %v", isDeleted, result.IsReportNew, err)
		}
		if isDeleted && !slices.Equal(states, []bundle.State{bundle.StateApplying}) {
			t.Errorf("the states during the correction are %v", states)
		}
	}
}

func TestOwnWritesCauseNoRequests(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := &meter{}
	h := c.runEngine(t, m)
	var objects []*unstructured.Unstructured
	for i := range 20 {
		objects = append(objects, c.configMap(fmt.Sprintf("cm-%d", i), "1"))
	}
	converge(t, h.Engine, c.bundle("one", objects...))
	last := c.configMap("cm-0", "2")
	objects[0] = last
	converge(t, h.Engine, c.bundle("one", objects...))
	m.take()
	// A later correction proves that the engine has processed all earlier watch events.
	c.patch(configMaps, "cm-1", `{"data":{"key":"2"}}`)
	eventually(t, "corrected", func() bool { return c.value("cm-1") == "1" && h.countCorrections() > 0 })
	var writes []string
	for _, line := range m.take() {
		if strings.HasPrefix(line, "PATCH") {
			writes = append(writes, line)
		}
	}
	if len(writes) != 1 || !strings.Contains(writes[0], "/cm-1?") {
		t.Errorf("writes: got %v, want one of cm-1", writes)
	}
	if h.countCorrections() != 1 {
		t.Errorf("corrections: got %d, want 1", h.countCorrections())
	}
}

func TestDriftIgnoredAndOneTimeObjectsStayEdited(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	ignored := c.configMap("ignored", "1")
	ignored.SetAnnotations(map[string]string{"projectsveltos.io/driftDetectionIgnore": "ok"})
	converge(t, h.Engine, c.bundle("one", ignored, c.configMap("normal", "1")))
	once := c.bundle("once", c.configMap("once", "1"))
	once.Options.CorrectDrift = false
	converge(t, h.Engine, once)
	for _, name := range []string{"ignored", "once", "normal"} {
		c.patch(configMaps, name, `{"data":{"key":"2"}}`)
	}
	eventually(t, "corrected", func() bool { return c.value("normal") == "1" })
	if got := []string{c.value("ignored"), c.value("once")}; !slices.Equal(got, []string{"2", "2"}) {
		t.Errorf("values: got %v, want both 2", got)
	}
}

func TestDriftCorrectionEndsWithTheOption(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	b := c.bundle("one", c.configMap("a", "1"))
	converge(t, h.Engine, b)
	c.patch(configMaps, "a", `{"data":{"key":"2"}}`)
	eventually(t, "corrected", func() bool { return c.value("a") == "1" })
	b.Options.CorrectDrift = false
	wantChanges(t, converge(t, h.Engine, b).Changes, counts{bundle.Unchanged: 1})
	sentinel := c.bundle("two", c.configMap("b", "1"))
	converge(t, h.Engine, sentinel)
	c.patch(configMaps, "a", `{"data":{"key":"2"}}`)
	c.patch(configMaps, "b", `{"data":{"key":"2"}}`)
	eventually(t, "the other object is corrected", func() bool { return c.value("b") == "1" })
	if got := c.value("a"); got != "2" {
		t.Errorf("corrected without the option: got %s, want 2", got)
	}
}

func TestInterruptedRunIsFinishedByTheNextProcess(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"), c.configMap("c", "1"))
	for n := 4; ; n++ {
		line := &meter{}
		line.cutAfter(n)
		e := c.engine(line)
		if _, err := e.Converge(t.Context(), b); err == nil {
			t.Fatal("the run was not interrupted")
		}
		if _, state, ok, err := c.engine(nil).RecordedDigest(t.Context(), b.ID); err == nil && ok && state == bundle.StateApplying {
			break
		}
	}
	h := c.runEngine(t, nil)
	eventually(t, "applied", func() bool {
		_, state, _, err := h.RecordedDigest(t.Context(), b.ID)
		return err == nil && state == bundle.StateApplied
	})
	c.wantNames(configMaps, "a", "b", "c")
}

func TestWithdrawnObjectsAreNotCorrected(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	b := c.bundle("one", c.configMap("a", "1"))
	converge(t, h.Engine, b)
	sentinel := c.bundle("two", c.configMap("b", "1"))
	converge(t, h.Engine, sentinel)
	withdraw(t, h.Engine, bundle.Withdrawal{ID: b.ID})
	c.delete(configMaps, "b")
	eventually(t, "the other object is corrected", func() bool { return c.value("b") == "1" })
	c.wantNames(configMaps, "b")
}

func TestConflictEndsWhenTheOwnerIsWithdrawn(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	first := c.bundle("first", c.configMap("shared", "1"))
	converge(t, h.Engine, first)
	second := c.bundle("second", c.configMap("shared", "2"))
	wantConvergeError(t, h.Engine, second)
	withdraw(t, h.Engine, bundle.Withdrawal{ID: first.ID})
	eventually(t, "the other profile's object is there", func() bool { return c.value("shared") == "2" })
}

func TestRepeatedDriftIsCorrectedWithBackoff(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	converge(t, h.Engine, c.bundle("one", c.configMap("a", "1")))
	began := time.Now()
	// Another client changes the object after each correction. Three corrections have no backoff, then 1 s and 2 s follow.
	for round := range 5 {
		c.patch(configMaps, "a", fmt.Sprintf(`{"data":{"key":"theirs-%d"}}`, round))
		eventually(t, "corrected", func() bool { return c.value("a") == "1" })
	}
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("five corrections took %s, want more than 2 s", took)
	}
}

func TestDriftDuringAnOutageIsCorrected(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	h := c.runEngine(t, line)
	converge(t, h.Engine, c.bundle("one", c.configMap("a", "1")))
	c.patch(configMaps, "a", `{"data":{"key":"2"}}`)
	eventually(t, "corrected", func() bool { return c.value("a") == "1" })
	// The watch stays open, but the engine cannot read the object yet.
	line.cutAfter(0)
	c.patch(configMaps, "a", `{"data":{"key":"3"}}`)
	eventually(t, "a request failed", func() bool { return line.refused() > 0 })
	line.endCut()
	eventually(t, "corrected", func() bool { return c.value("a") == "1" })
}

// TestExpiredJobRunsAgainOnlyWithAnotherBundle deletes a finished Job like Kubernetes after ttlSecondsAfterFinished,
// and corrects the drift of another object.
func TestExpiredJobRunsAgainOnlyWithAnotherBundle(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	jobs := schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}
	container := map[string]any{"name": "a", "image": "a"}
	job := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "batch/v1", "kind": "Job", "metadata": map[string]any{"name": "expiring", "namespace": c.ns},
		"spec": map[string]any{
			"ttlSecondsAfterFinished": int64(10),
			"template":                map[string]any{"spec": map[string]any{"restartPolicy": "Never", "containers": []any{container}}},
		},
	}}
	b := c.bundle("one", c.configMap("deleted", "1"), job)
	h := c.runEngine(t, nil)
	converge(t, h.Engine, b)
	if err := c.objects.Resource(jobs).Namespace(c.ns).Delete(t.Context(), "expiring", metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationBackground)}); err != nil {
		t.Fatal(err)
	}
	c.delete(configMaps, "deleted")
	eventually(t, "the ConfigMap is corrected", func() bool { return h.countCorrections() > 0 && c.value("deleted") == "1" })
	converge(t, h.Engine, b)
	if c.get(jobs, c.ns, "expiring") != nil {
		t.Error("the Job runs again")
	}
	b.Items[0].Objects = append(b.Items[0].Objects, c.configMap("new", "1"))
	converge(t, h.Engine, b)
	if c.get(jobs, c.ns, "expiring") == nil {
		t.Error("another bundle does not create the Job")
	}
}
