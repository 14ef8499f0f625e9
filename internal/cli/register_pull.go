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

// agentOptionFlags are the flags of `register cluster` that say how the agent of a cluster in pull mode is started.
type agentOptionFlags struct {
	hubURL, hubCA string
	proxyURL      string
	image         string
	pullSecrets   []string
	requests      map[string]string
	limits        map[string]string
	lifetime      string
	revoke        bool
}

func (a *agentOptionFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&a.hubURL, "management-cluster-url", "", "pull: https `address` under which the agent reaches the hub (default: the one in the current kubeconfig)")
	flags.StringVar(&a.hubCA, "management-cluster-ca", "", "pull: `file` with the certificate authority of that address, in PEM (default: the one in the current kubeconfig)")
	flags.StringVar(&a.proxyURL, "proxy-url", "", "pull: `address` of the proxy on the agent's way to the hub, http, https or socks5, without a password")
	flags.StringVar(&a.image, "agent-image", "", "pull: container `image` of the agent (default: "+join.DefaultAgentImage+")")
	flags.StringSliceVar(&a.pullSecrets, "image-pull-secret", nil, "pull: `name` of a Secret of namespace projectsveltos on the cluster that the image is pulled with; repeatable")
	flags.StringToStringVar(&a.requests, "agent-requests", nil, "pull: what the agent requests, as `cpu=200m,memory=512Mi` (default: that)")
	flags.StringToStringVar(&a.limits, "agent-limits", nil, "pull: what the agent is limited to, as `cpu=500m,memory=512Mi` (default: that)")
	for _, name := range []string{"agent-requests", "agent-limits"} {
		// Else the help would show an empty map as the default.
		flags.Lookup(name).DefValue = ""
	}
	flags.StringVar(&a.lifetime, "token-lifetime", "", "pull: life of the manifest's token, a `duration` from 10m to 24h (default: 1h)")
	flags.BoolVar(&a.revoke, "revoke", false, "pull: make every token worthless that was issued for the cluster before")
}

// agentOptionNames are the names of agentOptionFlags.
func agentOptionNames() []string {
	return []string{
		"management-cluster-url", "management-cluster-ca", "proxy-url", "agent-image", "image-pull-secret", "agent-requests", "agent-limits",
		"token-lifetime", "revoke",
	}
}

// options returns what the flags say; what they do not say is left to the options that the cluster has.
func (a *agentOptionFlags) options() (join.AgentOptions, error) {
	options := join.AgentOptions{
		Image: a.image, ImagePullSecrets: a.pullSecrets, ProxyURL: a.proxyURL, HubURL: a.hubURL, Requests: a.requests, Limits: a.limits,
		TokenLifetime: a.lifetime,
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

// applyFlags are the flags of `register cluster` that start the agent of a cluster in pull mode, too.
type applyFlags struct {
	context, kubeconfig string
	wait                time.Duration
}

// applyWait is how long the agent may take to make the cluster ready: the time to pull an image and to start.
const applyWait = 2 * time.Minute

func (a *applyFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&a.context, "apply-to-context", "", "pull: apply the manifest to the cluster of this `context` in KUBECONFIG instead of printing it, and wait until it is ready")
	flags.StringVar(&a.kubeconfig, "apply-to-kubeconfig", "", "pull: the same with the kubeconfig in this `file`")
	flags.DurationVar(&a.wait, "wait", applyWait, "pull: how long to wait after applying until the cluster is ready; 0 for not at all")
}

// applyNames are the names of applyFlags.
func applyNames() []string { return []string{"apply-to-context", "apply-to-kubeconfig", "wait"} }

func (a *applyFlags) given() bool { return a.context != "" || a.kubeconfig != "" }

func (a *applyFlags) validate(flags *pflag.FlagSet) error {
	switch {
	case a.context != "" && a.kubeconfig != "":
		return errors.New("--apply-to-context and --apply-to-kubeconfig exclude each other")
	case flags.Changed("wait") && !a.given():
		return errors.New("--wait needs --apply-to-context or --apply-to-kubeconfig")
	case a.wait < 0:
		return fmt.Errorf("--wait: %s is less than nothing", a.wait)
	}
	return nil
}

// member finds the way to the cluster.
func (a *applyFlags) member() (*rest.Config, error) {
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
