package karmada

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	joinkarmada "github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/survey"
)

// requestLimit is how long the hub, or the member, may take for one small request.
const requestLimit = 15 * time.Second

// agent is one running agent.
type agent struct {
	opts     Options
	member   kubernetes.Interface
	home     home
	observer *survey.Observer
	metrics  *session.Metrics
	probes   *session.Probes
	pulses   *pulses
	// id tells the member from every other cluster.
	id string
	// gate is closed while this agent is not the elected one, so that another one of this Cluster may be at work.
	gate    *session.Gate
	healing *healing
	// departure removes the agent from its member when the hub orders that.
	departure *departure
	refusal   *session.AuthErrorLog
	// lost tells people of a hub that does not know the Cluster.
	lost *session.AuthErrorLog
	// pending is a renewed certificate that could not be kept yet.
	pending *renewal
	// inbox and works are those of the session that runs, if one does.
	inbox atomic.Pointer[deliver.AgentSource]
	works atomic.Pointer[workload]
}

// Run works for one member until ctx ends, or until it has removed the agent on the hub's order, and then returns nil. It heals what is
// deployed from the member's own records first of all, and whether or not the hub can be reached; it connects to the hub, and connects
// again, by itself. It fails for options that cannot work, and if the Cluster is not this member's: then the error is joinkarmada.ErrTaken.
// Several agents for different Clusters can run in one process.
func Run(ctx context.Context, opts Options) error {
	opts, err := opts.complete()
	if err != nil {
		return err
	}
	a := &agent{opts: opts, gate: session.NewGate(true)}
	if a.member, err = kubernetes.NewForConfig(opts.Member); err != nil {
		return fmt.Errorf("make client for the member: %w", err)
	}
	a.home = newHome(a.member, opts)
	a.refusal = &session.AuthErrorLog{Clock: opts.Clock, Repair: Repair(opts.Cluster), IsRejected: refused}
	a.lost = &session.AuthErrorLog{
		Clock: opts.Clock, IsRejected: unknown, Message: "the hub does not let the agent see its Cluster; what is deployed stays and is healed",
		Repair: "if the cluster was unregistered while its agent was away, run: karmadactl unregister " + opts.Cluster + " --cluster-kubeconfig=FILE",
	}
	a.metrics = session.NewMetrics(fleet.TypeKarmada, types.NamespacedName{Name: opts.Cluster}, session.NewWatchdog(opts.Clock, opts.turn()))
	a.pulses = &pulses{hub: a.metrics.Watchdog}
	if opts.LeaderElect {
		a.pulses.election = session.NewWatchdog(opts.Clock, opts.ElectRetry)
	}
	a.probes = &session.Probes{Metrics: a.metrics.Registry, Member: opts.Member, Watchdog: a.pulses}
	a.healing = &healing{agent: a}
	if a.departure, err = newDeparture(opts, a.member, a.home); err != nil {
		return err
	}
	a.observer, err = survey.NewObserver(opts.Member, survey.Options{Clock: opts.Clock, Success: opts.SuccessThreshold, Failure: opts.FailureThreshold})
	if err != nil {
		return err
	}
	return a.run(ctx)
}

// Repair says what to run where, in one line, to give the agent of a Cluster a new certificate.
func Repair(cluster string) string {
	return "with the hub's kubeconfig run: karmadactl token create --cluster-name=" + cluster + " --print-register-command; " +
		"then with this cluster's kubeconfig run the command that it prints"
}

func (a *agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	served, worked := make(chan error, 1), make(chan error, 1)
	running.Go(func() { served <- a.probes.Run(ctx, a.opts.HealthAddress, a.opts.MetricsAddress) })
	running.Go(func() { worked <- a.elect(ctx) })
	running.Go(func() {
		if a.opts.runs(clusterStatus) {
			_ = a.persistence().Run(ctx, "watch nodes and pods", a.observer.Run)
		}
	})
	var err error
	select {
	case err = <-served:
	case err = <-worked:
	}
	cancel()
	if errors.Is(err, errDeparted) {
		return nil
	}
	return err
}

// lead does the agent's work until ctx ends. It returns an error only when that is the end of the agent.
func (a *agent) lead(ctx context.Context) error {
	a.pulses.hub.Reset()
	a.pulses.working.Store(true)
	defer a.pulses.working.Store(false)
	defer a.healing.stop()
	a.healing.while(ctx)
	return a.persistence().Run(ctx, "connect to the hub", a.connect)
}

// meet asks the member which cluster it is.
func (a *agent) meet(ctx context.Context) error {
	if a.id != "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	namespace, err := a.member.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	a.id = string(namespace.UID)
	a.probes.Ready.Store(true)
	return nil
}

func (a *agent) persistence() session.BackoffLoop {
	return session.BackoffLoop{
		Clock: a.opts.Clock, BeforeAttempt: a.metrics.Watchdog.Reset,
		IsFinal: func(err error) bool {
			return errors.Is(err, errDeparted) || errors.Is(err, errYielded) || errors.Is(err, joinkarmada.ErrTaken)
		},
		LogError: func(ctx context.Context, err error) bool {
			return a.refusal.LogIfRejected(ctx, err) || errors.Is(err, errLost)
		},
	}
}

// healed takes what the engine put back: the hub is told if that failed, or works again.
func (a *agent) healed(id bundle.ID, changes bundle.ChangeSet) {
	a.metrics.RecordCorrection(id, changes)
	if in := a.inbox.Load(); in != nil {
		in.Wake(id)
	}
	if w := a.works.Load(); w != nil {
		w.wake(id)
	}
}

// changed takes news of an object that the engine deployed.
func (a *agent) changed(id bundle.ID) {
	if w := a.works.Load(); w != nil && a.opts.runs(workStatus) {
		w.wake(id)
	}
}

// cluster is the key of the Cluster, and lease that of its Lease.
func (a *agent) cluster() types.NamespacedName { return types.NamespacedName{Name: a.opts.Cluster} }

func (a *agent) lease() types.NamespacedName {
	return types.NamespacedName{Namespace: fleet.ExecutionSpace(a.opts.Cluster), Name: a.opts.Cluster}
}
