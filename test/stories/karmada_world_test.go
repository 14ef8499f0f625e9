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

// karmadaWork is a Work for one cluster, with one object that the stories look for.
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

// karmadaMembers starts members in which the agent's image runs as our binary.
func (w *world) karmadaMembers(names ...string) []*localkube.Plane {
	w.t.Helper()
	return localkube.SeveralForTest(w.t, names, localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")))
}

// types runs a line in a shell, as somebody does who has our programs on his path and the plane's kubeconfig in his
// environment.
func (w *world) types(plane *localkube.Plane, line string) *exec.Cmd {
	cmd := exec.CommandContext(w.t.Context(), "sh", "-c", "exec "+line)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig, "PATH="+filepath.Dir(w.binary("kubectl"))+":"+os.Getenv("PATH"))
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// typed is types for a line that must succeed. It returns the standard output.
func (w *world) typed(plane *localkube.Plane, line string) string {
	w.t.Helper()
	out, err := output(w.types(plane, line))
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// token makes a bootstrap token on the hub and returns the register command that is printed with it.
func (w *world) token(flags ...string) string {
	w.t.Helper()
	line := w.typed(w.hub, strings.Join(append([]string{"karmadactl token create --print-register-command"}, flags...), " "))
	return strings.TrimSuffix(line, "\n")
}

// joins brings a member in by push, under the name of its control plane.
func (w *world) joins(plane *localkube.Plane) {
	w.t.Helper()
	w.typed(w.hub, fmt.Sprintf("karmadactl join %s --kubeconfig=%s --cluster-kubeconfig=%s", plane.Name, w.hub.Kubeconfig, plane.Kubeconfig))
	w.clusterReady(plane.Name, "Push")
}

// registers brings a member in by pull, under the name of its control plane.
func (w *world) registers(plane *localkube.Plane, flags ...string) {
	w.t.Helper()
	w.typed(plane, strings.Join(append([]string{w.token()}, flags...), " "))
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Errorf("right after it was registered: %v", err)
	}
}

// wantCluster says what is wrong unless `kubectl get clusters` says so of a cluster.
func (w *world) wantCluster(name, mode, ready string) error {
	out, err := w.try(w.hub, "kubectl", "get", "clusters")
	if err != nil {
		return err
	}
	version := "v1.36.3"
	if ready != "True" {
		version = "*"
	}
	return wantFields(w.row(out, name), name, version, mode, ready, "*")
}

func (w *world) clusterReady(name, mode string) {
	w.t.Helper()
	w.eventually(name+" is ready", func() error { return w.wantCluster(name, mode, "True") })
}

// cluster reads a Cluster.
func (w *world) cluster(name string) (*clusterv1alpha1.Cluster, error) {
	found := &clusterv1alpha1.Cluster{}
	err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Name: name}, found)
	return found, err
}

