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
	// credentialCheckInterval is the time between two checks of the stored kubeconfig.
	credentialCheckInterval = 5 * time.Second
	// rejectedRetryInterval is the time between two attempts with a certificate that the hub rejects. An API server that
	// starts can reject a valid one.
	rejectedRetryInterval = session.MaxRetryDelay
)

var (
	// errRecreated ends a session because the Cluster was deleted and created again, or has moved to another hub.
	errRecreated = errors.New("the Cluster was created again")
	// errClusterMissing ends a session because the hub returns NotFound or Forbidden for the Cluster. missingLog has
	// logged it.
	errClusterMissing = errors.New("the hub does not let the agent see its Cluster")
)

// hubSession is the work of an agent with one kubeconfig and one Cluster.
type hubSession struct {
	*agent
	transport *hubTransport
	hubClient client.WithWatch
	// state is the stored agentState.
	state agentState
	// clusterUID is the UID of the Cluster, and hubID the ID of the hub.
	clusterUID types.UID
	hubID      string
	engine     *engine.Engine
	// cluster is the last known version of the Cluster.
	cluster atomic.Pointer[clusterv1alpha1.Cluster]
	// reportRequested holds one signal to observe the member and report.
	reportRequested chan struct{}
	// heartbeatsStarted is closed after the first heartbeat.
	heartbeatsStarted chan struct{}
	// end ends the session with an error, which run returns.
	end context.CancelCauseFunc
	// isHeartbeatFailing is true if the hub did not accept the last heartbeat.
	isHeartbeatFailing bool
	// reportedAt is the time of the last report.
	reportedAt time.Time
	// heartbeatRequested holds one signal to send a heartbeat now.
	heartbeatRequested chan struct{}
	// reportedUnrequested is the value of kube.AnnotationUnrequested in the hub's last response; nil if unknown.
	reportedUnrequested *string
}

// connect runs sessions. It starts a new one at once after errReplaced or errRecreated. After any other end it returns
// the error, so that its BackoffLoop delays the next call or ends.
func (a *agent) connect(ctx context.Context) error {
	for {
		err := a.runSession(ctx)
		switch {
		case errors.Is(err, errReplaced), errors.Is(err, errRecreated):
			log.FromContext(ctx).Info("reconnecting to the hub", "reason", err.Error())
		default:
			return err
		}
	}
}

// runSession continues an uninstallation if one has begun. Otherwise it starts the engine of the last session, runs one
// session, and uninstalls the agent if the hub requests that.
func (a *agent) runSession(ctx context.Context) error {
	kubeconfig, state, err := a.credentials.read(ctx)
	if err != nil {
		return err
	}
	uninstallState, err := a.uninstaller.resumeOrRollBack(ctx)
	if err != nil {
		return err
	}
	if uninstallState != nil {
		return a.finishUninstall(ctx, uninstallState)
	}
	if state.clusterUID != "" {
		if _, err := a.engineRunner.ensureEngine(ctx, state.clusterUID, state.hubID); err != nil {
			return err
		}
	}
	if err := a.ensureMemberID(ctx); err != nil {
		return err
	}
	s := &hubSession{agent: a, state: state, reportRequested: make(chan struct{}, 1), heartbeatRequested: make(chan struct{}, 1), heartbeatsStarted: make(chan struct{})}
	if s.transport, err = newHubTransport(kubeconfig, a.opts); err != nil {
		return err
	}
	if s.hubClient, err = newHubClient(s.transport.config); err != nil {
		return err
	}
	if err := s.open(ctx); err != nil {
		return err
	}
	err = s.run(a.rejectedLog.WithFilteredLog(ctx))
	if errors.Is(err, session.ErrUninstallRequested) {
		return a.uninstall(ctx, s.hubClient)
	}
	return err
}

