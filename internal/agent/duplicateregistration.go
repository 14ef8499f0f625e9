package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
)

// takeoverDelay is the time without heartbeats after which another member may take a registration over: 90 s, the
// longest time after which the hub reports a member as Down.
const takeoverDelay = heartbeats.SveltosLimit

var (
	// errDuplicateRegistration means that another member uses the registration.
	errDuplicateRegistration = errors.New("another cluster uses this registration")
	// errTakenOver ends a session because another member has claimed the Lease.
	errTakenOver = errors.New("another cluster took the registration over")
)

// duplicateRegistration tracks the heartbeats of another member that uses the same registration.
type duplicateRegistration struct {
	clock clock.PassiveClock
	// member is the ID of the other member, renewTime is the time of its last heartbeat by its own clock, and observedAt
	// is the time by this agent's clock at which that heartbeat was first read.
	member     string
	renewTime  time.Time
	observedAt time.Time
	// loggedAt is the time of the last log message.
	loggedAt time.Time
}

// observe records the heartbeat that lease contains. It returns true if the other member has sent no new heartbeat for
// takeoverDelay by this agent's clock. It does not compare renewTime with this clock, because the clocks may differ.
func (d *duplicateRegistration) observe(lease *coordinationv1.Lease) (isSilent bool) {
	now, member := d.clock.Now(), lease.Annotations[kube.AnnotationMember]
	var renewTime time.Time
	if lease.Spec.RenewTime != nil {
		renewTime = lease.Spec.RenewTime.Time
	}
	if d.member != member || !d.renewTime.Equal(renewTime) {
		d.member, d.renewTime, d.observedAt = member, renewTime, now
	}
	return now.Sub(d.observedAt) >= takeoverDelay
}

// log logs the duplicate registration, at most every session.LogInterval.
func (d *duplicateRegistration) log(ctx context.Context, cluster types.NamespacedName) {
	now := d.clock.Now()
	if !d.loggedAt.IsZero() && now.Sub(d.loggedAt) < session.LogInterval {
		return
	}
	d.loggedAt = now
	log.FromContext(ctx).Error(nil, "another cluster uses this cluster's registration; this agent waits, and deploys nothing until the other cluster sends no heartbeats for 90s",
		"registration", cluster.String(), "otherMember", d.member,
		"repair", fmt.Sprintf("register this cluster under another name: with the hub's kubeconfig run: "+
			"sveltosctl register cluster --namespace=%s --cluster=ANOTHER-NAME --pullmode > registration.yaml; "+
			"then with this cluster's kubeconfig run: kubectl apply -f registration.yaml", cluster.Namespace))
}

// claimLease claims the Lease for this member. It returns errDuplicateRegistration if another member has claimed the
// Lease and renews it.
func (s *hubSession) claimLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease := &coordinationv1.Lease{}
	err := s.hubClient.Get(ctx, s.leaseKey, lease)
	if apierrors.IsNotFound(err) {
		// No other member uses the registration. Heartbeats fail until the hub has created the Lease, and then claim it.
		return nil
	}
	if err != nil {
		return fmt.Errorf("read Lease %s: %w", s.leaseKey, err)
	}
	holder := lease.Annotations[kube.AnnotationMember]
	if holder == string(s.memberID) {
		return nil
	}
	if holder != "" {
		if !s.duplicate.observe(lease) {
			return errDuplicateRegistration
		}
		log.FromContext(ctx).Info("taking the registration over from a cluster that sends no heartbeats", "otherMember", holder)
	}
	// This fails if another member has written the Lease since it was read.
	_, err = s.patchHeartbeat(ctx, lease.ResourceVersion)
	return err
}
