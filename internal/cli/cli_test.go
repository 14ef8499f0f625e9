package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// progressLines are the lines with the step and the time of a command that takes long.
var progressLines = regexp.MustCompile(`(?m)^.* \(\d+ s\)\n`)

// result is the result of a call of the program.
type result struct {
	out, err string
	code     int
}

func run(t *testing.T, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	code := cli.Run(t.Context(), args, command.Streams{Out: &out, Err: &errs})
	// Commands print progress on a busy machine.
	return result{out.String(), progressLines.ReplaceAllString(errs.String(), ""), code}
}

func TestHelpNeedsNoCluster(t *testing.T) {
	t.Setenv("KUBECONFIG", "/does/not/exist")
	for _, args := range []string{
		"towline", "towline help", "towline --help", "towline register", "towline register cluster --help",
		"towline register cluster-eks --help", "towline register cluster-gke --help", "towline register cluster-aks --help", "towline show addons --help",
		"towline hub --help", "towline generate kubeconfig --help", "towline deregister cluster --help", "towline agent --help", "towline demo --help", "towline version", "towline version -o json",
		"towline completion bash", "sveltosctl", "sveltosctl version",
	} {
		got := run(t, strings.Fields(args)...)
		if got.code != 0 || got.out == "" || got.err != "" {
			t.Errorf("%s: got code %d, %d bytes of output and error output %q", args, got.code, len(got.out), got.err)
		}
	}
}

func TestHelpHasTheNameOfTheCall(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"/usr/bin/sveltosctl": "sveltosctl register", "bin/towline": "towline register", "x": "towline register"} {
		if got := run(t, name, "register"); !strings.Contains(got.out, "Usage:\n  "+want) {
			t.Errorf("%s: got help\n%s\nwant the name in %q", name, got.out, want)
		}
	}
	if got := run(t, "/manager", "--help"); !strings.Contains(got.out, "--cluster-namespace") {
		t.Errorf("manager: got\n%s\nwant the help of the agent", got.out)
	}
}