// open waits until the hub accepts the certificate, verifies and stores the Cluster, and starts the engine for it.
func (s *hubSession) open(ctx context.Context) error {
	cluster, err := s.awaitCluster(ctx)
	if err != nil {
		return err
	}
	if err := s.verifyCluster(ctx, cluster); err != nil {
		return err
	}
	hub := cluster.Annotations[kube.AnnotationHub]
	if hub == "" {
		return fmt.Errorf("the hub has not processed Cluster %s yet", cluster.Name)
	}
	s.cluster.Store(cluster)
	s.clusterUID, s.hubID = cluster.UID, hub
	if state := (agentState{clusterUID: string(cluster.UID), hubID: hub, lifetime: s.state.lifetime}); state != s.state {
		if err := s.credentials.saveState(ctx, state); err != nil {
			return err
		}
		s.state = state
	}
	if s.engine, err = s.engineRunner.ensureEngine(ctx, string(cluster.UID), hub); err != nil {
		return err
	}
	s.engine.ConfirmScope() // the hub has confirmed the UID: the engine may delete inventories of earlier registrations
	return s.patchSpec(ctx, cluster)
}

// awaitCluster waits until the hub accepts the certificate, and returns the Cluster. It returns errReplaced if the
// kubeconfig is replaced meanwhile, and errClusterMissing if the Cluster is missing.
func (s *hubSession) awaitCluster(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	for {
		cluster, err := s.readCluster(ctx)
		switch {
		case err == nil:
			s.rejectedLog.Reset()
			s.missingLog.Reset()
			return cluster, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case s.missingLog.LogIfRejected(ctx, err):
			s.metrics.RecordHeartbeat(err)
			return nil, fmt.Errorf("%w: %w", errClusterMissing, err)
		case !s.rejectedLog.LogIfRejected(ctx, err):
			s.metrics.RecordHeartbeat(err)
			return nil, err
		}
		s.metrics.RecordHeartbeat(err)
		if err := s.waitForRetry(ctx, rejectedRetryInterval); err != nil {
			return nil, err
		}
	}
}

func (s *hubSession) readCluster(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	cluster := &clusterv1alpha1.Cluster{}
	if err := s.hubClient.Get(ctx, s.clusterKey(), cluster); err != nil {
		return nil, fmt.Errorf("read Cluster %s: %w", s.opts.Cluster, err)
	}
	return cluster, nil
}

// waitForRetry waits for duration. If ctx ends or the kubeconfig is replaced, it returns an error earlier.
func (s *hubSession) waitForRetry(ctx context.Context, duration time.Duration) error {
	for end := s.opts.Clock.Now().Add(duration); s.opts.Clock.Now().Before(end); {
		s.metrics.Watchdog.Reset()
		if !session.Sleep(ctx, s.opts.Clock, credentialCheckInterval) {
			return ctx.Err()
		}
		if s.isReplaced(ctx) {
			return errReplaced
		}
	}
	return nil
}

