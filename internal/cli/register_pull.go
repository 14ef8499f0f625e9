package cli

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join"
)

// agentOptionFlags are the flags of `register cluster` for the agent of a cluster in pull mode.
type agentOptionFlags struct {
	hubURL, hubCA    string
	proxyURL         string
	image            string
	imagePullSecrets []string
	requests         map[string]string
	limits           map[string]string
	tokenLifetime    string
	revoke           bool
}

func (a *agentOptionFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&a.hubURL, "management-cluster-url", "",
		"https `URL` at which the agent connects to the hub (default from the current kubeconfig)")
	flags.StringVar(&a.hubCA, "management-cluster-ca", "",
		"`file` with the CA certificates of that URL, in PEM (default from the current kubeconfig)")
	flags.StringVar(&a.proxyURL, "proxy-url", "",
		"`URL` of the proxy between the agent and the hub: http, https or socks5, without a password")
	flags.StringVar(&a.image, "agent-image", "", "container `image` of the agent (default "+join.DefaultAgentImage+")")
	flags.StringSliceVar(&a.imagePullSecrets, "image-pull-secret", nil,
		"`name` of an image pull Secret in namespace projectsveltos of the cluster; repeatable")
	flags.StringToStringVar(&a.requests, "agent-requests", nil,
		"resource `requests` of the agent (default cpu=200m,memory=512Mi)")
	flags.StringToStringVar(&a.limits, "agent-limits", nil,
		"resource `limits` of the agent (default cpu=500m,memory=512Mi)")
	for _, name := range []string{"agent-requests", "agent-limits"} {
		// Otherwise the help has the empty map as the default.
		flags.Lookup(name).DefValue = ""
	}
	flags.StringVar(&a.tokenLifetime, "token-lifetime", "",
		"lifetime of the token in the manifest, a `duration` from 10m to 24h (default 1h)")
	flags.BoolVar(&a.revoke, "revoke", false, "revoke all earlier tokens of the cluster")
}

// options returns the options in the flags. An option that is not set keeps its value from an earlier registration.
func (a *agentOptionFlags) options() (join.AgentOptions, error) {
	options := join.AgentOptions{
		Image: a.image, ImagePullSecrets: a.imagePullSecrets, ProxyURL: a.proxyURL, HubURL: a.hubURL,
		Requests: a.requests, Limits: a.limits, TokenLifetime: a.tokenLifetime,
	}
	if a.hubCA != "" {
		ca, err := os.ReadFile(a.hubCA)
		if err != nil {
			return options, fmt.Errorf("--management-cluster-ca: %w", err)
		}
		options.HubCA = string(ca)
	}
	return options, nil
}

// applyFlags are the flags of `register cluster` that apply the manifest in pull mode.
type applyFlags struct {
	context, kubeconfig string
	wait                time.Duration
}

// applyWait is the default time until the cluster must be ready: the time to pull an image and to start the agent.
const applyWait = 2 * time.Minute

func (a *applyFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&a.context, "apply-to-context", "",
		"`context` in KUBECONFIG; apply the manifest to the cluster of this context instead of printing it")
	flags.StringVar(&a.kubeconfig, "apply-to-kubeconfig", "",
		"`file` with a kubeconfig; apply the manifest to the cluster of its current context")
	flags.DurationVar(&a.wait, "wait", applyWait,
		"maximum time to wait until the cluster is ready; a cluster that is not ready stays registered; 0 does not wait")
}

// isSet reports whether the command applies the manifest.
func (a *applyFlags) isSet() bool { return a.context != "" || a.kubeconfig != "" }

func (a *applyFlags) validate(flags *pflag.FlagSet) error {
	switch {
	case a.context != "" && a.kubeconfig != "":
		return errors.New("--apply-to-context and --apply-to-kubeconfig exclude each other")
	case flags.Changed("wait") && !a.isSet():
		return errors.New("--wait needs --apply-to-context or --apply-to-kubeconfig")
	case a.wait < 0:
		return fmt.Errorf("--wait: %s must not be negative", a.wait)
	}
	return nil
}

// restConfig returns the config of the cluster to which the manifest is applied.
func (a *applyFlags) restConfig() (*rest.Config, error) {
	if a.context != "" {
		config, err := contextConfig(a.context)
		if err != nil {
			return nil, fmt.Errorf("--apply-to-context: %w", err)
		}
		return config, nil
	}
	config, err := fileConfig(a.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--apply-to-kubeconfig: %w", err)
	}
	return config, nil
}
