package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube/logkeys"
)

// firstReportRetry is the time until the second attempt to report. It doubles after each further failure, up to
// session.MaxRetryDelay.
const firstReportRetry = time.Second

// runReports calls reportStatus at once, after each reportInterval and on request, until ctx ends.
func (s *hubSession) runReports(ctx context.Context) {
	retry := time.Duration(0)
	for {
		err := s.reportStatus(ctx)
		delay, isFirstFailure := reportInterval, err != nil && retry == 0
		if err == nil {
			retry = 0
		} else {
			retry = min(max(2*retry, firstReportRetry), session.MaxRetryDelay)
			delay = session.Jitter(retry)
		}
		if isFirstFailure && ctx.Err() == nil && !s.rejectedLog.LogIfRejected(ctx, err) {
			log.FromContext(ctx).Info("cannot report on the SveltosCluster yet", logkeys.Reason, err.Error())
		}
		if !session.SleepOrWake(ctx, s.opts.Clock, delay, s.facts.reportRequested) {
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
		// The member's API has not responded, or the checks have not run, so it is not known whether the member is ready.
		return nil
	}
	status := state.statusFields()
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
