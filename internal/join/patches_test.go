package join_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// patchesIn writes ConfigMap namespace/patches.
func patchesIn(t *testing.T, hubClient client.Client, namespace string, data map[string]string) {
	t.Helper()
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "patches"}, Data: data}
	err := hubClient.Create(t.Context(), configMap)
	if apierrors.IsAlreadyExists(err) {
		err = hubClient.Update(t.Context(), configMap)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// patchedCluster creates a pull-mode cluster, as kubectl apply does, with patches for its agent.
func patchedCluster(t *testing.T, hubClient client.Client, namespace string) *libv1beta1.SveltosCluster {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "c", Annotations: map[string]string{libv1beta1.AgentConfigAnnotation: namespace + "/patches"},
		},
		Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	if err := hubClient.Create(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// deploymentOf returns the agent's Deployment, and the labels of the Namespace.
func deploymentOf(t *testing.T, manifest []byte) (*appsv1.Deployment, map[string]string) {
	t.Helper()
	docs := documents(t, manifest)
	var namespace corev1.Namespace
	var deployment appsv1.Deployment
	for at, into := range map[int]any{0: &namespace, 5: &deployment} {
		raw, err := yaml.Marshal(docs[at])
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict(raw, into); err != nil {
			t.Fatal(err)
		}
	}
	return &deployment, namespace.Labels
}

func TestRegisterPullPatchesTheManifest(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "patched")
	patchesIn(t, hubClient, namespace, map[string]string{
		"a-alone": `
apiVersion: apps/v1
kind: Deployment
metadata:
  name: sveltos-applier-manager
spec:
  template:
    spec:
      tolerations: [{key: infra, operator: Exists}]
      containers:
        - name: controller
          env: [{name: HTTPS_PROXY, value: "http://proxy:3128"}]
`,
		"b-one": `
patch: |-
  - op: replace
    path: /spec/template/spec/containers/0/image
    value: registry.example.com/towline:v1
target:
  group: apps
  version: v1
  kind: Deployment
  name: sveltos-applier-.*
`,
		"c-some": `
patch: |-
  metadata:
    labels: {team: platform}
target: {kind: Namespace|Deployment}
`,
		"d-labelled": `
target: {labelSelector: team=platform, kind: Deployment}
patch: |-
  kind: Deployment
  metadata: {name: ignored, annotations: {team: platform}}
`,
		"e-operations": "- {op: add, path: /spec/template/spec/priorityClassName, value: system-cluster-critical}",
	})
	cluster := patchedCluster(t, hubClient, namespace)
	for _, turn := range []string{"first", "again"} {
		deployment, labels := deploymentOf(t, registered(t, plane, pullRequest(namespace, "c")))
		pod := deployment.Spec.Template.Spec
		got := map[string]bool{
			"toleration": len(pod.Tolerations) == 1,
			"env":        len(pod.Containers[0].Env) == 4 && len(pod.Containers) == 1,
			"image":      pod.Containers[0].Image == "registry.example.com/towline:v1",
			"label":      labels["team"] == "platform" && deployment.Labels["team"] == "platform",
			"annotation": deployment.Annotations["team"] == "platform" && deployment.Name == "sveltos-applier-manager",
			"priority":   pod.PriorityClassName == "system-cluster-critical",
		}
		for what, ok := range got {
			if !ok {
				t.Errorf("%s registration: the patch of the %s is missing in %+v", turn, what, deployment)
			}
		}
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
		t.Fatal(err)
	}
	if got := cluster.Annotations[libv1beta1.AgentConfigAnnotation]; got != namespace+"/patches" {
		t.Errorf("annotation after the registrations: got %q", got)
	}
}

func TestInvalidPatchesAreNamed(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "unpatched")
	patchedCluster(t, hubClient, namespace)
	at := "ConfigMap " + namespace + "/patches"
	fail := func(want ...string) {
		t.Helper()
		var out bytes.Buffer
		err := join.RegisterPull(t.Context(), plane.Config, pullRequest(namespace, "c"), &out)
		if !errors.Is(err, join.ErrPatch) || out.Len() > 0 {
			t.Errorf("got error %v and %d bytes of manifest, want ErrPatch and none", err, out.Len())
		}
		for _, text := range append(want, at) {
			wantText(t, err, text)
		}
	}
	fail("does not exist", libv1beta1.AgentConfigAnnotation)
	failForeign(t, plane, hubClient)
	for value, want := range map[string]string{
		"[":                                    "it is not YAML",
		"text":                                 "neither a strategic merge patch",
		"# nothing":                            "neither a strategic merge patch",
		"a: b\n---\nc: d":                      "more than one document",
		"{patch: 'a: b', to: x}":               `unknown field "to"`,
		"{patch: \"a: b\\n---\\nc: d\"}":       "field patch: it holds more than one document",
		"{patch: '[1]'}":                       "cannot unmarshal",
		"{patch: 'a: b', target: {name: '('}}": "target.name",
		"{patch: 'a: b', target: {name: nobody}}": "it hits nothing",
		"{apiVersion: apps/v2, kind: Deployment}": "it hits nothing",
		"[{op: remove, path: /spec/none}]":        "apply the patch",
		"[{path: /spec}]":                         "unsupported operation",
		"{patch: '[{op: replace, path: /metadata/name, value: x}]', target: {kind: Service}}":                           "apiVersion, kind, name and namespace must stay",
		"{kind: Namespace, $patch: delete}":                                                                             "must stay",
		"{kind: Deployment, spec: {replica: 2}}":                                                                        `unknown field "replica"`,
		"[{op: add, path: /spec/template/spec/containers/0/args/-, value: --v=2}, {op: test, path: /kind, value: Pod}]": "apply the patch",
		"a: &a " + strings.Repeat("x", 50<<10) + "\nb: [" + strings.Repeat("*a, ", 500) + "]":                           "aliases make it too large",
	} {
		patchesIn(t, hubClient, namespace, map[string]string{"bad": value})
		fail("key bad", want)
	}
	// A failed registration leaves the cluster as it was, and no identity.
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "c"}, &corev1.ServiceAccount{}); !apierrors.IsNotFound(err) {
		t.Errorf("ServiceAccount: got %v, want not found", err)
	}
	patchesIn(t, hubClient, namespace, nil)
	registered(t, plane, pullRequest(namespace, "c"))
}

