package karmada

import (
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// TestKubeconfigOfASecretRunsNoProgram uses a kubeconfig that runs a program. Only the file of --karmada-kubeconfig may
// have one.
func TestKubeconfigOfASecretRunsNoProgram(t *testing.T) {
	t.Parallel()
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: "https://127.0.0.1:1"}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"c": {Exec: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", Command: "touch", InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
		}}},
		Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "c"}}, CurrentContext: "c",
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newHubTransport(kubeconfig, Options{HubSecret: "karmada-system/karmada-kubeconfig"}); err == nil || !strings.Contains(err.Error(), "exec plugins are not supported") {
		t.Errorf("from a Secret: got error %v", err)
	}
	if _, err := newHubTransport(kubeconfig, Options{HubKubeconfig: "hub.config"}); err != nil {
		t.Errorf("from a file: got error %v", err)
	}
}
