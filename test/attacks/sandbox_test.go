package attacks

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// childArgument is the argument with which the tests start their binary as a child of the sandbox that executes code of
// the attacker.
const childArgument = "exploited"

// attackTargets are resources that the attacker tries to access from a child.
type attackTargets struct {
	File, Address string
	Process       int
}

// serveExploited is a child in which the attacker's content has found a bug in an interpreter: the function exploited
// attacks the rest of the machine. The functions of the hub return forged results after an input with exploit.
func serveExploited() error {
	functions := render.SandboxFunctions()
	maps.Copy(functions, check.Functions())
	isExploited := false
	for name, function := range functions {
		functions[name] = func(input json.RawMessage, callBack func(any) (json.RawMessage, error)) (any, error) {
			if isExploited = isExploited || bytes.Contains(input, []byte(exploit)); isExploited {
				return json.RawMessage(forgedResults()[name]), nil
			}
			return function(input, callBack)
		}
	}
	functions[childArgument] = func(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
		var to attackTargets
		if err := json.Unmarshal(input, &to); err != nil {
			return nil, err
		}
		failures := map[string]string{}
		for what, attack := range to.attacks() {
			failures[what] = fmt.Sprint(attack())
		}
		failures["environment"] = fmt.Sprint(os.Environ())
		return failures, nil
	}
	return sandbox.Serve(functions, os.Stdin, os.Stdout)
}

// exploit is content that exploits a bug in a child.
const exploit = "exploit this child"

