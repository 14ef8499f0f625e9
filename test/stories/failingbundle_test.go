package stories

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// quietTime is the time in which requests are counted, and quietRequests the maximum number of requests to one API
	// server: the contested objects are corrected a few times.
	quietTime     = 2 * time.Minute
	quietRequests = 20
	// fastCorrections is the number of corrections of a contested object after which the pauses between them are long.
	fastCorrections = 8
)

// quietProfiles has a profile with the same object in two references, one with a manifest that is no YAML, one with an
// object that the API server refuses, and one with a refused object and an object that another client edits after each
// correction.
const quietProfiles = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: twice}
spec:
  clusterSelector: {matchLabels: {env: quiet}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: twice-1}
  - {kind: ConfigMap, namespace: default, name: twice-2}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: unreadable}
spec:
  clusterSelector: {matchLabels: {env: quiet}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: unreadable}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: refused}
spec:
  clusterSelector: {matchLabels: {env: quiet}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: refused}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: beside}
spec:
  clusterSelector: {matchLabels: {env: quiet}}
  continueOnError: true
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: beside}
  - {kind: ConfigMap, namespace: default, name: contested}
`

// quietContent has the ConfigMaps of quietProfiles. %[1]s is a data key, which is invalid if it has a space, %[2]s the
// name of the second object of the profile twice, and %[3]s a value in YAML.
const quietContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: twice-1}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: twice}, data: {text: one}}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: twice-2}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: %[2]s}, data: {text: two}}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: unreadable}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: unreadable}, data: {text: %[3]s}}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: refused}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: refused}, data: {%[1]s: x}}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: beside}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: beside}, data: {%[1]s: x}}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: contested}
data: {"object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: quiet, name: contested}, data: {text: ours}}"}
`

// TestFailingBundleIsQuiet delivers bundles that cannot be applied. They cost few requests, and their status stays true
// until their content is corrected.
func TestFailingBundleIsQuiet(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := map[string]*localkube.Plane{
		"far": w.pullMember("far", "far", "env=quiet"), "near": w.pushMember("near", "near", "env=quiet"),
	}
	statuses := w.watchStatuses()
	w.apply(w.hub, fmt.Sprintf(quietContent, "not a key", "twice", "["))
	w.apply(w.hub, quietProfiles)
	texts := map[string]string{"twice": "ConfigMap quiet/twice is listed twice", "refused": "not a key", "beside": "not a key", "unreadable": "default/unreadable"}
	for name := range members {
		for profile, text := range texts {
			status := "Failed"
			if profile == "unreadable" {
				status = "FailedNonRetriable"
			}
			w.eventually(profile+" reports its failure on "+name, func() error { return statuses.want(profile+"-sveltos-"+name, status, text) })
		}
	}
	for name, plane := range members {
		editor := w.startCompetingEditor(plane)
		w.eventually("the corrections on "+name+" become rare", editor.wantRareCorrections)
	}

	// The agent checks its credential and the hub its API server every 5 s.
	checks := int(quietTime / (5 * time.Second))
	heartbeats := map[string]localkube.RequestCounts{"hub": {{Verb: "GET", Resource: "namespaces"}: checks}, "far": {{Verb: "GET", Resource: "secrets"}: checks}}
	statuses.reset()
	planes := map[string]*localkube.Plane{"hub": w.hub, "far": members["far"], "near": members["near"]}
	before := map[string]localkube.RequestCounts{}
	for name, plane := range planes {
		before[name] = w.requestsFor(plane, isWorkload)
	}
	<-time.After(quietTime)
	for name, plane := range planes {
		cost := w.requestsFor(plane, isWorkload).Since(before[name]).Since(heartbeats[name])
		t.Logf("requests to %s in %s:\n%s", name, quietTime, cost)
		if cost.Total() > quietRequests {
			t.Errorf("%d requests to %s in %s, want at most %d:\n%s", cost.Total(), name, quietTime, quietRequests, cost)
		}
	}
	if changes := statuses.list(); len(changes) > 0 {
		t.Errorf("statuses were written although nothing has changed: %q", changes)
	}

	began := time.Now()
	w.apply(w.hub, fmt.Sprintf(quietContent, "key", "other", "x"))
	for name := range members {
		for profile := range texts {
			w.awaitProvisioned(name, profile+"-sveltos-"+name)
		}
	}
	t.Logf("all are provisioned %s after the correction", time.Since(began).Round(time.Millisecond))
}

