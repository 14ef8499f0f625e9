package sveltosclusters

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/phase"
)

// state is the data that the steps of one reconcile share.
type state struct {
	cluster *libv1beta1.SveltosCluster
	member  fleet.Member
	// status and labels are the desired values. finalStatus completes the status.
	status libv1beta1.SveltosClusterStatus
	labels map[string]string
	// window is the evaluated active window, nil if the cluster is being deregistered. For an invalid window it is empty.
	window *windowState
	// problems are the problems that do not fail a contact, separated by messageSeparator.
	problems string
	// requeueAfter is the time until the next reconcile; zero means that only a watch event triggers it.
	requeueAfter time.Duration
}

// requeueWithin limits s.requeueAfter to after. Zero or less changes nothing.
func (s *state) requeueWithin(after time.Duration) {
	if after > 0 && (s.requeueAfter == 0 || after < s.requeueAfter) {
		s.requeueAfter = after
	}
}

// addProblem appends to s.problems.
func (s *state) addProblem(problem string) {
	if s.problems != "" {
		s.problems += messageSeparator
	}
	s.problems += problem
}

// contact observes the member by its mode and sets s.status. It does not contact a refused member.
func (c *Controller) contact(ctx context.Context, s *state) error {
	if s.member.Refused != "" {
		s.status = withFailureMessage(s.cluster.Status, s.member.Refused)
		return nil
	}
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.contactPush, fleet.Pull: c.evaluatePull}[s.member.Mode](ctx, s)
}

// contactPush sends requests to a push member, runs its checks, and renews its token. A failure of the member is part
// of the status, not an error.
func (c *Controller) contactPush(ctx context.Context, s *state) error {
	s.requeueWithin(contactInterval)
	threshold := s.cluster.Spec.ConsecutiveFailureThreshold
	config, facts, err := c.probe(ctx, s.member)
	if ctx.Err() != nil {
		return fmt.Errorf("contact %s: %w", s.member.Key(), ctx.Err())
	}
	if err != nil {
		s.status = withContactFailure(s.cluster.Status, threshold, stableMessage(err))
		return nil
	}
	checked, err := c.runChecks(ctx, config, s.cluster)
	if err != nil {
		return fmt.Errorf("check %s: %w", s.member.Key(), err)
	}
	if !checked.Ready {
		s.requeueWithin(readinessInterval)
	}
	facts = c.keepAPIVersions(client.ObjectKeyFromObject(s.cluster), s.cluster.Status.APIVersions, facts)
	s.status = statusOfPush(withFacts(s.cluster.Status, facts), threshold, checked)
	s.labels, _ = desiredLabels(s.cluster.Labels, facts.Version)
	c.renewToken(ctx, s)
	return nil
}

// probe returns the configuration for requests to a push member, and its version and APIs.
func (c *Controller) probe(ctx context.Context, m fleet.Member) (*rest.Config, fleet.Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, contactTimeout)
	defer cancel()
	config, err := c.MemberConfig(ctx, m)
	if err != nil {
		return nil, fleet.Facts{}, err
	}
	facts, err := fleet.Probe(ctx, config)
	return config, facts, err
}

// volatileText matches the parts of a network error that differ at each attempt: the source port and the timeout.
var volatileText = regexp.MustCompile(`(\b[0-9.]+|\[[0-9a-f:.%]+\]):[0-9]+->|\?timeout=[^"&\s]*`)

// stableMessage returns the message for a failed contact, without volatileText. The status of a member that fails in
// the same way does not change.
func stableMessage(err error) string {
	var dnsErr *net.DNSError
	var netErr net.Error
	isDNS := errors.As(err, &dnsErr)
	if !isDNS && (errors.Is(err, context.DeadlineExceeded) || errors.As(err, &netErr) && netErr.Timeout()) {
		return fmt.Sprintf("does not answer within %s", contactTimeout)
	}
	return volatileText.ReplaceAllString(err.Error(), "")
}

