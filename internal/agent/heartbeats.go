package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// firstHeartbeatRetry is the delay after the first failed heartbeat. The delay doubles after each further failure, up
// to session.MaxRetryDelay or the time between two heartbeats.
const firstHeartbeatRetry = 5 * time.Second

// runHeartbeats renews the Lease until ctx ends. It returns errTakenOver if another member holds the Lease.
func (s *hubSession) runHeartbeats(ctx context.Context) error {
	isFailing, retry := false, time.Duration(0)
	for {
		err := s.renewLease(ctx)
		if err != nil && ctx.Err() != nil {
			return nil //nolint:nilerr // ctx has ended, and its end explains the error
		}
		pause := s.opts.Heartbeat
		if err != nil {
			retry = nextHeartbeatRetry(retry, s.opts.Heartbeat)
			pause = retry
		}
		switch {
		case errors.Is(err, errTakenOver):
			s.metrics.RecordHeartbeat(err)
			return err
		case err != nil && s.rejectedLog.LogIfRejected(ctx, err):
			isFailing = true
		case err != nil && !isFailing:
			isFailing = true
			log.FromContext(ctx).Info("the hub does not accept the heartbeat; deployed objects stay, and drift is corrected", logkeys.Reason, err.Error())
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
		s.metrics.RecordHeartbeat(err) // it also resets the watchdog
		if !session.SleepOrWake(ctx, s.opts.Clock, session.Jitter(pause), s.heartbeatRequested) {
			return nil
		}
	}
}

// nextHeartbeatRetry returns the delay after a failed heartbeat. previous is the delay after the previous heartbeat,
// zero if the hub accepted that heartbeat.
func nextHeartbeatRetry(previous, interval time.Duration) time.Duration {
	return min(max(2*previous, firstHeartbeatRetry), session.MaxRetryDelay, interval)
}

// renewLease renews the Lease, and claims it if no member has claimed it. It returns errTakenOver if another member
// has.
func (s *hubSession) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease, err := s.patchHeartbeat(ctx, "")
	if err != nil {
		return err
	}
	switch lease.Annotations[kube.AnnotationMember] {
	case string(s.memberID):
		return nil
	case "":
		_, err := s.patchHeartbeat(ctx, lease.ResourceVersion)
		return err
	default:
		return errTakenOver
	}
}

// patchHeartbeat writes a heartbeat to the Lease and returns the result. With a resourceVersion it also claims the
// Lease for this member, and fails if the Lease has another version.
func (s *hubSession) patchHeartbeat(ctx context.Context, resourceVersion string) (*coordinationv1.Lease, error) {
	patch := map[string]any{"spec": map[string]any{
		"holderIdentity": s.opts.Identity, "leaseDurationSeconds": int32(heartbeats.LeaseDuration / time.Second), "renewTime": metav1.NewMicroTime(s.opts.Clock.Now()),
	}}
	// AnnotationDecrypts shows the hub that this agent can read encrypted content. AnnotationExchanged names the Secret on
	// the hub to which the exchanged token of the manifest is bound. The hub deletes this Secret.
	annotations := map[string]any{kube.AnnotationDecrypts: s.opts.Identity}
	exchanged := s.credential.ExchangedSecretUID()
	if exchanged != s.reportedExchange {
		annotations[kube.AnnotationExchanged] = exchanged
	}
	unrequested, known := session.UnrequestedValue(s.engine, s.source.Load())
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
