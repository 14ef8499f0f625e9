package charts

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// poll is the interval between two checks of a wait.
	poll = 200 * time.Millisecond
	// deployLimit is the maximum time of a deployment, and of a removal.
	deployLimit = 3 * time.Minute
	// failLimit is the maximum time for which a deployment may fail, with retries.
	failLimit = 30 * time.Second
	// settleTime is the time for which checkRevision waits for additional revisions.
	settleTime = 3 * time.Second
	// emptyLimit is the maximum time of deleteLeftovers.
	emptyLimit = time.Minute
)

func fileServer(content map[string][]byte) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, ok := content[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(raw) // the client reports a connection that breaks
	})
}

// hub is a running Towline hub with a chart repository.
type hub struct {
	plane      *localkube.Plane
	client     client.Client
	repository string
	members    int
}

// member is a member cluster.
type member struct {
	name, mode string
	// initial is its inventory before the first chart.
	initial map[string]bool

	plane     *localkube.Plane
	discovery discovery.DiscoveryInterface
	metadata  metadata.Interface
	objects   dynamic.Interface
	mapper    *kube.Mapper
}

func newHub(t *testing.T, archives []string) *hub {
	t.Helper()
	h := &hub{plane: localkube.ForTest(t, localkube.Named("hub")), repository: serve(t, archives)}
	var err error
	if h.client, err = client.New(h.plane.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "hub.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), binary(t, "towline"), "hub", "--install-crds", "--diagnostics-address=127.0.0.1:0",
		"--health-address=127.0.0.1:0", "--cache-dir="+filepath.Join(t.TempDir(), "cache"))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+h.plane.Kubeconfig)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // an error means that it has ended
		_ = cmd.Wait()         // it was killed
		_ = log.Close()        // the process has ended
	})
	h.eventually(t, "the hub registers itself", func() error { return h.wantReady("mgmt", "mgmt") })
	return h
}

// newMember starts and registers a member.
func (h *hub) newMember(t *testing.T, mode string) *member {
	t.Helper()
	h.members++
	name := fmt.Sprintf("%s-%d", mode, h.members)
	plane := localkube.ForTest(t, localkube.Named(name), localkube.WithExec(join.DefaultAgentImage, binary(t, "towline-agent")))
	m := &member{
		name: name, mode: mode, plane: plane, discovery: discovery.NewDiscoveryClientForConfigOrDie(plane.Config),
		metadata: metadata.NewForConfigOrDie(plane.Config), objects: dynamic.NewForConfigOrDie(plane.Config),
	}
	m.mapper = kube.NewMapper(m.discovery)
	register := []string{"register", "cluster", "--namespace=" + name, "--cluster=" + name, "--labels=member=" + name}
	if mode == "pull" {
		apply(t, plane, mustRun(t, h.plane, "sveltosctl", append(register, "--pullmode")...))
	} else {
		mustRun(t, h.plane, "kubectl", "create", "namespace", name)
		mustRun(t, h.plane, "sveltosctl", append(register, "--kubeconfig="+plane.Kubeconfig)...)
	}
	h.eventually(t, name+" is ready", func() error { return h.wantReady(name, name) })
	m.initial = m.inventory(t)
	return m
}

// removeMember stops a member and deletes its SveltosCluster.
func (h *hub) removeMember(t *testing.T, m *member) {
	t.Helper()
	if err := m.plane.Stop(); err != nil {
		t.Error(err)
	}
	_, err := run(t.Context(), h.plane, "", "kubectl", "delete", "sveltoscluster", "-n", m.name, m.name, "--wait=false")
	if err != nil {
		t.Error(err)
	}
}

// changeLabel changes a label of the member that no profile selects.
func (h *hub) changeLabel(t *testing.T, m *member) {
	t.Helper()
	mustRun(t, h.plane, "kubectl", "label", "sveltoscluster", "-n", m.name, m.name, "--overwrite", "touched="+strconv.FormatInt(time.Now().UnixNano(), 10))
}

func (h *hub) wantReady(namespace, name string) error {
	out, err := run(context.Background(), h.plane, "", "kubectl", "get", "sveltosclusters", "-n", namespace, name, "-o", "jsonpath={.status.ready}")
	if err == nil && out != "true" {
		return fmt.Errorf("cluster %s is not ready", name)
	}
	return err
}

