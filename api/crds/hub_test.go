package crds_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
	"github.com/towline/towline/internal/localkube"
)

// crdResource is where definitions are installed.
var crdResource = apiextensionsv1.SchemeGroupVersion.WithResource("customresourcedefinitions")

// definition is one CustomResourceDefinition as generated.
type definition struct {
	file   string
	object *unstructured.Unstructured
	typed  apiextensionsv1.CustomResourceDefinition
}

// groupVersion is the only version that is served.
func (d definition) groupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: d.typed.Spec.Group, Version: d.typed.Spec.Versions[0].Name}
}

// definitions parses what the package embeds.
func definitions(t testing.TB) []definition {
	t.Helper()
	files, err := fs.Glob(crds.FS, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := make([]definition, len(files))
	for i, file := range files {
		text, err := fs.ReadFile(crds.FS, file)
		if err != nil {
			t.Fatal(err)
		}
		d := definition{file: file, object: &unstructured.Unstructured{}}
		if err := yaml.Unmarshal(text, &d.object.Object); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if err := yaml.UnmarshalStrict(text, &d.typed); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all[i] = d
	}
	return all
}

// hub is a real API server with the definitions installed, and a namespace of the test's own.
type hub struct {
	plane     *localkube.Plane
	client    dynamic.Interface
	namespace string
}

// install puts the definitions on the shared control plane once per test binary.
var install sync.Once

func newHub(t *testing.T) hub {
	t.Helper()
	plane := localkube.Shared(t)
	client, err := dynamic.NewForConfig(plane.Config)
	if err != nil {
		t.Fatal(err)
	}
	install.Do(func() { installAll(t, client) })
	if t.Failed() {
		t.FailNow()
	}
	return hub{plane: plane, client: client, namespace: plane.Namespace(t, "crds")}
}

// installAll creates the definitions and waits until the API server serves them.
func installAll(t *testing.T, client dynamic.Interface) {
	t.Helper()
	all := definitions(t)
	for _, d := range all {
		if _, err := client.Resource(crdResource).Create(t.Context(), d.object, metav1.CreateOptions{FieldValidation: "Strict"}); err != nil {
			t.Errorf("install %s: %v", d.file, err)
		}
	}
	if t.Failed() {
		return
	}
	for _, d := range all {
		probe := client.Resource(d.groupVersion().WithResource(d.typed.Spec.Names.Plural))
		var last error
		ready := func(ctx context.Context) (bool, error) {
			_, last = probe.List(ctx, metav1.ListOptions{})
			return last == nil, nil
		}
		if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, ready); err != nil {
			t.Errorf("%s is not served: %v", d.file, errors.Join(err, last))
		}
	}
}

// resource returns the client for obj's kind, in the test's namespace if the kind has namespaces.
func (h hub) resource(t testing.TB, obj *unstructured.Unstructured) dynamic.ResourceInterface {
	t.Helper()
	for _, d := range definitions(t) {
		if d.typed.Spec.Names.Kind != obj.GetKind() {
			continue
		}
		gvr := obj.GroupVersionKind().GroupVersion().WithResource(d.typed.Spec.Names.Plural)
		if d.typed.Spec.Scope == apiextensionsv1.ClusterScoped {
			return h.client.Resource(gvr)
		}
		return h.client.Resource(gvr).Namespace(h.namespace)
	}
	t.Fatalf("no definition of kind %s", obj.GetKind())
	return nil
}

// create creates obj as kubectl does, unknown fields being errors, and returns what the API server stored.
func (h hub) create(t *testing.T, obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	t.Helper()
	return h.resource(t, obj).Create(t.Context(), obj, metav1.CreateOptions{FieldValidation: "Strict"})
}

// kubectl runs kubectl in the test's namespace and returns its output.
func (h hub) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	program, err := localkube.Binary("kubectl")
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"--kubeconfig", h.plane.Kubeconfig, "--namespace", h.namespace}, args...)
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// manifests reads the documents of a YAML file.
func manifests(t testing.TB, file string) []*unstructured.Unstructured {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var docs []*unstructured.Unstructured
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		doc := &unstructured.Unstructured{}
		err := decoder.Decode(doc)
		if errors.Is(err, io.EOF) {
			return docs
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		docs = append(docs, doc)
	}
}

// files lists the manifests of a directory under testdata, by base name.
func files(t testing.TB, dir string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", dir, "*.yaml"))
	if err != nil || len(paths) == 0 {
		t.Fatal(fmt.Errorf("no manifests in %s: %w", dir, err))
	}
	byName := map[string]string{}
	for _, path := range paths {
		byName[strings.TrimSuffix(filepath.Base(path), ".yaml")] = path
	}
	return byName
}
