package karmada

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// reportRetry is the time until the second attempt at a report. It doubles up to StatusInterval.
const reportRetry = time.Second

// minHeartbeatTimeout is the minimal timeout of a heartbeat: a late heartbeat is better than none.
const minHeartbeatTimeout = 5 * time.Second

// heartbeatJitter spreads the heartbeats of many agents: each comes up to this fraction of the interval early or late.
const heartbeatJitter = 0.04

// runReports calls reportStatus at once, after each StatusInterval and on request, until ctx ends.
func (s *hubSession) runReports(ctx context.Context) {
	isLogged, retry := false, reportRetry
	for {
		err := s.reportStatus(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			isLogged, retry = false, reportRetry
		case !s.rejectedLog.LogIfRejected(ctx, err) && !isLogged:
			isLogged = true
			log.FromContext(ctx).Info("cannot report on the Cluster yet", "reason", err.Error())
		}
		if err != nil && retry < s.opts.StatusInterval {
			// New permissions reach the hub's API servers one after the other, so an early retry can succeed.
			if !session.Sleep(ctx, s.opts.Clock, retry) {
				return
			}
			retry *= 2
			continue
		}
		if !s.waitForReport(ctx) {
			return
		}
	}
}

// waitForReport waits until the next report is due or requested. It returns false if ctx ended first. The pause is at
// least half an interval, so that the agent and a hub that writes another status do not overwrite each other quickly.
func (s *hubSession) waitForReport(ctx context.Context) bool {
	timer := s.opts.Clock.NewTimer(s.opts.StatusInterval)
	defer timer.Stop()
	if minPause := s.opts.StatusInterval/2 - s.opts.Clock.Since(s.reportedAt); minPause > 0 && !session.Sleep(ctx, s.opts.Clock, minPause) {
		return false
	}
	select {
	case <-timer.C():
		return true
	case <-s.reportRequested:
		return true
	case <-ctx.Done():
		return false
	}
}

// reportStatus observes the member, and patches the status of the Cluster if it has changed.
func (s *hubSession) reportStatus(ctx context.Context) error {
	cluster := s.cluster.Load()
	status := s.observer.Observe(ctx, cluster.Status, cluster.Spec.ResourceModels)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !s.opts.ResourceModeling && status.ResourceSummary != nil {
		status.ResourceSummary = status.ResourceSummary.DeepCopy()
		status.ResourceSummary.AllocatableModelings = nil
	}
	// The first heartbeat comes before the first status, because the hub sets the status of a Cluster without
	// heartbeats to unknown.
	s.startHeartbeats(ctx)
	if equality.Semantic.DeepEqual(cluster.Status, status) {
		return nil
	}
	changed := cluster.DeepCopy()
	changed.Status = status
	patchCtx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if !s.gate.IsOpen() { // not the leader
		if _, err := s.checkSuperseded(patchCtx); err != nil {
			return err
		}
	}
	if err := s.hubClient.Status().Patch(patchCtx, changed, client.MergeFrom(cluster)); err != nil {
		return fmt.Errorf("report on Cluster %s: %w", cluster.Name, err)
	}
	s.reportedAt = s.opts.Clock.Now()
	// The watch may have stored a newer version already.
	s.cluster.CompareAndSwap(cluster, changed)
	return nil
}

// readyStatus returns the status of the condition Ready, or "".
func readyStatus(status *clusterv1alpha1.ClusterStatus) string {
	if ready := meta.FindStatusCondition(status.Conditions, clusterv1alpha1.ClusterConditionReady); ready != nil {
		return string(ready.Status)
	}
	return ""
}

// needsReport returns true if the hub has set the condition Ready to unknown, or the reported status is missing.
func (s *hubSession) needsReport(cluster *clusterv1alpha1.Cluster) bool {
	ready := readyStatus(&cluster.Status)
	return ready == string(metav1.ConditionUnknown) || ready == "" || cluster.Status.KubernetesVersion == "" || len(cluster.Status.APIEnablements) == 0
}

// startHeartbeats sends the first heartbeat, and lets runHeartbeats send the others. Later calls do nothing.
func (s *hubSession) startHeartbeats(ctx context.Context) {
	select {
	case <-s.heartbeatsStarted:
		return
	default:
	}
	s.sendHeartbeat(ctx)
	close(s.heartbeatsStarted)
}

// runHeartbeats sends heartbeats after the first one, until ctx ends.
func (s *hubSession) runHeartbeats(ctx context.Context) {
	select {
	case <-s.heartbeatsStarted:
	case <-ctx.Done():
		return
	}
	for {
		pause := time.Duration(float64(s.opts.heartbeatInterval()) * (1 + heartbeatJitter*(2*rand.Float64()-1)))
		if !session.SleepOrWake(ctx, s.opts.Clock, pause, s.heartbeatRequested) {
			return
		}
		s.sendHeartbeat(ctx)
	}
}

