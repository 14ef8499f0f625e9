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

// looseAgent is a pull member whose agent is a process of the story and not of a pod: it can be killed, and it sees the
// hub and its own cluster through gates. Everything else is as the printed manifest says.
type looseAgent struct {
	w              *world
	plane          *localkube.Plane
	hub, member    *gate
	args, env      []string
	process        *process
	namespace      string
	cluster        string
	credentialsDir string
}

// looseAgent registers a new pull member, runs its agent and waits until it is ready.
func (w *world) looseAgent(namespace, cluster, labels string) *looseAgent {
	w.t.Helper()
	// Nothing is said about the agent's image, so that its pod is reported as running, and runs nothing.
	a := &looseAgent{w: w, plane: localkube.ForTest(w.t, localkube.Named(cluster)), namespace: namespace, cluster: cluster}
	a.hub, a.member = w.gate(rest.AnonymousClientConfig(w.hub.Config)), w.gate(rest.AnonymousClientConfig(a.plane.Config))
	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--pullmode", "--labels="+labels)
	w.kubectlApply(a.plane, a.readManifest(manifest))
	a.writeCredentials()
	a.start()
	w.ready(namespace, cluster)
	return a
}

// readManifest takes the agent's arguments out of the manifest and returns it with the way to the hub leading through
// the gate.
func (a *looseAgent) readManifest(manifest string) string {
	a.w.t.Helper()
	documents := strings.Split(manifest, "---\n")
	for i, document := range documents {
		switch {
		case strings.Contains(document, "kind: Deployment\n"):
			var deployment appsv1.Deployment
			a.parse(document, &deployment)
			a.args = slices.Clone(deployment.Spec.Template.Spec.Containers[0].Args)
		case strings.Contains(document, "kind: Secret\n"):
			documents[i] = a.detour(document)
		}
	}
	return strings.Join(documents, "---\n")
}

func (a *looseAgent) parse(document string, into any) {
	a.w.t.Helper()
	if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
		a.w.t.Fatal(err)
	}
}

// detour returns the Secret with a kubeconfig that leads through the gate.
func (a *looseAgent) detour(document string) string {
	a.w.t.Helper()
	var secret corev1.Secret
	a.parse(document, &secret)
	config, err := clientcmd.Load(secret.Data[join.KubeconfigKey])
	if err != nil {
		a.w.t.Fatal(err)
	}
	raw, err := clientcmd.Write(*a.hub.through(config))
	if err != nil {
		a.w.t.Fatal(err)
	}
	encoded := base64.StdEncoding.EncodeToString(raw)
	return strings.Replace(document, base64.StdEncoding.EncodeToString(secret.Data[join.KubeconfigKey]), encoded, 1)
}

// writeCredentials writes what a pod finds at /var/run/secrets, with the gate's certificate in place of the API
// server's.
func (a *looseAgent) writeCredentials() {
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

// start starts the agent, with the arguments of the manifest. Ports of its own would be taken by other stories.
func (a *looseAgent) start() {
	a.w.t.Helper()
	args := slices.Clone(a.args)
	for i, arg := range args {
		if strings.HasPrefix(arg, "--diagnostics-address=") {
			args[i] = "--diagnostics-address=127.0.0.1:0"
		}
	}
	a.process = a.w.startWith("agent of "+a.cluster, a.env, "towline", args...)
}
