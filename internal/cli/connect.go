package cli

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// serviceAccountVariable names the directory with the token, ca.crt and namespace of a process that runs as a pod without a file system of
// its own, as the pods of localkube do.
const serviceAccountVariable = "TOWLINE_SERVICEACCOUNT_DIR"

// hubConfig finds the way to the hub: the file in flag, else those in KUBECONFIG, else the pod's own cluster, else ~/.kube/config.
func hubConfig(flag string) (*rest.Config, error) { return currentConfig("hub", flag) }

// currentConfig finds the way to a cluster as hubConfig does; what is the cluster in the words of errors.
func currentConfig(what, flag string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	if flag != "" {
		rules = &clientcmd.ClientConfigLoadingRules{ExplicitPath: flag}
	} else if os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		config, err := inCluster()
		if !errors.Is(err, rest.ErrNotInCluster) {
			return config, err
		}
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{}).ClientConfig()
	if files := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); clientcmd.IsEmptyConfig(err) && files != "" {
		return nil, fmt.Errorf("no way to the %s: KUBECONFIG is %q, where no kubeconfig is", what, files)
	}
	if clientcmd.IsEmptyConfig(err) {
		return nil, fmt.Errorf("no way to the %s: set KUBECONFIG to its kubeconfig", what)
	}
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig of the %s: %w", what, err)
	}
	return config, nil
}

// contextConfig finds the way to the cluster of a context among the kubeconfigs of KUBECONFIG, else in ~/.kube/config. They are only read.
func contextConfig(name string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	// Migrating would write a file.
	rules.MigrationRules = nil
	merged, err := rules.Load()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfigs: %w", err)
	}
	if _, ok := merged.Contexts[name]; !ok {
		names := slices.Sorted(maps.Keys(merged.Contexts))
		if len(names) == 0 {
			return nil, fmt.Errorf("there is no context %q: no kubeconfig is there", name)
		}
		return nil, fmt.Errorf("there is no context %q, only: %s", name, strings.Join(names, ", "))
	}
	// Without access to the files, nothing can be kept in them: current-context stays, and so do tokens.
	config, err := clientcmd.NewNonInteractiveClientConfig(*merged, name, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("use context %q: %w", name, err)
	}
	return config, nil
}

// fileConfig finds the way to the cluster of the current context of a kubeconfig file. The file is only read.
func fileConfig(path string) (*rest.Config, error) {
	loaded, err := (&clientcmd.ClientConfigLoadingRules{ExplicitPath: path}).Load()
	if err != nil {
		return nil, err
	}
	if len(loaded.Contexts) == 0 && len(loaded.Clusters) == 0 {
		return nil, fmt.Errorf("%s is empty", path)
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*loaded, "", &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("use %s: %w", path, err)
	}
	return config, nil
}

// inCluster returns the way to the cluster that this process runs in as a pod.
func inCluster() (*rest.Config, error) {
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
		// The file is read again as the token is renewed in it.
		BearerTokenFile: tokenFile,
	}, nil
}