// runChecks runs the readiness and liveness checks of a push member. A failed check is in Result.Failure, not an error.
// It returns an error if ctx ends or the sandbox cannot run the checks, and a phase.Wait if all slots are in use.
func (c *Controller) runChecks(ctx context.Context, config *rest.Config, cluster *libv1beta1.SveltosCluster) (check.Result, error) {
	if !cluster.DeletionTimestamp.IsZero() {
		// The objects on the cluster must be removed even if a check fails or the status was lost.
		return check.Result{Ready: true}, nil
	}
	if len(cluster.Spec.ReadinessChecks)+len(cluster.Spec.LivenessChecks) == 0 {
		return check.Result{Ready: true}, nil
	}
	release, ok := c.acquireCheckSlot(cluster)
	if !ok {
		return check.Result{}, phase.Wait{Reason: "the checks of other clusters are running"}
	}
	defer release()
	checksCtx, cancel := context.WithTimeout(ctx, checksTimeout)
	defer cancel()
	memberClient, err := check.NewReader(config)
	if err != nil {
		return check.Result{Failure: err.Error()}, nil
	}
	checker := check.Checker{Sandbox: c.Sandbox, Cluster: client.ObjectKeyFromObject(cluster)}
	result, err := checker.EvaluateCluster(checksCtx, memberClient, &cluster.Spec, cluster.Status.Ready)
	return result, errors.Join(ctx.Err(), err)
}

// acquireCheckSlot acquires a slot for the checks of a cluster. If ok is true, the caller must call release after the
// checks. Otherwise other members use all slots, and the cluster is reconciled again when a slot is free.
func (c *Controller) acquireCheckSlot(cluster *libv1beta1.SveltosCluster) (release func(), ok bool) {
	if c.checkSlots == nil {
		return func() {}, true
	}
	pool := slots.Pool{Name: "checks", Workers: maxConcurrentChecks, Slow: maxSlowChecks}
	key := slots.Key{Name: cluster.Namespace, Max: maxChecksOfNamespace, Shared: maxChecksOfNamespace}
	slot, ok := c.checkSlots.Acquire(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(cluster)}, pool, key)
	start := c.Clock.Now()
	return func() {
		if c.Clock.Since(start) > slowChecks {
			slot.Release(key.Name) // the namespace is slow
			return
		}
		slot.Release()
	}, ok
}

// renewToken renews the token of a push member before it expires. It adds an error to s.problems and does not fail the
// reconcile, since the present token is still valid.
func (c *Controller) renewToken(ctx context.Context, s *state) {
	// The hub does not renew the tokens of a cloud identity.
	if s.cluster.Spec.TokenRequestRenewalOption == nil || s.member.Identity != nil {
		return
	}
	renewal := join.Renewal{Hub: c.Hub, Clock: c.Clock, Member: func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (*rest.Config, error) {
		return c.MemberConfig(ctx, fleet.FromSveltosCluster(cluster))
	}}
	if c.LimitConfig != nil {
		renewal.Limit = func(config *rest.Config) error { return c.LimitConfig(config, s.cluster.Namespace) }
	}
	renewAfter, err := renewal.Run(ctx, s.cluster)
	s.requeueWithin(renewAfter)
	if err == nil || ctx.Err() != nil {
		return
	}
	log.FromContext(ctx).Info("cannot renew the token; retrying", logkeys.Member, s.member.Key(), logkeys.Reason, err.Error())
	s.addProblem(err.Error())
}

// evaluatePull sets s.status from the heartbeats and the reports of the agent of a pull member.
func (c *Controller) evaluatePull(ctx context.Context, s *state) error {
	lastReport := ""
	if at := s.cluster.Status.AgentLastReportTime; at != nil {
		lastReport = at.UTC().String()
	}
	liveness, err := c.Heartbeats.Evaluate(ctx, s.member, lastReport)
	if err != nil {
		return err
	}
	if !s.cluster.Status.Ready {
		c.markNotReady(client.ObjectKeyFromObject(s.cluster))
	}
	before := *s.cluster.Status.DeepCopy()
	if s.member.Deleting {
		// The objects on the cluster must be removed even if a check fails or the status was lost.
		before.AgentCheckFailures, before.Ready = 0, before.Ready || liveness.HasReported
	}
	status, evaluateAfter := statusOfPull(before, s.cluster.Spec.ConsecutiveFailureThreshold, liveness)
	s.status = status
	s.status.AgentCheckFailures = s.cluster.Status.AgentCheckFailures // only the agent writes it
	s.requeueWithin(evaluateAfter)
	return nil
}