// clusterBecomes waits for a status of Ready more closely than kubectl can, and returns how long it took.
func (w *world) clusterBecomes(name, status string) time.Duration {
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

// sends gives a cluster a Work, and waits until its object is there.
func (w *world) sends(plane *localkube.Plane, text string) {
	w.t.Helper()
	w.apply(w.hub, fmt.Sprintf(karmadaWork, plane.Name, text))
	w.eventually(plane.Name+" has what the Work says", func() error {
		data, err := w.data(plane, "default", "delivered")
		if err == nil && data["text"] != text {
			err = fmt.Errorf("it says %q, want %q", data["text"], text)
		}
		return err
	})
}

// wantLeft checks that neither side has anything of a cluster any more, and that the member is rid of agents and of
// what a registration makes.
func (w *world) wantLeft(plane *localkube.Plane) {
	w.t.Helper()
	w.wantNoCluster(plane.Name)
	w.wantBare(plane)
}

// wantNoCluster checks that the hub has nothing of a cluster any more.
func (w *world) wantNoCluster(name string) {
	w.t.Helper()
	w.eventually("the hub has nothing of "+name, func() error {
		if found := w.karmadaTraces(name); len(found) > 0 {
			return fmt.Errorf("found %q", found)
		}
		return nil
	})
}

// karmadaTraces lists the hub's objects that name a cluster.
func (w *world) karmadaTraces(name string) []string {
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

// wantBare checks that a member has nothing that a registration, or the fleet, made.
func (w *world) wantBare(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually(plane.Name+" is as it was", func() error {
		kinds := "namespaces,serviceaccounts,secrets,clusterroles,clusterrolebindings,roles,rolebindings,deployments,pods,configmaps,leases"
		out, err := w.try(plane, "kubectl", "get", kinds, "-A", "--no-headers", "-o", "custom-columns=KIND:.kind,NS:.metadata.namespace,NAME:.metadata.name")
		if err != nil {
			return err
		}
		var found []string
		for line := range strings.Lines(out) {
			if strings.Contains(line, "karmada-") || strings.Contains(line, " delivered") || strings.Contains(line, "towline") {
				if !strings.Contains(line, "kube-root-ca.crt") && !strings.Contains(line, " default\n") { // every namespace has those
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

// agentConfig reads the agent's way to the hub from its member, and the kubeconfig that says it.
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

// stopAgent stops the agent of a member, by its Deployment.
func (w *world) stopAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=0")
	w.eventually("the agent of "+plane.Name+" stops", func() error {
		out, err := w.try(plane, "kubectl", "get", "pods", "-n", agentSpace, "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
}

// dumped are the kinds of objects that a registration, or an attack on one, could change.
func dumped() []string {
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

// dump returns what a control plane has: every object of those kinds as JSON, by kind and name, without what changes by
// itself.
func (w *world) dump(plane *localkube.Plane) map[string]string {
	w.t.Helper()
	c, found := w.client(plane), map[string]string{}
	for _, kind := range dumped() {
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
			if passing(&item) {
				continue
			}
			still(&item)
			text, err := json.Marshal(item.Object)
			if err != nil {
				w.t.Fatal(err)
			}
			found[strings.TrimSpace(fmt.Sprintf("%s %s/%s", path.Base(kind), item.GetNamespace(), item.GetName()))] = string(text)
		}
	}
	return found
}

// passing says whether an object comes and goes with requests: bootstrap tokens, what belongs to requests for
// certificates, and the Leases of Kubernetes itself.
func passing(object *unstructured.Unstructured) bool {
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

// still takes away from an object what changes by itself: its status, the times of heartbeats, and the signatures of
// cluster-info.
func still(object *unstructured.Unstructured) {
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

// settled waits until a control plane changes no more by itself, and returns what it has.
func (w *world) settled(plane *localkube.Plane) map[string]string {
	w.t.Helper()
	last := map[string]string(nil)
	err := wait.PollUntilContextTimeout(w.t.Context(), 500*time.Millisecond, waitTimeout, true, func(context.Context) (bool, error) {
		now := w.dump(plane)
		same := last != nil && differences(last, now) == nil
		last = now
		return same, nil
	})
	if err != nil {
		w.t.Fatalf("%s does not come to rest: %v", plane.Name, err)
	}
	return last
}

// differences says what is different, if anything is.
func differences(before, after map[string]string) error {
	var found []error
	for key, was := range before {
		switch is, ok := after[key]; {
		case !ok:
			found = append(found, fmt.Errorf("%s is gone", key))
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

// wantUnchanged waits until a control plane is what it was. What is taken back may take a moment.
func (w *world) wantUnchanged(what string, plane *localkube.Plane, before map[string]string) {
	w.t.Helper()
	w.eventually(what+" leaves "+plane.Name+" as it was", func() error { return differences(before, w.dump(plane)) })
}

// exits checks the exit code of a command that was run with output, and that its error is one line.
func exits(t *testing.T, err error, code int, texts ...string) {
	t.Helper()
	wantError(t, err, append([]string{"error: "}, texts...)...)
	exit := &exec.ExitError{}
	if errors.As(err, &exit) && exit.ExitCode() != code {
		t.Errorf("exit code %d, want %d: %v", exit.ExitCode(), code, err)
	}
}
