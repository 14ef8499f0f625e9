package engine_test

import (
	"strings"
	"testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

// TestOlderBundleKeepsObjectsThatItLacks delivers an older bundle, like a hub that was restored from a backup. This and
// later bundles keep and report the objects that they lack. The withdrawal deletes them.
func TestOlderBundleKeepsObjectsThatItLacks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	converge(t, e, c.bundle("one", c.configMap("a", "2"), c.configMap("later", "1"), c.configMap("also-later", "1")))
	older := c.bundle("one", c.configMap("a", "1"))
	older.KeepObjects = true
	report := convergeKeeping(t, e, older)
	c.wantNames(configMaps, "a", "also-later", "later")
	if !strings.HasPrefix(report.Message, bundle.KeptPrefix) || !strings.Contains(report.Message, "ConfigMap "+c.ns+"/later") {
		t.Errorf("the report does not list the kept object: %q", report.Message)
	}
	if got := c.value("a"); got != "1" {
		t.Errorf("a has %q, want the value of the older bundle", got)
	}

	again := c.engine(nil)
	if report, ok, err := again.Resume(t.Context(), older.ID); err != nil || !ok || !strings.HasPrefix(report.Message, bundle.KeptPrefix) {
		t.Errorf("Resume() = %+v, %t, %v", report, ok, err)
	}
	c.delete(configMaps, "also-later")
	report = convergeKeeping(t, again, c.bundle("one", c.configMap("b", "1")))
	c.wantNames(configMaps, "b", "later")
	if strings.Contains(report.Message, "also-later") || !strings.Contains(report.Message, "ConfigMap "+c.ns+"/later") {
		t.Errorf("the report lists %q, want the objects that are still kept", report.Message)
	}
	converge(t, again, c.bundle("one", c.configMap("b", "1"), c.configMap("later", "3"))) // the bundle has object b again, so it is not reported
	converge(t, again, c.bundle("one", c.configMap("b", "1")))
	c.wantNames(configMaps, "b")

	converge(t, again, c.bundle("one", c.configMap("b", "1"), c.configMap("last", "1")))
	older = c.bundle("one", c.configMap("b", "1"))
	older.KeepObjects = true
	convergeKeeping(t, again, older)
	c.wantNames(configMaps, "b", "last")
	withdraw(t, again, bundle.Withdrawal{ID: older.ID})
	c.wantNames(configMaps)
}

// convergeKeeping is converge for a bundle that keeps objects that it lacks.
func convergeKeeping(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.Converge(t.Context(), b)
	if err != nil || report.State != bundle.StateApplied {
		t.Fatalf("report: got %+v, %v", report, err)
	}
	return report
}