// failForeign checks that a cluster cannot use the ConfigMaps of other namespaces, and gets the same error whether they
// exist or not, unless they have the label.
func failForeign(t *testing.T, plane *localkube.Plane, hubClient client.Client) {
	t.Helper()
	foreign, own := plane.Namespace(t, "foreign"), plane.Namespace(t, "own")
	cluster := patchedCluster(t, hubClient, own)
	cluster.Annotations[libv1beta1.AgentConfigAnnotation] = foreign + "/patches"
	if err := hubClient.Update(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	register := func() error { return join.RegisterPull(t.Context(), plane.Config, pullRequest(own, "c"), io.Discard) }
	missing := register()
	wantText(t, missing, "does not exist or does not have the label towline.dev/agent-patches")
	patchesIn(t, hubClient, foreign, map[string]string{"a": "{kind: Deployment, metadata: {labels: {a: b}}}"})
	if existing := register(); existing == nil || existing.Error() != missing.Error() {
		t.Errorf("got error %v, want the one for a missing ConfigMap, %v", existing, missing)
	}
	configMap := &corev1.ConfigMap{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: foreign, Name: "patches"}, configMap); err != nil {
		t.Fatal(err)
	}
	configMap.Labels = map[string]string{kube.LabelAgentPatches: "true"}
	if err := hubClient.Update(t.Context(), configMap); err != nil {
		t.Fatal(err)
	}
	if err := register(); err != nil {
		t.Errorf("with the label: %v", err)
	}
}

