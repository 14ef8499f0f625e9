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
	"github.com/towline/towline/internal/clusterstatus"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	joinkarmada "github.com/towline/towline/internal/join/karmada"
)

// requestTimeout is the timeout of a request to the hub or the member. Most requests of an uninstallation have none.
const requestTimeout = 15 * time.Second

// agent is one running agent.
type agent struct {
	opts        Options
	member      kubernetes.Interface
	credentials credentialStore
	observer    *clusterstatus.Observer
	// metrics also has the watchdog of the heartbeat loop.
	metrics   *session.Metrics
	probes    *session.Probes
	watchdogs *watchdogs
	// memberID is the UID of the member's namespace kube-system.
	memberID string
	// gate is closed while this agent is not the leader, because another agent may be changing the member.
	gate         *session.Gate
	engineRunner *engineRunner
	// uninstaller removes the agent from its member when the hub requests that.
	uninstaller *uninstaller
	rejectedLog *session.AuthErrorLog
	// missingLog logs that the hub returns NotFound or Forbidden for the Cluster.
	missingLog *session.AuthErrorLog
	// pendingRenewal is a renewed certificate that could not be stored yet.
	pendingRenewal *renewal
	// source receives the deliveries of the current session, workQueue its Works; nil between sessions.
	source    atomic.Pointer[deliver.AgentSource]
	workQueue atomic.Pointer[workQueue]
}

// Run runs the agent of one member. It returns nil when ctx ends or the agent has uninstalled itself on request of the
// hub. It returns an error for invalid options, if it cannot serve the addresses in the options, and with
// joinkarmada.ErrAlreadyRegistered if the Cluster belongs to another member. It corrects drift from the inventory on
// the member even without the hub, and reconnects to the hub after each error. Several agents for different Clusters
// can run in one process.
func Run(ctx context.Context, opts Options) error {
	opts, err := opts.complete()
	if err != nil {
		return err
	}
	a := &agent{opts: opts, gate: session.NewGate(true)}
	if a.member, err = kubernetes.NewForConfig(opts.Member); err != nil {
		return fmt.Errorf("create a client for the member: %w", err)
	}
	a.credentials = newCredentialStore(a.member, opts)
	a.rejectedLog = &session.AuthErrorLog{Clock: opts.Clock, Repair: Repair(opts.Cluster), IsRejected: isRejected}
	a.missingLog = &session.AuthErrorLog{
		Clock: opts.Clock, IsRejected: isMissingCluster, Message: "the hub does not let the agent see its Cluster; deployed objects stay, and drift is corrected",
		Repair: "if the cluster was unregistered while its agent was down, run: karmadactl unregister " + opts.Cluster + " --cluster-kubeconfig=FILE",
	}
	a.metrics = session.NewMetrics(fleet.TypeKarmada, types.NamespacedName{Name: opts.Cluster}, session.NewWatchdog(opts.Clock, opts.watchdogInterval()))
	a.watchdogs = &watchdogs{heartbeat: a.metrics.Watchdog}
	if opts.LeaderElect {
		a.watchdogs.election = session.NewWatchdog(opts.Clock, opts.ElectRetry)
	}
	a.probes = &session.Probes{Metrics: a.metrics.Registry, Member: opts.Member, Watchdog: a.watchdogs}
	a.engineRunner = &engineRunner{agent: a}
	if a.uninstaller, err = newUninstaller(opts, a.credentials); err != nil {
		return err
	}
	a.observer, err = clusterstatus.NewObserver(opts.Member, clusterstatus.Options{Clock: opts.Clock, SuccessThreshold: opts.SuccessThreshold, FailureThreshold: opts.FailureThreshold})
	if err != nil {
		return err
	}
	return a.run(ctx)
}

// Repair returns instructions, in one line, to give the agent of a Cluster a new certificate.
func Repair(cluster string) string {
	return "with the hub's kubeconfig run: karmadactl token create --cluster-name=" + cluster + " --print-register-command; " +
		"then with this cluster's kubeconfig run the command that it prints"
}

func (a *agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	probesEnded, electionEnded := make(chan error, 1), make(chan error, 1)
	goroutines.Go(func() { probesEnded <- a.probes.Run(ctx, a.opts.HealthAddress, a.opts.MetricsAddress) })
	goroutines.Go(func() { electionEnded <- a.runElection(ctx) })
	goroutines.Go(func() {
		if a.opts.isEnabled(clusterStatus) {
			_ = a.backoffLoop().Run(ctx, "watch nodes and pods", a.observer.Run)
		}
	})
	var err error
	select {
	case err = <-probesEnded:
	case err = <-electionEnded:
	}
	cancel()
	if errors.Is(err, session.ErrUninstalled) {
		return nil
	}
	return err
}

// runSessions runs sessions one after the other until ctx ends or one returns a final error. Then it stops the engine.
func (a *agent) runSessions(ctx context.Context) error {
	a.watchdogs.heartbeat.Reset()
	a.watchdogs.inSession.Store(true)
	defer a.watchdogs.inSession.Store(false)
	defer a.engineRunner.stop()
	a.engineRunner.setSessionsContext(ctx)
	return a.backoffLoop().Run(ctx, "connect to the hub", a.connect)
}

// ensureMemberID reads memberID unless it is known. The agent is ready once the member has returned it.
func (a *agent) ensureMemberID(ctx context.Context) error {
	if a.memberID != "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	namespace, err := a.member.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	a.memberID = string(namespace.UID)
	a.probes.Ready.Store(true)
	return nil
}

func (a *agent) backoffLoop() session.BackoffLoop {
	return session.BackoffLoop{
		Clock: a.opts.Clock, BeforeAttempt: a.metrics.Watchdog.Reset,
		IsFinal: func(err error) bool {
			return errors.Is(err, session.ErrUninstalled) || errors.Is(err, errSuperseded) || errors.Is(err, joinkarmada.ErrAlreadyRegistered)
		},
		LogError: func(ctx context.Context, err error) bool {
			return a.rejectedLog.LogIfRejected(ctx, err) || errors.Is(err, errClusterMissing)
		},
	}
}

// onReport is called by the engine when the report of a bundle has changed. It queues the delivery or the Work of this
// bundle again, so that the report is written to the hub.
func (a *agent) onReport(id bundle.ID) {
	if source := a.source.Load(); source != nil {
		source.Wake(id)
	}
	if queue := a.workQueue.Load(); queue != nil {
		queue.requeue(id)
	}
}

// onObjectChange is called by the engine when an object of a bundle has changed. It queues the Work of this bundle
// again.
func (a *agent) onObjectChange(id bundle.ID) {
	if queue := a.workQueue.Load(); queue != nil && a.opts.isEnabled(workStatus) {
		queue.requeue(id)
	}
}

// clusterKey is the key of the Cluster, and leaseKey the key of its Lease on the hub.
func (a *agent) clusterKey() types.NamespacedName { return types.NamespacedName{Name: a.opts.Cluster} }

func (a *agent) leaseKey() types.NamespacedName {
	return types.NamespacedName{Namespace: fleet.ExecutionSpace(a.opts.Cluster), Name: a.opts.Cluster}
}
