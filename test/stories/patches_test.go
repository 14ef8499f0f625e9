package stories

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/localkube"
)

const patchedContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: patched}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: patched, name: manifest}
    data: {text: rendered}
    ---
    apiVersion: v1
    kind: Service
    metadata: {namespace: patched, name: manifest}
    spec:
      selector: {app: web}
      ports: [{name: http, port: 80}]
`

// patchedProfile has an operation for all ConfigMaps, and a merge patch that names the Service. A label, an annotation
// and a further patch are added to it.
const patchedProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: patched}
spec:
  clusterSelector: {matchLabels: {env: patched}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: patched}
  helmCharts:
  - repositoryURL: %[1]s
    repositoryName: stories
    chartName: stories/hello
    chartVersion: 0.1.0
    releaseName: chart
    releaseNamespace: patched
  patches:
  - target: {kind: ConfigMap, name: "manifest|hook|chart-page"}
    patch: |
      - op: add
        path: /data/cluster
        value: "{{ .ClusterName }}"
  - patch: |
      apiVersion: v1
      kind: Service
      metadata: {namespace: patched, name: manifest}
      spec:
        ports: [{port: 80, name: web}]
  patchesFrom:
  - {kind: ConfigMap, namespace: default, name: patches}
%[2]s`

const patchesObject = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: patches, annotations: {projectsveltos.io/template: ""}}
data:
  added: |
    target: {kind: ConfigMap, name: "manifest|hook"}
    patch: |
%s`

// TestPatches patches and labels the objects of a ConfigMap and of a chart with a hook. A change of the patches is
// deployed, an invalid patch and a deleted object with patches change nothing, and a label that the profile no longer
// has is removed.
func TestPatches(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.serveRepository(examples.Chart{Files: map[string]string{
		"templates/hook.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: hook, annotations: {helm.sh/hook: pre-install}}\ndata: {text: rendered}\n",
	}})
	members := map[string]*localkube.Plane{"pulled": w.pullMember("fleet-pulled", "pulled", "env=patched"), "pushed": w.pushMember("fleet-pushed", "pushed", "env=patched")}
	setPatch := func(operation string) {
		w.apply(w.hub, fmt.Sprintf(patchesObject, "      - "+operation+"\n"))
	}
	setExtras := func(extras string) {
		w.apply(w.hub, fmt.Sprintf(patchedProfile, w.Charts, extras))
	}
	setPatch("{op: replace, path: /data/text, value: 'first on {{ .ClusterName }}'}")
	w.apply(w.hub, patchedContent)
	setExtras("  extraLabels: {team: a, stage: b}\n  extraAnnotations: {note: c}\n")
	extras := func(labels, annotations string) extraMetadata { return extraMetadata{labels, annotations} }
	everywhere := func(what string, check func(cluster string, member *localkube.Plane) error) {
		t.Helper()
		for cluster, member := range members {
			w.eventually(what+" on "+cluster, func() error {
				return errors.Join(check(cluster, member), w.wantStatuses("fleet-"+cluster, "patched-sveltos-"+cluster, "Provisioned"))
			})
		}
	}

	everywhere("the objects are patched", func(cluster string, member *localkube.Plane) error {
		return errors.Join(
			w.wantPatched(member, "manifest", cluster, "first on "+cluster, extras("a b", "c")), w.wantPatched(member, "hook", cluster, "first on "+cluster, extras("a b", "c")),
			w.wantPatched(member, "chart-page", cluster, "", extras("a b", "c")), w.wantPort(member, "web"),
		)
	})
	if labels := w.podLabels(members["pulled"], "chart"); labels["team"] != "" {
		t.Errorf("the pod template has the labels %v", labels)
	}

	setPatch("{op: replace, path: /data/text, value: 'second on {{ .ClusterName }}'}")
	everywhere("a change of the patches arrives", func(cluster string, member *localkube.Plane) error {
		return w.wantPatched(member, "manifest", cluster, "second on "+cluster, extras("a b", "c"))
	})

	wantFailure := w.expectUntouched(map[string]*localkube.Plane{"fleet-pulled/pulled": members["pulled"], "fleet-pushed/pushed": members["pushed"]}, "patched", "patched")
	setPatch("{op: replace, path: /nothing/text, value: third}")
	wantFailure("patchesFrom ConfigMap default/patches, key added", "cannot be applied to ConfigMap", "/nothing/text")
	for cluster := range members {
		w.eventually("the failure is final", func() error { return w.wantResourcesStatus(cluster, libv1beta1.FeatureStatusFailedNonRetriable) })
	}
	w.kubectl(w.hub, "delete", "configmap", "patches")
	wantFailure("patchesFrom: ConfigMap default/patches does not exist")

	setPatch("{op: replace, path: /data/text, value: third}")
	setExtras("  extraLabels: {team: d}\n")
	everywhere("removed labels are removed", func(cluster string, member *localkube.Plane) error {
		return errors.Join(w.wantPatched(member, "manifest", cluster, "third", extras("d", "")), w.wantPatched(member, "chart-page", cluster, "", extras("d", "")))
	})
}

// wantResourcesStatus returns an error unless the feature Resources of the summary of a cluster has a status.
func (w *world) wantResourcesStatus(cluster string, want libv1beta1.FeatureStatus) error {
	found := &configv1beta1.ClusterSummary{}
	if err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: "fleet-" + cluster, Name: "patched-sveltos-" + cluster}, found); err != nil {
		return err
	}
	for _, feature := range found.Status.FeatureSummaries {
		if feature.FeatureID == libv1beta1.FeatureResources && feature.Status == want {
			return nil
		}
	}
	return fmt.Errorf("the features are %+v, want Resources %s", found.Status.FeatureSummaries, want)
}

// extraMetadata are the values of the labels team and stage and of the annotation note, separated by spaces.
type extraMetadata struct{ labels, annotations string }

// wantPatched returns an error unless a ConfigMap has the data and the metadata of the profile.
func (w *world) wantPatched(plane *localkube.Plane, name, cluster, text string, extras extraMetadata) error {
	found := &corev1.ConfigMap{}
	if err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: "patched", Name: name}, found); err != nil {
		return err
	}
	labels := strings.TrimSpace(found.Labels["team"] + " " + found.Labels["stage"])
	if found.Data["cluster"] != cluster || found.Data["text"] != text || labels != extras.labels || found.Annotations["note"] != extras.annotations {
		return fmt.Errorf("ConfigMap %s has data %v, labels %v and annotations %v", name, found.Data, found.Labels, found.Annotations)
	}
	return nil
}

// wantPort returns an error unless the Service has exactly one port with this name.
func (w *world) wantPort(plane *localkube.Plane, name string) error {
	found := &corev1.Service{}
	if err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: "patched", Name: "manifest"}, found); err != nil {
		return err
	}
	if ports := found.Spec.Ports; len(ports) != 1 || ports[0].Name != name {
		return fmt.Errorf("the Service has the ports %v, want %s", ports, name)
	}
	return nil
}

// podLabels returns the labels of the pod template of the Deployment of the chart.
func (w *world) podLabels(plane *localkube.Plane, release string) map[string]string {
	w.t.Helper()
	list := corev1.PodList{}
	if err := w.client(plane).List(w.t.Context(), &list, client.InNamespace("patched")); err != nil {
		w.t.Fatal(err)
	}
	for _, pod := range list.Items {
		if strings.HasPrefix(pod.Name, release) {
			return pod.Labels
		}
	}
	return nil
}
