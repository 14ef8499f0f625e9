package approvals

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// maxPerToken and maxPerAgent are the maximum numbers of pending and approved requests of one requester. The API
	// server keeps signed requests for an hour. A registration needs one request, and one for each retry. An agent with
	// the shortest certificate lifetime, ten minutes, needs about eight requests in an hour.
	maxPerToken = 20
	maxPerAgent = 100
)

// state is the data that the steps of one reconcile share.
type state struct {
	csr    *certificatesv1.CertificateSigningRequest
	parsed ParsedCSR
	// cluster is the Cluster whose agent requests the certificate. It is nil before the step that reads or creates it.
	cluster *clusterv1alpha1.Cluster
	// firstUse is the time of the first use of the token, the value of kube.AnnotationFirstUse.
	firstUse string
	// restrictedTo is the UID of the only Cluster for which the token is valid, "" if the token is not restricted.
	restrictedTo types.UID
}

// denied returns a DeniedError with the text of err, or nil if err is nil.
func denied(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &bootstrap.DeniedError{Reason: reason, Message: err.Error()}
}

func deniedf(reason, format string, args ...any) error {
	return denied(reason, fmt.Errorf(format, args...))
}

// grantRead allows the requester to read the answer. It runs right before the answer is written, so that no RBAC
// objects are created for pending requests.
func (c *Controller) grantRead(ctx context.Context, s *state) error {
	if !strings.HasPrefix(s.csr.Spec.Username, bootstrap.TokenUserPrefix) && !strings.HasPrefix(s.csr.Spec.Username, bootstrap.AgentUserPrefix) {
		return nil // other requesters have their own RBAC, or none
	}
	return bootstrap.EnsureCSRReadRBAC(ctx, c.Live, s.csr)
}

// checkDeadline denies a request whose requester has stopped waiting: its certificate and its Cluster would be unused.
// The deadline is at most RegistrationTimeout after the creation, even if the requester waits longer.
func (c *Controller) checkDeadline(_ context.Context, s *state) error {
	deadline := s.csr.CreationTimestamp.Add(executionnamespaces.RegistrationTimeout)
	if requesterDeadline := s.parsed.Until; !requesterDeadline.IsZero() && requesterDeadline.Before(deadline) {
		deadline = requesterDeadline
	}
	if c.Clock.Now().After(deadline) {
		return deniedf(bootstrap.ReasonTooLate, "the request was not answered before %s, when the requester stopped waiting: request again, and check that the clocks of cluster and hub agree",
			deadline.UTC().Format(time.RFC3339))
	}
	return nil
}

// checkRequestCount denies a request if its requester has created too many earlier ones. Denied requests do not count,
// so that a requester cannot lock itself out.
func (c *Controller) checkRequestCount(ctx context.Context, s *state) error {
	maximum := maxPerToken
	if s.parsed.Renewal {
		maximum = maxPerAgent
	}
	var all certificatesv1.CertificateSigningRequestList
	if err := c.Hub.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list CertificateSigningRequests: %w", err)
	}
	earlier := 0
	for i := range all.Items {
		if other := &all.Items[i]; other.Spec.Username == s.csr.Spec.Username && isOlder(other, s.csr) && !isRejected(other) {
			earlier++
		}
	}
	if earlier >= maximum {
		return deniedf(bootstrap.ReasonTooManyRequests, "%s has %d other requests that are pending or were approved within the last hour; request again later", s.csr.Spec.Username, earlier)
	}
	return nil
}

// isOlder returns whether a was created before b. In the same second the UID decides.
func isOlder(a, b *certificatesv1.CertificateSigningRequest) bool {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(string(a.UID), string(b.UID))) < 0
}

// isRejected returns whether a request was denied or its signing failed.
func isRejected(csr *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(condition certificatesv1.CertificateSigningRequestCondition) bool {
		return condition.Type != certificatesv1.CertificateApproved
	})
}

