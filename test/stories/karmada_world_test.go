package stories

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
)

const (
	agentSpace  = "karmada-system"
	agentSecret = "karmada-kubeconfig"
)

// karmadaWork is a Work for one cluster, with one object.
const karmadaWork = `
apiVersion: work.karmada.io/v1alpha1
kind: Work
metadata:
  name: delivered
  namespace: karmada-es-%s
  finalizers: [karmada.io/execution-controller]
spec:
  workload:
    manifests:
    - apiVersion: v1
      kind: ConfigMap
      metadata: {namespace: default, name: delivered}
      data: {text: %q}
`

// karmadaMembers starts members. The agent's image runs our program.
func (w *world) karmadaMembers(names ...string) []*localkube.Plane {
	w.t.Helper()
	return localkube.SeveralForTest(w.t, names, localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")))
}

// shellCommand runs a line in a shell, with Towline's programs in PATH and the plane's kubeconfig in KUBECONFIG.
func (w *world) shellCommand(plane *localkube.Plane, line string) *exec.Cmd {
	cmd := exec.CommandContext(w.t.Context(), "sh", "-c", "exec "+line)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig, "PATH="+filepath.Dir(w.binary("kubectl"))+":"+os.Getenv("PATH"))
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// runShell is shellCommand for a line that must succeed. It returns the standard output.
func (w *world) runShell(plane *localkube.Plane, line string) string {
	w.t.Helper()
	out, err := output(w.shellCommand(plane, line))
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// createTokenCommand creates a bootstrap token on the hub and returns the printed register command.
func (w *world) createTokenCommand(flags ...string) string {
	w.t.Helper()
	line := w.runShell(w.hub, strings.Join(append([]string{"karmadactl token create --print-register-command"}, flags...), " "))
	return strings.TrimSuffix(line, "\n")
}

// joinMember joins a member, under the name of its control plane.
func (w *world) joinMember(plane *localkube.Plane) {
	w.t.Helper()
	w.runShell(w.hub, fmt.Sprintf("karmadactl join %s --kubeconfig=%s --cluster-kubeconfig=%s", plane.Name, w.hub.Kubeconfig, plane.Kubeconfig))
	w.awaitClusterReady(plane.Name, "Push")
}

// registerMember registers a member, under the name of its control plane.
func (w *world) registerMember(plane *localkube.Plane, flags ...string) {
	w.t.Helper()
	w.runShell(plane, strings.Join(append([]string{w.createTokenCommand()}, flags...), " "))
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Errorf("right after the registration: %v", err)
	}
}

// wantCluster returns an error unless `kubectl get clusters` prints this line for a cluster.
func (w *world) wantCluster(name, mode, ready string) error {
	out, err := w.try(w.hub, "kubectl", "get", "clusters")
	if err != nil {
		return err
	}
	version := "v1.36.3"
	if ready != "True" {
		version = "*"
	}
	return wantFields(w.tableRow(out, name), name, version, mode, ready, "*")
}

func (w *world) awaitClusterReady(name, mode string) {
	w.t.Helper()
	w.eventually(name+" is ready", func() error { return w.wantCluster(name, mode, "True") })
}

// readCluster reads a Cluster.
func (w *world) readCluster(name string) (*clusterv1alpha1.Cluster, error) {
	found := &clusterv1alpha1.Cluster{}
	err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Name: name}, found)
	return found, err
}

// awaitClusterStatus waits for a status of Ready with short pauses, and returns the time that it took.
func (w *world) awaitClusterStatus(name, status string) time.Duration {
	w.t.Helper()
	began, c := time.Now(), w.client(w.hub)
	err := wait.PollUntilContextTimeout(w.t.Context(), 20*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
		found := &clusterv1alpha1.Cluster{}
		err := c.Get(ctx, client.ObjectKey{Name: name}, found)
		ready := meta.FindStatusCondition(found.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
		return err == nil && ready != nil && string(ready.Status) == status, client.IgnoreNotFound(err)
	})
	if err != nil {
		w.t.Fatalf("Ready of cluster %s is not %s within %s: %v", name, status, waitTimeout, err)
	}
	return time.Since(began)
}

