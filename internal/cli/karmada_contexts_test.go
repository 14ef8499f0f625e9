package cli_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// unreachable is a context without an API server.
const unreachable = "dead-end"

// writeMergedKubeconfig writes one kubeconfig with the contexts of hub and member and with unreachable as the current
// context, and returns its path.
func (w *hubAndMember) writeMergedKubeconfig(t *testing.T) string {
	t.Helper()
	merged := clientcmdapi.NewConfig()
	for _, file := range w.files {
		config, err := clientcmd.LoadFromFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for name := range config.Contexts {
			merged.Contexts[name], merged.Clusters[name], merged.AuthInfos[name] = config.Contexts[name], config.Clusters[name], config.AuthInfos[name]
		}
	}
	merged.Clusters[unreachable] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}
	merged.Contexts[unreachable] = &clientcmdapi.Context{Cluster: unreachable, AuthInfo: "hub-admin"}
	merged.CurrentContext = unreachable
	path := filepath.Join(t.TempDir(), "several")
	if err := clientcmd.WriteToFile(*merged, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// karmadactl runs karmadactl with the arguments in line.
func karmadactl(t *testing.T, line string) result {
	t.Helper()
	return run(t, append([]string{"karmadactl"}, strings.Fields(line)...)...)
}

// TestContextsOfKarmadactl is one test, since its parts share a hub, a member and KUBECONFIG.
func TestContextsOfKarmadactl(t *testing.T) {
	w := startHubAndMember(t)
	mergedFile := w.writeMergedKubeconfig(t)
	t.Setenv("KUBECONFIG", mergedFile)
	t.Run("join", func(t *testing.T) { w.joinsByContext(t) })
	t.Run("impersonation", func(t *testing.T) { w.joinsWithImpersonation(t) })
	t.Run("unjoin", func(t *testing.T) { w.unjoinsByContext(t) })
	t.Run("printed line", func(t *testing.T) { w.registersByThePrintedLine(t) })
	t.Run("register", func(t *testing.T) { w.checksByContext(t) })
	t.Run("preflight", func(t *testing.T) { w.failsPreflight(t) })
	t.Run("unregister", func(t *testing.T) { w.unchecksByContext(t) })
}

// wantUnreachable fails the test unless the command connects to unreachable.
func wantUnreachable(t *testing.T, line string) {
	t.Helper()
	if got := karmadactl(t, line); got.code != 1 || !strings.Contains(got.err, "127.0.0.1:1") {
		t.Errorf("%s: got %+v, want a failed connection to 127.0.0.1:1", line, got)
	}
}

func (w *hubAndMember) joinsByContext(t *testing.T) {
	t.Helper()
	wantUnreachable(t, "join shop --dry-run")
	wantUnreachable(t, "join shop --dry-run --karmada-context=hub-admin")
	wantUnreachable(t, "join shop --dry-run --cluster-context=member-admin")
	note := result{err: "note: dry run: nothing was changed; cluster shop can join\n"}
	if got := karmadactl(t, "join shop --dry-run --karmada-context=hub-admin --cluster-context=member-admin"); got != note {
		t.Errorf("join in a dry run: got %+v, want %+v", got, note)
	}
	// A context with the name of the cluster takes precedence over the current context.
	want := result{out: "cluster(member-admin) is joined successfully\n"}
	if got := karmadactl(t, "join member-admin --karmada-context=hub-admin"); got != want {
		t.Fatalf("join: got %+v, want %+v", got, want)
	}
	cluster := &clusterv1alpha1.Cluster{}
	if err := w.hub.Get(t.Context(), client.ObjectKey{Name: "member-admin"}, cluster); err != nil {
		t.Fatal(err)
	}
	if cluster.Spec.APIEndpoint != w.memberPlane.Config.Host {
		t.Errorf("cluster: got the endpoint %s, want %s", cluster.Spec.APIEndpoint, w.memberPlane.Config.Host)
	}
}

func (w *hubAndMember) joinsWithImpersonation(t *testing.T) {
	t.Helper()
	const join = "join other --dry-run --karmada-context=hub-admin --cluster-context=hub-admin --karmada-as=mara"
	if got := karmadactl(t, join); got.code != 1 || !strings.Contains(got.err, `User "mara" cannot`) {
		t.Errorf("join as mara: got %+v, want the permissions that mara lacks", got)
	}
	if got := karmadactl(t, join+" --karmada-as-group=viewers --karmada-as-group=system:masters --karmada-as-uid=7"); got.code != 0 {
		t.Errorf("join as one of system:masters: got %+v", got)
	}
}

func (w *hubAndMember) unjoinsByContext(t *testing.T) {
	t.Helper()
	account := client.ObjectKey{Namespace: "karmada-cluster", Name: "karmada-member-admin"}
	if err := w.member.Get(t.Context(), account, &corev1.ServiceAccount{}); err != nil {
		t.Fatalf("the account of the hub: %v", err)
	}
	wantUnreachable(t, "unjoin member-admin")
	wantUnreachable(t, "unjoin member-admin --karmada-context="+unreachable)
	if got := karmadactl(t, "unjoin member-admin --karmada-context=hub-admin --cluster-kubeconfig="+os.Getenv("KUBECONFIG")); got.code != 0 || got.out != "" {
		t.Errorf("unjoin: got %+v", got)
	}
	if err := w.member.Get(t.Context(), account, &corev1.ServiceAccount{}); !apierrors.IsNotFound(err) {
		t.Errorf("the account of the hub: got error %v, want NotFound", err)
	}
	if err := w.hub.Get(t.Context(), client.ObjectKey{Name: "member-admin"}, &clusterv1alpha1.Cluster{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Cluster: got error %v, want NotFound", err)
	}
}

// dryRunOutput is the output of a registration with --dry-run.
const dryRunOutput = "[preflight] Running pre-flight checks\n[preflight] All pre-flight checks were passed\n"

func (w *hubAndMember) registersByThePrintedLine(t *testing.T) {
	t.Helper()
	for name, program := range map[string]string{"karmadactl": "karmadactl", "kubectl-karmada": "kubectl karmada", "towline": "towline"} {
		printed := run(t, name, "token", "create", "--print-register-command", "--karmada-context=hub-admin")
		line := regexp.MustCompile(`^` + program + ` (register \S+ --token \S+ --discovery-token-ca-cert-hash \S+)\n$`).FindStringSubmatch(printed.out)
		if line == nil {
			t.Fatalf("%s: got %+v, want one register line", name, printed)
		}
		// On the side of the cluster.
		t.Setenv("KUBECONFIG", w.files[1])
		got := run(t, append([]string{name}, append(strings.Fields(line[1]), "--dry-run")...)...)
		if want := (result{out: dryRunOutput}); got != want {
			t.Errorf("%s %s: got %+v, want %+v", name, line[1], got, want)
		}
		t.Setenv("KUBECONFIG", w.files[0])
	}
}

const registration = "register 127.0.0.1:1 --dry-run --token=abcdef.0123456789abcdef --discovery-token-unsafe-skip-ca-verification=true"

func (w *hubAndMember) checksByContext(t *testing.T) {
	t.Helper()
	wantUnreachable(t, registration+" --discovery-timeout=1s")
	if got, want := karmadactl(t, registration+" --context=member-admin"), (result{out: dryRunOutput}); got != want {
		t.Errorf("register: got %+v, want %+v", got, want)
	}
}

func (w *hubAndMember) failsPreflight(t *testing.T) {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "karmada-system"}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: "karmada-agent-sa"}}
	for _, obj := range []client.Object{namespace, account} {
		if err := w.member.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	want := result{
		code: 1, out: "[preflight] Running pre-flight checks\n",
		err: "error execution phase preflight: [preflight] Some fatal errors occurred:\n" +
			"\t[ERROR]: karmada-system/karmada-agent-sa ServiceAccount already exists\n" +
			"[preflight] Remove these from the cluster, or choose another --namespace\n" +
			"error: the pre-flight checks failed; nothing was changed\n",
	}
	for _, line := range []string{registration, strings.Replace(registration, "--dry-run ", "", 1)} {
		if got := karmadactl(t, line+" --context=member-admin"); got != want {
			t.Errorf("%s: got %+v, want %+v", line, got, want)
		}
	}
	if got := karmadactl(t, registration+" --context=member-admin --namespace=elsewhere"); got.code != 0 || got.out != dryRunOutput {
		t.Errorf("in another namespace: got %+v", got)
	}
}

