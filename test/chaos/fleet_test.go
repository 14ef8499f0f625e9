package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// clusters is the hub namespace of all clusters.
	clusters = "fleet"
	// contentNamespace is the member namespace of the objects of all profiles. It exists before, so that no profile owns
	// it.
	contentNamespace = "site"
	// chartProfile is the name of the profile with the chart, of its release, and of the namespace of the release.
	chartProfile = "charted"
	// chartObject is the ConfigMap of the chart.
	chartObject = "edition"
	// settleTimeout is loose: a slow machine must pass, a hang must fail. An agent needs up to a minute to notice a lost
	// connection.
	settleTimeout = 5 * time.Minute
	// retryTimeout limits a change by the test while an API server is down.
	retryTimeout = 2 * time.Minute
	pollInterval = 300 * time.Millisecond
)

// member is a cluster of the fleet.
type member struct {
	name   string
	isPull bool
	plane  *localkube.Plane
	admin  client.Client
	// link leads from the agent to the hub, or from the hub to the member.
	link *link
	// agent is nil in push mode, and while the member is not registered.
	agent   *process
	hooks   *hookLog
	foreign foreignLog
	hasLeft bool // the member has left the fleet in some round
	// labelled has the UIDs of the managed objects on which another client has set a label, by kind and key. adopted is
	// the UID of adoptedObject.
	labelled map[string]types.UID
	adopted  types.UID
}

// fleet is a hub with its members.
type fleet struct {
	t       *testing.T
	dir     string
	plane   *localkube.Plane
	admin   client.Client
	hub     *process
	hubLink *link // leads from the hub to its own API server
	charts  string
	members []*member
	foreign foreignLog // on the hub
	// background waits for API servers that are being restarted.
	background sync.WaitGroup
}

func newFleet(t *testing.T, names ...string) *fleet {
	t.Helper()
	planes := localkube.SeveralForTest(t, append([]string{"hub"}, names...))
	f := &fleet{t: t, dir: t.TempDir(), plane: planes[0], admin: newAdmin(t, planes[0]), charts: serveChart(t), foreign: foreignLog{}}
	f.hubLink = newLink(t, "hub", hostOf(f.plane))
	kubeconfig := f.linkedKubeconfig(f.plane, f.hubLink)
	// As in config/hub.yaml, a lost connection is noticed in 20 s.
	env := []string{"KUBECONFIG=" + kubeconfig, "HTTP2_READ_IDLE_TIMEOUT_SECONDS=10", "HTTP2_PING_TIMEOUT_SECONDS=10"}
	f.hub = run(t, "hub", env, "towline", "hub", "--leader-elect", "--install-crds", "--diagnostics-address=127.0.0.1:0",
		"--health-address=127.0.0.1:0", "--cache-dir="+filepath.Join(f.dir, "cache"))
	f.createNamespace(f.admin, f.foreign, clusters)
	for i, name := range names {
		m := &member{name: name, isPull: strings.HasPrefix(name, "pull"), plane: planes[i+1], admin: newAdmin(t, planes[i+1])}
		target := m.plane
		if m.isPull {
			target = f.plane
		}
		m.link = newLink(t, name, hostOf(target))
		f.createForeignOnMember(m)
		f.members = append(f.members, m)
	}
	return f
}