// propagateWork creates a Work for a cluster, and waits until its object is on the member.
func (w *world) propagateWork(plane *localkube.Plane, text string) {
	w.t.Helper()
	w.apply(w.hub, fmt.Sprintf(karmadaWork, plane.Name, text))
	w.eventually(plane.Name+" has the object of the Work", func() error {
		data, err := w.data(plane, "default", "delivered")
		if err == nil && data["text"] != text {
			err = fmt.Errorf("its text is %q, want %q", data["text"], text)
		}
		return err
	})
}

// wantRemoved checks that the hub has no object of a cluster, and that the member has no agent and no object of a
// registration.
func (w *world) wantRemoved(plane *localkube.Plane) {
	w.t.Helper()
	w.wantNoCluster(plane.Name)
	w.wantCleanMember(plane)
}

// wantNoCluster waits until the hub has no object of a cluster.
func (w *world) wantNoCluster(name string) {
	w.t.Helper()
	w.eventually("the hub has no object of "+name, func() error {
		if found := w.listKarmadaObjects(name); len(found) > 0 {
			return fmt.Errorf("found %q", found)
		}
		return nil
	})
}

// listKarmadaObjects lists the hub's objects that name a cluster.
func (w *world) listKarmadaObjects(name string) []string {
	w.t.Helper()
	var found []string
	for key := range w.dump(w.hub) {
		for part := range strings.FieldsFuncSeq(key, func(r rune) bool { return r == ' ' || r == '/' || r == ':' || r == '.' }) {
			if part == name || strings.HasSuffix(part, "-es-"+name) || strings.HasPrefix(part, name+"-impersonator") {
				found = append(found, key)
				break
			}
		}
	}
	return found
}

// wantCleanMember waits until a member has no object of a registration or of the fleet.
func (w *world) wantCleanMember(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually(plane.Name+" has no object of Towline", func() error {
		kinds := "namespaces,serviceaccounts,secrets,clusterroles,clusterrolebindings,roles,rolebindings,deployments,pods,configmaps,leases"
		out, err := w.try(plane, "kubectl", "get", kinds, "-A", "--no-headers", "-o", "custom-columns=KIND:.kind,NS:.metadata.namespace,NAME:.metadata.name")
		if err != nil {
			return err
		}
		var found []string
		for line := range strings.Lines(out) {
			if strings.Contains(line, "karmada-") || strings.Contains(line, " delivered") || strings.Contains(line, "towline") {
				if !strings.Contains(line, "kube-root-ca.crt") && !strings.Contains(line, " default\n") { // every namespace has these
					found = append(found, strings.Join(strings.Fields(line), " "))
				}
			}
		}
		if len(found) > 0 {
			return fmt.Errorf("found %q", found)
		}
		return nil
	})
}

// agentConfig reads the agent's kubeconfig for the hub from its member.
func (w *world) agentConfig(plane *localkube.Plane) (*rest.Config, []byte) {
	w.t.Helper()
	secret := &corev1.Secret{}
	if err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: agentSpace, Name: agentSecret}, secret); err != nil {
		w.t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[agentSecret])
	if err != nil {
		w.t.Fatal(err)
	}
	config.QPS = -1
	return config, secret.Data[agentSecret]
}

// stopAgent scales the Deployment of a member's agent to zero.
func (w *world) stopAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=0")
	w.eventually("the agent of "+plane.Name+" stops", func() error {
		out, err := w.try(plane, "kubectl", "get", "pods", "-n", agentSpace, "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("pods still exist: %s", out)
		}
		return err
	})
}

// dumpedKinds are the kinds of objects that a registration, or an attack on one, can change.
func dumpedKinds() []string {
	return []string{
		"v1/Namespace", "v1/ServiceAccount", "v1/Secret", "v1/ConfigMap", "coordination.k8s.io/v1/Lease", "apps/v1/Deployment",
		"rbac.authorization.k8s.io/v1/Role", "rbac.authorization.k8s.io/v1/RoleBinding",
		"rbac.authorization.k8s.io/v1/ClusterRole", "rbac.authorization.k8s.io/v1/ClusterRoleBinding",
		"cluster.karmada.io/v1alpha1/Cluster", "work.karmada.io/v1alpha1/Work",
		"lib.projectsveltos.io/v1beta1/ConfigurationGroup", "lib.projectsveltos.io/v1beta1/ConfigurationBundle",
		"lib.projectsveltos.io/v1beta1/SveltosCluster", "config.projectsveltos.io/v1beta1/ClusterSummary",
		"admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding",
	}
}

