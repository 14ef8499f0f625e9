package cli_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// TestMain runs this test binary as the container of the agent, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		cli.Run(context.Background(), append([]string{"manager"}, os.Args[1:]...), command.Streams{Out: os.Stdout, Err: os.Stderr})
		return
	}
	m.Run()
}

// brokenImage is an image with a program that fails.
const brokenImage = "registry.invalid/broken:v1"

// hubAndMember has a hub, a member, and a kubeconfig file for each.
type hubAndMember struct {
	hub, member   client.Client
	hubPlane      *localkube.Plane
	memberPlane   *localkube.Plane
	files         []string
	memberContext string
}

func startHubAndMember(t *testing.T) *hubAndMember {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w := &hubAndMember{
		hubPlane: localkube.ForTest(t, localkube.Named("hub")), memberContext: "member-admin",
		memberPlane: localkube.ForTest(t, localkube.Named("member"), localkube.WithExec(join.DefaultAgentImage, self), localkube.WithExec(brokenImage, "/bin/false")),
	}
	for plane, to := range map[*localkube.Plane]*client.Client{w.hubPlane: &w.hub, w.memberPlane: &w.member} {
		if *to, err = client.New(plane.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
			t.Fatal(err)
		}
	}
	if err := hub.InstallCRDs(t.Context(), w.hubPlane.Config); err != nil {
		t.Fatal(err)
	}
	directory := t.TempDir()
	for name, plane := range map[string]*localkube.Plane{"hub-admin": w.hubPlane, w.memberContext: w.memberPlane} {
		file := filepath.Join(directory, name)
		if err := os.WriteFile(file, renamedKubeconfig(t, plane.Kubeconfig, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// The current context is the one of the first file.
	w.files = []string{filepath.Join(directory, "hub-admin"), filepath.Join(directory, w.memberContext)}
	t.Setenv("KUBECONFIG", strings.Join(w.files, string(filepath.ListSeparator)))
	return w
}

// renamedKubeconfig returns a kubeconfig with one context, cluster and user of this name.
func renamedKubeconfig(t *testing.T, file, name string) []byte {
	t.Helper()
	config, err := clientcmd.LoadFromFile(file)
	if err != nil {
		t.Fatal(err)
	}
	current := config.Contexts[config.CurrentContext]
	cluster, user := config.Clusters[current.Cluster], config.AuthInfos[current.AuthInfo]
	clear(config.Contexts)
	clear(config.Clusters)
	clear(config.AuthInfos)
	current.Cluster, current.AuthInfo, config.CurrentContext = name, name, name
	config.Contexts[name], config.Clusters[name], config.AuthInfos[name] = current, cluster, user
	text, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func (w *hubAndMember) contents(t *testing.T) map[string]string {
	t.Helper()
	contents := map[string]string{}
	for _, file := range w.files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		contents[file] = string(text)
	}
	return contents
}

// TestRegisterWithTheKubeconfigOfTheMember is one test, since its parts share a hub, a member and KUBECONFIG.
func TestRegisterWithTheKubeconfigOfTheMember(t *testing.T) {
	w := startHubAndMember(t)
	before := w.contents(t)
	missing := run(t, strings.Fields("sveltosctl register cluster --namespace=n --cluster=c --fleet-cluster-context=nowhere")...)
	if want := `error: --fleet-cluster-context: there is no context "nowhere", only: hub-admin, member-admin` + "\n"; missing.err != want {
		t.Errorf("missing context: got %q, want %q", missing.err, want)
	}
	w.generates(t)
	w.registersByContext(t)
	w.undoesInterruptedRegistration(t)
	w.reportsWhyTheClusterIsNotReady(t)
	w.waitsUntilReady(t)
	if diff := cmp.Diff(before, w.contents(t)); diff != "" {
		t.Errorf("kubeconfig files (-before +after):\n%s", diff)
	}
	for _, file := range w.files {
		if left, err := filepath.Glob(filepath.Dir(file) + "/*"); err != nil || len(left) != len(w.files) {
			t.Errorf("files beside the kubeconfigs: got %v and error %v", left, err)
		}
	}
}

func (w *hubAndMember) generates(t *testing.T) {
	t.Helper()
	got := run(t, "sveltosctl", "generate", "kubeconfig", "--context="+w.memberContext)
	if got.code != 1 || got.out != "" || !strings.Contains(got.err, "ServiceAccount projectsveltos/projectsveltos does not exist; --create makes it") {
		t.Errorf("generate without an account: got %+v", got)
	}
	got = run(t, "sveltosctl", "generate", "kubeconfig", "--context="+w.memberContext, "--create", "--expirationSeconds=600")
	if got.code != 0 || got.err != "" {
		t.Fatalf("generate: got %+v", got)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(got.out))
	if err != nil {
		t.Fatal(err)
	}
	generated, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	if err := generated.List(t.Context(), &corev1.SecretList{}); err != nil {
		t.Errorf("use the generated kubeconfig: %v", err)
	}
}

func (w *hubAndMember) registersByContext(t *testing.T) {
	t.Helper()
	got := run(t, "sveltosctl", "register", "cluster", "--namespace=aks", "--cluster=pushed", "--fleet-cluster-context="+w.memberContext, "--shard=blue")
	if want := (result{out: "cluster pushed successfully registered/updated in namespace aks.\n"}); got != want {
		t.Fatalf("register by context: got %+v, want %+v", got, want)
	}
	cluster := &libv1beta1.SveltosCluster{}
	if err := w.hub.Get(t.Context(), client.ObjectKey{Namespace: "aks", Name: "pushed"}, cluster); err != nil {
		t.Fatal(err)
	}
	if cluster.Spec.TokenRequestRenewalOption == nil || cluster.Annotations["sharding.projectsveltos.io/key"] != "blue" {
		t.Errorf("registered by context: got %+v", cluster)
	}
	if got := run(t, "sveltosctl", "deregister", "cluster", "--namespace=aks", "--cluster=pushed"); got.code != 0 {
		t.Errorf("deregister: got %+v", got)
	}
}

// countObjects returns the numbers of Deployments on the member and of SveltosClusters on the hub.
func (w *hubAndMember) countObjects(t *testing.T) (agents, clusters int) {
	t.Helper()
	deployments, registered := &appsv1.DeploymentList{}, &libv1beta1.SveltosClusterList{}
	if err := errors.Join(w.member.List(t.Context(), deployments), w.hub.List(t.Context(), registered, client.InNamespace("edge"))); err != nil {
		t.Fatal(err)
	}
	return len(deployments.Items), len(registered.Items)
}

const registerAndApply = "sveltosctl register cluster --namespace=edge --cluster=c --pullmode --apply-to-context=member-admin "

// cancelingWriter is an output that cancels the command at the first write.
type cancelingWriter struct{ cancel context.CancelFunc }

func (c cancelingWriter) Write([]byte) (int, error) {
	c.cancel()
	return 0, context.Canceled
}

func (w *hubAndMember) undoesInterruptedRegistration(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var errs bytes.Buffer
	code := cli.Run(ctx, strings.Fields(registerAndApply), command.Streams{Out: cancelingWriter{cancel}, Err: &errs})
	agents, clusters := w.countObjects(t)
	if code != 130 || !strings.Contains(errs.String(), "error: interrupted while registering cluster edge/c") || !strings.Contains(errs.String(), "; everything was taken back\n") || agents != 0 || clusters != 0 {
		t.Errorf("got code %d, error output %q, %d agents and %d clusters", code, errs.String(), agents, clusters)
	}
	// The registration created the namespace, so it is deleted, which takes some time.
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		return apierrors.IsNotFound(w.hub.Get(ctx, client.ObjectKey{Name: "edge"}, &corev1.Namespace{})), nil
	})
	if err != nil {
		t.Fatalf("wait until namespace edge is deleted: %v", err)
	}
}

func (w *hubAndMember) reportsWhyTheClusterIsNotReady(t *testing.T) {
	t.Helper()
	got := run(t, strings.Fields(registerAndApply+"--wait=3s --agent-image="+brokenImage)...)
	agents, clusters := w.countObjects(t)
	if got.code != 1 || agents != 1 || clusters != 1 || !strings.Contains(got.out, "deployment.apps/sveltos-applier-manager created\n") {
		t.Errorf("got %+v, %d agents and %d clusters", got, agents, clusters)
	}
	for _, want := range []string{"not ready after 3s: agent: ", "pod sveltos-applier-manager-", "hub: the agent has not connected yet", "run the same command again"} {
		if !strings.Contains(got.err, want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("got error output %q, want one line with %q", got.err, want)
		}
	}
}

func (w *hubAndMember) waitsUntilReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- hub.Run(ctx, w.hubPlane.Config, hub.Options{CacheDir: t.TempDir()}) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("hub: %v", err)
		}
	}()
	began := time.Now()
	got := run(t, strings.Fields(registerAndApply+"--wait=1m --agent-image="+join.DefaultAgentImage)...)
	if got.code != 0 || !strings.HasSuffix(got.out, "cluster edge/c is ready, Kubernetes v1.36.3\n") {
		t.Fatalf("register and apply: got %+v", got)
	}
	t.Logf("ready after %.1f s", time.Since(began).Seconds())
	cluster := &libv1beta1.SveltosCluster{}
	if err := w.hub.Get(t.Context(), client.ObjectKey{Namespace: "edge", Name: "c"}, cluster); err != nil || !cluster.Status.Ready {
		t.Errorf("cluster: got %+v and error %v, want it to be ready", cluster.Status, err)
	}
	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=edge", "--cluster=c", "--wait=0")
	if got.code != 0 {
		t.Errorf("deregister without waiting: got %+v", got)
	}
	got = run(t, "sveltosctl", "deregister", "cluster", "--namespace=edge", "--cluster=c")
	// The hub may have finished the removal before.
	if !strings.HasPrefix(got.out, "Successfully deregistered cluster edge/c\n") && !strings.Contains(got.err, "the cluster is not registered") {
		t.Errorf("deregister: got %+v", got)
	}
	err := w.hub.Get(t.Context(), client.ObjectKey{Namespace: "edge", Name: "c"}, cluster)
	if !apierrors.IsNotFound(err) {
		t.Errorf("read the cluster after its end: got error %v", err)
	}
}