func TestWrongArgumentsFailBeforeConnecting(t *testing.T) {
	// A command that connects fails with another message.
	t.Setenv("KUBECONFIG", "/does/not/exist")
	directory := t.TempDir()
	broken := filepath.Join(directory, "broken.yaml")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(directory, "empty.yaml")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	register := "sveltosctl register cluster --namespace=n --cluster=c "
	for args, want := range map[string]string{
		"towline nonsense":                                                 `unknown command "nonsense"`,
		"towline register nonsense":                                        `unknown command "nonsense"`,
		"towline register cluster --nonsense":                              "unknown flag: --nonsense; see towline register cluster --help",
		"towline register cluster extra":                                   `unknown command "extra"`,
		"sveltosctl register cluster --namespace=n --pullmode":             "--cluster is required",
		"sveltosctl register cluster --cluster=c --pullmode":               "--namespace is required",
		"sveltosctl register cluster --namespace=n --cluster=A --pullmode": `--cluster: "A" is not a DNS label`,
		register:                               "either kubeconfig or fleet-cluster-context must be specified",
		register + "--pullmode --kubeconfig=x": "--kubeconfig is for push mode only",
		register + "--pullmode --fleet-cluster-context=x":                          "--fleet-cluster-context is for push mode only",
		register + "--pullmode --service-account-token":                            "--service-account-token is for push mode only",
		register + "--kubeconfig=x --fleet-cluster-context=y":                      "--kubeconfig and --fleet-cluster-context exclude each other",
		register + "--kubeconfig=x --service-account-token":                        "--service-account-token needs --fleet-cluster-context",
		register + "--kubeconfig=x --management-cluster-url=https://hub":           "--management-cluster-url is for pull mode only",
		register + "--kubeconfig=x --management-cluster-ca=ca.crt":                 "--management-cluster-ca is for pull mode only",
		register + "--kubeconfig=x --proxy-url=http://proxy":                       "--proxy-url is for pull mode only",
		register + "--kubeconfig=x --agent-image=image":                            "--agent-image is for pull mode only",
		register + "--kubeconfig=x --image-pull-secret=s":                          "--image-pull-secret is for pull mode only",
		register + "--kubeconfig=x --agent-requests=cpu=1":                         "--agent-requests is for pull mode only",
		register + "--kubeconfig=x --agent-limits=cpu=1":                           "--agent-limits is for pull mode only",
		register + "--kubeconfig=x --token-lifetime=1h":                            "--token-lifetime is for pull mode only",
		register + "--kubeconfig=x --revoke":                                       "--revoke is for pull mode only",
		register + "--kubeconfig=x --apply-to-context=c":                           "--apply-to-context is for pull mode only",
		register + "--kubeconfig=x --apply-to-kubeconfig=c":                        "--apply-to-kubeconfig is for pull mode only",
		register + "--fleet-cluster-context=x --wait=1m":                           "--wait is for pull mode only",
		register + "--revoke":                                                      "--revoke is for pull mode only",
		register + "--fleet-cluster-context=x":                                     `--fleet-cluster-context: there is no context "x": no kubeconfig found`,
		register + "--pullmode --apply-to-context=x":                               `--apply-to-context: there is no context "x"`,
		register + "--pullmode --apply-to-context=":                                "--apply-to-context is empty",
		register + "--pullmode --proxy-url=":                                       "--proxy-url is empty",
		register + "--pullmode --apply-to-kubeconfig=/missing":                     "--apply-to-kubeconfig: stat /missing: no such file or directory",
		register + "--pullmode --apply-to-context=x --apply-to-kubeconfig=y":       "--apply-to-context and --apply-to-kubeconfig exclude each other",
		register + "--pullmode --wait=1m":                                          "--wait needs --apply-to-context or --apply-to-kubeconfig",
		register + "--pullmode --apply-to-context=x --wait=-1s":                    "--wait: -1s must not be negative",
		register + "--pullmode --labels=env":                                       "--labels: invalid key-value pair format: env",
		register + "--pullmode --shard=a/b":                                        `--shard: "a/b" is not a key`,
		register + "--pullmode --management-cluster-url=hub":                       "--management-cluster-url) is not an https:// address",
		register + "--pullmode --management-cluster-ca=/missing":                   "--management-cluster-ca: open /missing: no such file or directory",
		register + "--pullmode --management-cluster-ca=" + broken:                  "--management-cluster-ca) holds no certificate in PEM",
		register + "--pullmode --proxy-url=proxy:3128":                             "--proxy-url) is not an http:// address",
		register + "--pullmode --proxy-url=http://me:secret@proxy:3128":            "--proxy-url) holds a user name or password",
		register + "--pullmode --image-pull-secret=A":                              `--image-pull-secret): "A" is not the name of a Secret`,
		register + "--pullmode --agent-requests=cpu":                               `"--agent-requests" flag: cpu must be formatted as key=value`,
		register + "--pullmode --agent-requests=disk=1":                            `--agent-requests): "disk" is neither cpu nor memory`,
		register + "--pullmode --agent-limits=cpu=much":                            `--agent-limits): "much" is not a quantity of cpu`,
		register + "--pullmode --token-lifetime=9m":                                "--token-lifetime): 9m0s is not between 10m0s and 24h0m0s",
		register + "--pullmode --token-lifetime=48h":                               "--token-lifetime): 48h0m0s is not between 10m0s and 24h0m0s",
		"sveltosctl generate kubeconfig --expirationSeconds=599":                   "--expirationSeconds: 599 is less than 600",
		"sveltosctl generate kubeconfig --namespace=A":                             `--namespace: "A" is not a DNS label`,
		"sveltosctl generate kubeconfig --context=x":                               `--context: there is no context "x"`,
		"sveltosctl generate kubeconfig":                                           "no kubeconfig for the cluster found: no file of KUBECONFIG",
		"towline hub --management-cluster-url=hub":                                 "--management-cluster-url) is not an https:// address",
		"towline hub --management-cluster-ca=/missing":                             "--management-cluster-ca: open /missing: no such file or directory",
		register + "--kubeconfig=/missing":                                         "--kubeconfig: open /missing: no such file or directory",
		register + "--kubeconfig=" + broken:                                        "--kubeconfig: it is not a kubeconfig",
		"sveltosctl deregister cluster --namespace=n":                              "--cluster is required",
		"sveltosctl deregister cluster --namespace=n --cluster=c --wait=-1s":       "--wait: -1s must not be negative",
		"sveltosctl show addons -o yaml":                                           `--output: "yaml" is not supported`,
		"sveltosctl show addons --profile=x":                                       `--profile: "x" is not ClusterProfile/<name> or Profile/<name>`,
		"towline agent --cluster-name=c":                                           "--cluster-namespace and --cluster-name are required",
		"towline agent --cluster-name=c --cluster-namespace=n --cluster-type=capi": `--cluster-type: "capi" is not supported`,
		register + "--kubeconfig=" + empty:                                         "--kubeconfig: " + empty + " is empty",
		register + "--pullmode --apply-to-kubeconfig=" + empty:                     "--apply-to-kubeconfig: " + empty + " is empty",
		"towline hub --shard-key=blue --install-crds":                              "--install-crds and --shard-key exclude each other",
		"towline hub --log-format=xml":                                             `--log-format: "xml" is not supported`,
		"towline hub --agent-patch-config-map=patches":                             `--agent-patch-config-map: "patches" is not <namespace>/<name> of a ConfigMap`,
		"towline hub --outdated-chart-interval=-1h":                                "--outdated-chart-interval: -1h0m0s must not be negative",
		register + "--pullmode":                                                    `no kubeconfig for the hub found: no file of KUBECONFIG ("/does/not/exist") has a kubeconfig`,
	} {
		got := run(t, strings.Fields(args)...)
		if got.code != 1 || got.out != "" {
			t.Errorf("%s: got code %d and output %q, want 1 and none", args, got.code, got.out)
		}
		if !strings.HasPrefix(got.err, "error: ") || !strings.Contains(got.err, want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%s: got error output %q, want one line with %q", args, got.err, want)
		}
	}
}

