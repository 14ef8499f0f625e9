package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// requestTimeout is the timeout of a request to the hub or the member. Most requests of an uninstallation, which lists
	// the objects of every kind, have none.
	requestTimeout = 15 * time.Second
	// memberRetryInterval is the time between two attempts to read the paused state from the member.
	memberRetryInterval = time.Second
	// pausedAnnotation on the kubeconfig Secret is "true" while the cluster is paused, for a start without the hub.
	pausedAnnotation = "towline.dev/paused"
)

// driftCorrectingEngine is the part of *engine.Engine that the agent uses.
type driftCorrectingEngine interface {
	session.Engine
	// Run corrects drift from the inventory on the member until ctx ends.
	Run(ctx context.Context) error
}

// agent is one running agent.
type agent struct {
	opts Options
	// secrets and namespaces are clients for the member: for Secrets in kube.AgentNamespace, and for Namespaces.
	secrets    corev1client.SecretInterface
	namespaces corev1client.NamespaceInterface
	engine     driftCorrectingEngine
	// gate is closed while the cluster is paused.
	gate   *session.Gate
	facts  *clusterFacts
	checks *checks
	// metrics also has the watchdog of the heartbeat loop.
	metrics *session.Metrics
	probes  *session.Probes
	// uninstaller removes the agent from its member when the hub requests that.
	uninstaller *uninstaller
	rejectedLog *session.AuthErrorLog
	// duplicate is kept across sessions: a new session after a failed request must not restart takeoverDelay.
	duplicate duplicateRegistration
	// source receives the deliveries of the current session; nil between sessions.
	source atomic.Pointer[deliver.AgentSource]
	// otherRegistrations are the names of the Secrets that logOtherRegistrations has logged.
	otherRegistrations []string
}

// Run runs the agent of one member. It returns nil when ctx ends or the agent has uninstalled itself on request of the
// hub. It returns an error for invalid options, or if it cannot serve the addresses in the options. It corrects drift
// from the inventory on the member even without the hub, and reconnects to the hub after each error. Several agents for
// different clusters can run in one process.
func Run(ctx context.Context, opts Options) error {
	opts, err := opts.complete()
	if err != nil {
		return err
	}
	member, err := corev1client.NewForConfig(opts.Member)
	if err != nil {
		return fmt.Errorf("create a client for the member: %w", err)
	}
	metadataClient, err := metadata.NewForConfig(opts.Member)
	if err != nil {
		return fmt.Errorf("create a metadata client for the member: %w", err)
	}
	a := &agent{
		opts: opts, secrets: member.Secrets(kube.AgentNamespace), namespaces: member.Namespaces(),
		facts:       newClusterFacts(opts.Member, metadataClient, opts.Clock),
		metrics:     session.NewMetrics(fleet.TypeSveltos, types.NamespacedName{Namespace: opts.Namespace, Name: opts.Name}, session.NewWatchdog(opts.Clock, opts.Heartbeat)),
		rejectedLog: &session.AuthErrorLog{Clock: opts.Clock, Repair: credentials.Repair(opts.Namespace, opts.Name), IsRejected: isRejected},
	}
	a.duplicate.clock = opts.Clock
	a.checks = newChecks(opts.Member, opts.checker(), opts.Clock, a.facts.requestReport)
	a.probes = &session.Probes{Metrics: a.metrics.Registry, Member: opts.Member, Watchdog: a.metrics.Watchdog}
	if a.uninstaller, err = newUninstaller(opts.Member, opts); err != nil {
		return err
	}
	if a.engine, err = engine.New(opts.Member, engine.Options{OnCorrect: a.metrics.RecordCorrection, OnReport: a.onReport}); err != nil {
		return fmt.Errorf("create the engine for the member: %w", err)
	}
	return a.run(ctx)
}

func (a *agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	probesEnded := make(chan error, 1)
	goroutines.Go(func() { probesEnded <- a.probes.Run(ctx, a.opts.HealthAddress, a.opts.DiagnosticsAddress) })
	goroutines.Go(func() { a.checks.run(ctx) })
	goroutines.Go(func() { a.facts.run(ctx, func() { a.probes.Ready.Store(true) }) })
	goroutines.Go(func() { a.facts.watchKinds(ctx) })
	goroutines.Go(func() {
		defer cancel()
		a.runEngineAndSessions(ctx)
	})
	select {
	case err := <-probesEnded:
		cancel()
		return err
	case <-ctx.Done():
		return nil
	}
}

// runEngineAndSessions runs the engine and the sessions with the hub until ctx ends or the agent has uninstalled
// itself.
func (a *agent) runEngineAndSessions(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	defer cancel()
	a.gate = session.NewGate(a.readPaused(ctx))
	goroutines.Go(func() {
		a.gate.RunWhileOpen(ctx, func(ctx context.Context) { _ = a.backoffLoop().Run(ctx, "correct drift", a.engine.Run) })
	})
	// Run returns nil when ctx ends, and session.ErrUninstalled after an uninstallation.
	_ = a.backoffLoop().Run(ctx, "connect to the hub", a.connect)
}

// backoffLoop returns a loop that retries until the agent has uninstalled itself. It logs a rejected credential at most
// every session.LogInterval.
func (a *agent) backoffLoop() session.BackoffLoop {
	return session.BackoffLoop{
		Clock: a.opts.Clock, BeforeAttempt: a.metrics.Watchdog.Reset, LogError: a.rejectedLog.LogIfRejected,
		IsFinal: func(err error) bool { return errors.Is(err, session.ErrUninstalled) },
	}
}

// isRejected returns true if err means that the hub rejects the agent's credential.
func isRejected(err error) bool {
	return errors.Is(err, credentials.ErrRejected) || apierrors.IsUnauthorized(err)
}

// clusterKey is the key of the SveltosCluster on the hub.
func (a *agent) clusterKey() client.ObjectKey {
	return client.ObjectKey{Namespace: a.opts.Namespace, Name: a.opts.Name}
}

// readPaused returns true if the cluster was paused at the last contact with the hub. It retries until the member
// responds, and returns true if ctx ends before. A member that is not registered yet is not paused.
func (a *agent) readPaused(ctx context.Context) bool {
	for {
		a.metrics.Watchdog.Reset()
		requestCtx, cancel := context.WithTimeout(ctx, requestTimeout)
		secret, err := a.secrets.Get(requestCtx, a.opts.KubeconfigSecret, metav1.GetOptions{})
		cancel()
		if err == nil {
			return secret.Annotations[pausedAnnotation] == "true"
		}
		if apierrors.IsNotFound(err) {
			return false
		}
		if ctx.Err() == nil {
			log.FromContext(ctx).Info("cannot read the Secret with the hub's kubeconfig on the member yet", logkeys.Reason, err.Error())
		}
		if !session.Sleep(ctx, a.opts.Clock, memberRetryInterval) {
			return true
		}
	}
}

// onReport is called by the engine when the report of a bundle has changed. It queues the delivery of this bundle
// again, so that the Worker writes the report to the hub.
func (a *agent) onReport(id bundle.ID) {
	if source := a.source.Load(); source != nil {
		source.Wake(id)
	}
}
