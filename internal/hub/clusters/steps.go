package clusters

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

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// state is what the steps of one reconcile know.
type state struct {
	cluster *libv1beta1.SveltosCluster
	member  fleet.Member
	// status and labels are what the cluster object shall have.
	status libv1beta1.SveltosClusterStatus
	labels map[string]string
	// window is what the active window makes of the cluster now; nil if that cannot be said.
	window *turn
	// remarks say what is wrong though the member is reached.
	remarks string
	// next is when to look again if nothing happens until then; zero means never.
	next time.Duration
}

// look makes the cluster be looked at again after a pause; zero changes nothing.
func (s *state) look(after time.Duration) {
	if after > 0 && (s.next == 0 || after < s.next) {
		s.next = after
	}
}

// remark adds to what is wrong though the member is reached.
func (s *state) remark(what string) {
	if s.remarks != "" {
		s.remarks += alsoWrong
	}
	s.remarks += what
}

// contact finds out how the member is, each mode in its own way.
func (c *Controller) contact(ctx context.Context, s *state) error {
	if s.member.Refused != "" {
		s.status = refused(s.cluster.Status, s.member.Refused)
		return nil
	}
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.dial, fleet.Pull: c.listen}[s.member.Mode](ctx, s)
}

// dial asks a push member. That it does not answer is a finding, not an error.
func (c *Controller) dial(ctx context.Context, s *state) error {
	s.look(contactInterval)
	threshold := s.cluster.Spec.ConsecutiveFailureThreshold
	config, facts, err := c.reach(ctx, s.member)
	if ctx.Err() != nil {
		return fmt.Errorf("contact %s: %w", s.member.Key(), ctx.Err())
	}
	if err != nil {
		s.status = missed(s.cluster.Status, threshold, steadily(err))
		return nil
	}
	liveness, err := c.judge(ctx, config, s.cluster)
	if err != nil {
		return fmt.Errorf("check %s: %w", s.member.Key(), err)
	}
	if !liveness.Ready {
		s.look(readinessInterval)
	}
	facts = c.fillGaps(client.ObjectKeyFromObject(s.cluster), s.cluster.Status.APIVersions, facts)
	s.status = afterPushCheck(learned(s.cluster.Status, facts), threshold, liveness)
	s.labels, _ = labelled(s.cluster.Labels, facts.Version)
	c.renew(ctx, s)
	return nil
}

// reach asks a push member what it is.
func (c *Controller) reach(ctx context.Context, m fleet.Member) (*rest.Config, fleet.Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, contactLimit)
	defer cancel()
	config, err := c.Dial(ctx, m)
	if err != nil {
		return nil, fleet.Facts{}, err
	}
	facts, err := fleet.Probe(ctx, config)
	return config, facts, err
}

// passing finds what of a failed contact is another one each time: the port that it was made from, and the time that
// was left for it.
var passing = regexp.MustCompile(`(\b[0-9.]+|\[[0-9a-f:.%]+\]):[0-9]+->|\?timeout=[^"&\s]*`)

// steadily says why a member is not reached, in the same words for the same reason.
func steadily(err error) string {
	var lookup *net.DNSError
	var slow net.Error
	named := errors.As(err, &lookup)
	if !named && (errors.Is(err, context.DeadlineExceeded) || errors.As(err, &slow) && slow.Timeout()) {
		return fmt.Sprintf("does not answer within %s", contactLimit)
	}
	return passing.ReplaceAllString(err.Error(), "")
}

// judge runs the checks of a push member. It fails only when ctx ends.
func (c *Controller) judge(ctx context.Context, config *rest.Config, cluster *libv1beta1.SveltosCluster) (check.Result, error) {
	if !cluster.DeletionTimestamp.IsZero() {
		// A check that fails must not keep what is deployed from being withdrawn, and neither must a status that was lost.
		return check.Result{Ready: true}, nil
	}
	if len(cluster.Spec.ReadinessChecks)+len(cluster.Spec.LivenessChecks) == 0 {
		return check.Result{Ready: true}, nil
	}
	// Its turn comes, whatever the checks of others take: waiting for it says nothing of this member.
	turns := c.checkTurns()
	select {
	case turns <- struct{}{}:
		defer func() { <-turns }()
	case <-ctx.Done():
		return check.Result{}, ctx.Err()
	}
	limited, cancel := context.WithTimeout(ctx, checksLimit)
	defer cancel()
	// It asks for the kinds that the checks name, and for nothing else.
	member, err := client.New(config, client.Options{})
	if err != nil {
		return check.Result{Failure: err.Error()}, nil
	}
	liveness := check.EvaluateCluster(limited, member, &cluster.Spec, cluster.Status.Ready)
	return liveness, ctx.Err()
}

// renew keeps the token of a push member fresh. While that fails the present token works, so that the connection stays
// healthy: people see an event, and failureMessage until it succeeds.
func (c *Controller) renew(ctx context.Context, s *state) {
	// The tokens of an identity renew themselves.
	if s.cluster.Spec.TokenRequestRenewalOption == nil || s.member.Identity != nil {
		return
	}
	renewal := join.Renewal{Hub: c.Hub, Clock: c.Clock, Member: func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (*rest.Config, error) {
		return c.Dial(ctx, fleet.FromSveltosCluster(cluster))
	}}
	next, err := renewal.Run(ctx, s.cluster)
	s.look(next)
	if err == nil || ctx.Err() != nil {
		return
	}
	log.FromContext(ctx).Info("cannot renew the token; trying again", logkeys.Member, s.member.Key(), logkeys.Reason, err.Error())
	s.remark(err.Error())
}