// forgedResults are the results of an exploited child, by function. All have the text "forged".
func forgedResults() map[string]string {
	const object = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"forged"}}`
	return map[string]string{
		"expand":               `{"Text":` + strconv.Quote(object) + `,"IsShared":true,"OnlyResources":true}`,
		"script":               `{"Text":` + strconv.Quote(object) + `,"IsShared":true,"OnlyResources":true}`,
		"substitute":           `[` + strconv.Quote(object) + `]`,
		"render":               `{"Objects":[` + object + `],"Paths":["a"]}`,
		"patch":                `{"0":` + object + `}`,
		"kustomize":            `{"Objects":[` + object + `],"Templates":{"0":` + strconv.Quote(object) + `}}`,
		"condition of a check": `"forged"`,
	}
}

// attacks are functions that return nil if they succeed.
func (to attackTargets) attacks() map[string]func() error {
	read := func(name string) func() error {
		return func() error {
			_, err := os.ReadFile(name)
			return err
		}
	}
	return map[string]func() error{
		"read a file":                   read(to.File),
		"read the parent's environment": read(fmt.Sprintf("/proc/%d/environ", to.Process)),
		"write a file":                  func() error { return os.WriteFile(to.File+".new", nil, 0o600) },
		"delete a file":                 func() error { return syscall.Unlink(to.File) },
		"connect": func() error {
			_, err := net.Dial("tcp", to.Address)
			return err
		},
		"listen": func() error {
			_, err := net.Listen("tcp", "127.0.0.1:0")
			return err
		},
		"start a program":     func() error { return exec.Command("/bin/true").Run() },
		"replace the program": func() error { return syscall.Exec("/no/such/program", nil, nil) },
		"have the kernel signal the parent": func() error {
			_, err := unix.FcntlInt(0, unix.F_SETOWN, to.Process)
			return err
		},
		"take memory beyond the limit": func() error {
			_, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
			return err
		},
		"signal the parent": func() error { return syscall.Kill(to.Process, 0) },
		"copy the parent's memory": func() error {
			_, err := unix.ProcessVMReadv(to.Process, nil, nil, 0)
			return err
		},
		"raise the limit of memory": func() error {
			return syscall.Setrlimit(syscall.RLIMIT_DATA, &syscall.Rlimit{Cur: 1 << 40, Max: 1 << 40})
		},
	}
}

// TestExploitedSandbox: the content of a tenant executes code in a child that renders it. The child runs as the user of
// the hub, in its pod: it can neither read the token of the hub, nor use the network, nor access the process of the
// hub.
func TestExploitedSandbox(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("a token of the hub"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := newListener(nil)
	server.Start()
	t.Cleanup(server.Close)
	to := attackTargets{File: token, Address: server.Listener.Addr().String(), Process: os.Getpid()}
	failures := map[string]string{}
	call := sandbox.Call{Function: childArgument, Key: childArgument, Limit: time.Minute, Input: to, Output: &failures}
	if err := sandbox.NewPool([]string{program, childArgument}, clock.RealClock{}).Call(call); err != nil {
		t.Fatal(err)
	}
	for what := range to.attacks() {
		if failure := failures[what]; !strings.Contains(failure, syscall.EPERM.Error()) {
			t.Errorf("%s: got %s, want %q", what, failure, syscall.EPERM)
		}
	}
	if got := failures["environment"]; !strings.HasPrefix(got, "[GOMAXPROCS=2 GOMEMLIMIT=") || strings.Count(got, "=") != 2 {
		t.Errorf("the child has the environment %s", got)
	}
	if _, err := os.Stat(token); err != nil {
		t.Error(err)
	}
}

// rendering renders the same public contents for several tenants, with the caches of a hub.
type rendering struct {
	*testing.T
	pool           *sandbox.Pool
	expansions     *cache.Cache[string]
	manifests      *render.ManifestRenderer
	kustomizations *render.KustomizationRenderer
	charts         *render.Charts
	changer        *render.Changer
	chart          source.Chart
}

func newRendering(t *testing.T, program string) *rendering {
	t.Helper()
	pool := sandbox.NewPool([]string{program, childArgument}, clock.RealClock{})
	packed, err := examples.Chart{Name: "public", Version: "1.0.0"}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "public.tgz")
	if err := os.WriteFile(file, packed, 0o600); err != nil {
		t.Fatal(err)
	}
	return &rendering{
		T: t, pool: pool, expansions: source.NewExpansions(), manifests: render.NewManifestRenderer(), kustomizations: render.NewKustomizationRenderer(pool),
		charts: render.NewCharts(pool), changer: render.NewChanger(pool), chart: source.Chart{Name: "public", Version: "1.0.0", Path: file, Digest: "public"},
	}
}

// template context returns the cluster of a tenant, or one of a ClusterProfile if the namespace is empty.
func (r *rendering) templateContext(namespace string) source.TemplateContext {
	return source.TemplateContext{Namespace: cmp.Or(namespace, "fleet"), Name: "cluster", RestrictedNamespace: namespace, Sandbox: r.pool, Expansions: r.expansions}
}

// results returns the results for a tenant by content.
func (r *rendering) results(namespace string) map[string]string {
	r.Helper()
	const (
		manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: public, namespace: default}\ndata: {a: '%s'}\n"
		script   = "function evaluate() return {resources = 'apiVersion: v1\\nkind: ConfigMap\\nmetadata: {name: public}'} end"
	)
	tmplCtx, results := r.templateContext(namespace), map[string]string{}
	add := func(what string, result any, err error) {
		if err != nil {
			r.Fatalf("%s of %q: %v", what, namespace, err)
		}
		text, err := json.Marshal(result)
		if err != nil {
			r.Fatal(err)
		}
		results[what] = string(text)
	}
	expanded, err := tmplCtx.Expand("text", `{{ upper "public" }}`)
	add("expansion", expanded, err)
	file := func(text string) []source.File { return []source.File{{Name: "a.yaml", Data: []byte(text)}} }
	reference := source.Reference{Kind: source.KindURL, URL: "https://example.com/public"}
	objects, _, err := r.manifests.Render(source.Content{Reference: reference, Digest: "a", Template: true, Files: file(fmt.Sprintf(manifest, `{{ upper "a" }}`))}, tmplCtx)
	add("template", objects, err)
	objects, _, err = r.manifests.Render(source.Content{Reference: reference, Digest: "b", Lua: true, Files: file(script)}, tmplCtx)
	add("script", objects, err)
	files := append(file(fmt.Sprintf(manifest, "{{ .value }}")), source.File{Name: "kustomization.yaml", Data: []byte("resources: [a.yaml]")})
	k := render.Kustomization{Content: source.Content{Reference: reference, Digest: "c", Files: files}}
	built, documents, err := r.kustomizations.Render(k, tmplCtx)
	add("kustomization", built, err)
	k.Values = map[string]string{"value": "public"}
	objects, _, err = r.kustomizations.Render(k, tmplCtx)
	add("kustomization with values", objects, err)
	patches := []render.Patch{{Text: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: public, namespace: default}\ndata: {b: public}"}}
	changed, err := r.changer.Change(built, documents, render.Changes{Patches: patches, Scope: tmplCtx.RestrictedNamespace}, nil)
	add("patch", changed.Objects, err)
	release, err := r.charts.Render(r.Context(), render.ChartRequest{
		Chart: r.chart, Name: "public", Namespace: "public", KubeVersion: "v1.36.3", APIVersions: []string{"v1"}, Scope: tmplCtx.RestrictedNamespace,
	})
	add("chart", release.Objects, err)
	checker := check.Checker{Sandbox: r.pool, Cluster: client.ObjectKey{Namespace: tmplCtx.Namespace, Name: tmplCtx.Name}}
	failure, err := checker.Run(r.Context(), nil, []libv1beta1.ClusterCheck{{Name: "public", Condition: "function evaluate() return {pass = true} end"}})
	add("check", failure, err)
	return results
}

// TestExploitedSandboxOfAnotherTenant: the content of a tenant executes code in a child that renders it. The child
// returns forged results for public contents, which other tenants and ClusterProfiles also use. They get correct
// results.
func TestExploitedSandboxOfAnotherTenant(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := newRendering(t, program)
	if _, err := r.templateContext("attacker").Expand("text", "{{ upper "+strconv.Quote(exploit)+" }}"); err != nil {
		t.Fatal(err)
	}
	for what, result := range r.results("attacker") {
		if isOwn := what != "check"; strings.Contains(result, "forged") != isOwn {
			t.Errorf("the attacker controls the %s of his namespace: %t: %s", what, !isOwn, result)
		}
	}
	for _, namespace := range []string{"victim", ""} {
		for what, result := range r.results(namespace) {
			if strings.Contains(result, "forged") {
				t.Errorf("the attacker controls the %s of %q: %s", what, namespace, result)
			}
		}
	}
}

// TestContentReachesNothing: templates, scripts, charts and kustomizations of a tenant try to read the environment and
// the files of the hub, and to use the network.
func TestContentReachesNothing(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "member")
	file := filepath.Join(t.TempDir(), "token")
	w.noError(os.WriteFile(file, []byte("a-token-of-the-hub"), 0o600))
	server := w.startListener(nil)
	const (
		manifest             = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: loot, namespace: default}\ndata: {loot: %q}\n"
		asTemplate, asScript = "projectsveltos.io/template", "projectsveltos.io/lua"
	)
	template := func(call string) string {
		return fmt.Sprintf(strings.ReplaceAll(manifest, "%q", "'%s'"), "{{ "+call+" }}")
	}
	script := func(call string) string {
		return "function evaluate()\n local loot = " + call + "\n return {resources = loot}\nend\n"
	}
	kustomization := func(fields string) string {
		return "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n" + fields
	}
	for name, test := range map[string]struct{ annotation, key, text, want string }{
		"template-env":       {asTemplate, "a.yaml", template(`env "AWS_SECRET_ACCESS_KEY"`), "not defined"},
		"template-expandenv": {asTemplate, "a.yaml", template(`expandenv "$AWS_SECRET_ACCESS_KEY"`), "not defined"},
		"template-host":      {asTemplate, "a.yaml", template(`getHostByName "localhost"`), "not defined"},
		"lua-env":            {asScript, "a.lua", script(`os.getenv("AWS_SECRET_ACCESS_KEY")`), "non-table"},
		"lua-file":           {asScript, "a.lua", script(fmt.Sprintf("io.open(%q):read()", file)), "non-table"},
		"lua-dofile":         {asScript, "a.lua", script(fmt.Sprintf("dofile(%q)", file)), "non-function"},
		"kustomize-file":     {"", "kustomization.yaml", kustomization(fmt.Sprintf("configMapGenerator: [{name: loot, files: [%s]}]", file)), "a file"},
		"kustomize-url":      {"", "kustomization.yaml", kustomization(fmt.Sprintf("resources: [%s/loot.yaml]", server.URL)), "without a network"},
		"kustomize-program":  {"", "kustomization.yaml", kustomization("generators: [generator.yaml]"), "not a valid directory"},
	} {
		content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Data: map[string]string{test.key: test.text}}
		if test.annotation != "" {
			content.Annotations = map[string]string{test.annotation: "ok"}
		}
		w.noError(tenant.Create(t.Context(), content))
		w.createProfile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
			if test.annotation == "" {
				spec.KustomizationRefs = []configv1beta1.KustomizationRef{{Kind: "ConfigMap", Name: name}}
			} else {
				spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: "ConfigMap", Name: name}}
			}
		})
		message := w.awaitFailure(name, nil)
		if err := wantText(message, test.want); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	charts, err := examples.Repository(
		examples.Chart{Name: "environment", Version: "1.0.0", Files: map[string]string{"templates/a.yaml": template(`env "AWS_SECRET_ACCESS_KEY"`)}},
		examples.Chart{Name: "schema", Version: "1.0.0", Files: map[string]string{"values.schema.json": fmt.Sprintf(`{"$ref": %q}`, "file://"+file)}},
		examples.Chart{Name: "schema-url", Version: "1.0.0", Files: map[string]string{"values.schema.json": fmt.Sprintf(`{"$ref": %q}`, server.URL)}},
	)
	w.noError(err)
	repository := httptest.NewServer(charts)
	t.Cleanup(repository.Close)
	for name, want := range map[string]string{"environment": "not defined", "schema": "without a network", "schema-url": "without a network"} {
		w.createProfile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
			spec.HelmCharts = []configv1beta1.HelmChart{{
				RepositoryURL: repository.URL, RepositoryName: "r", ChartName: "r/" + name, ChartVersion: "1.0.0", ReleaseNamespace: name,
			}}
		})
		if err := wantText(w.awaitFailure(name, nil), want); err != nil {
			t.Errorf("chart %s: %v", name, err)
		}
	}
	if n, _ := server.received(); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
}
