package agent

import (
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/sandbox"
)

const (
	// defaultWorkers is the number of parallel deliveries. Small bundles do not wait for one big bundle.
	defaultWorkers = 4
	// defaultHeartbeat is the time between two renewals of the Lease. The hub reports a member as Down after two missed
	// renewals: see heartbeats.LeaseDuration.
	defaultHeartbeat = 20 * time.Second
	// reportInterval is the maximal time between two reports in the status of the SveltosCluster. Sveltos tools treat an
	// agent as dead after ten minutes without a report.
	reportInterval = 5 * time.Minute
	// factsInterval is the maximal time between two reads of the member's facts. The agent also reads them when a
	// definition changes.
	factsInterval = 10 * time.Minute
)

// Options configure an agent.
type Options struct {
	// Member is the configuration of a client for the member.
	Member *rest.Config
	// Namespace and Name identify the SveltosCluster on the hub.
	Namespace string
	Name      string
	// KubeconfigSecret is the Secret with the kubeconfig of the hub, in kube.AgentNamespace on the member. Default:
	// <Name>-sveltos-kubeconfig.
	KubeconfigSecret string
	// Identity is the holder identity in the Lease: the name of the pod or host. Default: Name.
	Identity string
	// HealthAddress serves /healthz and /readyz over HTTP, DiagnosticsAddress /metrics and /debug/pprof/ over HTTPS. An
	// empty address serves nothing.
	HealthAddress      string
	DiagnosticsAddress string
	// Workers is the number of parallel deliveries. Default: 4.
	Workers int
	// Heartbeat is the time between two renewals of the Lease. Default: 20 s.
	Heartbeat time.Duration
	// TokenLife is the requested lifetime of the agent's tokens for the hub. Default: credentials.DefaultLife.
	TokenLife time.Duration
	// SandboxCommand is the command line of a process that runs the scripts of checks (check.Functions). Default: the
	// scripts run in this process, whose whole memory then counts against their memory limit.
	SandboxCommand []string
	// Clock is the clock of the agent. Default: the real clock.
	Clock clock.WithTicker
}

// checker returns the Checker for the checks of the cluster.
func (o Options) checker() check.Checker {
	if len(o.SandboxCommand) == 0 {
		return check.Checker{}
	}
	return check.Checker{Sandbox: sandbox.NewPool(o.SandboxCommand, o.Clock), Cluster: client.ObjectKey{Namespace: o.Namespace, Name: o.Name}}
}

// complete sets the defaults, and returns an error for missing options.
func (o Options) complete() (Options, error) {
	if o.Member == nil {
		return o, errors.New("agent needs the configuration of a client for its cluster")
	}
	if o.Namespace == "" || o.Name == "" {
		return o, fmt.Errorf("agent needs the namespace and name of its cluster, got %q and %q", o.Namespace, o.Name)
	}
	if o.Member.QPS == 0 {
		// The API server limits its clients by API Priority and Fairness. A limit here would only delay big bundles.
		o.Member = rest.CopyConfig(o.Member)
		o.Member.QPS = -1
	}
	if o.KubeconfigSecret == "" {
		o.KubeconfigSecret = join.KubeconfigSecret(o.Name)
	}
	if o.Identity == "" {
		o.Identity = o.Name
	}
	if o.Workers == 0 {
		o.Workers = defaultWorkers
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = defaultHeartbeat
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	return o, nil
}
