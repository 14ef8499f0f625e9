package attacks

import (
	"bytes"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/fleet"
)

// TestKubeconfigOfAMember: the administrator of a member puts a kubeconfig that runs a program, or sends a file, into
// the Secret of its agent. The operator of the hub unregisters the cluster.
func TestKubeconfigOfAMember(t *testing.T) {
	w := newWorld(t)
	trace, secret := filepath.Join(t.TempDir(), "trace"), filepath.Join(t.TempDir(), "secret")
	w.noError(os.WriteFile(secret, []byte("a token of the operator"), 0o600))
	server := w.startListener(nil)
	for name, user := range map[string]*clientcmdapi.AuthInfo{
		"runs": {Exec: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", Command: "touch", Args: []string{trace}, InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
		}},
		"reads": {TokenFile: secret},
	} {
		raw, err := clientcmd.Write(clientcmdapi.Config{
			Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: server.URL}}, AuthInfos: map[string]*clientcmdapi.AuthInfo{"c": user},
			Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "c"}}, CurrentContext: "c",
		})
		w.noError(err)
		namespace := w.hub.Namespace(t, name)
		w.noError(w.Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "karmada-kubeconfig"}, Data: map[string][]byte{"karmada-kubeconfig": raw},
		}))
		var output bytes.Buffer
		args := []string{"karmadactl", "unregister", "edge", "--cluster-kubeconfig=" + w.hub.Kubeconfig, "--namespace=" + namespace}
		if code := cli.Run(t.Context(), args, command.Streams{Out: &output, Err: &output}); code == 0 || !strings.Contains(output.String(), "Secret "+namespace+"/karmada-kubeconfig") {
			t.Errorf("%s: exit code %d, output %s", name, code, output.String())
		}
	}
	if _, err := os.Stat(trace); err == nil {
		t.Error("the kubeconfig has run a program")
	}
	if _, credentials := server.received(); len(credentials) > 0 {
		t.Errorf("the server got %q", credentials)
	}
}

// TestRegistrationOfTheHubCluster: an attacker who may write in the namespace mgmt registers the hub's own cluster, to
// get all rights of the hub. The hub of the tests runs without --register-self.
func TestRegistrationOfTheHubCluster(t *testing.T) {
	w := newWorld(t)
	w.ns = fleet.HubNamespace
	w.noError(client.IgnoreAlreadyExists(w.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}})))
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: fleet.HubName}}
	w.noError(w.tenant().Create(t.Context(), cluster))
	w.eventually("the hub refuses the cluster", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if cluster.Status.Ready {
			t.Fatal("the hub is a member")
		}
		return wantText(cluster.Status.FailureMessage, "--register-self")
	})
}

// certificateOf returns the certificate of a server in PEM.
func certificateOf(server *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
}