func TestHelpShowsTheDefaultsOfTheAgent(t *testing.T) {
	t.Parallel()
	got := run(t, "sveltosctl", "register", "cluster", "--help")
	for _, want := range []string{"cpu=200m,memory=512Mi", "cpu=500m,memory=512Mi"} {
		if !strings.Contains(got.out, want) {
			t.Errorf("help lacks %q", want)
		}
	}
	if strings.Contains(got.out, "default []") {
		t.Errorf("help shows an empty default:\n%s", got.out)
	}
}

func TestClosedOutputFailsBeforeChanges(t *testing.T) {
	t.Setenv("KUBECONFIG", "/does/not/exist")
	for _, args := range []string{"sveltosctl register cluster --namespace=n --cluster=c --pullmode", "sveltosctl generate kubeconfig"} {
		var out, errs bytes.Buffer
		code := cli.Run(t.Context(), strings.Fields(args), command.Streams{Out: &out, Err: &errs, Closed: true})
		if code != 1 || !strings.HasPrefix(errs.String(), "error: standard output is closed") {
			t.Errorf("%s: got code %d and error output %q", args, code, errs.String())
		}
	}
}

func TestHubWithoutCustomResourceDefinitions(t *testing.T) {
	plane := localkube.ForTest(t, localkube.Named("bare"))
	t.Setenv("KUBECONFIG", plane.Kubeconfig)
	for _, args := range []string{"sveltosctl show addons", "towline hub --health-address= --diagnostics-address= --cache-dir=" + t.TempDir()} {
		got := run(t, strings.Fields(args)...)
		if got.code != 1 || !strings.Contains(got.err, "error: the hub does not know SveltosClusters; install Towline there first: towline hub --install-crds") {
			t.Errorf("%s: got %+v", args, got)
		}
	}
}

func TestInterruptedCommand(t *testing.T) {
	plane := localkube.Shared(t)
	t.Setenv("KUBECONFIG", plane.Kubeconfig)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	code := cli.Run(ctx, []string{"towline", "register", "cluster", "--namespace=n", "--cluster=c", "--pullmode"}, command.Streams{Out: &out, Err: &errs})
	if code != 130 || out.Len() > 0 || !strings.HasPrefix(errs.String(), "error: interrupted") {
		t.Errorf("got code %d, output %q and error output %q", code, out.String(), errs.String())
	}
}

func TestHubReusesItsCacheDirectory(t *testing.T) {
	caches, directory := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", caches)
	t.Setenv("KUBECONFIG", filepath.Join(directory, "kubeconfig"))
	for _, server := range []string{"https://127.0.0.1:1", "https://127.0.0.1:1", "https://127.0.0.1:2"} {
		kubeconfig := `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],` +
			`"clusters":[{"name":"c","cluster":{"server":"` + server + `"}}],"users":[{"name":"u","user":{}}]}`
		if err := os.WriteFile(filepath.Join(directory, "kubeconfig"), []byte(kubeconfig), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := run(t, "towline", "hub", "--diagnostics-address="); got.code != 1 {
			t.Errorf("a hub that cannot reach its server: got %+v, want code 1", got)
		}
	}
	kept, err := filepath.Glob(filepath.Join(caches, "towline", "hub-*"))
	if err != nil || len(kept) != 2 {
		t.Fatalf("caches of two hubs: got %v and error %v, want two", kept, err)
	}
	if info, err := os.Stat(kept[0]); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("cache: got mode %v and error %v, want 0700", info.Mode(), err)
	}
}

