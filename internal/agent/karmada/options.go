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

// DefaultNamespace is where the agent is on its member unless a registration says otherwise: that of the Karmada surface.
const DefaultNamespace = "karmada-system"

// The parts of the agent that --controllers turns on and off.
const (
	clusterStatus = "clusterStatus" // the status of the Cluster, and the heartbeat
	execution     = "execution"     // what the hub deploys
	workStatus    = "workStatus"    // the status of what Works deployed, as it changes
	certRotation  = "certRotation"
)

// Options say which member an agent works for and how. Defaults has the defaults.
type Options struct {
	// Member is how the agent reaches its cluster. If it is nil MemberKubeconfig and MemberContext say it.
	Member           *rest.Config
	MemberKubeconfig string
	MemberContext    string
	// HubSecret names the Secret of the member, <namespace>/<name>, that holds the way to the hub. Otherwise HubKubeconfig, a file, with
	// HubContext is the way.
	HubSecret     string
	HubKubeconfig string
	HubContext    string
	// Cluster is the name of the Cluster.
	Cluster string
	// ClusterNamespace is the namespace of the member in which is kept what is deployed.
	ClusterNamespace string
	// APIEndpoint, ProxyURL, Provider, Region and Zones are what the Cluster is to say of the member. What is empty is not touched.
	APIEndpoint, ProxyURL, Provider, Region string
	Zones                                   []string
	// Controllers are the parts that run; * stands for all, -name for all but that one.
	Controllers []string

	// StatusInterval is the time between two looks at the member.
	StatusInterval time.Duration
	// LeaseDuration times LeaseRenewFraction is the time between two heartbeats.
	LeaseDuration      time.Duration
	LeaseRenewFraction float64
	// SuccessThreshold and FailureThreshold are how long a change of health must last to be told.
	SuccessThreshold, FailureThreshold time.Duration
	// ResourceModeling has the nodes counted by the grades of the Cluster.
	ResourceModeling bool
	// MemberQPS and HubQPS are how many requests per second the agent makes at most of either, for longer than a burst.
	MemberQPS, HubQPS     float32
	MemberBurst, HubBurst int
	// WorkSyncs is how many Works, and how many deliveries, are worked on at once.
	WorkSyncs int
	// ResyncPeriod is the time after which each Work is looked at again without a reason; zero for never.
	ResyncPeriod time.Duration
	// RetryBase and RetryMost bound the growing time between attempts at one Work, RetryQPS and RetryBurst how many are made of all of them.
	RetryBase, RetryMost time.Duration
	RetryQPS, RetryBurst int
	// RotationInterval is the longest time between two looks at how long the certificate lasts, RotationThreshold the part of its life that
	// remains when it is renewed.
	RotationInterval  time.Duration
	RotationThreshold float64

	// LeaderElect lets one of several agents of the Cluster work, by a Lease in ElectNamespace of the member.
	LeaderElect                              bool
	ElectNamespace                           string
	ElectDuration, ElectDeadline, ElectRetry time.Duration
	// HealthAddress serves /healthz and /readyz over HTTP, and MetricsAddress /metrics over HTTPS; empty serves nothing.
	HealthAddress  string
	MetricsAddress string

	// Identity tells the agents of one Cluster apart. Default: made from the name of the host.
	Identity string
	// Clock tells the time. Default: the real one.
	Clock clock.WithTicker

	// wrapHub sees all requests to the hub; nil for nobody.
	wrapHub transport.WrapperFunc
}

// Defaults returns the defaults of the Karmada surface.
func Defaults() Options {
	return Options{
		ClusterNamespace: fleet.DefaultClusterNamespace, Controllers: []string{"*"},
		StatusInterval: 10 * time.Second, LeaseDuration: 40 * time.Second, LeaseRenewFraction: 0.25,
		SuccessThreshold: 30 * time.Second, FailureThreshold: 30 * time.Second, ResourceModeling: true,
		MemberQPS: 40, MemberBurst: 60, HubQPS: 40, HubBurst: 60, WorkSyncs: 5,
		RetryBase: 5 * time.Millisecond, RetryMost: 1000 * time.Second, RetryQPS: 10, RetryBurst: 100,
		RotationInterval: 5 * time.Minute, RotationThreshold: 0.2,
		LeaderElect: true, ElectNamespace: DefaultNamespace,
		ElectDuration: 15 * time.Second, ElectDeadline: 10 * time.Second, ElectRetry: 2 * time.Second,
		HealthAddress: ":10357", MetricsAddress: ":8080",
	}
}

