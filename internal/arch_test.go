package internal_test

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const modulePath = "github.com/towline/towline/"

// goPackage is the part of `go list -json` that the law is about.
type goPackage struct {
	ImportPath string
	Doc        string
	Imports    []string
	Deps       []string
}

// listed is one line of README.md: a package and its sentence, in the order of the journey.
type listed struct{ name, sentence string }

func TestArchitectureListMatchesThePackages(t *testing.T) {
	t.Parallel()
	order := readList(t)
	for _, pkg := range packages(t) {
		name, sub := journeyName(pkg.ImportPath)
		if name == "" {
			continue
		}
		at := slices.IndexFunc(order, func(l listed) bool { return l.name == name })
		if at < 0 {
			t.Errorf("%s is not in internal/README.md", pkg.ImportPath)
			continue
		}
		if want := "Package " + name + " " + order[at].sentence; !sub && !strings.HasPrefix(oneLine(pkg.Doc), want) {
			t.Errorf("%s: package comment is %q, want %q", pkg.ImportPath, pkg.Doc, want)
		}
		for _, dep := range pkg.Imports {
			imported, _ := journeyName(dep)
			to := slices.IndexFunc(order, func(l listed) bool { return l.name == imported })
			if imported != "" && imported != name && to > at {
				t.Errorf("%s imports %s, which is listed below it", pkg.ImportPath, dep)
			}
		}
	}
}

func TestArchitectureWalls(t *testing.T) {
	t.Parallel()
	walls := map[string][]string{
		"agent": {"match", "source", "render", "hub"},
		"hub":   {"agent", "localkube"},
	}
	for _, pkg := range packages(t) {
		from, _ := journeyName(pkg.ImportPath)
		for _, dep := range pkg.Deps {
			if to, _ := journeyName(dep); to != "" && slices.Contains(walls[from], to) {
				t.Errorf("%s reaches %s", pkg.ImportPath, dep)
			}
		}
		if strings.HasPrefix(pkg.ImportPath, modulePath+"api/") {
			checkContract(t, pkg)
		}
	}
}

// TestAgentProgramLinksNoLargeLibraries keeps the memory of agents small: each linked package costs memory, also if no
// function of it is called.
func TestAgentProgramLinksNoLargeLibraries(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../cmd/towline-agent").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, modulePath+"internal/agent/karmada") {
		t.Fatal("the program has no agent")
	}
	forbidden := []string{
		modulePath + "internal/match", modulePath + "internal/source", modulePath + "internal/render", modulePath + "internal/hub",
		modulePath + "internal/localkube", modulePath + "internal/fleet/identity",
		"github.com/aws/", "github.com/Azure/", "cloud.google.com/", "golang.org/x/oauth2/google", "github.com/sigstore/",
		"github.com/theupdateframework/", "github.com/google/go-containerregistry/", "oras.land/", "github.com/santhosh-tekuri/",
		"sigs.k8s.io/controller-runtime/pkg/manager", "sigs.k8s.io/kustomize/", "helm.sh/helm/v4/",
	}
	// The types of Helm's release records.
	allowed := []string{
		"helm.sh/helm/v4/internal/version", "helm.sh/helm/v4/pkg/chart/common", "helm.sh/helm/v4/pkg/chart/v2",
		"helm.sh/helm/v4/pkg/release/common", "helm.sh/helm/v4/pkg/release/v1",
	}
	for _, dep := range deps {
		isForbidden := slices.ContainsFunc(forbidden, func(prefix string) bool { return strings.HasPrefix(dep, prefix) })
		if isForbidden && !slices.Contains(allowed, dep) {
			t.Errorf("cmd/towline-agent links %s", dep)
		}
	}
}