// listen judges a pull member by the heartbeats of its agent.
func (c *Controller) listen(ctx context.Context, s *state) error {
	report := ""
	if at := s.cluster.Status.AgentLastReportTime; at != nil {
		report = at.UTC().String()
	}
	liveness, err := c.Heartbeats.Evaluate(ctx, s.member, report)
	if err != nil {
		return err
	}
	if !s.cluster.Status.Ready {
		c.await(client.ObjectKeyFromObject(s.cluster))
	}
	before := *s.cluster.Status.DeepCopy()
	if s.member.Deleting {
		// A check that fails must not keep what is deployed from being withdrawn, and neither must a status that was lost.
		before.AgentCheckFailures, before.Ready = 0, before.Ready || liveness.HasReported
	}
	status, next := afterPullCheck(before, s.cluster.Spec.ConsecutiveFailureThreshold, liveness)
	s.status = status
	s.status.AgentCheckFailures = s.cluster.Status.AgentCheckFailures
	s.look(next)
	return nil
}

// label writes the labels of a push member, if they differ.
func (c *Controller) label(ctx context.Context, s *state) error {
	if equality.Semantic.DeepEqual(s.cluster.Labels, s.labels) {
		return nil
	}
	labelled := s.cluster.DeepCopy()
	labelled.Labels = s.labels
	if err := c.Hub.Patch(ctx, labelled, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("label cluster %s: %w", s.member.Key(), err)
	}
	labelled.Status = s.cluster.Status
	s.cluster = labelled
	return nil
}

// report writes the status, if it differs, and tells what changed.
func (c *Controller) report(ctx context.Context, s *state) error {
	before := s.cluster.Status
	s.status = complete(s)
	if equality.Semantic.DeepEqual(before, s.status) {
		return nil
	}
	// The agent of a pull member writes other fields of the status: a merge patch leaves those alone.
	written := s.cluster.DeepCopy()
	written.Status = s.status
	err := c.Hub.Status().Patch(ctx, written, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("report on cluster %s: %w", s.member.Key(), err)
	}
	c.tell(s, before)
	return nil
}

// tell records what changed and people care about. Of a cluster that is being deregistered, which stops answering
// sooner or later, the departure tells.
func (c *Controller) tell(s *state, before libv1beta1.SveltosClusterStatus) {
	if s.member.Deleting {
		return
	}
	now, became := s.status, c.becameReady(s, before)
	switch {
	case became && now.Version != "":
		c.event(s, corev1.EventTypeNormal, "Ready", " is ready, Kubernetes "+now.Version)
	case became:
		c.event(s, corev1.EventTypeNormal, "Ready", " is ready")
	case now.ConnectionStatus == libv1beta1.ConnectionDown && before.ConnectionStatus != now.ConnectionStatus:
		c.event(s, corev1.EventTypeWarning, "Down", " is down: "+now.FailureMessage)
	case now.ConnectionStatus == libv1beta1.ConnectionHealthy && before.ConnectionStatus == libv1beta1.ConnectionDown:
		c.event(s, corev1.EventTypeNormal, "Healthy", " is healthy again")
	case now.FailureMessage != "" && now.FailureMessage != s.remarks && now.FailureMessage != before.FailureMessage && !now.Ready:
		c.event(s, corev1.EventTypeWarning, "NotReady", ": "+now.FailureMessage)
	}
	if s.remarks != "" && !strings.Contains(before.FailureMessage, s.remarks) {
		c.event(s, corev1.EventTypeWarning, "Attention", ": "+s.remarks)
	}
}

// becameReady says whether a member is ready that was not. The agent of a pull member says so itself, so we compare
// with what we saw last.
func (c *Controller) becameReady(s *state, before libv1beta1.SveltosClusterStatus) bool {
	if s.member.Mode == fleet.Push || !s.status.Ready || s.status.ConnectionStatus != libv1beta1.ConnectionHealthy {
		return s.status.Ready && !before.Ready
	}
	return c.arrived(client.ObjectKeyFromObject(s.cluster)) || before.ConnectionStatus == ""
}

// await remembers that a pull member is not ready.
func (c *Controller) await(name types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.awaited == nil {
		c.awaited = map[types.NamespacedName]struct{}{}
	}
	c.awaited[name] = struct{}{}
}

// arrived says, once, whether a pull member that is ready was awaited.
func (c *Controller) arrived(name types.NamespacedName) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, awaited := c.awaited[name]
	delete(c.awaited, name)
	return awaited
}

// event records an event on the cluster.
func (c *Controller) event(s *state, kind, reason, what string) {
	c.Events.Eventf(s.cluster, nil, kind, reason, libv1beta1.SveltosClusterKind, "cluster %s%s", s.member.Key(), what)
}

// tellTurn says that the active window paused or unpaused the cluster.
func (c *Controller) tellTurn(s *state) {
	reason, what := "Unpaused", "unpaused"
	if s.cluster.Spec.Paused {
		reason, what = "Paused", "paused"
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, reason, "SveltosCluster", "cluster %s is %s by its active window", s.member.Key(), what)
}
