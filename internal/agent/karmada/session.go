package karmada

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	joinkarmada "github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/works"
)

const (
	// lookAgain is the time between two looks for another way to the hub.
	lookAgain = 5 * time.Second
	// refusedRetry is the time between two attempts with a certificate that the hub refused.
	refusedRetry = 30 * time.Second
)

var (
	// errAnew says that the Cluster is another one than before, although of the same name.
	errAnew = errors.New("the Cluster was made anew")
	// errLost says that the hub does not let the agent see its Cluster. People were told.
	errLost = errors.New("the hub does not let the agent see its Cluster")
)

// link is one session: what is done over one way to the hub.
type link struct {
	*agent
	way *way
	hub client.WithWatch
	// kept is the memory as it is kept.
	kept memory
	// scope is the uid of the Cluster, and hubID that of the hub.
	scope  types.UID
	hubID  string
	engine *engine.Engine
	// seen is the Cluster as the hub last told of it.
	seen atomic.Pointer[clusterv1alpha1.Cluster]
	// look holds one request for a look at the member.
	look chan struct{}
	// beating is closed once there is a heartbeat to keep up.
	beating chan struct{}
	// end ends the session, for that reason.
	end context.CancelCauseFunc
	// silent says that the hub did not take the last heartbeat.
	silent bool
	// toldAt is when the hub was told last of the cluster's status.
	toldAt time.Time
	// beatSoon holds one request for a heartbeat that does not wait for its time.
	beatSoon chan struct{}
	// toldUnrequested is the value of kube.AnnotationUnrequested in the hub's last answer; nil means not known.
	toldUnrequested *string
}

// connect works over the latest way to the hub.
func (a *agent) connect(ctx context.Context) error {
	for {
		err := a.session(ctx)
		switch {
		case errors.Is(err, errReplaced), errors.Is(err, errAnew):
			log.FromContext(ctx).Info("connecting anew", "reason", err.Error())
		default:
			return err
		}
	}
}

// session works over one way to the hub, for as long as that is the way.
func (a *agent) session(ctx context.Context) error {
	kubeconfig, kept, err := a.home.read(ctx)
	if err != nil {
		return err
	}
	left, err := a.departure.marked(ctx)
	if err != nil {
		return err
	}
	if left != nil {
		return a.leave(ctx, left)
	}
	if kept.scope != "" {
		if _, err := a.healing.start(ctx, kept.scope, kept.hub); err != nil {
			return err
		}
	}
	if err := a.meet(ctx); err != nil {
		return err
	}
	l := &link{agent: a, kept: kept, look: make(chan struct{}, 1), beatSoon: make(chan struct{}, 1), beating: make(chan struct{})}
	if l.way, err = openWay(kubeconfig, a.opts); err != nil {
		return err
	}
	if l.hub, err = newHubClient(l.way.config); err != nil {
		return err
	}
	if err := l.enter(ctx); err != nil {
		return err
	}
	err = l.serve(a.refusal.WithFilteredLog(ctx))
	if errors.Is(err, errOrdered) {
		return a.depart(ctx, l.hub)
	}
	return err
}

// enter waits until the hub accepts the certificate, makes sure of the Cluster, and starts the engine for it.
func (l *link) enter(ctx context.Context) error {
	cluster, err := l.meetHub(ctx)
	if err != nil {
		return err
	}
	if err := l.verify(ctx, cluster); err != nil {
		return err
	}
	hub := cluster.Annotations[kube.AnnotationHub]
	if hub == "" {
		return fmt.Errorf("the hub has not taken Cluster %s up yet", cluster.Name)
	}
	l.seen.Store(cluster)
	l.scope, l.hubID = cluster.UID, hub
	if known := (memory{scope: string(cluster.UID), hub: hub, life: l.kept.life}); known != l.kept {
		if err := l.home.remember(ctx, known); err != nil {
			return err
		}
		l.kept = known
	}
	if l.engine, err = l.healing.start(ctx, string(cluster.UID), hub); err != nil {
		return err
	}
	l.engine.ConfirmScope()
	return l.describe(ctx, cluster)
}

// meetHub reads the Cluster, as soon as the hub lets the agent. It returns errReplaced when there is another way to the hub meanwhile.
func (l *link) meetHub(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	for {
		cluster, err := l.readCluster(ctx)
		switch {
		case err == nil:
			l.refusal.Reset()
			l.lost.Reset()
			return cluster, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case l.lost.LogIfRejected(ctx, err):
			l.metrics.RecordHeartbeat(err)
			return nil, fmt.Errorf("%w: %w", errLost, err)
		case !l.refusal.LogIfRejected(ctx, err):
			l.metrics.RecordHeartbeat(err)
			return nil, err
		}
		l.metrics.RecordHeartbeat(err)
		if err := l.rest(ctx, refusedRetry); err != nil {
			return nil, err
		}
	}
}

func (l *link) readCluster(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	cluster := &clusterv1alpha1.Cluster{}
	if err := l.hub.Get(ctx, l.cluster(), cluster); err != nil {
		return nil, fmt.Errorf("read Cluster %s: %w", l.opts.Cluster, err)
	}
	return cluster, nil
}

