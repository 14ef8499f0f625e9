package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
)

const (
	// jitter spreads the requests of many agents: each delay is shortened by up to this fraction.
	jitter = 0.2
	// firstHeartbeatRetry is the time from a heartbeat that failed to the next one. It doubles after each further
	// failure, up to the time between two heartbeats.
	firstHeartbeatRetry = 5 * time.Second
	// firstReportRetry and maxReportRetry bound the growing time between attempts to report.
	firstReportRetry = time.Second
	maxReportRetry   = 30 * time.Second
)

// runHeartbeats renews the Lease until ctx ends. It returns errTakenOver if another member holds the Lease.
func (s *hubSession) runHeartbeats(ctx context.Context) error {
	isFailing, retry := false, time.Duration(0)
	for {
		err := s.renewLease(ctx)
		pause := s.opts.Heartbeat
		if err != nil {
			retry = nextHeartbeatRetry(retry, s.opts.Heartbeat)
			pause = retry
		}
		switch {
		case errors.Is(err, errTakenOver):
			s.metrics.RecordHeartbeat(err)
			return err
		case err != nil && ctx.Err() != nil:
		case err != nil && s.rejectedLog.LogIfRejected(ctx, err):
			isFailing = true
		case err != nil && !isFailing:
			isFailing = true
			log.FromContext(ctx).Info("the hub does not accept the heartbeat; deployed objects stay, and drift is corrected", "reason", err.Error())
		case err == nil && isFailing:
			isFailing = false
			log.FromContext(ctx).Info("the hub accepts the heartbeat again")
			// The hub may have reported the member as Down meanwhile.
			s.facts.requestReport()
		}
		if err == nil {
			retry = 0
			s.rejectedLog.Reset()
		}
		s.metrics.RecordHeartbeat(err)
		if !session.SleepOrWake(ctx, s.opts.Clock, time.Duration(float64(pause)*(1-jitter*rand.Float64())), s.heartbeatRequested) {
			return nil
		}
	}
}

// nextHeartbeatRetry returns the time from a heartbeat that failed to the next one. previous is the result for the
// heartbeat before, zero if that one was accepted.
func nextHeartbeatRetry(previous, interval time.Duration) time.Duration {
	return min(max(2*previous, firstHeartbeatRetry), interval)
}

// renewLease renews the Lease, and claims it if no member holds it. It returns errTakenOver if another member holds it.
func (s *hubSession) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease, err := s.writeLease(ctx, "")
	if err != nil {
		return err
	}
	switch lease.Annotations[kube.AnnotationMember] {
	case string(s.memberID):
		return nil
	case "":
		_, err := s.writeLease(ctx, lease.ResourceVersion)
		return err
	default:
		return errTakenOver
	}
}

// writeLease renews the Lease and returns it. With a resourceVersion it also claims the Lease for this member, and
// fails if the Lease has another version.
func (s *hubSession) writeLease(ctx context.Context, resourceVersion string) (*coordinationv1.Lease, error) {
	patch := map[string]any{"spec": map[string]any{
		"holderIdentity": s.opts.Identity, "leaseDurationSeconds": int32(heartbeats.LeaseDuration / time.Second), "renewTime": metav1.NewMicroTime(s.opts.Clock.Now()),
	}}
	annotations := map[string]any{}
	exchanged := s.credential.Exchanged()
	if exchanged != s.reportedExchange {
		annotations[kube.AnnotationExchanged] = exchanged
	}
	unrequested, known := session.UnrequestedValue(s.engine, s.deliveries.Load())
	if known && (s.reportedUnrequested == nil || *s.reportedUnrequested != unrequested) {
		annotations[kube.AnnotationUnrequested] = session.NullIfEmpty(unrequested)
	}
	metadata := map[string]any{"annotations": annotations}
	if resourceVersion != "" {
		metadata["resourceVersion"], annotations[kube.AnnotationMember] = resourceVersion, s.memberID
	}
	patch["metadata"] = metadata
	data, err := json.Marshal(patch)
	if err != nil {
		return nil, fmt.Errorf("encode heartbeat: %w", err)
	}
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = s.leaseKey.Namespace, s.leaseKey.Name
	if err := s.hubClient.Patch(ctx, lease, client.RawPatch(types.MergePatchType, data)); err != nil {
		return nil, fmt.Errorf("renew Lease %s: %w", s.leaseKey, err)
	}
	s.reportedExchange = exchanged
	reported := lease.Annotations[kube.AnnotationUnrequested]
	s.reportedUnrequested = &reported
	return lease, nil
}

// runReports reports at once, after each interval and on request, until ctx ends.
func (s *hubSession) runReports(ctx context.Context) {
	pause := firstReportRetry
	for {
		err := s.reportStatus(ctx)
		wait := reportInterval
		if err == nil {
			pause = firstReportRetry
		} else {
			if ctx.Err() == nil && pause == firstReportRetry && !s.rejectedLog.LogIfRejected(ctx, err) {
				log.FromContext(ctx).Info("cannot report on the SveltosCluster yet", "reason", err.Error())
			}
			wait = time.Duration(float64(pause) * (1 - jitter*rand.Float64()))
			pause = min(pause*2, maxReportRetry)
		}
		timer := s.opts.Clock.NewTimer(wait)
		select {
		case <-timer.C():
		case <-s.facts.reportRequested:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// reportStatus writes the facts and the state of the checks into the status of the SveltosCluster.
func (s *hubSession) reportStatus(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	facts, state := s.facts.latest(), s.checks.latest()
	if facts.Version == "" || !state.isKnown {
		// The status must not become ready before the member's API has responded and its checks have passed.
		return nil
	}
	status := state.status()
	status["version"], status["apiVersions"] = reportedVersion(facts), facts.APIVersions
	status["agentLastReportTime"] = metav1.NewTime(s.opts.Clock.Now())
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	cluster := &libv1beta1.SveltosCluster{}
	cluster.Namespace, cluster.Name = s.opts.Namespace, s.opts.Name
	if err := s.hubClient.Status().Patch(ctx, cluster, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("report on SveltosCluster %s: %w", s.clusterKey(), err)
	}
	return nil
}

// needsReport returns true if the status of the SveltosCluster differs from the state of the member, because the
// SveltosCluster was created again or its status was lost.
func (s *hubSession) needsReport(cluster *libv1beta1.SveltosCluster) bool {
	facts, state := s.facts.latest(), s.checks.latest()
	if facts.Version == "" || !state.isKnown {
		return false
	}
	return !state.isReported(cluster.Status) || cluster.Status.Version != reportedVersion(facts) ||
		!slices.Equal(cluster.Status.APIVersions, facts.APIVersions)
}
