package stories

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	lostNamespace = "lost"
	lostSummary   = "nothing-lost-sveltos-edge-1"
	// editionParts is the number of ConfigMaps on the hub for the profile of these stories; each becomes a bundle.
	editionParts = 3
)

const lostProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata:
  name: nothing-lost
spec:
  clusterSelector:
    matchLabels:
      env: lost
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: part-1}
  - {kind: ConfigMap, namespace: default, name: part-2}
  - {kind: ConfigMap, namespace: default, name: part-3}
`

// edition is the desired state of these stories: the texts of the member's objects, by name.
type edition map[string]string

// newEdition returns edition n. From each edition to the next, every part keeps one object, changes one, drops one and
// adds one.
func newEdition(n int) edition {
	e := edition{}
	for part := 1; part <= editionParts; part++ {
		e[fmt.Sprintf("part-%d-kept", part)] = "always the same"
		e[fmt.Sprintf("part-%d-changed", part)] = fmt.Sprintf("edition %d", n)
		e[fmt.Sprintf("part-%d-only-in-%d", part, n)] = "comes and goes"
	}
	return e
}

// without returns the edition without one object.
func (e edition) without(name string) edition {
	e = maps.Clone(e)
	delete(e, name)
	return e
}

// manifest returns the hub's ConfigMaps with the edition.
func (e edition) manifest() string {
	var out strings.Builder
	for part := 1; part <= editionParts; part++ {
		name := fmt.Sprintf("part-%d", part)
		fmt.Fprintf(&out, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s}\ndata:\n  objects.yaml: |\n", name)
		for _, object := range slices.Sorted(maps.Keys(e)) {
			if strings.HasPrefix(object, name+"-") {
				fmt.Fprintf(&out, "    ---\n    apiVersion: v1\n    kind: ConfigMap\n    metadata: {namespace: %s, name: %s}\n    data: {text: %q}\n", lostNamespace, object, e[object])
			}
		}
	}
	return out.String()
}

// changesBetween returns the expected events of a member's objects from one edition to another.
func changesBetween(from, to edition) map[string]changeCount {
	want := map[string]changeCount{}
	for name, text := range to {
		before, had := from[name]
		switch {
		case !had:
			want[name] = changeCount{Added: 1}
		case before != text:
			want[name] = changeCount{Modified: 1}
		}
	}
	for name := range from {
		if _, has := to[name]; !has {
			want[name] = changeCount{Deleted: 1}
		}
	}
	return want
}

// awaitEdition waits until the member has exactly the edition and the summary is provisioned, and checks that the
// objects have one field manager.
func (w *world) awaitEdition(plane *localkube.Plane, want edition) {
	w.t.Helper()
	w.eventually("the member has the edition", func() error {
		got := edition{}
		for name, object := range w.configMaps(plane, lostNamespace) {
			got[name] = object.Data["text"]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("objects (-want +got):\n%s", diff)
		}
		return w.wantStatuses("edge", lostSummary, "Provisioned")
	})
	w.awaitNoBundles()
	for name, object := range w.configMaps(plane, lostNamespace) {
		for _, entry := range object.ManagedFields {
			if entry.Manager != kube.FieldManager {
				w.t.Errorf("%s has fields of %q, want only those of %q", name, entry.Manager, kube.FieldManager)
			}
		}
	}
}

var (
	bundlesPath     = regexp.MustCompile(`/configurationbundles$`)
	bundlePath      = regexp.MustCompile(`/configurationbundles/[^/]+$`)
	groupPath       = regexp.MustCompile(`/configurationgroups/[^/]+$`)
	groupStatusPath = regexp.MustCompile(`/configurationgroups/[^/]+/status$`)
	summaryStatus   = regexp.MustCompile(`/clustersummaries/[^/]+/status$`)
	recordPath      = regexp.MustCompile(`/namespaces/projectsveltos/secrets/towline-record-[^/]+$`)
	objectPath      = regexp.MustCompile(`/namespaces/` + lostNamespace + `/configmaps/[^/]+$`)
)

// stage is a request of a rollout at which a process is killed.
type stage struct {
	name string
	gate *gate
	requestMatch
	// meanwhile means that the profile changes while the process is dead.
	meanwhile bool
}

// TestNothingLostAgent kills the agent with -9 at every stage of a rollout.
func TestNothingLostAgent(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	agent := w.startProcessAgent("edge", "edge-1", "env=lost")
	w.apply(w.hub, lostProfile)
	w.killAtStages(agent.plane, victim{kill: func() { agent.process.kill() }, start: agent.start}, []stage{
		{name: "before it reads the first bundle", gate: agent.hub, requestMatch: requestMatch{method: "GET", path: bundlePath}},
		{name: "between two bundles", gate: agent.hub, requestMatch: requestMatch{method: "GET", path: bundlePath, nth: 2}},
		{name: "before it writes its record", gate: agent.member, requestMatch: requestMatch{method: "PUT", path: recordPath}},
		{name: "after it wrote its record, response lost", gate: agent.member, requestMatch: requestMatch{method: "PUT", path: recordPath, answered: true}},
		{name: "before it applies the first object", gate: agent.member, requestMatch: requestMatch{method: "PATCH", path: objectPath}},
		{name: "half-way through the objects", gate: agent.member, requestMatch: requestMatch{method: "PATCH", path: objectPath, nth: 4}},
		{name: "after an object was applied, response lost", gate: agent.member, requestMatch: requestMatch{method: "PATCH", path: objectPath, nth: 3, answered: true}},
		{name: "before it prunes", gate: agent.member, requestMatch: requestMatch{method: "DELETE", path: objectPath}},
		{name: "after it pruned, response lost", gate: agent.member, requestMatch: requestMatch{method: "DELETE", path: objectPath, answered: true}},
		{name: "before it records the applied objects", gate: agent.member, requestMatch: requestMatch{method: "PUT", path: recordPath, nth: 2}},
		{name: "before it reports", gate: agent.hub, requestMatch: requestMatch{method: "PATCH", path: groupStatusPath, body: `"observedRequestorHash"`}},
		{name: "after it reported, response lost", gate: agent.hub, requestMatch: requestMatch{method: "PATCH", path: groupStatusPath, body: `"observedRequestorHash"`, answered: true}},
		{name: "half-way, and the profile drops an object meanwhile", gate: agent.member, requestMatch: requestMatch{method: "PATCH", path: objectPath, nth: 4}, meanwhile: true},
	})
}

// TestNothingLostHub kills the hub with -9 at every stage of a rollout.
func TestNothingLostHub(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := w.pullMember("edge", "edge-1", "env=lost")
	hub := w.startGate(w.hub.Config)
	w.hubProcess.kill()
	w.hubKubeconfig = w.writeGateKubeconfig("through-gate.kubeconfig", hub)
	w.startHub()
	w.apply(w.hub, lostProfile)
	w.killAtStages(member, victim{kill: func() { w.hubProcess.kill() }, start: func() { w.startHub() }}, []stage{
		{name: "before it writes the first bundle", gate: hub, requestMatch: requestMatch{method: "POST", path: bundlesPath}},
		{name: "between two bundles", gate: hub, requestMatch: requestMatch{method: "POST", path: bundlesPath, nth: 2}},
		{name: "between bundles and group", gate: hub, requestMatch: requestMatch{method: "PATCH", path: groupPath}},
		{name: "after it wrote the group, response lost", gate: hub, requestMatch: requestMatch{method: "PATCH", path: groupPath, answered: true}},
		{name: "before it reports Provisioned", gate: hub, requestMatch: requestMatch{method: "PATCH", path: summaryStatus, body: `"Provisioned"`}},
		{name: "after it reported Provisioned, response lost", gate: hub, requestMatch: requestMatch{method: "PATCH", path: summaryStatus, body: `"Provisioned"`, answered: true}},
		{name: "before it removes a bundle", gate: hub, requestMatch: requestMatch{method: "DELETE", path: bundlePath}},
		{name: "between bundles and group, and the profile drops an object meanwhile", gate: hub, requestMatch: requestMatch{method: "PATCH", path: groupPath}, meanwhile: true},
	})
}

// victim is the process that a story kills.
type victim struct{ kill, start func() }

// killAtStages rolls out one edition for each stage, kills the victim there, starts it again and checks that no change
// is missing, is made twice, or is left over.
func (w *world) killAtStages(member *localkube.Plane, v victim, stages []stage) {
	w.t.Helper()
	now := newEdition(0)
	w.apply(w.hub, now.manifest())
	w.awaitEdition(member, now)
	journal := w.startJournal(member, lostNamespace)
	for i, s := range stages {
		next := newEdition(i + 1)
		began := time.Now()
		blocked := s.gate.block(s.requestMatch)
		w.apply(w.hub, next.manifest())
		w.awaitBlocked(blocked)
		v.kill()
		dropped := ""
		if s.meanwhile {
			dropped = fmt.Sprintf("part-2-only-in-%d", i+1)
			next = next.without(dropped)
			w.apply(w.hub, next.manifest())
		}
		v.start()
		w.awaitEdition(member, next)
		happened := journal.nextPage()
		if t := happened[dropped]; t.Added != t.Deleted || t.Added > 1 {
			w.t.Errorf("killed %s: the dropped object %s has the events %+v", s.name, dropped, t)
		}
		delete(happened, dropped)
		if diff := cmp.Diff(changesBetween(now, next), happened); diff != "" {
			w.t.Errorf("killed %s: events of the objects (-want +got):\n%s", s.name, diff)
		}
		w.t.Logf("killed %s: the edition was complete %.1f s after the change", s.name, time.Since(began).Seconds())
		now = next
	}
}

// TestNothingLostWithoutHub stops the hub's API server for a minute.
func TestNothingLostWithoutHub(t *testing.T) {
	awaitSlot(t)
	const (
		outage = time.Minute
		// catchUp is the maximum time of a change after an outage: clients retry a lost server every few seconds.
		catchUp = 45 * time.Second
	)
	w := newWorld(t)
	member := w.pullMember("edge", "edge-1", "env=lost")
	now := newEdition(0)
	w.apply(w.hub, lostProfile+now.manifest())
	w.awaitEdition(member, now)
	before := w.configMaps(member, lostNamespace)
	journal := w.startJournal(member, lostNamespace)

	if err := w.hub.Stop(); err != nil {
		t.Fatal(err)
	}
	over := time.After(outage)
	w.kubectl(member, "patch", "configmap", "part-1-changed", "-n", lostNamespace, "--type=merge", "-p", `{"data":{"text":"by hand"}}`)
	w.kubectl(member, "delete", "configmap", "part-2-kept", "-n", lostNamespace, "--wait=false")
	w.eventually("drift is corrected without the hub", func() error {
		healed := w.configMaps(member, lostNamespace)
		if got := healed["part-1-changed"].Data["text"]; got != now["part-1-changed"] {
			return fmt.Errorf("the edited object has text %q", got)
		}
		if healed["part-2-kept"].Data["text"] != now["part-2-kept"] {
			return errors.New("the deleted object does not exist again")
		}
		return nil
	})
	<-over
	journal.wantChanges("during the outage", map[string]changeCount{"part-1-changed": {Modified: 2}, "part-2-kept": {Added: 1, Deleted: 1}})

	if err := w.hub.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := newEdition(1)
	began := time.Now()
	w.apply(w.hub, next.manifest())
	w.restartHubIfEnded()
	w.awaitEdition(member, next)
	took := time.Since(began)
	t.Logf("caught up %.1f s after the hub's API server started", took.Seconds())
	if took > catchUp {
		t.Errorf("the change took %s after the hub's API server started, want at most %s", took, catchUp)
	}
	journal.wantChanges("after the outage", changesBetween(now, next))
	for name, object := range w.configMaps(member, lostNamespace) {
		if was, had := before[name]; had && was.UID != object.UID && name != "part-2-kept" {
			t.Errorf("%s has uid %s, want %s", name, object.UID, was.UID)
		}
	}
}

// restartHubIfEnded starts the hub again after its end, as its Deployment would.
func (w *world) restartHubIfEnded() {
	w.t.Helper()
	select {
	case <-w.hubProcess.exited:
		w.t.Logf("the hub ended while its API server was stopped; starting it again, as its Deployment would")
		w.startHub()
	default:
	}
}