// TestKubeconfigsHaveOneValidator lists the packages that may decode kubeconfigs, or use decoded ones, without
// fleet.ParseKubeconfig, which refuses programs and files. Those that only read an address or a certificate may, too.
func TestKubeconfigsHaveOneValidator(t *testing.T) {
	t.Parallel()
	allowed := map[string][]string{
		"Load":                            {"agent/karmada", "fleet", "join", "join/bootstrap"},
		"NewDefaultClientConfig":          {"agent/karmada", "fleet"},
		"NewNonInteractiveClientConfig":   {"cli"}, // for files of the user
		"BuildConfigFromKubeconfigGetter": nil, "GetConfigFromFileOrDie": nil, "LoadFromFile": nil, "NewClientConfigFromBytes": nil,
		"NewInteractiveClientConfig": nil, "RESTConfigFromKubeConfig": nil,
	}
	// Other names of the package, and its decoder, are not used.
	imports := regexp.MustCompile(`(?m)^(?:import |\t)(?:[\w.]+ "k8s\.io/client-go/tools/clientcmd"|(?:[\w.]+ )?"k8s\.io/client-go/tools/clientcmd/api/(?:latest|v1)")`)
	calls := regexp.MustCompile(`\bclientcmd\.(\w+)`)
	for _, root := range []string{"../cmd", "."} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if imports.Match(text) {
				t.Errorf("%s decodes kubeconfigs by itself, or imports clientcmd under another name: %s", path, imports.Find(text))
			}
			for _, call := range calls.FindAllStringSubmatch(string(text), -1) {
				packages, isLoader := allowed[call[1]]
				if isLoader && !slices.Contains(packages, filepath.ToSlash(filepath.Dir(path))) {
					t.Errorf("%s uses clientcmd.%s: use fleet.ParseKubeconfig, which validates", path, call[1])
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestYAMLHasOneDecoder lists the files that may decode YAML without kube.YAMLToJSON and kube.UnmarshalYAML: aliases
// make text of a few KiB as large as all memory.
func TestYAMLHasOneDecoder(t *testing.T) {
	t.Parallel()
	allowed := []string{
		"kube/aliases.go", "kube/manifest.go", "kube/yaml.go",
		// They count values and aliases first.
		"fleet/clients.go", "join/patches.go", "join/renew.go", "render/values.go", "source/charts.go", "source/fluxchart.go", "source/repository.go",
		"render/chart.go", // in a child, which has a limit of memory
		// Files of this program, or of the cluster in which it runs.
		"agent/karmada/hubtransport.go", "hub/crds.go", "join/address.go", "join/bootstrap/discovery.go", "localkube/crds/crds.go",
		"release/record.go", // encodes only
	}
	decoders := regexp.MustCompile(`\byaml\.(?:Unmarshal|YAMLToJSON|NewDecoder)|\bloader\.Load\w*\(|\bclientcmd\.Load\(|` +
		`\w+ "sigs\.k8s\.io/yaml|"(?:go\.yaml\.in/yaml/|gopkg\.in/yaml\.|k8s\.io/apimachinery/pkg/util/yaml"|sigs\.k8s\.io/(?:yaml/|kustomize/kyaml/yaml"))`)
	for _, root := range []string{"../cmd", "."} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if found := decoders.Find(text); found != nil && !slices.Contains(allowed, filepath.ToSlash(path)) {
				t.Errorf("%s has %s: use kube.YAMLToJSON or kube.UnmarshalYAML, which limit aliases", path, found)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func checkContract(t *testing.T, pkg goPackage) {
	t.Helper()
	for _, dep := range pkg.Imports {
		if strings.HasPrefix(dep, modulePath+"internal") || strings.HasPrefix(dep, "sigs.k8s.io/controller-runtime") {
			t.Errorf("%s imports %s; the contract holds types only", pkg.ImportPath, dep)
		}
	}
}

func readList(t *testing.T) []listed {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var list []listed
	for _, m := range regexp.MustCompile("(?m)^\\d+\\. `(\\w+)` — (.+)$").FindAllStringSubmatch(string(text), -1) {
		list = append(list, listed{m[1], m[2]})
	}
	if len(list) == 0 {
		t.Fatal("internal/README.md lists no packages")
	}
	return list
}

func packages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Doc,Imports,Deps", "../internal/...", "../api/...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []goPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var pkg goPackage
		if err := dec.Decode(&pkg); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("decode go list: %v", err)
		}
		pkgs = append(pkgs, pkg)
	}
}

// journeyName returns the listed package that importPath belongs to, and whether it is a package below that one.
func journeyName(importPath string) (name string, sub bool) {
	rest, ok := strings.CutPrefix(importPath, modulePath+"internal/")
	if !ok {
		return "", false
	}
	name, _, sub = strings.Cut(rest, "/")
	return name, sub
}

func oneLine(doc string) string { return strings.Join(strings.Fields(doc), " ") }