func (w *hubAndMember) unchecksByContext(t *testing.T) {
	t.Helper()
	system := &corev1.Namespace{}
	if err := w.member.Get(t.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, system); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"member-admin", "eu-1"} {
		cluster := &clusterv1alpha1.Cluster{Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull, ID: string(system.UID)}}
		cluster.Name = name
		if err := w.hub.Create(t.Context(), cluster); err != nil {
			t.Fatal(err)
		}
	}
	mergedFile := os.Getenv("KUBECONFIG")
	wantUnreachable(t, "unregister eu-1 --karmada-context=hub-admin --cluster-kubeconfig="+mergedFile)
	wantUnreachable(t, "unregister member-admin --karmada-config="+mergedFile+" --cluster-kubeconfig="+mergedFile)
	for name, line := range map[string]string{
		// Without --karmada-config the context is one of KUBECONFIG.
		"member-admin": "unregister member-admin --karmada-context=hub-admin --cluster-kubeconfig=" + mergedFile,
		"eu-1":         "unregister eu-1 --karmada-config=" + mergedFile + " --karmada-context=hub-admin --cluster-kubeconfig=" + mergedFile + " --cluster-context=member-admin",
	} {
		if got := karmadactl(t, line+" --dry-run"); got.code != 0 || got.out != "" {
			t.Errorf("%s --dry-run: got %+v", line, got)
		}
		got := karmadactl(t, line)
		if got.code != 0 || !strings.Contains(got.err, "Successfully delete cluster object ("+name+") from control plane.\n") {
			t.Errorf("%s: got %+v", line, got)
		}
		if again := karmadactl(t, line+" --dry-run"); again.code != 1 || again.err != "error: no cluster object "+name+" found in karmada control Plane\n" {
			t.Errorf("%s --dry-run, after the deletion: got %+v", line, again)
		}
	}
}
