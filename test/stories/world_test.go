package stories

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// waitTimeout bounds every wait of a story. It is loose: a slow machine must pass, a hang must fail.
	waitTimeout = 4 * time.Minute
	// pollInterval is the minimum time between two checks of a wait.
	pollInterval = 250 * time.Millisecond
	// pollCost is the maximum part of a wait that its checks take. Many start kubectl, which needs 0.2 s of processor
	// time.
	pollCost = 0.25
)

// world is a hub with Towline, a chart repository, and the members that the story starts.
type world struct {
	t          *testing.T
	dir        string
	hub        *localkube.Plane
	hubProcess *process
	// clients has the administrator's client of each plane. A new client first lists all APIs of its server.
	clients *sync.Map
	// hubKubeconfig is the kubeconfig of `towline hub`.
	hubKubeconfig string
	// granted is true if the hub has more rights than config/hub.yaml defines.
	granted bool
	// Charts is the URL of a Helm repository with the example chart under every name that the stories use.
	Charts string
}

// newWorld starts the hub and waits until it serves its CRDs.
func newWorld(t *testing.T, options ...localkube.Option) *world {
	t.Helper()
	repository, err := examples.Repository(charts()...)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)
	w := &world{
		t: t, dir: t.TempDir(), hub: localkube.ForTest(t, append(options, localkube.Named("hub"))...), Charts: server.URL, clients: &sync.Map{},
	}
	w.useHubAccount()
	w.startHub()
	return w
}

// startHub runs `towline hub` with further flags; it is stopped when the story ends.
func (w *world) startHub(flags ...string) {
	w.t.Helper()
	flags = append([]string{"hub", "--install-crds", "--register-self=false", "--v=11", "--diagnostics-address=127.0.0.1:0", "--health-address=127.0.0.1:0", "--cache-dir=" + filepath.Join(w.dir, "cache")}, flags...)
	// The memory limit of the chart, which also limits the children of the hub.
	env := []string{"KUBECONFIG=" + w.hubKubeconfig, "GOMEMLIMIT=2GiB", "GOGC=100"}
	w.hubProcess = w.startFiltered(w.hubRequests, w.hub.Network(), "hub", env, "towline", flags...)
	w.eventually("the hub installs its CRDs", func() error {
		c := w.client(w.hub)
		return errors.Join(c.List(w.t.Context(), &libv1beta1.SveltosClusterList{}), c.List(w.t.Context(), &configv1beta1.ClusterProfileList{}),
			c.List(w.t.Context(), &libv1beta1.ConfigurationGroupList{}))
	})
}

// member starts a member cluster. The agent's image runs our program.
func (w *world) member(name string) *localkube.Plane {
	w.t.Helper()
	return localkube.ForTest(w.t, localkube.Named(name), localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")))
}

// pullMember starts a member, registers it in pull mode and waits until it is ready.
func (w *world) pullMember(namespace, cluster, labels string) *localkube.Plane {
	w.t.Helper()
	plane := w.member(cluster)
	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--pullmode", "--labels="+labels)
	w.apply(plane, manifest)
	w.awaitReady(namespace, cluster)
	return plane
}

// pushMember starts a member, registers it in push mode and waits until it is ready.
func (w *world) pushMember(namespace, cluster, labels string) *localkube.Plane {
	w.t.Helper()
	plane := w.member(cluster)
	w.kubectl(w.hub, "create", "namespace", namespace)
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--kubeconfig="+plane.Kubeconfig, "--labels="+labels)
	w.awaitReady(namespace, cluster)
	return plane
}

func (w *world) awaitReady(namespace, cluster string) {
	w.t.Helper()
	w.eventually(cluster+" is ready", func() error {
		found := &libv1beta1.SveltosCluster{}
		err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: cluster}, found)
		if err == nil && (!found.Status.Ready || found.Status.Version == "") {
			err = fmt.Errorf("the status is %+v", found.Status)
		}
		return err
	})
}

// awaitProvisioned waits until the status of every feature of the summary is Provisioned.
func (w *world) awaitProvisioned(namespace, summary string) {
	w.t.Helper()
	w.eventually(summary+" is provisioned", func() error {
		return w.wantStatuses(namespace, summary, "Provisioned")
	})
}

// wantStatuses returns an error unless every feature of the summary has the status want.
func (w *world) wantStatuses(namespace, summary, want string) error {
	found := &configv1beta1.ClusterSummary{}
	if err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: summary}, found); err != nil {
		return err
	}
	if len(found.Status.FeatureSummaries) == 0 {
		return fmt.Errorf("%s/%s has no features, want all %s", namespace, summary, want)
	}
	for _, feature := range found.Status.FeatureSummaries {
		if string(feature.Status) != want {
			return fmt.Errorf("feature %s of %s/%s is %s: %s, want %s", feature.FeatureID, namespace, summary, feature.Status, feature.FailureMessage, want)
		}
	}
	return nil
}

// client returns the administrator's client of a plane.
func (w *world) client(plane *localkube.Plane) client.Client {
	w.t.Helper()
	if known, ok := w.clients.Load(plane); ok {
		return known.(client.Client)
	}
	c, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.clients.Store(plane, c)
	return c
}

// data returns the data of a ConfigMap.
func (w *world) data(plane *localkube.Plane, namespace, name string) (map[string]string, error) {
	found := &corev1.ConfigMap{}
	err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, found)
	return found.Data, err
}

// kubectl runs kubectl against a plane and returns its standard output.
func (w *world) kubectl(plane *localkube.Plane, args ...string) string {
	w.t.Helper()
	return w.run(plane, "kubectl", args...)
}

