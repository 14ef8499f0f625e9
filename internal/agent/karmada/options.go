package karmada

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/fleet"
)

// DefaultNamespace is the agent's namespace on its member unless a registration sets another one. It is Karmada's
// default.
const DefaultNamespace = "karmada-system"

// The controllers that --controllers enables and disables.
const (
	clusterStatus = "clusterStatus" // the status of the Cluster, and the heartbeat
	execution     = "execution"     // Works and the bundles of profiles
	workStatus    = "workStatus"    // the status of Works when their objects change
	certRotation  = "certRotation"
)

// Options configure an agent. Defaults returns the default values.
type Options struct {
	// Member is the client configuration of the agent's cluster. If it is nil, it is loaded from MemberKubeconfig and
	// MemberContext.
	Member           *rest.Config
	MemberKubeconfig string
	MemberContext    string
	// HubSecret is the Secret of the member, <namespace>/<name>, that has the kubeconfig of the hub. Without it,
	// HubKubeconfig is a file with the kubeconfig, and HubContext its context.
	HubSecret     string
	HubKubeconfig string
	HubContext    string
	// Cluster is the name of the Cluster.
	Cluster string
	// ClusterNamespace is the namespace of the member that has the inventories.
	ClusterNamespace string
	// APIEndpoint, ProxyURL, Provider, Region and Zones are written into the spec of the Cluster. Empty values are not
	// written.
	APIEndpoint, ProxyURL, Provider, Region string
	Zones                                   []string
	// Controllers are the enabled controllers: * for all, name for one, -name to disable one.
	Controllers []string

	// StatusInterval is the time between two observations of the member.
	StatusInterval time.Duration
	// LeaseDuration times LeaseRenewFraction is the time between two heartbeats.
	LeaseDuration      time.Duration
	LeaseRenewFraction float64
	// SuccessThreshold and FailureThreshold are how long a change of health must last before it is reported.
	SuccessThreshold, FailureThreshold time.Duration
	// ResourceModeling counts the nodes by the grades in spec.resourceModels of the Cluster.
	ResourceModeling bool
	// MemberQPS and HubQPS limit the agent's requests per second to the member and the hub, beyond a burst.
	MemberQPS, HubQPS     float32
	MemberBurst, HubBurst int
	// WorkSyncs is the number of Works, and of deliveries, that are handled concurrently.
	WorkSyncs int
	// ResyncPeriod is the time after which each Work is executed again without a change; zero disables that.
	ResyncPeriod time.Duration
	// RetryBase and RetryMax bound the growing delay between attempts at one Work. RetryQPS and RetryBurst limit the
	// attempts at all Works.
	RetryBase, RetryMax  time.Duration
	RetryQPS, RetryBurst int
	// RotationInterval is the longest time between two checks of the certificate. RotationThreshold is the remaining
	// fraction of its lifetime at which it is renewed.
	RotationInterval  time.Duration
	RotationThreshold float64

	// LeaderElect elects one of several agents of the Cluster, by a Lease in ElectNamespace of the member.
	LeaderElect                              bool
	ElectNamespace                           string
	ElectDuration, ElectDeadline, ElectRetry time.Duration
	// HealthAddress serves /healthz and /readyz over HTTP, MetricsAddress serves /metrics and /debug/pprof/ over HTTPS; an
	// empty address serves nothing.
	HealthAddress  string
	MetricsAddress string

	// Identity is the name of this agent in the election. Default: derived from the host name.
	Identity string
	// Clock gives the time. Default: the real clock.
	Clock clock.WithTicker

	// wrapHubTransport wraps the transport to the hub, for tests; nil for none.
	wrapHubTransport transport.WrapperFunc
}

// Defaults returns Karmada's defaults.
func Defaults() Options {
	return Options{
		ClusterNamespace: fleet.DefaultClusterNamespace, Controllers: []string{"*"},
		StatusInterval: 10 * time.Second, LeaseDuration: 40 * time.Second, LeaseRenewFraction: 0.25,
		SuccessThreshold: 30 * time.Second, FailureThreshold: 30 * time.Second, ResourceModeling: true,
		MemberQPS: 40, MemberBurst: 60, HubQPS: 40, HubBurst: 60, WorkSyncs: 5,
		RetryBase: 5 * time.Millisecond, RetryMax: 1000 * time.Second, RetryQPS: 10, RetryBurst: 100,
		RotationInterval: 5 * time.Minute, RotationThreshold: 0.2,
		LeaderElect: true, ElectNamespace: DefaultNamespace,
		ElectDuration: 15 * time.Second, ElectDeadline: 10 * time.Second, ElectRetry: 2 * time.Second,
		HealthAddress: ":10357", MetricsAddress: ":8080",
	}
}

