package command

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
)

// serviceAccountVariable is the environment variable with the directory of the token, ca.crt and namespace of a pod
// that has no file system of its own, such as a pod of localkube.
const serviceAccountVariable = "TOWLINE_SERVICEACCOUNT_DIR"

// InClusterConfig returns the config of the cluster in which this process runs as a pod. Outside of a pod it returns
// rest.ErrNotInCluster.
func InClusterConfig() (*rest.Config, error) {
	dir := os.Getenv(serviceAccountVariable)
	if dir == "" {
		return rest.InClusterConfig()
	}
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, fmt.Errorf("%s is set, but KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not", serviceAccountVariable)
	}
	tokenFile := filepath.Join(dir, "token")
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		return nil, fmt.Errorf("read the pod's token: %w", err)
	}
	return &rest.Config{
		Host:            "https://" + net.JoinHostPort(host, port),
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(dir, "ca.crt")},
		BearerToken:     string(token),
		// Clients read the file again, since the kubelet renews the token in it.
		BearerTokenFile: tokenFile,
	}, nil
}
