package stories

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
)

// processAgent is a pull member whose agent is a process of the story instead of a pod: the story can kill it, and it
// connects to the hub and to its own cluster through gates. It has the arguments of the printed manifest.
type processAgent struct {
	w              *world
	plane          *localkube.Plane
	hub, member    *gate
	args, env      []string
	process        *process
	namespace      string
	cluster        string
	credentialsDir string
}

// startProcessAgent registers a new pull member, runs its agent and waits until the cluster is ready.
func (w *world) startProcessAgent(namespace, cluster, labels string) *processAgent {
	w.t.Helper()
	// No program is registered for the agent's image: its pod is reported as running, and runs nothing.
	a := &processAgent{w: w, plane: localkube.ForTest(w.t, localkube.Named(cluster)), namespace: namespace, cluster: cluster}
	a.hub, a.member = w.startGate(rest.AnonymousClientConfig(w.hub.Config)), w.startGate(rest.AnonymousClientConfig(a.plane.Config))
	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--pullmode", "--labels="+labels)
	w.kubectlApply(a.plane, a.readManifest(manifest))
	a.writeCredentials()
	a.start()
	w.awaitReady(namespace, cluster)
	return a
}

// readManifest reads the agent's arguments from the manifest, and returns the manifest with the gate as the address of
// the hub.
func (a *processAgent) readManifest(manifest string) string {
	a.w.t.Helper()
	documents := strings.Split(manifest, "---\n")
	for i, document := range documents {
		switch {
		case strings.Contains(document, "kind: Deployment\n"):
			var deployment appsv1.Deployment
			a.parse(document, &deployment)
			a.args = slices.Clone(deployment.Spec.Template.Spec.Containers[0].Args)
		case strings.Contains(document, "kind: Secret\n"):
			documents[i] = a.gatedKubeconfig(document)
		}
	}
	return strings.Join(documents, "---\n")
}

func (a *processAgent) parse(document string, into any) {
	a.w.t.Helper()
	if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
		a.w.t.Fatal(err)
	}
}

// gatedKubeconfig returns the Secret with a kubeconfig for the gate.
func (a *processAgent) gatedKubeconfig(document string) string {
	a.w.t.Helper()
	var secret corev1.Secret
	a.parse(document, &secret)
	config, err := clientcmd.Load(secret.Data[join.KubeconfigKey])
	if err != nil {
		a.w.t.Fatal(err)
	}
	raw, err := clientcmd.Write(*a.hub.throughGate(config))
	if err != nil {
		a.w.t.Fatal(err)
	}
	encoded := base64.StdEncoding.EncodeToString(raw)
	return strings.Replace(document, base64.StdEncoding.EncodeToString(secret.Data[join.KubeconfigKey]), encoded, 1)
}

// writeCredentials writes the files of a pod's /var/run/secrets, with the certificate of the gate instead of the API
// server's.
func (a *processAgent) writeCredentials() {
	a.w.t.Helper()
	a.credentialsDir = filepath.Join(a.w.dir, a.cluster)
	if err := os.MkdirAll(a.credentialsDir, 0o700); err != nil {
		a.w.t.Fatal(err)
	}
	token := a.w.kubectl(a.plane, "create", "token", "sveltos-applier-manager", "-n", "projectsveltos", "--duration=2h")
	a.w.save(filepath.Join(a.cluster, "token"), strings.TrimSpace(token))
	a.w.save(filepath.Join(a.cluster, "ca.crt"), string(a.member.ca()))
	a.w.save(filepath.Join(a.cluster, "namespace"), "projectsveltos")
	a.env = []string{
		"KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=" + a.member.port(),
		"TOWLINE_SERVICEACCOUNT_DIR=" + a.credentialsDir, "NAMESPACE=projectsveltos", "KUBECONFIG=",
	}
}

// start starts the agent with the arguments of the manifest, but on a free port: other stories run agents, too.
func (a *processAgent) start() {
	a.w.t.Helper()
	args := slices.Clone(a.args)
	for i, arg := range args {
		if strings.HasPrefix(arg, "--diagnostics-address=") {
			args[i] = "--diagnostics-address=127.0.0.1:0"
		}
	}
	a.process = a.w.startWith("agent of "+a.cluster, a.env, "towline", args...)
}