// AddFlags sets the defaults and adds the flags, which have Karmada's names.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	*o = Defaults()
	flags.StringVar(&o.MemberKubeconfig, "kubeconfig", "", "kubeconfig `file` of the agent's cluster (default: the cluster of its pod)")
	flags.StringVar(&o.MemberContext, "context", "", "`context` of --kubeconfig")
	flags.StringVar(&o.HubSecret, "karmada-kubeconfig-secret", "", "`namespace/name` of the Secret in the agent's cluster that has the kubeconfig of the hub, in key karmada-kubeconfig")
	flags.StringVar(&o.HubKubeconfig, "karmada-kubeconfig", "", "kubeconfig `file` of the hub, instead of a Secret")
	flags.StringVar(&o.HubContext, "karmada-context", "", "`context` of --karmada-kubeconfig")
	flags.StringVar(&o.Cluster, "cluster-name", "", "`name` of the Cluster (required)")
	flags.StringVar(&o.ClusterNamespace, "cluster-namespace", o.ClusterNamespace, "`namespace` of the agent's cluster that has the inventories of deployed objects")
	flags.StringVar(&o.APIEndpoint, "cluster-api-endpoint", "", "`URL` of the agent's cluster, for the spec of the Cluster")
	flags.StringVar(&o.ProxyURL, "proxy-server-address", "", "`URL` of the proxy for the agent's cluster, for the spec of the Cluster")
	flags.StringVar(&o.Provider, "cluster-provider", "", "`provider` of the agent's cluster, for the spec of the Cluster")
	flags.StringVar(&o.Region, "cluster-region", "", "`region` of the agent's cluster, for the spec of the Cluster")
	flags.StringSliceVar(&o.Zones, "cluster-zones", nil, "`zones` of the agent's cluster, for the spec of the Cluster")
	flags.StringSliceVar(&o.Controllers, "controllers", o.Controllers,
		"`controllers` to run: * for all, name for one, -name to disable one; any of "+strings.Join(controllers(), ", "))
	o.addTimingFlags(flags)
	flags.BoolVar(&o.LeaderElect, "leader-elect", o.LeaderElect, "elect one of several agents of the cluster, by a Lease in the agent's cluster")
	flags.StringVar(&o.ElectNamespace, "leader-elect-resource-namespace", o.ElectNamespace, "`namespace` of that Lease")
	flags.DurationVar(&o.ElectDuration, "leader-elect-lease-duration", o.ElectDuration, "how long other agents wait for a leader that does not renew that Lease")
	flags.DurationVar(&o.ElectDeadline, "leader-elect-renew-deadline", o.ElectDeadline, "how long the leader works without renewing that Lease")
	flags.DurationVar(&o.ElectRetry, "leader-elect-retry-period", o.ElectRetry, "time between two attempts to renew that Lease")
	flags.StringVar(&o.MetricsAddress, "metrics-bind-address", o.MetricsAddress, "`address` that serves /metrics and /debug/pprof/ over https; empty for none")
	flags.StringVar(&o.HealthAddress, "health-probe-bind-address", o.HealthAddress, "`address` that serves /healthz and /readyz over http; empty for none")
}

func (o *Options) addTimingFlags(flags *pflag.FlagSet) {
	flags.DurationVar(&o.StatusInterval, "cluster-status-update-frequency", o.StatusInterval, "time between two observations of the agent's cluster")
	flags.DurationVar(&o.LeaseDuration, "cluster-lease-duration", o.LeaseDuration, "how long the cluster counts as alive after a heartbeat")
	flags.Float64Var(&o.LeaseRenewFraction, "cluster-lease-renew-interval-fraction", o.LeaseRenewFraction, "fraction of that time between two heartbeats")
	flags.DurationVar(&o.SuccessThreshold, "cluster-success-threshold", o.SuccessThreshold, "how long the cluster must be healthy to become ready")
	flags.DurationVar(&o.FailureThreshold, "cluster-failure-threshold", o.FailureThreshold, "how long the cluster must be unhealthy to become not ready")
	flags.BoolVar(&o.ResourceModeling, "enable-cluster-resource-modeling", o.ResourceModeling, "count the nodes by the grades in spec.resourceModels")
	flags.Float32Var(&o.MemberQPS, "cluster-api-qps", o.MemberQPS, "requests per second to the agent's cluster")
	flags.IntVar(&o.MemberBurst, "cluster-api-burst", o.MemberBurst, "requests to the agent's cluster in a burst")
	flags.Float32Var(&o.HubQPS, "kube-api-qps", o.HubQPS, "requests per second to the hub")
	flags.IntVar(&o.HubBurst, "kube-api-burst", o.HubBurst, "requests to the hub in a burst")
	flags.IntVar(&o.WorkSyncs, "concurrent-work-syncs", o.WorkSyncs, "number of Works that are handled concurrently")
	flags.DurationVar(&o.ResyncPeriod, "resync-period", o.ResyncPeriod, "time after which each Work is executed again without a change; 0 to disable")
	flags.DurationVar(&o.RetryBase, "rate-limiter-base-delay", o.RetryBase, "time until the second attempt at a Work")
	flags.DurationVar(&o.RetryMax, "rate-limiter-max-delay", o.RetryMax, "longest time between two attempts at a Work")
	flags.IntVar(&o.RetryQPS, "rate-limiter-qps", o.RetryQPS, "attempts per second at Works that failed")
	flags.IntVar(&o.RetryBurst, "rate-limiter-bucket-size", o.RetryBurst, "attempts at Works that failed in a burst")
	flags.DurationVar(&o.RotationInterval, "cert-rotation-checking-interval", o.RotationInterval, "longest time between two checks of the certificate")
	flags.Float64Var(&o.RotationThreshold, "cert-rotation-remaining-time-threshold", o.RotationThreshold, "remaining fraction of the certificate's lifetime at which it is renewed")
}