// sendHeartbeat calls renewLease once, and logs and records the result.
func (s *hubSession) sendHeartbeat(ctx context.Context) {
	err := s.renewLease(ctx)
	if ctx.Err() != nil {
		return
	}
	wasFailing := s.isHeartbeatFailing
	s.isHeartbeatFailing = err != nil
	switch {
	case err == nil:
		s.rejectedLog.Reset()
		if wasFailing {
			log.FromContext(ctx).Info("the hub accepts the heartbeat again")
			// The hub may have set the condition Ready to unknown meanwhile.
			session.Signal(s.reportRequested)
		}
	case s.rejectedLog.LogIfRejected(ctx, err):
	case isMissingCluster(err) && s.logIfMissing(ctx):
		s.end(errClusterMissing)
	case !wasFailing:
		log.FromContext(ctx).Info("the hub does not accept the heartbeat; deployed objects stay, and drift is corrected", "reason", err.Error())
	}
	s.metrics.RecordHeartbeat(err)
}

// logIfMissing reads the Cluster. If the Cluster is missing, it logs that and returns true.
func (s *hubSession) logIfMissing(ctx context.Context) bool {
	_, err := s.readCluster(ctx)
	return s.missingLog.LogIfRejected(ctx, err)
}

// renewLease writes a heartbeat. An agent that is not the leader first checks that no other agent sends heartbeats.
func (s *hubSession) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(requestTimeout, max(minHeartbeatTimeout, s.opts.heartbeatInterval())))
	defer cancel()
	if s.gate.IsOpen() {
		return s.patchHeartbeat(ctx, map[string]any{})
	}
	return kube.RetryOnConflict(ctx, func() error {
		version, err := s.checkSuperseded(ctx)
		if err != nil {
			return err
		}
		return s.patchHeartbeat(ctx, map[string]any{"resourceVersion": version})
	})
}

// checkSuperseded returns the resourceVersion of the Lease if no other agent sends heartbeats. Otherwise it ends the
// session and returns errSuperseded.
func (s *hubSession) checkSuperseded(ctx context.Context) (version string, err error) {
	lease := &coordinationv1.Lease{}
	if err := s.hubClient.Get(ctx, s.leaseKey(), lease); err != nil {
		return "", fmt.Errorf("read Lease %s: %w", s.leaseKey(), err)
	}
	// An agent without heartbeats for LeaseDuration counts as dead.
	renewed := ptr.Deref(lease.Spec.RenewTime, metav1.MicroTime{})
	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != "" && holder != s.opts.Identity && s.opts.Clock.Since(renewed.Time) < s.opts.LeaseDuration {
		err := fmt.Errorf("%w: %s", errSuperseded, holder)
		s.end(err)
		return "", err
	}
	return lease.ResourceVersion, nil
}

// patchHeartbeat writes a heartbeat to the Lease. metadata is empty, or has the resourceVersion that the Lease must
// have.
func (s *hubSession) patchHeartbeat(ctx context.Context, metadata map[string]any) error {
	annotations := map[string]any{kube.AnnotationDecrypts: s.opts.Identity}
	metadata["annotations"] = annotations
	unrequested, known := session.UnrequestedValue(s.engine, s.source.Load())
	if known && (s.reportedUnrequested == nil || *s.reportedUnrequested != unrequested) {
		annotations[kube.AnnotationUnrequested] = session.NullIfEmpty(unrequested)
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata, "spec": map[string]any{
		"holderIdentity": s.opts.Identity, "leaseDurationSeconds": int32(s.opts.LeaseDuration / time.Second), "renewTime": metav1.NewMicroTime(s.opts.Clock.Now()),
	}})
	if err != nil {
		return fmt.Errorf("encode heartbeat: %w", err)
	}
	lease, err := s.patchLease(ctx, s.hubClient, patch)
	if err != nil {
		return err
	}
	reported := lease.Annotations[kube.AnnotationUnrequested]
	s.reportedUnrequested = &reported
	return nil
}

// patchLease patches the agent's Lease on the hub and returns the result.
func (a *agent) patchLease(ctx context.Context, hub client.Client, patch []byte) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = a.leaseKey().Namespace, a.leaseKey().Name
	err := hub.Patch(ctx, lease, client.RawPatch(types.MergePatchType, patch))
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("the hub does not answer")
	}
	if err != nil {
		return nil, fmt.Errorf("renew Lease %s: %w", a.leaseKey(), err)
	}
	return lease, nil
}
