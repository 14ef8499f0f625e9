package stories

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

// excludedContent has the number of replicas, and a text.
const excludedContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: excluded}
data:
  objects.yaml: |
    apiVersion: apps/v1
    kind: Deployment
    metadata: {namespace: excluded, name: web}
    spec:
      replicas: %d
      selector: {matchLabels: {app: web}}
      template:
        metadata: {labels: {app: web}}
        spec:
          containers: [{name: web, image: "example.com/web:1"}]
    ---
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: excluded, name: text}
    data: {text: %s}
`

const excludedProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: excluded}
spec:
  clusterSelector: {matchLabels: {env: excluded}}
  syncMode: ContinuousWithDriftDetection
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: excluded}
  helmCharts:
  - repositoryURL: %s
    repositoryName: stories
    chartName: stories/hello
    chartVersion: 0.1.0
    releaseName: chart
    releaseNamespace: excluded
    values: "{replicas: %d, message: %s}"
%s`

// TestDriftExclusions changes the replicas of a Deployment on the members, which the profile excludes, and a field that
// the profile does not exclude. Only the latter is corrected, also after restarts and further deliveries, until the
// profile no longer excludes the replicas. An invalid exclusion and a deleted source are reported, and change nothing.
func TestDriftExclusions(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(examples.Chart{})
	agent := w.startProcessAgent("fleet-pulled", "pulled", "env=excluded")
	members := map[string]*localkube.Plane{"pulled": agent.plane, "pushed": w.pushMember("fleet-pushed", "pushed", "env=excluded")}
	everywhere := func(what string, replicas int32, text, page string) {
		t.Helper()
		for cluster, member := range members {
			w.eventually(what+" on "+cluster, func() error {
				return errors.Join(w.wantExcluded(member, replicas, text, page), w.wantStatuses("fleet-"+cluster, "excluded-sveltos-"+cluster, "Provisioned"))
			})
		}
	}
	change := func(text string) {
		for _, member := range members {
			w.patchObject(member, &corev1.ConfigMap{}, "text", `{"data":{"text":"`+text+`"}}`)
			w.patchObject(member, &corev1.ConfigMap{}, "chart-page", `{"data":{"index.html":"`+text+`"}}`)
		}
	}
	deliver := func(replicas int32, text, exclusions string) {
		w.apply(w.hub, fmt.Sprintf(excludedContent, replicas, text)+"---"+fmt.Sprintf(excludedProfile, w.Charts, replicas, text, exclusions))
	}
	const exclusions = "  driftExclusions:\n  - {paths: [/spec/replicas], target: {kind: Deployment, name: web|chart.*}}\n"

	deliver(2, "first", exclusions)
	everywhere("the first delivery", 2, "first", "first")
	for _, member := range members {
		w.patchObject(member, &appsv1.Deployment{}, "web", `{"spec":{"replicas":5}}`)
		w.patchObject(member, &appsv1.Deployment{}, "chart", `{"spec":{"replicas":5}}`)
	}
	change("theirs")
	everywhere("the text is corrected", 5, "first", "first")

	agent.process.kill()
	w.hubProcess.kill()
	change("theirs, too")
	agent.start()
	w.startHub()
	everywhere("the text is corrected after restarts", 5, "first", "first")

	w.apply(w.hub, fmt.Sprintf(excludedContent, 2, "alone"))
	everywhere("a change of the content alone", 5, "alone", "first")
	untouched := w.expectUntouched(map[string]*localkube.Plane{"fleet-pulled/pulled": members["pulled"], "fleet-pushed/pushed": members["pushed"]}, "excluded", "excluded")
	wantFailure := func(texts ...string) {
		t.Helper()
		untouched(texts...)
		for cluster, member := range members {
			if err := w.wantExcluded(member, 5, "alone", "first"); err != nil {
				t.Errorf("%s: %v", cluster, err)
			}
		}
	}
	w.apply(w.hub, fmt.Sprintf(excludedProfile, w.Charts, 3, "refused", "  driftExclusions: [{paths: [spec]}]\n"))
	wantFailure(`driftExclusions[0]: "spec" is not a JSON pointer`)
	w.kubectl(w.hub, "delete", "configmap", "excluded")
	w.apply(w.hub, fmt.Sprintf(excludedProfile, w.Charts, 2, "first", exclusions))
	wantFailure("ConfigMap default/excluded does not exist")

	deliver(3, "second", exclusions)
	everywhere("the second delivery", 5, "second", "second")
	deliver(3, "third", "")
	everywhere("without exclusions", 3, "third", "third")
}

// patchObject changes an object in the namespace excluded as its user.
func (w *world) patchObject(plane *localkube.Plane, object client.Object, name, patch string) {
	w.t.Helper()
	object.SetNamespace("excluded")
	object.SetName(name)
	if err := w.client(plane).Patch(w.t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(patch)), client.FieldOwner("user")); err != nil {
		w.t.Fatal(err)
	}
}

// wantExcluded returns an error unless the Deployments have these replicas, the ConfigMap of the content has this text,
// and the ConfigMap of the chart has this page.
func (w *world) wantExcluded(plane *localkube.Plane, replicas int32, text, page string) error {
	for _, name := range []string{"web", "chart"} {
		found := &appsv1.Deployment{}
		if err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: "excluded", Name: name}, found); err != nil {
			return err
		}
		if *found.Spec.Replicas != replicas {
			return fmt.Errorf("Deployment %s has %d replicas, want %d", name, *found.Spec.Replicas, replicas)
		}
	}
	manifest, err := w.data(plane, "excluded", "text")
	chart, chartErr := w.data(plane, "excluded", "chart-page")
	if !strings.Contains(chart["index.html"], "<title>"+page+"</title>") || manifest["text"] != text {
		return fmt.Errorf("got the texts %v and %v, want %s and %s (%w)", manifest, chart, text, page, errors.Join(err, chartErr))
	}
	return nil
}
