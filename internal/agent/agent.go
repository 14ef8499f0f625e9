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

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

const (
	// memberRetry is the time between two attempts to read what the agent must know before it starts.
	memberRetry = time.Second
	// pausedAnnotation on the kubeconfig Secret remembers that the cluster is paused, for a start while the hub is away.
	pausedAnnotation = "towline.dev/paused"
)

// healer is the engine as the agent uses it.
type healer interface {
	session.Engine
	// Run puts back what others change in what was applied, from the records on the member, until ctx ends.
	Run(ctx context.Context) error
}

// agent is one running agent.
type agent struct {
	opts       Options
	secrets    corev1client.SecretInterface
	namespaces corev1client.NamespaceInterface
	engine     healer
	gate       *session.Gate
	self       *self
	checks     *checks
	metrics    *session.Metrics
	probes     *session.Probes
	// departure removes the agent from its member when the hub orders that.
	departure *departure
	refusal   *session.AuthErrorLog
	// inbox is that of the session that runs, if one does.
	inbox atomic.Pointer[deliver.AgentSource]
	// others are what lookForOthers told of last.
	others []string
}

// Run works for one member until ctx ends, or until it has removed the agent on the hub's order, and then returns nil.
// It heals what is deployed from the member's own records first of all, and whether or not the hub can be reached; it
// connects to the hub, and connects again, by itself. It fails only for options that cannot work. Several agents for
// different clusters can run in one process.
func Run(ctx context.Context, opts Options) error {
	opts, err := opts.withDefaults()
	if err != nil {
		return err
	}
	member, err := corev1client.NewForConfig(opts.Member)
	if err != nil {
		return fmt.Errorf("make client for the member: %w", err)
	}
	objects, err := metadata.NewForConfig(opts.Member)
	if err != nil {
		return fmt.Errorf("make client for the member: %w", err)
	}
	a := &agent{
		opts: opts, secrets: member.Secrets(kube.AgentNamespace), namespaces: member.Namespaces(),
		self:    newSelf(opts.Member, objects, opts.Clock),
		metrics: session.NewMetrics(fleet.TypeSveltos, types.NamespacedName{Namespace: opts.Namespace, Name: opts.Name}, session.NewWatchdog(opts.Clock, opts.Heartbeat)),
		refusal: &session.AuthErrorLog{Clock: opts.Clock, Repair: join.Repair(opts.Namespace, opts.Name), IsRejected: refused},
	}
	a.checks = newChecks(opts.Member, opts.Clock, a.self.announceSoon)
	a.probes = &session.Probes{Metrics: a.metrics.Registry, Member: opts.Member, Watchdog: a.metrics.Watchdog}
	if a.departure, err = newDeparture(opts.Member, opts); err != nil {
		return err
	}
	if a.engine, err = engine.New(opts.Member, engine.Options{OnHeal: a.healed}); err != nil {
		return fmt.Errorf("make engine for the member: %w", err)
	}
	return a.run(ctx)
}

func (a *agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	served := make(chan error, 1)
	running.Go(func() { served <- a.probes.Run(ctx, a.opts.HealthAddress, a.opts.DiagnosticsAddress) })
	running.Go(func() { a.checks.run(ctx) })
	running.Go(func() { a.self.watch(ctx, func() { a.probes.Ready.Store(true) }) })
	running.Go(func() { a.self.watchKinds(ctx) })
	running.Go(func() {
		a.gate = session.NewGate(a.wasPaused(ctx))
		running.Go(func() { a.gate.RunWhileOpen(ctx, func(ctx context.Context) { a.persist(ctx, "heal", a.engine.Run) }) })
		// It ends with ctx, or when the agent has left.
		a.persist(ctx, "connect to the hub", a.connect)
		cancel()
	})
	select {
	case err := <-served:
		cancel()
		return err
	case <-ctx.Done():
		return nil
	}
}

// persist runs work, and runs it again when it ends, after a growing pause, until ctx ends or the agent has left.
func (a *agent) persist(ctx context.Context, what string, work func(context.Context) error) {
	p := session.BackoffLoop{
		Clock: a.opts.Clock, BeforeAttempt: a.metrics.Watchdog.Reset, LogError: a.refusal.LogIfRejected,
		IsFinal: func(err error) bool { return errors.Is(err, errDeparted) },
	}
	// The only error that ends it has been dealt with by who returned it.
	_ = p.Run(ctx, what, work)
}

// refused says whether err means that the hub refuses the agent's credential.
func refused(err error) bool { return errors.Is(err, join.ErrRefused) || apierrors.IsUnauthorized(err) }

// connect works over the latest way to the hub.
func (a *agent) connect(ctx context.Context) error {
	for {
		err := a.session(ctx)
		switch {
		case errors.Is(err, join.ErrSuperseded):
			log.FromContext(ctx).Info("the cluster was registered again: connecting anew")
		case errors.Is(err, errDisplaced):
			log.FromContext(ctx).Info("another cluster took the registration over while this one was silent")
		default:
			return err
		}
	}
}

// session works over one way to the hub, for as long as that is the way.
func (a *agent) session(ctx context.Context) error {
	m, err := a.departure.marked(ctx)
	if err != nil {
		return err
	}
	if m != nil {
		return a.leave(ctx, m)
	}
	if err := a.lookForOthers(ctx); err != nil {
		return err
	}
	credential, err := a.openCredential(ctx)
	if err != nil {
		return err
	}
	// The manifest's token is good for this alone: somebody else may have a copy of it.
	if err := credential.Exchange(ctx); err != nil {
		return err
	}
	hub, err := newHubClient(credential.Config())
	if err != nil {
		return err
	}
	member, err := a.memberUID(ctx)
	if err != nil {
		return err
	}
	link := a.newLink(credential, hub, member)
	if err := a.enter(ctx, credential, link); err != nil {
		return err
	}
	err = a.serve(a.refusal.WithFilteredLog(ctx), credential, hub, link)
	if errors.Is(err, errOrdered) {
		return a.depart(ctx, hub)
	}
	return err
}