// AddFlags sets the defaults and adds the flags that change them, which are those of the Karmada surface.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	*o = Defaults()
	flags.StringVar(&o.MemberKubeconfig, "kubeconfig", "", "`file` with the way to the agent's own cluster (default: that of the pod it runs in)")
	flags.StringVar(&o.MemberContext, "context", "", "`context` of --kubeconfig")
	flags.StringVar(&o.HubSecret, "karmada-kubeconfig-secret", "", "`namespace/name` of the Secret in the agent's own cluster with the way to the hub, in key karmada-kubeconfig")
	flags.StringVar(&o.HubKubeconfig, "karmada-kubeconfig", "", "`file` with the way to the hub, where there is no such Secret")
	flags.StringVar(&o.HubContext, "karmada-context", "", "`context` of that kubeconfig")
	flags.StringVar(&o.Cluster, "cluster-name", "", "`name` of the Cluster (required)")
	flags.StringVar(&o.ClusterNamespace, "cluster-namespace", o.ClusterNamespace, "`namespace` of the agent's own cluster in which is kept what is deployed there")
	flags.StringVar(&o.APIEndpoint, "cluster-api-endpoint", "", "`URL` of the agent's own cluster, for the Cluster to say")
	flags.StringVar(&o.ProxyURL, "proxy-server-address", "", "`URL` of the proxy on the way to the agent's own cluster, for the Cluster to say")
	flags.StringVar(&o.Provider, "cluster-provider", "", "`provider` of the agent's own cluster, for the Cluster to say")
	flags.StringVar(&o.Region, "cluster-region", "", "`region` of the agent's own cluster, for the Cluster to say")
	flags.StringSliceVar(&o.Zones, "cluster-zones", nil, "`zones` of the agent's own cluster, for the Cluster to say")
	flags.StringSliceVar(&o.Controllers, "controllers", o.Controllers,
		"`parts` of the agent that run: * for all, name for one, -name for not that one, of "+strings.Join(controllers(), ", "))
	o.addPaceFlags(flags)
	flags.BoolVar(&o.LeaderElect, "leader-elect", o.LeaderElect, "let one of several agents of the cluster work, by a Lease in the agent's own cluster")
	flags.StringVar(&o.ElectNamespace, "leader-elect-resource-namespace", o.ElectNamespace, "`namespace` of that Lease")
	flags.DurationVar(&o.ElectDuration, "leader-elect-lease-duration", o.ElectDuration, "how long another agent waits for one that is silent")
	flags.DurationVar(&o.ElectDeadline, "leader-elect-renew-deadline", o.ElectDeadline, "how long the agent works without renewing that Lease")
	flags.DurationVar(&o.ElectRetry, "leader-elect-retry-period", o.ElectRetry, "time between two attempts to renew that Lease")
	flags.StringVar(&o.MetricsAddress, "metrics-bind-address", o.MetricsAddress, "`address` that serves /metrics over https; empty for none")
	flags.StringVar(&o.HealthAddress, "health-probe-bind-address", o.HealthAddress, "`address` that serves /healthz and /readyz over http; empty for none")
}

