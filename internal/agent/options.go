package agent

import (
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/join"
)

const (
	// defaultWorkers is how many deliveries are worked on at once: enough for a big one not to hold up small ones.
	defaultWorkers = 4
	// defaultHeartbeat is the time between two renewals of the Lease. The hub calls a member Down after three missed ones.
	defaultHeartbeat = 30 * time.Second
	// refreshInterval is the longest time between two reports on the cluster object; tools of the Sveltos surface give
	// up on an agent after ten minutes.
	refreshInterval = 5 * time.Minute
	// factsInterval is how often the agent looks which kinds its cluster serves; it also looks when a definition
	// changes.
	factsInterval = 10 * time.Minute
)

// Options say which member an agent works for and how.
type Options struct {
	// Member is how the agent reaches the cluster that it runs in.
	Member *rest.Config
	// Namespace and Name are those of the cluster on the hub.
	Namespace string
	Name      string
	// KubeconfigSecret is the Secret in kube.AgentNamespace on the member with the way to the hub. Default:
	// <Name>-sveltos-kubeconfig.
	KubeconfigSecret string
	// Identity tells the agents of one cluster apart, in the Lease; the name of the pod or host.
	Identity string
	// HealthAddress serves /healthz and /readyz over HTTP, and DiagnosticsAddress /metrics over HTTPS; empty serves
	// nothing.
	HealthAddress      string
	DiagnosticsAddress string
	// Workers is how many deliveries are worked on at once. Default 4.
	Workers int
	// Heartbeat is the time between two renewals of the Lease. Default 30 s.
	Heartbeat time.Duration
	// TokenLife is the life to ask for when the credential for the hub is renewed. Default join.AgentTokenLife.
	TokenLife time.Duration
	// Clock tells the time. Default: the real one.
	Clock clock.WithTicker
}

func (o Options) withDefaults() (Options, error) {
	if o.Member == nil {
		return o, errors.New("agent needs a way to its own cluster")
	}
	if o.Namespace == "" || o.Name == "" {
		return o, fmt.Errorf("agent needs the namespace and name of its cluster, got %q and %q", o.Namespace, o.Name)
	}
	if o.Member.QPS == 0 {
		// The API server shares its capacity out fairly itself; a limit here would only slow big bundles down.
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