// isWorkload selects the requests that deliver and apply bundles. It omits watches, which are opened again from time to
// time, the edits of startCompetingEditor, and heartbeats.
func isWorkload(r localkube.Request) bool {
	switch {
	case r.Verb == "WATCH", r.Verb == "PATCH" && r.Resource == "configmaps":
		return false
	case r.Group == "":
		return (r.Resource == "configmaps" || r.Resource == "secrets" || r.Resource == "namespaces") && r.Verb != "LIST"
	}
	return strings.HasSuffix(r.Group, ".projectsveltos.io") || r.Resource == "events"
}

// statusLog has the statuses of summaries from a watch.
type statusLog struct {
	// mu guards the fields below.
	mu sync.Mutex
	// latest has the last status of each summary, and changes the statuses since reset.
	latest  map[string]string
	changes []string
}

func (w *world) watchStatuses() *statusLog {
	w.t.Helper()
	log := &statusLog{latest: map[string]string{}}
	(&rolloutWatch{w: w}).follow(&configv1beta1.ClusterSummaryList{}, func(event watch.Event) {
		summary, ok := event.Object.(*configv1beta1.ClusterSummary)
		if !ok {
			return
		}
		var text strings.Builder
		for _, feature := range summary.Status.FeatureSummaries {
			fmt.Fprintf(&text, "%s: %s", feature.Status, feature.FailureMessage)
		}
		log.mu.Lock()
		defer log.mu.Unlock()
		log.latest[summary.Name] = text.String()
		log.changes = append(log.changes, summary.Name+" "+text.String())
	})
	return log
}

func (l *statusLog) reset() { l.mu.Lock(); defer l.mu.Unlock(); l.changes = nil }

func (l *statusLog) list() []string { l.mu.Lock(); defer l.mu.Unlock(); return l.changes }

// want returns an error unless the last status of a summary has the status and the text.
func (l *statusLog) want(summary, status, text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if got := l.latest[summary]; !strings.HasPrefix(got, status+": ") || !strings.Contains(got, text) {
		return fmt.Errorf("summary %s is %q, want %s with %q", summary, got, status, text)
	}
	return nil
}

// competingEditor edits the object contested on a member after each correction, until the story ends.
type competingEditor struct {
	mu          sync.Mutex // guards corrections
	corrections int
}

func (w *world) startCompetingEditor(plane *localkube.Plane) *competingEditor {
	w.t.Helper()
	watcher, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx := context.WithoutCancel(w.t.Context())
	events, err := watcher.Watch(ctx, &corev1.ConfigMapList{}, client.InNamespace("quiet"))
	if err != nil {
		w.t.Fatal(err)
	}
	c := &competingEditor{}
	var editor sync.WaitGroup
	editor.Go(func() {
		for event := range events.ResultChan() {
			obj, ok := event.Object.(*corev1.ConfigMap)
			if !ok || obj.Name != "contested" || obj.Data["text"] != "ours" {
				continue
			}
			c.mu.Lock()
			c.corrections++
			c.mu.Unlock()
			if err := watcher.Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(`{"data":{"text":"theirs"}}`))); err != nil {
				w.t.Error(err)
			}
		}
	})
	w.t.Cleanup(func() { events.Stop(); editor.Wait() })
	return c
}

// wantRareCorrections returns an error until the object was corrected fastCorrections times.
func (c *competingEditor) wantRareCorrections() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.corrections < fastCorrections {
		return fmt.Errorf("it was corrected %d times", c.corrections)
	}
	return nil
}