// authorize checks with a SubjectAccessReview whether the requester may create requests of this kind.
func (c *Controller) authorize(ctx context.Context, s *state) error {
	subresource := bootstrap.RegistrationSubresource
	if s.parsed.Renewal {
		subresource = bootstrap.RenewalSubresource
	}
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range s.csr.Spec.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: s.csr.Spec.Username, UID: s.csr.Spec.UID, Groups: s.csr.Spec.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "create", Group: certificatesv1.GroupName, Version: "v1", Resource: "certificatesigningrequests", Subresource: subresource,
		},
	}}
	if err := c.Live.Create(ctx, review); err != nil {
		return fmt.Errorf("review the access of %s: %w", s.csr.Spec.Username, err)
	}
	if !review.Status.Allowed {
		return deniedf(bootstrap.ReasonForbidden, "%s may not create certificatesigningrequests/%s", s.csr.Spec.Username, subresource)
	}
	return nil
}

// ensurePolicy ensures the admission policy that limits the writes of agents. The reconcile waits until a new policy is
// in effect.
func (c *Controller) ensurePolicy(ctx context.Context, _ *state) error {
	isNew, err := bootstrap.EnsureAgentPolicy(ctx, c.Live)
	if err != nil || !isNew {
		return err
	}
	return phase.Wait{After: kube.PolicyDelay, Reason: "the admission policy for agents is not in effect yet"}
}

// findCluster reads the Cluster whose agent renews its certificate.
func (c *Controller) findCluster(ctx context.Context, s *state) error {
	cluster, found, err := c.getCluster(ctx, s.parsed.Cluster)
	if err != nil {
		return err
	}
	if !found || cluster.Spec.SyncMode != clusterv1alpha1.Pull || !cluster.DeletionTimestamp.IsZero() {
		return deniedf(bootstrap.ReasonClusterNotFound, "cluster %s does not exist or has no agent", s.parsed.Cluster)
	}
	s.cluster = cluster
	return nil
}

// ensureAgentRBAC creates the agent's RBAC on the hub.
func (c *Controller) ensureAgentRBAC(ctx context.Context, s *state) error {
	return bootstrap.EnsureAgentRBAC(ctx, c.Live, s.cluster)
}

// approve approves the request, so that the API server signs the certificate.
func (c *Controller) approve(ctx context.Context, s *state) error {
	message := "registers cluster " + s.parsed.Cluster
	if s.parsed.Renewal {
		message = "renews the certificate of the agent of cluster " + s.parsed.Cluster
	}
	if err := c.setCondition(ctx, s, certificatesv1.CertificateApproved, &bootstrap.DeniedError{Reason: bootstrap.ReasonApproved, Message: message}); err != nil {
		return err
	}
	c.Events.Eventf(s.csr, nil, corev1.EventTypeNormal, "Approved", "Approve", "%s", message)
	return nil
}

// deny rolls back the objects of this request and denies the request. The objects of an approved request stay. The
// cache may not have the approval, so deny reads the request from the API server first.
func (c *Controller) deny(ctx context.Context, s *state, denial *bootstrap.DeniedError) error {
	pending, err := c.isPendingLive(ctx, s.csr)
	if err != nil || !pending {
		return err
	}
	if err := c.rollBack(ctx, s); err != nil {
		return err
	}
	if err := c.grantRead(ctx, s); err != nil {
		return err
	}
	if err := c.setCondition(ctx, s, certificatesv1.CertificateDenied, denial); err != nil {
		return err
	}
	c.Events.Eventf(s.csr, nil, corev1.EventTypeWarning, denial.Reason, "Deny", "%s", denial.Message)
	return nil
}

// isPendingLive calls isPending for the request on the API server. It returns false if the request does not exist.
func (c *Controller) isPendingLive(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (bool, error) {
	live := &certificatesv1.CertificateSigningRequest{}
	err := c.Live.Get(ctx, client.ObjectKeyFromObject(csr), live)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read the request: %w", err)
	}
	return err == nil && live.UID == csr.UID && isPending(live), nil
}

// setCondition writes a condition with the reason and the message of answer, which is also used for an approval. It
// returns nil if the request was deleted.
func (c *Controller) setCondition(ctx context.Context, s *state, conditionType certificatesv1.RequestConditionType, answer *bootstrap.DeniedError) error {
	answered := s.csr.DeepCopy()
	answered.Status.Conditions = append(answered.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: conditionType, Status: corev1.ConditionTrue, Reason: answer.Reason, Message: answer.Message, LastUpdateTime: metav1.NewTime(c.Clock.Now()),
	})
	err := c.Live.SubResource("approval").Update(ctx, answered, client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	return nil
}