func controllers() []string { return []string{clusterStatus, execution, workStatus, certRotation} }

// isEnabled returns true if a controller is enabled.
func (o Options) isEnabled(controller string) bool {
	return !slices.Contains(o.Controllers, "-"+controller) && (slices.Contains(o.Controllers, "*") || slices.Contains(o.Controllers, controller))
}

// complete validates o and returns it with default values.
func (o Options) complete() (Options, error) {
	if err := o.validate(); err != nil {
		return o, err
	}
	var err error
	if o.Member == nil {
		rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: o.MemberKubeconfig}
		overrides := &clientcmd.ConfigOverrides{CurrentContext: o.MemberContext}
		if o.Member, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig(); err != nil {
			return o, fmt.Errorf("load the kubeconfig of the agent's cluster: %w", err)
		}
	}
	o.Member = rest.CopyConfig(o.Member)
	o.Member.QPS, o.Member.Burst = o.MemberQPS, o.MemberBurst
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Identity == "" {
		host, err := os.Hostname()
		if err != nil {
			return o, fmt.Errorf("read the host name: %w", err)
		}
		// In a pod the identity is the pod's name, so that a restarted container keeps the election.
		if o.Identity = os.Getenv("HOSTNAME"); o.Identity == "" || o.MemberKubeconfig != "" {
			o.Identity = host + "_" + rand.String(8)
		}
	}
	return o, nil
}

func (o Options) validate() error {
	switch {
	case o.Cluster == "":
		return errors.New("--cluster-name is required")
	case (o.HubSecret == "") == (o.HubKubeconfig == ""):
		return errors.New("one of --karmada-kubeconfig-secret and --karmada-kubeconfig is required")
	case o.HubContext != "" && o.HubKubeconfig == "":
		return errors.New("--karmada-context is for --karmada-kubeconfig")
	case o.Member == nil && o.MemberKubeconfig == "":
		return errors.New("--kubeconfig is required outside a pod")
	}
	if o.HubSecret != "" {
		if namespace, name, ok := strings.Cut(o.HubSecret, "/"); !ok || namespace == "" || name == "" {
			return fmt.Errorf("--karmada-kubeconfig-secret: %q is not <namespace>/<name>", o.HubSecret)
		}
	}
	for _, controller := range o.Controllers {
		if name := strings.TrimPrefix(controller, "-"); controller != "*" && !slices.Contains(controllers(), name) {
			return fmt.Errorf("--controllers: unknown controller %q, want one of %s", name, strings.Join(controllers(), ", "))
		}
	}
	return o.validateTiming()
}

func (o Options) validateTiming() error {
	for flag, fraction := range map[string]float64{
		"--cert-rotation-remaining-time-threshold": o.RotationThreshold, "--cluster-lease-renew-interval-fraction": o.LeaseRenewFraction,
	} {
		if fraction <= 0 || fraction >= 1 {
			return fmt.Errorf("%s: %v is not between 0 and 1", flag, fraction)
		}
	}
	if o.StatusInterval <= 0 || o.LeaseDuration < time.Second || o.RotationInterval <= 0 || o.WorkSyncs < 1 {
		return errors.New("--cluster-status-update-frequency, --cluster-lease-duration, --cert-rotation-checking-interval and --concurrent-work-syncs must be above zero")
	}
	return nil
}

// watchdogInterval is the maximal interval of the loop that resets the watchdog: the heartbeats or, if they are
// disabled, watchCredential, which can wait for a certificate.
func (o Options) watchdogInterval() time.Duration {
	if o.isEnabled(clusterStatus) {
		return o.heartbeatInterval()
	}
	return rotationTimeout
}

// heartbeatInterval is the time between two heartbeats.
func (o Options) heartbeatInterval() time.Duration {
	return time.Duration(float64(o.LeaseDuration) * o.LeaseRenewFraction)
}