// verifyCluster returns joinkarmada.AlreadyRegisteredError, which ends the agent, unless the Cluster belongs to this
// member: by its ID, its mode, and the Ready condition, in which the hub reports that another Cluster has the ID.
func (s *hubSession) verifyCluster(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	ready := meta.FindStatusCondition(cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	if cluster.Spec.ID == s.memberID && cluster.Spec.SyncMode == clusterv1alpha1.Pull && (ready == nil || ready.Reason != fleet.ReasonIDTaken) {
		return nil
	}
	taken := joinkarmada.AlreadyRegisteredError{ID: s.memberID, Name: cluster.Name}
	log.FromContext(ctx).Error(taken, "the Cluster belongs to another member", "itsID", cluster.Spec.ID, "mode", string(cluster.Spec.SyncMode))
	return taken
}

// patchSpec writes the options that describe the member, for example Region, into the spec of the Cluster.
func (s *hubSession) patchSpec(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	spec := map[string]any{}
	for field, value := range map[string]struct{ current, desired string }{
		"apiEndpoint": {cluster.Spec.APIEndpoint, s.opts.APIEndpoint}, "proxyURL": {cluster.Spec.ProxyURL, s.opts.ProxyURL},
		"provider": {cluster.Spec.Provider, s.opts.Provider}, "region": {cluster.Spec.Region, s.opts.Region},
	} {
		if value.desired != "" && value.desired != value.current {
			spec[field] = value.desired
		}
	}
	if len(s.opts.Zones) > 0 && !slices.Equal(s.opts.Zones, cluster.Spec.Zones) {
		spec["zones"] = s.opts.Zones
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
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := s.hubClient.Patch(ctx, cluster.DeepCopy(), client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("patch the spec of Cluster %s: %w", cluster.Name, err)
	}
	return nil
}

// run runs the tasks of the session in parallel. It returns nil if ctx ends, errReplaced if the kubeconfig is replaced,
// and the error of onClusterChange or end if one of them ends the session.
func (s *hubSession) run(ctx context.Context) error {
	server := s.transport.config.Host
	log.FromContext(ctx).Info("connected to the hub", "server", server)
	ctx, cancel := context.WithCancelCause(ctx)
	defer func() { log.FromContext(ctx).Info("disconnected from the hub", "server", server) }()
	s.end = cancel
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	defer cancel(nil)
	goroutines.Go(func() {
		session.ClusterWatcher[*clusterv1alpha1.Cluster]{
			Key: s.clusterKey(), Example: &clusterv1alpha1.Cluster{}, NewList: func() client.ObjectList { return &clusterv1alpha1.ClusterList{} },
			OnChange: func(ctx context.Context, cluster *clusterv1alpha1.Cluster) {
				if err := s.onClusterChange(ctx, cluster); err != nil {
					cancel(err)
				}
			},
		}.Run(ctx, s.hubClient)
	})
	if s.opts.isEnabled(clusterStatus) {
		goroutines.Go(func() { s.runReports(ctx) })
		goroutines.Go(func() { s.runHeartbeats(ctx) })
	}
	if s.opts.isEnabled(execution) {
		s.startDeliveries(ctx, &goroutines)
	}
	err := s.watchCredential(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// startDeliveries starts goroutines that handle Works and the bundles of profiles until ctx ends.
func (s *hubSession) startDeliveries(ctx context.Context, goroutines *sync.WaitGroup) {
	source := deliver.NewAgentSource(s.hubClient, s.leaseKey().Namespace, s.opts.Cluster)
	worker := &session.Worker{Source: source, Engine: s.engine, Gate: s.gate, OnKindsChanged: func() { session.Signal(s.reportRequested) }, OnConverged: s.metrics.RecordConverge,
		OnWithdrawn: func() { session.Signal(s.heartbeatRequested) },
	}
	queue := newWorkQueue(s.hubClient, s.leaseKey().Namespace, s.opts)
	queue.gate = s.gate
	queue.executor = &works.Executor{Hub: s.hubClient, Engine: countingEngine{s.engine, s.metrics}, Clock: s.opts.Clock}
	queue.clusterState = s.clusterState
	s.source.Store(source)
	s.workQueue.Store(queue)
	goroutines.Go(func() {
		defer s.source.CompareAndSwap(source, nil)
		// Run returns only when ctx ends.
		_ = source.Run(ctx, s.opts.WorkSyncs, worker.Handle)
	})
	goroutines.Go(func() {
		defer s.workQueue.CompareAndSwap(queue, nil)
		queue.run(ctx, s.opts.WorkSyncs)
	})
}

// clusterState returns the state of the member for the Executor of Works, which itself detects an unresponsive member.
func (s *hubSession) clusterState() works.ClusterState {
	member := fleet.FromCluster(s.cluster.Load())
	return works.ClusterState{Reachable: true, Deregistering: member.Deleting, Orphan: member.Deleting && member.KeepAddons}
}

// onClusterChange handles a new version of the Cluster. An error ends the session.
func (s *hubSession) onClusterChange(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	if cluster.UID != s.clusterUID {
		return errRecreated
	}
	if session.IsUninstallRequested(cluster) {
		return session.ErrUninstallRequested
	}
	if err := s.verifyCluster(ctx, cluster); err != nil {
		return err
	}
	before := s.clusterState()
	if cluster.Annotations[kube.AnnotationHub] != s.hubID {
		return errRecreated
	}
	s.cluster.Store(cluster)
	if queue := s.workQueue.Load(); queue != nil && before != s.clusterState() {
		queue.requeueAll()
	}
	if s.needsReport(cluster) {
		session.Signal(s.reportRequested)
	}
	return nil
}

// countingEngine counts the attempts to apply Works in the metrics. The session.Worker counts the attempts to apply
// bundles.
type countingEngine struct {
	*engine.Engine
	metrics *session.Metrics
}

// Converge makes the cluster equal b.
func (c countingEngine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	report, err := c.Engine.Converge(ctx, b)
	c.metrics.RecordConverge(err)
	return report, err
}