// rest waits, and returns an error when there is nothing more to wait for.
func (l *link) rest(ctx context.Context, pause time.Duration) error {
	for end := l.opts.Clock.Now().Add(pause); l.opts.Clock.Now().Before(end); {
		l.metrics.Watchdog.Reset()
		if !session.Sleep(ctx, l.opts.Clock, lookAgain) {
			return ctx.Err()
		}
		if l.replaced(ctx) {
			return errReplaced
		}
	}
	return nil
}

// verify makes sure that the Cluster is this member.
func (l *link) verify(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	if cluster.Spec.ID == l.id && cluster.Spec.SyncMode == clusterv1alpha1.Pull && (ready == nil || ready.Reason != fleet.ReasonTaken) {
		return nil
	}
	taken := joinkarmada.Taken{ID: l.id, Name: cluster.Name}
	log.FromContext(ctx).Error(taken, "the Cluster is not this member", "itsID", cluster.Spec.ID, "mode", string(cluster.Spec.SyncMode))
	return taken
}

// describe has the Cluster say what the options say of the member.
func (l *link) describe(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	spec := map[string]any{}
	for field, value := range map[string]struct{ have, want string }{
		"apiEndpoint": {cluster.Spec.APIEndpoint, l.opts.APIEndpoint}, "proxyURL": {cluster.Spec.ProxyURL, l.opts.ProxyURL},
		"provider": {cluster.Spec.Provider, l.opts.Provider}, "region": {cluster.Spec.Region, l.opts.Region},
	} {
		if value.want != "" && value.want != value.have {
			spec[field] = value.want
		}
	}
	if len(l.opts.Zones) > 0 && !slices.Equal(l.opts.Zones, cluster.Spec.Zones) {
		spec["zones"] = l.opts.Zones
		if cluster.Spec.Zone != "" {
			spec["zone"] = nil
		}
	}
	if len(spec) == 0 || cluster.DeletionTimestamp != nil {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"spec": spec})
	if err != nil {
		return fmt.Errorf("encode patch of Cluster: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if err := l.hub.Patch(ctx, cluster.DeepCopy(), client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("write what is known of the member into Cluster %s: %w", cluster.Name, err)
	}
	return nil
}

// serve does what the hub asks for, until ctx ends, or the way is replaced, or there is something else to be done first.
func (l *link) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	l.end = cancel
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	running.Go(func() {
		session.ClusterWatcher[*clusterv1alpha1.Cluster]{
			Key: l.cluster(), Example: &clusterv1alpha1.Cluster{}, NewList: func() client.ObjectList { return &clusterv1alpha1.ClusterList{} },
			OnChange: func(ctx context.Context, seen *clusterv1alpha1.Cluster) {
				if err := l.see(ctx, seen); err != nil {
					cancel(err)
				}
			},
		}.Run(ctx, l.hub)
	})
	if l.opts.runs(clusterStatus) {
		running.Go(func() { l.reportAlways(ctx) })
		running.Go(func() { l.beatAlways(ctx) })
	}
	if l.opts.runs(execution) {
		l.deliveries(ctx, &running)
	}
	err := l.watchWay(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// deliveries works on what the hub deploys: Works, and the bundles of profiles.
func (l *link) deliveries(ctx context.Context, running *sync.WaitGroup) {
	in := deliver.NewAgentSource(l.hub, l.lease().Namespace, l.opts.Cluster)
	worker := &session.Worker{Inbox: in, Engine: l.engine, Gate: l.gate, OnKindsChanged: func() { session.Signal(l.look) }, OnConverged: l.metrics.RecordConverge,
		OnWithdrawn: func() { session.Signal(l.beatSoon) },
	}
	load := newWorkload(l.hub, l.lease().Namespace, l.opts)
	load.gate = l.gate
	load.executor = &works.Executor{Hub: l.hub, Engine: counted{l.engine, l.metrics}, Clock: l.opts.Clock}
	load.circumstances = l.circumstances
	l.inbox.Store(in)
	l.works.Store(load)
	running.Go(func() {
		defer l.inbox.CompareAndSwap(in, nil)
		// It returns when ctx ends and not before.
		_ = in.Run(ctx, l.opts.WorkSyncs, worker.Handle)
	})
	running.Go(func() {
		defer l.works.CompareAndSwap(load, nil)
		load.run(ctx, l.opts.WorkSyncs)
	})
}

// circumstances say how the cluster stands. That it does not answer shows in the attempt.
func (l *link) circumstances() works.ClusterState {
	m := fleet.FromCluster(l.seen.Load())
	return works.ClusterState{Reachable: true, Deregistering: m.Deleting, Orphan: m.Deleting && m.KeepAddons}
}

// see takes the Cluster as it is now. An error is what is to be done first.
func (l *link) see(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	if cluster.UID != l.scope {
		return errAnew
	}
	if ordered(cluster) {
		return errOrdered
	}
	if err := l.verify(ctx, cluster); err != nil {
		return err
	}
	before := l.circumstances()
	if cluster.Annotations[kube.AnnotationHub] != l.hubID {
		return errAnew
	}
	l.seen.Store(cluster)
	if load := l.works.Load(); load != nil && before != l.circumstances() {
		load.wakeAll()
	}
	if l.disagrees(cluster) {
		session.Signal(l.look)
	}
	return nil
}

// counted is an engine whose passes are counted.
type counted struct {
	*engine.Engine
	metrics *session.Metrics
}

// Converge makes the cluster equal b.
func (c counted) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	report, err := c.Engine.Converge(ctx, b)
	c.metrics.RecordConverge(err)
	return report, err
}
