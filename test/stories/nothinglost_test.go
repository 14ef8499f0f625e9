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
	// lostParts is how many ConfigMaps of the hub the profile of these stories has; each becomes a bundle of its own.
	lostParts = 3
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

// edition is what the profile of these stories wants: objects of the member by name, each with a text.
type edition map[string]string

// lostEdition is edition n. From each one to the next, every part keeps one object, changes one, drops one and adds
// one.
func lostEdition(n int) edition {
	e := edition{}
	for part := 1; part <= lostParts; part++ {
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

// manifest returns the hub's ConfigMaps that hold the edition.
func (e edition) manifest() string {
	var out strings.Builder
	for part := 1; part <= lostParts; part++ {
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

// changes says what happens to the objects of a member, each once, when it goes from one edition to another.
func changes(from, to edition) map[string]changeCount {
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

// arrives waits until the member has exactly the edition and the summary says so, and checks that its objects have one
// writer.
func (w *world) arrives(plane *localkube.Plane, want edition) {
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
	w.bundlesGone()
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

// stage is a point of a rollout at which a process is killed.
type stage struct {
	name string
	gate *gate
	moment
	// meanwhile changes what the profile wants while the process is dead.
	meanwhile bool
}

// TestNothingLostAgent kills the agent with -9 at every stage of a rollout.
func TestNothingLostAgent(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	agent := w.looseAgent("edge", "edge-1", "env=lost")
	w.apply(w.hub, lostProfile)
	w.killAtStages(agent.plane, victim{kill: func() { agent.process.kill() }, start: agent.start}, []stage{
		{name: "before it reads the first bundle", gate: agent.hub, moment: moment{method: "GET", path: bundlePath}},
		{name: "between two bundles", gate: agent.hub, moment: moment{method: "GET", path: bundlePath, nth: 2}},
		{name: "before it writes its record", gate: agent.member, moment: moment{method: "PUT", path: recordPath}},
		{name: "after it wrote its record, unheard", gate: agent.member, moment: moment{method: "PUT", path: recordPath, answered: true}},
		{name: "before it applies the first object", gate: agent.member, moment: moment{method: "PATCH", path: objectPath}},
		{name: "half-way through the objects", gate: agent.member, moment: moment{method: "PATCH", path: objectPath, nth: 4}},
		{name: "after an object was applied, unheard", gate: agent.member, moment: moment{method: "PATCH", path: objectPath, nth: 3, answered: true}},
		{name: "before it prunes", gate: agent.member, moment: moment{method: "DELETE", path: objectPath}},
		{name: "after it pruned, unheard", gate: agent.member, moment: moment{method: "DELETE", path: objectPath, answered: true}},
		{name: "before it notes what it applied", gate: agent.member, moment: moment{method: "PUT", path: recordPath, nth: 2}},
		{name: "before it reports", gate: agent.hub, moment: moment{method: "PATCH", path: groupStatusPath, body: `"observedRequestorHash"`}},
		{name: "after it reported, unheard", gate: agent.hub, moment: moment{method: "PATCH", path: groupStatusPath, body: `"observedRequestorHash"`, answered: true}},
		{name: "half-way, and the profile drops an object meanwhile", gate: agent.member, moment: moment{method: "PATCH", path: objectPath, nth: 4}, meanwhile: true},
	})
}

// TestNothingLostHub kills the hub with -9 at every stage of a rollout.
func TestNothingLostHub(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	member := w.pullMember("edge", "edge-1", "env=lost")
	hub := w.gate(w.hub.Config)
	w.hubOS.kill()
	w.hubKubeconfig = w.kubeconfig("through-gate.kubeconfig", hub)
	w.startHub()
	w.apply(w.hub, lostProfile)
	w.killAtStages(member, victim{kill: func() { w.hubOS.kill() }, start: func() { w.startHub() }}, []stage{
		{name: "before it writes the first bundle", gate: hub, moment: moment{method: "POST", path: bundlesPath}},
		{name: "between two bundles", gate: hub, moment: moment{method: "POST", path: bundlesPath, nth: 2}},
		{name: "between bundles and group", gate: hub, moment: moment{method: "PATCH", path: groupPath}},
		{name: "after it wrote the group, unheard", gate: hub, moment: moment{method: "PATCH", path: groupPath, answered: true}},
		{name: "before it says Provisioned", gate: hub, moment: moment{method: "PATCH", path: summaryStatus, body: `"Provisioned"`}},
		{name: "after it said Provisioned, unheard", gate: hub, moment: moment{method: "PATCH", path: summaryStatus, body: `"Provisioned"`, answered: true}},
		{name: "before it removes a bundle", gate: hub, moment: moment{method: "DELETE", path: bundlePath}},
		{name: "between bundles and group, and the profile drops an object meanwhile", gate: hub, moment: moment{method: "PATCH", path: groupPath}, meanwhile: true},
	})
}

// victim is the process that a story kills.
type victim struct{ kill, start func() }

// killAtStages rolls out one edition a stage, kills the victim there, starts it again and checks that nothing is lost,
// done twice or left over.
func (w *world) killAtStages(member *localkube.Plane, v victim, stages []stage) {
	w.t.Helper()
	now := lostEdition(0)
	w.apply(w.hub, now.manifest())
	w.arrives(member, now)
	journal := w.journal(member, lostNamespace)
	for i, s := range stages {
		next := lostEdition(i + 1)
		began := time.Now()
		trap := s.gate.hold(s.moment)
		w.apply(w.hub, next.manifest())
		w.wait(trap)
		v.kill()
		dropped := ""
		if s.meanwhile {
			dropped = fmt.Sprintf("part-2-only-in-%d", i+1)
			next = next.without(dropped)
			w.apply(w.hub, next.manifest())
		}
		v.start()
		w.arrives(member, next)
		happened := journal.page()
		if t := happened[dropped]; t.Added != t.Deleted || t.Added > 1 {
			w.t.Errorf("killed %s: the dropped object %s was touched like this: %+v", s.name, dropped, t)
		}
		delete(happened, dropped)
		if diff := cmp.Diff(changes(now, next), happened); diff != "" {
			w.t.Errorf("killed %s: what happened to the objects (-want +got):\n%s", s.name, diff)
		}
		w.t.Logf("killed %s: right again %.1f s after the change", s.name, time.Since(began).Seconds())
		now = next
	}
}

// TestNothingLostWithoutHub stops the hub's API server for a minute.
func TestNothingLostWithoutHub(t *testing.T) {
	awaitTurn(t)
	const (
		outage = time.Minute
		// catchUp is how soon a change must arrive after an outage: whoever waits for a lost server asks it every few
		// seconds.
		catchUp = 45 * time.Second
	)
	w := newWorld(t)
	member := w.pullMember("edge", "edge-1", "env=lost")
	now := lostEdition(0)
	w.apply(w.hub, lostProfile+now.manifest())
	w.arrives(member, now)
	before := w.configMaps(member, lostNamespace)
	journal := w.journal(member, lostNamespace)

	if err := w.hub.Stop(); err != nil {
		t.Fatal(err)
	}
	over := time.After(outage)
	w.kubectl(member, "patch", "configmap", "part-1-changed", "-n", lostNamespace, "--type=merge", "-p", `{"data":{"text":"by hand"}}`)
	w.kubectl(member, "delete", "configmap", "part-2-kept", "-n", lostNamespace, "--wait=false")
	w.eventually("the member heals without the hub", func() error {
		healed := w.configMaps(member, lostNamespace)
		if got := healed["part-1-changed"].Data["text"]; got != now["part-1-changed"] {
			return fmt.Errorf("the edited object says %q", got)
		}
		if healed["part-2-kept"].Data["text"] != now["part-2-kept"] {
			return errors.New("the deleted object is not back")
		}
		return nil
	})
	<-over
	journal.want("during the outage", map[string]changeCount{"part-1-changed": {Modified: 2}, "part-2-kept": {Added: 1, Deleted: 1}})

	if err := w.hub.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := lostEdition(1)
	began := time.Now()
	w.apply(w.hub, next.manifest())
	w.restartHubIfEnded()
	w.arrives(member, next)
	took := time.Since(began)
	t.Logf("caught up %.1f s after the hub's API server was back", took.Seconds())
	if took > catchUp {
		t.Errorf("it took %s to catch up after the hub's API server was back, want at most %s", took, catchUp)
	}
	journal.want("after the outage", changes(now, next))
	for name, object := range w.configMaps(member, lostNamespace) {
		if was, had := before[name]; had && was.UID != object.UID && name != "part-2-kept" {
			t.Errorf("%s is not the object it was: uid %s, was %s", name, object.UID, was.UID)
		}
	}
}

// restartHubIfEnded does for the hub what its Deployment does.
func (w *world) restartHubIfEnded() {
	w.t.Helper()
	select {
	case <-w.hubOS.exited:
		w.t.Logf("the hub ended while its API server was away; starting it again, as its Deployment would")
		w.startHub()
	default:
	}
}