// apply applies a manifest like kubectl apply --server-side --force-conflicts, but without starting kubectl, which
// needs 0.2 s of processor time.
func (w *world) apply(plane *localkube.Plane, manifest string) {
	w.t.Helper()
	objects, err := kube.DecodeManifest([]byte(manifest))
	if err != nil {
		w.t.Fatal(err)
	}
	w.applyObjects(plane, objects)
}

func (w *world) applyObjects(plane *localkube.Plane, objects []*unstructured.Unstructured) {
	w.t.Helper()
	c := w.client(plane)
	for _, object := range objects {
		namespaced, err := c.IsObjectNamespaced(object)
		if namespaced && object.GetNamespace() == "" {
			object.SetNamespace(corev1.NamespaceDefault)
		}
		if err == nil {
			err = c.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(object), client.FieldOwner("kubectl"), client.ForceOwnership)
		}
		if err != nil {
			w.t.Fatalf("apply %s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

// kubectlApply runs kubectl apply -f - with the manifest.
func (w *world) kubectlApply(plane *localkube.Plane, manifest string) string {
	w.t.Helper()
	cmd := w.command(plane, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	out, err := output(cmd)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// run runs one of our programs with KUBECONFIG set to the plane's, and fails the story if the program fails.
func (w *world) run(plane *localkube.Plane, binary string, args ...string) string {
	w.t.Helper()
	out, err := w.try(plane, binary, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// try is run for commands that may fail; the error has the standard error.
func (w *world) try(plane *localkube.Plane, binary string, args ...string) (string, error) {
	return output(w.command(plane, binary, args...))
}

func (w *world) command(plane *localkube.Plane, binary string, args ...string) *exec.Cmd {
	cmd := plane.Network().Command(w.t.Context(), w.binary(binary), args...)
	// kubectl caches the APIs of a server by its address. A later story's control plane may get the same address.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig, "KUBECACHEDIR="+filepath.Join(w.dir, "kubectl"))
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func (w *world) binary(name string) string {
	path, err := localkube.Binary(name)
	if err != nil {
		w.t.Fatal(err)
	}
	return path
}

func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// eventually waits until check returns nil. After waitTimeout it fails the story with the last error.
func (w *world) eventually(what string, check func() error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), waitTimeout)
	defer cancel()
	for {
		began := time.Now()
		err := check()
		if err == nil {
			return
		}
		took := time.Since(began)
		select {
		case <-time.After(max(pollInterval, time.Duration(float64(took)/pollCost)-took)):
		case <-ctx.Done():
			w.t.Fatalf("%s: not within %s: %v", what, waitTimeout, err)
		}
	}
}

// tableRow returns the line of a kubectl table whose NAME is name, "" if there is none.
func (w *world) tableRow(table, name string) string {
	for line := range strings.Lines(table) {
		for i, field := range strings.Fields(line) {
			if i < 2 && field == name {
				return strings.TrimRight(line, "\n")
			}
		}
	}
	return ""
}

// wantFields compares the fields of a line; "*" stands for any text.
func wantFields(line string, want ...string) error {
	got := strings.Fields(line)
	if len(got) != len(want) {
		return fmt.Errorf("line %q has %d fields, want %q", line, len(got), want)
	}
	for i := range want {
		if want[i] != "*" && got[i] != want[i] {
			return fmt.Errorf("line %q, want %q", line, want)
		}
	}
	return nil
}

// process is a program that runs in the background.
type process struct {
	cmd    *exec.Cmd
	out    *lockedBuffer
	exited chan struct{}
}

// start runs a program in the background. It is stopped when the story ends, and its output is logged if the story
// failed.
func (w *world) start(what string, plane *localkube.Plane, binary string, args ...string) *process {
	w.t.Helper()
	return w.startIn(plane.Network(), what, []string{"KUBECONFIG=" + plane.Kubeconfig}, binary, args...)
}

// startWith is start with an environment instead of a plane.
func (w *world) startWith(what string, env []string, binary string, args ...string) *process {
	w.t.Helper()
	return w.startIn("", what, env, binary, args...)
}

// startIn is startWith in a network.
func (w *world) startIn(network localkube.Network, what string, env []string, binary string, args ...string) *process {
	w.t.Helper()
	return w.startFiltered(func(out io.Writer) io.Writer { return out }, network, what, env, binary, args...)
}

// startFiltered is startIn for a process whose output is written to the result of filter, which writes to out.
func (w *world) startFiltered(
	filter func(out io.Writer) io.Writer, network localkube.Network, what string, env []string, binary string, args ...string,
) *process {
	w.t.Helper()
	cmd := network.Command(context.WithoutCancel(w.t.Context()), w.binary(binary), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &process{cmd: cmd, out: &lockedBuffer{}, exited: make(chan struct{})}
	cmd.Stdout = filter(p.out)
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		_ = cmd.Wait() // stories kill many programs on purpose
	}()
	w.t.Cleanup(func() {
		p.stop()
		if w.t.Failed() {
			w.t.Logf("output of %s:\n%s", what, tail(p.out.String()))
		}
	})
	return p
}

// stop interrupts the process and waits for its end; after ten seconds it is killed.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(os.Interrupt) // an error means that it has ended
	select {
	case <-p.exited:
	case <-time.After(10 * time.Second):
		p.kill()
	}
}

// kill is kill -9.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error means that it has ended
	<-p.exited
}

func tail(text string) string {
	const most = 20_000
	if len(text) > most {
		return "…" + text[len(text)-most:]
	}
	return text
}

// save writes text to a file of the story and returns its path.
func (w *world) save(name, text string) string {
	w.t.Helper()
	path := filepath.Join(w.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

var _ io.Writer = (*lockedBuffer)(nil)