// TestHubCommands is one test, since its parts share a hub and KUBECONFIG.
func TestHubCommands(t *testing.T) {
	plane := localkube.ForTest(t)
	t.Setenv("KUBECONFIG", plane.Kubeconfig)
	got := run(t, "sveltosctl", "register", "cluster", "--namespace=rke2", "--cluster=cluster01", "--pullmode")
	if got.code != 1 || !strings.Contains(got.err, "install Towline there first: towline hub --install-crds") {
		t.Errorf("register on a cluster that is no hub: got %+v", got)
	}
	if err := hub.InstallCRDs(t.Context(), plane.Config); err != nil {
		t.Fatal(err)
	}

	got = run(t, "sveltosctl", "register", "cluster", "--namespace=rke2", "--cluster=cluster01", "--pullmode", "--labels=env=test", "--agent-image=registry.example.com/towline:v1")
	if got.code != 0 || got.err != "" || !strings.Contains(got.out, "image: registry.example.com/towline:v1\n") {
		t.Errorf("register in pull mode: got %+v", got)
	}
	objects, err := kube.DecodeManifest([]byte(got.out))
	if err != nil || len(objects) != 7 {
		t.Errorf("printed manifest: got %d objects and error %v, want 7", len(objects), err)
	}

	got = run(t, "sveltosctl", "register", "cluster", "--namespace=aks", "--cluster=cluster02", "--kubeconfig="+plane.Kubeconfig)
	if want := (result{out: "cluster cluster02 successfully registered/updated in namespace aks.\n"}); got != want {
		t.Errorf("register in push mode: got %+v, want %+v", got, want)
	}

	showsAddons(t, plane)

	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=aks", "--cluster=cluster02")
	want := "Successfully deregistered cluster aks/cluster02\n\nDeleted resources:\n  - SveltosCluster/aks/cluster02\n  - Secret/aks/cluster02-sveltos-kubeconfig\n"
	if diff := cmp.Diff(result{out: want}, got, cmp.AllowUnexported(result{})); diff != "" {
		t.Errorf("deregister (-want +got):\n%s", diff)
	}
	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=aks", "--cluster=cluster02")
	if want := (result{err: "error: deregister cluster aks/cluster02: the cluster is not registered\n", code: 1}); got != want {
		t.Errorf("deregister again: got %+v, want %+v", got, want)
	}
	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=rke2", "--cluster=cluster01")
	if got.code != 0 || !strings.Contains(got.out, "  - ServiceAccount/rke2/cluster01\n") {
		t.Errorf("deregister in pull mode: got %+v", got)
	}
}

func showsAddons(t *testing.T, plane *localkube.Plane) {
	t.Helper()
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := run(t, "sveltosctl", "show", "addons", "-o", "json"), (result{out: "[]\n"}); got != want {
		t.Errorf("show addons of nothing: got %+v, want %+v", got, want)
	}
	at := metav1.Unix(1757500000, 0)
	namespace := []configv1beta1.DeployedFeature{{
		FeatureID: libv1beta1.FeatureResources,
		Resources: []configv1beta1.DeployedResource{{Name: "team", Kind: "Namespace", Version: "v1", LastAppliedTime: &at}},
	}}
	configuration := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: "rke2", Name: "sveltos--cluster01"}}
	if err := hubClient.Create(t.Context(), configuration); err != nil {
		t.Fatal(err)
	}
	configuration.Status = configv1beta1.ClusterConfigurationStatus{
		ClusterProfileResources: []configv1beta1.ClusterProfileResource{
			{ClusterProfileName: "space", Features: namespace},
			{ClusterProfileName: "kyverno", Features: []configv1beta1.DeployedFeature{{
				FeatureID: libv1beta1.FeatureHelm,
				Charts: []configv1beta1.DeployedChart{{
					RepoURL: "https://example.com", ReleaseName: "kyverno-latest", Namespace: "kyverno", ChartVersion: "3.3.3", LastAppliedTime: &at,
				}},
			}}},
		},
		ProfileResources: []configv1beta1.ProfileResource{{ProfileName: "other", Features: namespace}},
	}
	if err := hubClient.Status().Update(t.Context(), configuration); err != nil {
		t.Fatal(err)
	}

	local := at.String()
	got := strings.ReplaceAll(run(t, "sveltosctl", "show", "addons").out, local, "2025-09-10 10:26:40 +0000 UTC")
	want, err := os.ReadFile(filepath.Join("testdata", "addons.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("show addons (-want +got):\n%s", diff)
	}
	for args, want := range map[string]int{
		"": 2, "--helm-charts": 1, "--resources": 1, "--helm-charts --resources": 2, "--namespace=aks": 0, "--namespace=rke2": 2,
		"--cluster=cluster01": 2, "--cluster=cluster": 0, "--profile=ClusterProfile/kyverno": 1, "--profile=Profile/other": 1,
	} {
		var rows []map[string]any
		got := run(t, append(strings.Fields("sveltosctl show addons -o json"), strings.Fields(args)...)...)
		if err := json.Unmarshal([]byte(got.out), &rows); err != nil || len(rows) != want {
			t.Errorf("show addons %s: got %d rows and error %v, want %d", args, len(rows), err, want)
		}
	}
}
