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
	"github.com/towline/towline/internal/hub/spaces"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

const (
	// mostByToken and mostByAgent are how many requests of one requester may wait or be approved at a time; the API server keeps those that it has
	// signed for an hour. A registration needs one, and one more for each time that it is tried again; an agent whose certificates live ten
	// minutes, which is the least, needs about eight in an hour.
	mostByToken = 20
	mostByAgent = 100
)

// guardPause is the time that the API server gets to put into force what bounds the agents, once that is written.
const guardPause = 2 * time.Second

// state is what the steps of one reconcile know.
type state struct {
	csr      *certificatesv1.CertificateSigningRequest
	petition bootstrap.Petition
	// cluster is the Cluster that the certificate is for.
	cluster *clusterv1alpha1.Cluster
	// only is the uid of the one Cluster that the token is worth anything for; empty if it has brought none into the fleet yet.
	only types.UID
}

// denied returns a denial with the text of err; nil if there is none.
func denied(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &bootstrap.Denied{Reason: reason, Message: err.Error()}
}

func deniedf(reason, format string, args ...any) error {
	return denied(reason, fmt.Errorf(format, args...))
}

// letRead lets the requester read the answer, whatever it will be. It comes right before that: what waits costs the hub nothing.
func (c *Controller) letRead(ctx context.Context, s *state) error {
	if !strings.HasPrefix(s.csr.Spec.Username, bootstrap.TokenUserPrefix) && !strings.HasPrefix(s.csr.Spec.Username, bootstrap.AgentUserPrefix) {
		return nil // others have rights of their own, or none
	}
	return bootstrap.LetRead(ctx, c.Live, s.csr)
}

// inTime denies what nobody waits for any more: a certificate that is approved now would be nobody's, and so would the Cluster. However long
// somebody says that he waits, the hub tries for no longer than a registration may take.
func (c *Controller) inTime(_ context.Context, s *state) error {
	until := s.csr.CreationTimestamp.Add(spaces.RegistrationTimeout)
	if named := s.petition.Until; !named.IsZero() && named.Before(until) {
		until = named
	}
	if c.Clock.Now().After(until) {
		return deniedf(bootstrap.ReasonTooLate, "whoever asked has waited for an answer until %s: ask again, and see that the clocks of cluster and hub agree",
			until.UTC().Format(time.RFC3339))
	}
	return nil
}

// few denies a requester who asks faster than anybody has a reason to. Requests that are denied do not count, so that nobody can lock himself out.
func (c *Controller) few(ctx context.Context, s *state) error {
	most := mostByToken
	if s.petition.Renewal {
		most = mostByAgent
	}
	var all certificatesv1.CertificateSigningRequestList
	if err := c.Hub.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list CertificateSigningRequests: %w", err)
	}
	earlier := 0
	for i := range all.Items {
		if other := &all.Items[i]; other.Spec.Username == s.csr.Spec.Username && before(other, s.csr) && !refused(other) {
			earlier++
		}
	}
	if earlier >= most {
		return deniedf(bootstrap.ReasonTooMany, "%s has %d other requests that wait or were approved within the last hour; ask again later", s.csr.Spec.Username, earlier)
	}
	return nil
}

// before says which of two requests was made first.
func before(a, b *certificatesv1.CertificateSigningRequest) bool {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(string(a.UID), string(b.UID))) < 0
}

// refused says whether a request was denied, or signing it failed.
func refused(csr *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(condition certificatesv1.CertificateSigningRequestCondition) bool {
		return condition.Type != certificatesv1.CertificateApproved
	})
}