func TestReconcileFollowsThePatches(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	namespace := w.cluster.Namespace
	w.cluster.Annotations = map[string]string{libv1beta1.AgentConfigAnnotation: namespace + "/patches"}
	patchesIn(t, w.hubClient, namespace, map[string]string{"image": "[{op: replace, path: /spec/template/spec/containers/0/image, value: 'x:1'}]"})
	w.keep(t)
	first := w.manifest(t)
	if deployment, _ := deploymentOf(t, first); deployment.Spec.Template.Spec.Containers[0].Image != "x:1" {
		t.Errorf("the manifest is not patched:\n%s", first)
	}
	if w.keep(t); !bytes.Equal(first, w.manifest(t)) {
		t.Error("the manifest was renewed although nothing changed")
	}
	patchesIn(t, w.hubClient, namespace, map[string]string{"image": "[{op: replace, path: /spec/template/spec/containers/0/image, value: 'x:2'}]"})
	if w.keep(t); !strings.Contains(string(w.manifest(t)), "x:2") {
		t.Error("the manifest does not follow the ConfigMap")
	}
	patchesIn(t, w.hubClient, namespace, map[string]string{"image": "[{op: remove, path: /nothing}]"})
	for range 2 {
		if _, err := w.manifests.Reconcile(t.Context(), w.cluster); !errors.Is(err, join.ErrPatch) {
			t.Errorf("got error %v, want ErrPatch", err)
		}
	}
	delete(w.cluster.Annotations, libv1beta1.AgentConfigAnnotation)
	if w.keep(t); w.manifest(t) == nil || strings.Contains(string(w.manifest(t)), "x:") {
		t.Errorf("without patches, the manifest is\n%s", w.manifest(t))
	}
}

func TestReconcileRenewsNoTokenIfAPatchMovesOrRemovesTheKubeconfig(t *testing.T) {
	t.Parallel()
	w := newWaiting(t)
	w.cluster.Annotations = map[string]string{libv1beta1.AgentConfigAnnotation: w.cluster.Namespace + "/patches"}
	for _, operation := range []string{"op: move, from: /data/kubeconfig, path: /data/elsewhere", "op: remove, path: /data/kubeconfig"} {
		patchesIn(t, w.hubClient, w.cluster.Namespace, map[string]string{"kubeconfig": `
target: {kind: Secret}
patch: "[{` + operation + `}]"
`})
		w.keep(t)
		first := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c"))
		w.keep(t)
		if manifest := string(first.Data[join.ManifestKey]); strings.Contains(manifest, " kubeconfig: ") {
			t.Errorf("%s: the manifest is not patched:\n%s", operation, manifest)
		}
		if again := secretOf(t, w.hubClient, w.cluster.Namespace, join.RegistrationSecret("c")); again.ResourceVersion != first.ResourceVersion {
			t.Errorf("%s: the Secret was written although nothing changed", operation)
		}
	}
}

func TestDefaultPatchesAreForClustersWithoutAnnotation(t *testing.T) {
	t.Parallel()
	plane, err := localkube.Start(t.Context(), localkube.Options{Name: "patches"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plane.Stop() })
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	if err := crds.Install(t.Context(), hubClient); err != nil {
		t.Fatal(err)
	}
	namespace := plane.Namespace(t, "default")
	registered(t, plane, pullRequest(namespace, "before"))
	if err := join.SetDefaultPatches(t.Context(), hubClient, "patches"); err == nil {
		t.Error("a name without a namespace was published")
	}
	for _, configMap := range []string{namespace + "/fleet", namespace + "/fleet", ""} {
		if err := join.SetDefaultPatches(t.Context(), hubClient, configMap); err != nil {
			t.Fatal(err)
		}
		err := join.RegisterPull(t.Context(), plane.Config, pullRequest(namespace, "a"), io.Discard)
		if configMap == "" && err != nil {
			t.Error(err)
		}
		if configMap != "" {
			wantText(t, err, "ConfigMap "+configMap+", which --agent-patch-config-map of the hub names, does not exist")
		}
	}
}