func (o *Options) addPaceFlags(flags *pflag.FlagSet) {
	flags.DurationVar(&o.StatusInterval, "cluster-status-update-frequency", o.StatusInterval, "time between two looks at the agent's own cluster")
	flags.DurationVar(&o.LeaseDuration, "cluster-lease-duration", o.LeaseDuration, "how long the cluster counts as alive after a heartbeat")
	flags.Float64Var(&o.LeaseRenewFraction, "cluster-lease-renew-interval-fraction", o.LeaseRenewFraction, "part of that time after which the next heartbeat follows")
	flags.DurationVar(&o.SuccessThreshold, "cluster-success-threshold", o.SuccessThreshold, "how long the cluster must be healthy again to be called ready")
	flags.DurationVar(&o.FailureThreshold, "cluster-failure-threshold", o.FailureThreshold, "how long the cluster must be unhealthy to be called not ready")
	flags.BoolVar(&o.ResourceModeling, "enable-cluster-resource-modeling", o.ResourceModeling, "count the nodes by the grades in spec.resourceModels")
	flags.Float32Var(&o.MemberQPS, "cluster-api-qps", o.MemberQPS, "requests per second to the agent's own cluster")
	flags.IntVar(&o.MemberBurst, "cluster-api-burst", o.MemberBurst, "requests to the agent's own cluster in a burst")
	flags.Float32Var(&o.HubQPS, "kube-api-qps", o.HubQPS, "requests per second to the hub")
	flags.IntVar(&o.HubBurst, "kube-api-burst", o.HubBurst, "requests to the hub in a burst")
	flags.IntVar(&o.WorkSyncs, "concurrent-work-syncs", o.WorkSyncs, "how many Works are worked on at once")
	flags.DurationVar(&o.ResyncPeriod, "resync-period", o.ResyncPeriod, "time after which each Work is looked at again without a reason; 0 for never")
	flags.DurationVar(&o.RetryBase, "rate-limiter-base-delay", o.RetryBase, "time until the second attempt at a Work")
	flags.DurationVar(&o.RetryMost, "rate-limiter-max-delay", o.RetryMost, "longest time between two attempts at a Work")
	flags.IntVar(&o.RetryQPS, "rate-limiter-qps", o.RetryQPS, "attempts per second at Works that failed")
	flags.IntVar(&o.RetryBurst, "rate-limiter-bucket-size", o.RetryBurst, "attempts at Works that failed in a burst")
	flags.DurationVar(&o.RotationInterval, "cert-rotation-checking-interval", o.RotationInterval, "longest time between two looks at how long the certificate lasts")
	flags.Float64Var(&o.RotationThreshold, "cert-rotation-remaining-time-threshold", o.RotationThreshold, "part of the certificate's life that remains when it is renewed")
}

func controllers() []string { return []string{clusterStatus, execution, workStatus, certRotation} }

// runs says whether a part of the agent runs.
func (o Options) runs(controller string) bool {
	return !slices.Contains(o.Controllers, "-"+controller) && (slices.Contains(o.Controllers, "*") || slices.Contains(o.Controllers, controller))
}

// complete returns o with what it leaves open, or says what is wrong with it.
func (o Options) complete() (Options, error) {
	if err := o.validate(); err != nil {
		return o, err
	}
	var err error
	if o.Member == nil {
		rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: o.MemberKubeconfig}
		overrides := &clientcmd.ConfigOverrides{CurrentContext: o.MemberContext}
		if o.Member, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig(); err != nil {
			return o, fmt.Errorf("find the agent's own cluster: %w", err)
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
			return o, fmt.Errorf("find the name of this host: %w", err)
		}
		// In a pod the name is the pod's, and a container that is started again may go on as the one before it.
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
	case o.Member == nil && o.MemberKubeconfig == "":
		return errors.New("--kubeconfig is required outside a pod")
	}
	if o.HubSecret != "" {
		if namespace, name, ok := strings.Cut(o.HubSecret, "/"); !ok || namespace == "" || name == "" {
			return fmt.Errorf("--karmada-kubeconfig-secret: %q is not <namespace>/<name>", o.HubSecret)
		}
	}
	for _, part := range o.Controllers {
		if name := strings.TrimPrefix(part, "-"); part != "*" && !slices.Contains(controllers(), name) {
			return fmt.Errorf("--controllers: there is no %q, only %s", name, strings.Join(controllers(), ", "))
		}
	}
	return o.validatePace()
}

func (o Options) validatePace() error {
	for flag, part := range map[string]float64{
		"--cert-rotation-remaining-time-threshold": o.RotationThreshold, "--cluster-lease-renew-interval-fraction": o.LeaseRenewFraction,
	} {
		if part <= 0 || part >= 1 {
			return fmt.Errorf("%s: %v is not between 0 and 1", flag, part)
		}
	}
	if o.StatusInterval <= 0 || o.LeaseDuration < time.Second || o.RotationInterval <= 0 || o.WorkSyncs < 1 {
		return errors.New("--cluster-status-update-frequency, --cluster-lease-duration, --cert-rotation-checking-interval and --concurrent-work-syncs must be above zero")
	}
	return nil
}

// turn is how long the loop that keeps in touch with the hub may take for one turn: that of the heartbeats, or where there are none that which
// renews the certificate.
func (o Options) turn() time.Duration {
	if o.runs(clusterStatus) {
		return o.heartbeat()
	}
	return rotationLimit
}

// heartbeat is the time between two heartbeats.
func (o Options) heartbeat() time.Duration {
	return time.Duration(float64(o.LeaseDuration) * o.LeaseRenewFraction)
}