// authorize asks the API server whether the requester may have such a certificate at all.
func (c *Controller) authorize(ctx context.Context, s *state) error {
	kind := bootstrap.PetitionFirst
	if s.petition.Renewal {
		kind = bootstrap.PetitionNext
	}
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range s.csr.Spec.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: s.csr.Spec.Username, UID: s.csr.Spec.UID, Groups: s.csr.Spec.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "create", Group: certificatesv1.GroupName, Version: "v1", Resource: "certificatesigningrequests", Subresource: kind,
		},
	}}
	if err := c.Live.Create(ctx, review); err != nil {
		return fmt.Errorf("ask what %s may do: %w", s.csr.Spec.Username, err)
	}
	if !review.Status.Allowed {
		return deniedf(bootstrap.ReasonForbidden, "%s may not create certificatesigningrequests/%s", s.csr.Spec.Username, kind)
	}
	return nil
}

// guard makes sure that the hub keeps agents from what they must not write, without which none gets a certificate.
func (c *Controller) guard(ctx context.Context, _ *state) error {
	guarded, err := bootstrap.Guarded(ctx, c.Live)
	if err != nil || guarded {
		return err
	}
	if err := bootstrap.Guard(ctx, c.Live); err != nil {
		return err
	}
	return phase.Wait{After: guardPause, Reason: "what agents may write was not bounded, and is from now on"}
}

// find reads the Cluster whose agent asks for its next certificate.
func (c *Controller) find(ctx context.Context, s *state) error {
	cluster, found, err := c.cluster(ctx, s.petition.Cluster)
	if err != nil {
		return err
	}
	if !found || cluster.Spec.SyncMode != clusterv1alpha1.Pull || !cluster.DeletionTimestamp.IsZero() {
		return deniedf(bootstrap.ReasonUnknown, "there is no cluster %s with an agent", s.petition.Cluster)
	}
	s.cluster = cluster
	return nil
}

// grant makes what the agent needs on the hub.
func (c *Controller) grant(ctx context.Context, s *state) error {
	return bootstrap.Grant(ctx, c.Live, s.cluster)
}

// approve has the certificate signed.
func (c *Controller) approve(ctx context.Context, s *state) error {
	message := "registers cluster " + s.petition.Cluster
	if s.petition.Renewal {
		message = "renews the certificate of the agent of cluster " + s.petition.Cluster
	}
	if err := c.answer(ctx, s, certificatesv1.CertificateApproved, &bootstrap.Denied{Reason: bootstrap.ReasonApproved, Message: message}); err != nil {
		return err
	}
	c.Events.Eventf(s.csr, nil, corev1.EventTypeNormal, "Approved", "Approve", "%s", message)
	return nil
}

// deny takes back what was made for this request and says why. The cache may not know yet that the request has been answered: what was made for
// one that is approved is not taken back.
func (c *Controller) deny(ctx context.Context, s *state, denial *bootstrap.Denied) error {
	waits, err := c.waits(ctx, s.csr)
	if err != nil || !waits {
		return err
	}
	if err := c.takeBack(ctx, s); err != nil {
		return err
	}
	if err := c.letRead(ctx, s); err != nil {
		return err
	}
	if err := c.answer(ctx, s, certificatesv1.CertificateDenied, denial); err != nil {
		return err
	}
	c.Events.Eventf(s.csr, nil, corev1.EventTypeWarning, denial.Reason, "Deny", "%s", denial.Message)
	return nil
}

// waits asks the API server whether a request still has no answer.
func (c *Controller) waits(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (bool, error) {
	live := &certificatesv1.CertificateSigningRequest{}
	err := c.Live.Get(ctx, client.ObjectKeyFromObject(csr), live)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("look whether it has been answered: %w", err)
	}
	return err == nil && live.UID == csr.UID && open(live), nil
}

// answer writes the one condition that ends the matter. A request that is gone needs none.
func (c *Controller) answer(ctx context.Context, s *state, kind certificatesv1.RequestConditionType, why *bootstrap.Denied) error {
	answered := s.csr.DeepCopy()
	answered.Status.Conditions = append(answered.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: kind, Status: corev1.ConditionTrue, Reason: why.Reason, Message: why.Message, LastUpdateTime: metav1.NewTime(c.Clock.Now()),
	})
	err := c.Live.SubResource("approval").Update(ctx, answered, client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	return nil
}