// patchLabels writes the labels of a push member if they differ.
func (c *Controller) patchLabels(ctx context.Context, s *state) error {
	if equality.Semantic.DeepEqual(s.cluster.Labels, s.labels) {
		return nil
	}
	patched := s.cluster.DeepCopy()
	patched.Labels = s.labels
	if err := c.Hub.Patch(ctx, patched, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("label cluster %s: %w", s.member.Key(), err)
	}
	patched.Status = s.cluster.Status // s.status was computed from it
	s.cluster = patched
	return nil
}

// patchStatus writes the status if it differs, and records events about the changes.
func (c *Controller) patchStatus(ctx context.Context, s *state) error {
	before := s.cluster.Status
	s.status = finalStatus(s)
	if equality.Semantic.DeepEqual(before, s.status) {
		return nil
	}
	patched := s.cluster.DeepCopy()
	// The merge patch changes only the fields that differ: the agent of a pull member may write others concurrently.
	patched.Status = s.status
	err := c.Hub.Status().Patch(ctx, patched, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("patch status of cluster %s: %w", s.member.Key(), err)
	}
	c.recordEvents(s, before)
	return nil
}

// recordEvents records the changes of the status as events. It records none for a cluster that is being deregistered:
// the deregistration has its own events.
func (c *Controller) recordEvents(s *state, before libv1beta1.SveltosClusterStatus) {
	if s.member.Deleting {
		return
	}
	now, hasBecomeReady := s.status, c.takeReadyTransition(s, before)
	switch {
	case hasBecomeReady && now.Version != "":
		c.recordEvent(s, corev1.EventTypeNormal, "Ready", " is ready, Kubernetes "+now.Version)
	case hasBecomeReady:
		c.recordEvent(s, corev1.EventTypeNormal, "Ready", " is ready")
	case now.ConnectionStatus == libv1beta1.ConnectionDown && before.ConnectionStatus != now.ConnectionStatus:
		c.recordEvent(s, corev1.EventTypeWarning, "Down", " is down: "+now.FailureMessage)
	case now.ConnectionStatus == libv1beta1.ConnectionHealthy && before.ConnectionStatus == libv1beta1.ConnectionDown:
		c.recordEvent(s, corev1.EventTypeNormal, "Healthy", " is healthy again")
	case now.FailureMessage != "" && now.FailureMessage != s.problems && now.FailureMessage != before.FailureMessage && !now.Ready:
		c.recordEvent(s, corev1.EventTypeWarning, "NotReady", ": "+now.FailureMessage)
	}
	if s.problems != "" && !strings.Contains(before.FailureMessage, s.problems) {
		c.recordEvent(s, corev1.EventTypeWarning, "Attention", ": "+s.problems)
	}
}

// takeReadyTransition returns whether a member has become ready. The agent of a pull member writes Ready itself, so
// that before.Ready can be true already. So it compares with c.notReady instead, and removes the member from it.
func (c *Controller) takeReadyTransition(s *state, before libv1beta1.SveltosClusterStatus) bool {
	if s.member.Mode == fleet.Push || !s.status.Ready || s.status.ConnectionStatus != libv1beta1.ConnectionHealthy {
		return s.status.Ready && !before.Ready
	}
	return c.unmarkNotReady(client.ObjectKeyFromObject(s.cluster)) || before.ConnectionStatus == ""
}

// markNotReady adds a pull member to c.notReady.
func (c *Controller) markNotReady(name types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.notReady == nil {
		c.notReady = map[types.NamespacedName]struct{}{}
	}
	c.notReady[name] = struct{}{}
}

// unmarkNotReady removes a pull member from c.notReady and returns whether it was there.
func (c *Controller) unmarkNotReady(name types.NamespacedName) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, wasNotReady := c.notReady[name]
	delete(c.notReady, name)
	return wasNotReady
}

// recordEvent records an event about the cluster. The message is "cluster <name>" and text.
func (c *Controller) recordEvent(s *state, eventType, reason, text string) {
	c.Events.Eventf(s.cluster, nil, eventType, reason, libv1beta1.SveltosClusterKind, "cluster %s%s", s.member.Key(), text)
}

// recordPauseEvent records that the active window paused or unpaused the cluster.
func (c *Controller) recordPauseEvent(s *state) {
	reason, text := "Unpaused", "unpaused"
	if s.cluster.Spec.Paused {
		reason, text = "Paused", "paused"
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, reason, libv1beta1.SveltosClusterKind, "cluster %s is %s by its active window", s.member.Key(), text)
}
