package render_test

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// files are the files of a tree by their path.
type files map[string]string

// kustomizationOf returns a kustomization in the tree of a GitRepository.
func kustomizationOf(path string, tree files) render.Kustomization {
	content := source.Content{Reference: source.Reference{Kind: "GitRepository", Namespace: "flux", Name: "apps"}}
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		content.Files = append(content.Files, source.File{Name: name, Data: []byte(tree[name])})
	}
	return render.Kustomization{Content: content, Path: path}
}

// buildKustomization builds k without the results of other tests.
func buildKustomization(k render.Kustomization) ([]*unstructured.Unstructured, error) {
	s := templateContext()
	s.Sandbox = pool
	objects, _, err := render.NewKustomizationRenderer(pool).Render(k, s)
	return objects, err
}

const deployment = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: web
        image: nginx:1.25
        args: [--host=$(WEB_HOST)]
        env: [{name: PORT, value: "8080"}]
        envFrom: [{configMapRef: {name: settings}}, {secretRef: {name: login}}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// base is a kustomization in directory base that the trees below use.
func base(more string) files {
	return files{
		"base/kustomization.yaml": `
resources: [web.yaml]
configMapGenerator:
- {name: settings, literals: [mode=plain], files: [greeting.txt, name=files/binary (1).bin], envs: [settings.env]}
secretGenerator:
- {name: login, literals: [password=secret], type: Opaque}
` + more,
		"base/web.yaml": deployment, "base/greeting.txt": "Good morning\n{{ .Name }}\n", "base/settings.env": "# comment\nLEVEL=info\n", "base/files/binary (1).bin": "\xff\xfe\x00",
	}
}

// with returns the files of both trees.
func with(tree, more files) files {
	all := files{}
	maps.Copy(all, tree)
	maps.Copy(all, more)
	return all
}

func kustomizeTrees() map[string]struct {
	path string
	tree files
} {
	type tree = struct {
		path string
		tree files
	}
	overlay := func(text string, more files) tree {
		return tree{"overlays/prod", with(base(""), with(more, files{"overlays/prod/kustomization.yaml": "resources: [../../base]\n" + text}))}
	}
	return map[string]tree{
		"base with generators": {"base", base("")},
		"a root in the root":   {"", files{"kustomization.yml": "resources: [a.yaml]\nnamePrefix: x-\nbuildMetadata: [managedByLabel]\n", "a.yaml": object("ConfigMap", "a")}},
		"names and labels": overlay(`
namespace: shop
namePrefix: prod-
nameSuffix: -v2
labels: [{pairs: {team: a}, includeSelectors: true, includeTemplates: true}]
commonAnnotations: {note: "1"}
buildMetadata: [originAnnotations, transformerAnnotations, managedByLabel]
`, nil),
		"patches": overlay(`
patches:
- path: replicas.yaml
- patch: '[{"op": "add", "path": "/spec/ports/-", "value": {"port": 443, "name": "https"}}]'
  target: {kind: Service}
- patch: |
    $patch: delete
    apiVersion: v1
    kind: Service
    metadata: {name: nobody}
  target: {kind: Service, labelSelector: none=such}
patchesJson6902:
- target: {group: apps, version: v1, kind: Deployment, name: web}
  patch: '[{"op": "remove", "path": "/spec/template/spec/containers/0/args"}]'
`, files{"overlays/prod/replicas.yaml": "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {replicas: 3, template: {spec: {containers: [{name: web, env: [{name: MORE, value: x}]}]}}}\n"}),
		"images, replicas and merged generators": overlay(`
images: [{name: nginx, newName: registry.example.com/nginx, newTag: "1.27"}]
replicas: [{name: web, count: 5}]
configMapGenerator:
- {name: settings, behavior: merge, literals: [mode=prod, added=true]}
generatorOptions: {labels: {generated: "true"}, disableNameSuffixHash: false}
`, nil),
		"replacements": overlay(`
replacements:
- source: {kind: Service, name: web, fieldPath: metadata.name}
  targets:
  - select: {kind: Deployment}
    fieldPaths: ['spec.template.spec.containers.[name=web].env.[name=PORT].value']
- path: replacement.yaml
`, files{"overlays/prod/replacement.yaml": "source: {kind: Service, name: web, fieldPath: 'spec.ports.0.port'}\ntargets: [{select: {kind: Deployment}, fieldPaths: [spec.replicas]}]\n"}),
		"vars": overlay("vars:\n- {name: WEB_HOST, objref: {kind: Service, name: web, apiVersion: v1}}\nnamePrefix: a-\n", nil),
		"components": overlay("components: [../../components/tls, ../../components/quota]\n", files{
			"components/tls/kustomization.yaml":   "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\npatches: [{path: p.yaml, target: {kind: Service}}]\n",
			"components/tls/p.yaml":               `[{"op": "replace", "path": "/spec/ports/0/port", "value": 443}]`,
			"components/quota/kustomization.yaml": "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nresources: [quota.yaml]\n",
			"components/quota/quota.yaml":         "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: q}\nspec: {hard: {pods: '10'}}\n",
		}),
		"own transformers and types": overlay("configurations: [names.yaml]\nnamePrefix: p-\ntransformers: [label.yaml]\nsortOptions: {order: legacy}\n", files{
			"overlays/prod/label.yaml": "apiVersion: builtin\nkind: LabelTransformer\nmetadata: {name: l}\nlabels: {from: transformer}\nfieldSpecs: [{path: metadata/labels, create: true}]\n",
			"overlays/prod/names.yaml": "namePrefix: [{path: metadata/name, kind: Service}]\n",
		}),
		"lists, anchors and local objects": {"", files{
			"kustomization.yaml": "resources: [list.yaml, anchors.yaml]\nnamespace: ns\n",
			"list.yaml":          "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {x: '01', y: 'yes', z: '1e3'}}\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: local, annotations: {config.kubernetes.io/local-config: 'true'}}}\n",
			"anchors.yaml":       "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: r}\nrules:\n- &r {apiGroups: [''], resources: [pods], verbs: [get]}\n- *r\n---\napiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\nmetadata: {name: b}\nroleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: r}\nsubjects: [{kind: ServiceAccount, name: default, namespace: x}]\n",
		}},
		"a directory below another root": {"a/b/c", files{
			"a/b/c/kustomization.yaml": "resources: [../d/, ../../../top]\n", "a/b/d/kustomization.yaml": "resources: [x.yaml]\n",
			"a/b/d/x.yaml": object("ConfigMap", "x"), "top/Kustomization": "resources: [y.yaml]\n", "top/y.yaml": object("Secret", "y"),
		}},
	}
}

// TestKustomizationsEqualKubectl compares the objects with the output of `kubectl kustomize`.
func TestKustomizationsEqualKubectl(t *testing.T) {
	t.Parallel()
	for name, test := range kustomizeTrees() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := kubectlKustomize(t, test.path, test.tree)
			got, err := buildKustomization(kustomizationOf(test.path, test.tree))
			if err != nil {
				t.Fatal(err)
			}
			if len(want) == 0 {
				t.Fatal("kubectl prints nothing")
			}
			if diff := cmp.Diff(fieldsByRef(want), fieldsByRef(got)); diff != "" {
				t.Errorf("objects (-kubectl +got):\n%s", diff)
			}
		})
	}
}

// kubectlKustomize returns the objects that `kubectl kustomize` prints for a directory of tree.
func kubectlKustomize(t *testing.T, path string, tree files) []*unstructured.Unstructured {
	t.Helper()
	kubectl, err := localkube.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for name, text := range tree {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var stdout, stderr bytes.Buffer
	command := exec.CommandContext(t.Context(), kubectl, "kustomize", filepath.Join(root, path))
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	objects, err := kube.DecodeManifest(stdout.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func fieldsByRef(objects []*unstructured.Unstructured) map[string]map[string]any {
	fields := map[string]map[string]any{}
	for _, object := range objects {
		fields[kube.RefOf(object).String()] = object.Object
	}
	return fields
}