func newAdmin(t *testing.T, plane *localkube.Plane) client.Client {
	t.Helper()
	config := rest.CopyConfig(plane.Config)
	config.WarningHandler = rest.NoWarnings{} // some kinds that are listed are deprecated
	c, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func hostOf(plane *localkube.Plane) string { return strings.TrimPrefix(plane.Config.Host, "https://") }

// serveChart starts a repository with the chart: a ConfigMap, a hook before and two after each install and upgrade, and
// a hook before the uninstallation. The hook onceHook has another name in each edition, and is not deleted unless it
// fails: a second run fails because its Job exists, also if the log of hooks has no first run because the API server
// was down.
func serveChart(t *testing.T) string {
	t.Helper()
	const hook = `
apiVersion: batch/v1
kind: Job
metadata:
  name: %[1]s
  annotations: {edition: "{{ .Values.edition }}", helm.sh/hook: "%[2]s", helm.sh/hook-delete-policy: %[3]s}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers: [{name: main, image: "example.com/hook:1"}]
`
	repository, err := examples.Repository(examples.Chart{Name: chartProfile, Files: map[string]string{
		"templates/pre.yaml":     fmt.Sprintf(hook, "pre", "pre-install,pre-upgrade", "before-hook-creation"),
		"templates/post.yaml":    fmt.Sprintf(hook, "post", "post-install,post-upgrade", "before-hook-creation"),
		"templates/once.yaml":    fmt.Sprintf(hook, onceHook+"{{ .Values.edition }}", "post-install,post-upgrade", "hook-failed"),
		"templates/delete.yaml":  fmt.Sprintf(hook, deleteHook, "pre-delete", "before-hook-creation"),
		"templates/edition.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + chartObject + "}\ndata: {edition: \"{{ .Values.edition }}\"}\n",
	}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)
	return server.URL
}

// linkedKubeconfig writes the administrator's kubeconfig of a plane with the address of a link.
func (f *fleet) linkedKubeconfig(plane *localkube.Plane, through *link) string {
	f.t.Helper()
	config, err := clientcmd.LoadFromFile(plane.Kubeconfig)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, cluster := range config.Clusters {
		cluster.Server = through.url()
	}
	path := filepath.Join(f.dir, plane.Name+".kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		f.t.Fatal(err)
	}
	return path
}

// createForeignOnMember creates the namespaces of a member with objects of others, beside the objects of the profiles.
// On the first member of each mode, the namespace of the agent also has objects of others.
func (f *fleet) createForeignOnMember(m *member) {
	f.t.Helper()
	m.foreign, m.labelled = foreignLog{}, map[string]types.UID{}
	namespaces := []string{contentNamespace, chartProfile, "theirs"}
	if strings.HasSuffix(m.name, "-1") {
		namespaces = append(namespaces, kube.AgentNamespace)
	}
	for _, namespace := range namespaces {
		f.createNamespace(m.admin, m.foreign, namespace)
		f.createForeign(m.admin, m.foreign, namespace, "theirs")
	}
	f.createForeignClusterRole(m.admin, m.foreign)
	f.createAdopted(m)
	m.hooks = watchHooks(f.t, m.plane)
}

// createForeignOnHub creates objects of others on the hub, in the namespace of the clusters and in the delivery
// namespace of a member that has its own one. They have the name of the kubeconfig of a member in push mode.
func (f *fleet) createForeignOnHub() {
	f.t.Helper()
	const name = "pull-2-sveltos-kubeconfig"
	f.createForeignClusterRole(f.admin, f.foreign)
	f.createForeign(f.admin, f.foreign, clusters, name)
	f.createForeign(f.admin, f.foreign, clusters+"--pull-2", name)
}

// register registers a member.
func (f *fleet) register(m *member, env string) {
	f.t.Helper()
	f.retry("delete the Jobs of the former release", func() error {
		return m.hooks.jobs.DeleteCollection(f.t.Context(), metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}, metav1.ListOptions{})
	})
	m.hooks.reset()
	args := []string{"register", "cluster", "--namespace=" + clusters, "--cluster=" + m.name, "--labels=env=" + env + ",charted=yes"}
	if !m.isPull {
		f.command(f.plane, "", "sveltosctl", append(args, "--kubeconfig="+f.linkedKubeconfig(m.plane, m.link))...)
		return
	}
	ca := f.save("hub-ca.crt", string(f.plane.Config.CAData))
	manifest := f.command(f.plane, "", "sveltosctl", append(args, "--pullmode", "--management-cluster-url="+m.link.url(), "--management-cluster-ca="+ca)...)
	f.command(m.plane, manifest, "kubectl", "apply", "-f", "-")
	f.startAgent(m, manifest)
}

// startAgent runs the agent of a member like its Deployment, but as a process of the test that can be killed.
func (f *fleet) startAgent(m *member, manifest string) {
	f.t.Helper()
	objects, err := kube.DecodeManifest([]byte(manifest))
	if err != nil {
		f.t.Fatal(err)
	}
	var args []string
	for _, object := range objects {
		if object.GetKind() != "Deployment" {
			continue
		}
		raw, err := json.Marshal(object.Object)
		if err != nil {
			f.t.Fatal(err)
		}
		var deployment appsv1.Deployment
		if err := json.Unmarshal(raw, &deployment); err != nil {
			f.t.Fatal(err)
		}
		args = slices.Clone(deployment.Spec.Template.Spec.Containers[0].Args)
	}
	for i, arg := range args {
		if strings.HasPrefix(arg, "--diagnostics-address=") {
			args[i] = "--diagnostics-address=127.0.0.1:0" // all agents use the ports of this machine
		}
	}
	token := f.command(m.plane, "", "kubectl", "create", "token", "sveltos-applier-manager", "-n", kube.AgentNamespace, "--duration=24h")
	f.save(filepath.Join(m.name, "token"), strings.TrimSpace(token))
	f.save(filepath.Join(m.name, "ca.crt"), string(m.plane.Config.CAData))
	f.save(filepath.Join(m.name, "namespace"), kube.AgentNamespace)
	m.agent = run(f.t, "the agent of "+m.name, []string{
		"KUBERNETES_SERVICE_HOST=127.0.0.1", fmt.Sprintf("KUBERNETES_SERVICE_PORT=%d", m.plane.Port()),
		"TOWLINE_SERVICEACCOUNT_DIR=" + filepath.Join(f.dir, m.name), "NAMESPACE=" + kube.AgentNamespace, "KUBECONFIG=",
	}, "towline", args...)
}

func (f *fleet) save(name, text string) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	return path
}

// command runs a program against a plane until it succeeds.
func (f *fleet) command(plane *localkube.Plane, stdin, program string, args ...string) string {
	f.t.Helper()
	var stdout, stderr bytes.Buffer
	f.retry(program+" "+strings.Join(args, " "), func() error {
		stdout.Reset()
		stderr.Reset()
		cmd := exec.CommandContext(f.t.Context(), binaryPath(f.t, program), args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%w: %s", err, stderr.String())
		}
		return nil
	})
	return stdout.String()
}

// retry repeats a change until it succeeds: API servers are down for some seconds.
func (f *fleet) retry(what string, change func() error) {
	f.t.Helper()
	if err := pollUntil(f.t.Context(), retryTimeout, change); err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
}

// pollUntil repeats check until it succeeds. It returns the last error.
func pollUntil(ctx context.Context, timeout time.Duration, check func() error) error {
	deadline := time.After(timeout)
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-deadline:
			return fmt.Errorf("not within %s: %w", timeout, err)
		}
	}
}
