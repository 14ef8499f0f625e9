package attacks

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/sandbox"
)

// exploited is the argument with which the tests start their binary as a child of the sandbox that executes code of the
// attacker.
const exploited = "exploited"

// targets are what the attacker tries to reach from a child.
type targets struct {
	File, Address string
	Process       int
}

// serveExploited is a child in which the attacker's content has found a bug in an interpreter.
func serveExploited() error {
	return sandbox.Serve(map[string]sandbox.Function{exploited: func(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
		var to targets
		if err := json.Unmarshal(input, &to); err != nil {
			return nil, err
		}
		failures := map[string]string{}
		for what, attack := range to.attacks() {
			failures[what] = fmt.Sprint(attack())
		}
		failures["environment"] = fmt.Sprint(os.Environ())
		return failures, nil
	}}, os.Stdin, os.Stdout)
}

// attacks are functions that return nil if they succeed.
func (to targets) attacks() map[string]func() error {
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
// the hub, in its pod: it can neither read the token of the hub there, nor use the network, nor reach the process of
// the hub.
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
	to := targets{File: token, Address: server.Listener.Addr().String(), Process: os.Getpid()}
	failures := map[string]string{}
	call := sandbox.Call{Function: exploited, Key: exploited, Limit: time.Minute, Input: to, Output: &failures}
	if err := sandbox.NewPool([]string{program, exploited}, clock.RealClock{}).Call(call); err != nil {
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

// TestContentReachesNothing: templates, scripts, charts and kustomizations of a tenant try to read the environment and
// the files of the hub, and to use the network.
func TestContentReachesNothing(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.pullCluster(tenant, "member")
	file := filepath.Join(t.TempDir(), "token")
	w.must(os.WriteFile(file, []byte("a-token-of-the-hub"), 0o600))
	server := w.listen(nil)
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
		w.must(tenant.Create(t.Context(), content))
		w.profile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
			if test.annotation == "" {
				spec.KustomizationRefs = []configv1beta1.KustomizationRef{{Kind: "ConfigMap", Name: name}}
			} else {
				spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: "ConfigMap", Name: name}}
			}
		})
		message := w.failure(name, nil)
		if err := wantText(message, test.want); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	charts, err := examples.Repository(
		examples.Chart{Name: "environment", Version: "1.0.0", Files: map[string]string{"templates/a.yaml": template(`env "AWS_SECRET_ACCESS_KEY"`)}},
		examples.Chart{Name: "schema", Version: "1.0.0", Files: map[string]string{"values.schema.json": fmt.Sprintf(`{"$ref": %q}`, "file://"+file)}},
		examples.Chart{Name: "schema-url", Version: "1.0.0", Files: map[string]string{"values.schema.json": fmt.Sprintf(`{"$ref": %q}`, server.URL)}},
	)
	w.must(err)
	repository := httptest.NewServer(charts)
	t.Cleanup(repository.Close)
	for name, want := range map[string]string{"environment": "not defined", "schema": "without a network", "schema-url": "without a network"} {
		w.profile(tenant, name, func(spec *configv1beta1.ProfileSpec) {
			spec.HelmCharts = []configv1beta1.HelmChart{{
				RepositoryURL: repository.URL, RepositoryName: "r", ChartName: "r/" + name, ChartVersion: "1.0.0", ReleaseNamespace: name,
			}}
		})
		if err := wantText(w.failure(name, nil), want); err != nil {
			t.Errorf("chart %s: %v", name, err)
		}
	}
	if n, _ := server.sent(); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
}