func (a *agent) openCredential(ctx context.Context) (*join.Credential, error) {
	return join.OpenCredential(ctx, join.CredentialOptions{
		Secrets: a.secrets, Secret: a.opts.KubeconfigSecret, Namespace: a.opts.Namespace, Name: a.opts.Name,
		Life: a.opts.TokenLife, Clock: a.opts.Clock,
	})
}

// cluster is the name of the cluster object on the hub.
func (a *agent) cluster() client.ObjectKey {
	return client.ObjectKey{Namespace: a.opts.Namespace, Name: a.opts.Name}
}

func (a *agent) newLink(credential *join.Credential, hub client.Client, member types.UID) *link {
	return &link{
		hub: hub, cluster: a.cluster(), lease: client.ObjectKey{Namespace: credential.DeliveryNamespace(), Name: a.opts.Name}, member: member,
		identity: a.opts.Identity, heartbeat: a.opts.Heartbeat, clock: a.opts.Clock, metrics: a.metrics, self: a.self,
		checks: a.checks, refusal: a.refusal, exchanged: credential.Exchanged,
		beatSoon:    make(chan struct{}, 1),
		unrequested: func() (string, bool) { return session.UnrequestedValue(a.engine, a.inbox.Load()) },
	}
}

// serve does what the hub asks for. It returns errOrdered when that is to leave, and errDisplaced when another cluster
// does it now.
func (a *agent) serve(ctx context.Context, credential *join.Credential, hub client.WithWatch, link *link) error {
	in := deliver.NewAgentSource(hub, credential.DeliveryNamespace(), a.opts.Name)
	a.inbox.Store(in)
	defer a.inbox.Store(nil)
	work := &session.Worker{Inbox: in, Engine: a.engine, Gate: a.gate, OnKindsChanged: a.self.kindsChanged, OnConverged: a.metrics.RecordConverge,
		OnWithdrawn: func() { session.Signal(link.beatSoon) },
	}

	server := credential.Config().Host
	log.FromContext(ctx).Info("connected to the hub", "server", server)
	ctx, cancel := context.WithCancelCause(ctx)
	defer func() { log.FromContext(ctx).Info("disconnected from the hub", "server", server) }()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	running.Go(func() {
		if err := link.beat(ctx); err != nil {
			cancel(err)
		}
	})
	running.Go(func() { link.announce(ctx) })
	running.Go(func() {
		session.ClusterWatcher[*libv1beta1.SveltosCluster]{
			Key: a.cluster(), Example: &libv1beta1.SveltosCluster{}, NewList: func() client.ObjectList { return &libv1beta1.SveltosClusterList{} },
			OnChange: func(ctx context.Context, seen *libv1beta1.SveltosCluster) {
				if ordered(seen) {
					cancel(errOrdered)
					return
				}
				a.see(ctx, link, seen)
			},
		}.Run(ctx, hub)
	})
	running.Go(func() {
		// It returns when ctx ends and not before.
		_ = in.Run(ctx, a.opts.Workers, work.Handle)
	})
	err := credential.Run(ctx)
	if cause := context.Cause(ctx); errors.Is(cause, errOrdered) || errors.Is(cause, errDisplaced) {
		return cause
	}
	return err
}

// see takes the cluster object as it is now.
func (a *agent) see(ctx context.Context, link *link, cluster *libv1beta1.SveltosCluster) {
	a.checks.take(cluster)
	if !link.agrees(cluster) {
		a.self.announceSoon()
	}
	// What is deployed on a cluster that is being deregistered is withdrawn, paused or not.
	paused := cluster.Spec.Paused && cluster.DeletionTimestamp == nil
	if !a.gate.SetClosed(paused) {
		return
	}
	log.FromContext(ctx).Info("the cluster was paused or unpaused", "paused", paused)
	patch := `{"metadata":{"annotations":{"` + pausedAnnotation + `":null}}}`
	if paused {
		patch = `{"metadata":{"annotations":{"` + pausedAnnotation + `":"true"}}}`
	}
	_, err := a.secrets.Patch(ctx, a.opts.KubeconfigSecret, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		log.FromContext(ctx).Info("cannot remember that for a restart", "reason", err.Error())
	}
}

// wasPaused says whether the cluster was paused when the hub was last heard of. It waits until the member says so; a
// member that is not registered yet has no say.
func (a *agent) wasPaused(ctx context.Context) bool {
	for {
		a.metrics.Watchdog.Reset()
		secret, err := a.secrets.Get(ctx, a.opts.KubeconfigSecret, metav1.GetOptions{})
		if err == nil {
			return secret.Annotations[pausedAnnotation] == "true"
		}
		if apierrors.IsNotFound(err) {
			return false
		}
		if ctx.Err() == nil {
			log.FromContext(ctx).Info("cannot read the cluster's own API yet", "reason", err.Error())
		}
		if !session.Sleep(ctx, a.opts.Clock, memberRetry) {
			return true
		}
	}
}

// healed takes what the engine put back: the hub is told if that failed, or works again.
func (a *agent) healed(id bundle.ID, changes bundle.ChangeSet) {
	a.metrics.RecordCorrection(id, changes)
	if in := a.inbox.Load(); in != nil {
		in.Wake(id)
	}
}