// dump returns every object of dumpedKinds as JSON, by kind and name. It omits fields and objects that change by
// themselves.
func (w *world) dump(plane *localkube.Plane) map[string]string {
	w.t.Helper()
	c, found := w.client(plane), map[string]string{}
	for _, kind := range dumpedKinds() {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(schema.FromAPIVersionAndKind(path.Dir(kind), path.Base(kind)+"List"))
		err := c.List(w.t.Context(), list)
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue // a member has no Clusters
		}
		if err != nil {
			w.t.Fatal(err)
		}
		for _, item := range list.Items {
			if isTransient(&item) {
				continue
			}
			removeTransientFields(&item)
			text, err := json.Marshal(item.Object)
			if err != nil {
				w.t.Fatal(err)
			}
			found[strings.TrimSpace(fmt.Sprintf("%s %s/%s", path.Base(kind), item.GetNamespace(), item.GetName()))] = string(text)
		}
	}
	return found
}

// isTransient returns whether an object is created and deleted with requests: bootstrap tokens, objects of requests for
// certificates, and the Leases of Kubernetes itself.
func isTransient(object *unstructured.Unstructured) bool {
	if object.GetKind() == "Lease" && strings.HasPrefix(object.GetNamespace(), "kube-") {
		return true
	}
	for _, owner := range object.GetOwnerReferences() {
		if owner.Kind == "CertificateSigningRequest" {
			return true
		}
	}
	return strings.HasPrefix(object.GetName(), "bootstrap-token-")
}

// removeTransientFields removes the fields that change by themselves: the status, the times of heartbeats, and the
// signatures of cluster-info.
func removeTransientFields(object *unstructured.Unstructured) {
	object.SetManagedFields(nil)
	object.SetResourceVersion("")
	unstructured.RemoveNestedField(object.Object, "status")
	unstructured.RemoveNestedField(object.Object, "spec", "renewTime")
	if object.GetName() == "cluster-info" {
		unstructured.RemoveNestedField(object.Object, "data")
	}
	if object.GetKind() == "Deployment" {
		annotations := object.GetAnnotations()
		delete(annotations, "deployment.kubernetes.io/revision")
		object.SetAnnotations(annotations)
		object.SetGeneration(0)
	}
}

// awaitStable waits until the objects of a control plane no longer change by themselves, and returns them.
func (w *world) awaitStable(plane *localkube.Plane) map[string]string {
	w.t.Helper()
	last := map[string]string(nil)
	err := wait.PollUntilContextTimeout(w.t.Context(), 500*time.Millisecond, waitTimeout, true, func(context.Context) (bool, error) {
		now := w.dump(plane)
		same := last != nil && differences(last, now) == nil
		last = now
		return same, nil
	})
	if err != nil {
		w.t.Fatalf("the objects of %s still change: %v", plane.Name, err)
	}
	return last
}

// differences returns an error with the differences, nil if there are none.
func differences(before, after map[string]string) error {
	var found []error
	for key, was := range before {
		switch is, ok := after[key]; {
		case !ok:
			found = append(found, fmt.Errorf("%s was deleted", key))
		case is != was:
			found = append(found, fmt.Errorf("%s was %s and is %s", key, was, is))
		}
	}
	for key := range after {
		if _, ok := before[key]; !ok {
			found = append(found, fmt.Errorf("%s is new", key))
		}
	}
	return errors.Join(found...)
}

// wantUnchanged waits until the objects of a control plane are the same as before. A rollback can take a moment.
func (w *world) wantUnchanged(what string, plane *localkube.Plane, before map[string]string) {
	w.t.Helper()
	w.eventually(what+" leaves "+plane.Name+" as it was", func() error { return differences(before, w.dump(plane)) })
}

// wantExit checks the exit code of a command that output ran, and that its error is one line.
func wantExit(t *testing.T, err error, code int, texts ...string) {
	t.Helper()
	wantError(t, err, append([]string{"error: "}, texts...)...)
	exit := &exec.ExitError{}
	if errors.As(err, &exit) && exit.ExitCode() != code {
		t.Errorf("exit code %d, want %d: %v", exit.ExitCode(), code, err)
	}
}