// deploy applies the profile of the chart.
func (c *comparison) deploy(values string) {
	c.Helper()
	profile := map[string]any{
		"apiVersion": "config.projectsveltos.io/v1beta1", "kind": "ClusterProfile", "metadata": map[string]any{"name": c.profile},
		"spec": map[string]any{
			"clusterSelector": map[string]any{"matchLabels": map[string]string{"member": c.member.name}}, "syncMode": "Continuous",
			"helmCharts": []any{map[string]any{
				"repositoryURL": c.hub.repository, "repositoryName": "compared", "chartName": "compared/" + c.chart, "chartVersion": c.at,
				"releaseName": c.chart, "releaseNamespace": namespace, "helmChartAction": "Install", "values": values,
			}},
		},
	}
	raw, err := json.Marshal(profile)
	if err != nil {
		c.Fatal(err)
	}
	apply(c.T, c.hub.plane, string(raw))
}

func (h *hub) deleteProfile(t *testing.T, name string) {
	t.Helper()
	mustRun(t, h.plane, "kubectl", "delete", "clusterprofile", name, "--wait=false")
}

// summaries returns the feature summaries of a member.
func (h *hub) summaries(m *member) (features []configv1beta1.FeatureSummary, found bool, err error) {
	var list configv1beta1.ClusterSummaryList
	if err := h.client.List(context.Background(), &list, client.InNamespace(m.name)); err != nil {
		return nil, false, err
	}
	for i := range list.Items {
		features = append(features, list.Items[i].Status.FeatureSummaries...)
	}
	return features, len(list.Items) > 0, nil
}

// awaitProvisioned waits until the profile is provisioned on the member. It returns the problem if that does not happen
// in time, or if the deployment fails for failLimit.
func (h *hub) awaitProvisioned(m *member) string {
	problem, failing := "", time.Time{}
	await(deployLimit, func() string {
		features, _, err := h.summaries(m)
		if err != nil || len(features) == 0 {
			problem = fmt.Sprintf("no summary yet (%v)", err)
			return problem
		}
		problem = ""
		for _, feature := range features {
			if feature.Status != libv1beta1.FeatureStatusProvisioned {
				problem = fmt.Sprintf("%s: %s", feature.Status, feature.FailureMessage)
			}
		}
		switch {
		case !strings.HasPrefix(problem, "Failed"):
			failing = time.Time{}
		case failing.IsZero():
			failing = time.Now()
		case time.Since(failing) > failLimit:
			return "" // stop the wait; the problem stays
		}
		return problem
	})
	return problem
}

// awaitNoSummaries waits until the member has no summary.
func (h *hub) awaitNoSummaries(m *member, limit time.Duration) string {
	return await(limit, func() string {
		features, found, err := h.summaries(m)
		if err != nil || found {
			return fmt.Sprintf("summary is still there: %v (%v)", features, err)
		}
		return ""
	})
}

// awaitRevision waits until a revision of the release is deployed.
func (m *member) awaitRevision(t *testing.T, name string, revision int, limit time.Duration) string {
	t.Helper()
	return await(limit, func() string {
		list, err := m.metadata.Resource(secrets()).Namespace(namespace).List(t.Context(), metav1.ListOptions{
			LabelSelector: fmt.Sprintf("owner=helm,name=%s,version=%d,status=deployed", name, revision),
		})
		if err != nil || len(list.Items) == 0 {
			return fmt.Sprintf("revision %d is not deployed (%v)", revision, err)
		}
		return ""
	})
}

func await(limit time.Duration, check func() (problem string)) string {
	problem := ""
	_ = wait.PollUntilContextTimeout(context.Background(), poll, limit, true, func(context.Context) (bool, error) {
		problem = check()
		return problem == "", nil
	}) // the problem is the error
	return problem
}

func (h *hub) eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	problem := await(3*time.Minute, func() string {
		if err := check(); err != nil {
			return err.Error()
		}
		return ""
	})
	if problem != "" {
		t.Fatalf("%s: %s", what, problem)
	}
}

func binary(t *testing.T, name string) string {
	t.Helper()
	path, err := localkube.Binary(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// run runs a program with the kubeconfig of a control plane and returns its standard output.
func run(ctx context.Context, plane *localkube.Plane, stdin, program string, args ...string) (string, error) {
	path, err := localkube.Binary(program)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

func mustRun(t *testing.T, plane *localkube.Plane, program string, args ...string) string {
	t.Helper()
	out, err := run(t.Context(), plane, "", program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func apply(t *testing.T, plane *localkube.Plane, manifest string) {
	t.Helper()
	if _, err := run(t.Context(), plane, manifest, "kubectl", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}
