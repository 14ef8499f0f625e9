package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/kube"
)

// loadingRules returns the rules to load a kubeconfig file, or for "" the files in KUBECONFIG, else ~/.kube/config.
// They never write a file. The default rules of client-go can copy ~/.kube/.kubeconfig to ~/.kube/config.
func loadingRules(file string) *clientcmd.ClientConfigLoadingRules {
	if file != "" {
		return &clientcmd.ClientConfigLoadingRules{ExplicitPath: file}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.MigrationRules = nil
	return rules
}

// hubConfig returns the config of the hub from currentConfig. Reads with it are cancelled when ctx ends.
func hubConfig(ctx context.Context) (*rest.Config, error) {
	config, err := currentConfig("hub", "")
	if err != nil {
		return nil, err
	}
	return kube.Interruptible(ctx, config), nil
}

// currentConfig returns the config of the current context: from file if it is not empty, else from the files in
// KUBECONFIG, else of the cluster in which this process runs as a pod, else from ~/.kube/config. A pod comes before
// ~/.kube/config because the hub runs in a pod. role names the cluster in errors, for example "hub".
func currentConfig(role, file string) (*rest.Config, error) {
	rules := loadingRules(file)
	if file == "" && os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		config, err := command.InClusterConfig()
		if !errors.Is(err, rest.ErrNotInCluster) {
			return config, err
		}
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{}).ClientConfig()
	if files := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); clientcmd.IsEmptyConfig(err) && files != "" {
		return nil, fmt.Errorf("no kubeconfig for the %s found: no file of KUBECONFIG (%q) has a kubeconfig", role, files)
	}
	if clientcmd.IsEmptyConfig(err) {
		return nil, fmt.Errorf("no kubeconfig for the %s found: set KUBECONFIG to its kubeconfig", role)
	}
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig of the %s: %w", role, err)
	}
	return config, nil
}

// contextConfig returns the config of a named context of the files in KUBECONFIG, else of ~/.kube/config.
func contextConfig(name string) (*rest.Config, error) {
	merged, err := loadingRules("").Load()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfigs: %w", err)
	}
	if _, ok := merged.Contexts[name]; !ok {
		names := slices.Sorted(maps.Keys(merged.Contexts))
		if len(names) == 0 {
			return nil, fmt.Errorf("there is no context %q: no kubeconfig found", name)
		}
		return nil, fmt.Errorf("there is no context %q, only: %s", name, strings.Join(names, ", "))
	}
	// Without access to the files the client cannot write them: current-context and tokens do not change.
	config, err := clientcmd.NewNonInteractiveClientConfig(*merged, name, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("use context %q: %w", name, err)
	}
	return config, nil
}

// fileConfig returns the config of the current context of a kubeconfig file.
func fileConfig(path string) (*rest.Config, error) {
	loaded, err := loadingRules(path).Load()
	if err != nil {
		return nil, err
	}
	if isEmpty(*loaded) {
		return nil, fmt.Errorf("%s is empty", path)
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*loaded, "", &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("use %s: %w", path, err)
	}
	return config, nil
}
