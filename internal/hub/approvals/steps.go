package approvals

import (
	"context"
	"fmt"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// state is what the steps of one reconcile know.
type state struct {
	csr      *certificatesv1.CertificateSigningRequest
	petition bootstrap.Petition
	// cluster is the Cluster that the certificate is for.
	cluster *clusterv1alpha1.Cluster
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

// letRead lets the requester read the answer, whatever it will be.
func (c *Controller) letRead(ctx context.Context, s *state) error {
	if !strings.HasPrefix(s.csr.Spec.Username, bootstrap.TokenUserPrefix) && !strings.HasPrefix(s.csr.Spec.Username, bootstrap.AgentUserPrefix) {
		return nil // others have rights of their own, or none
	}
	return bootstrap.LetRead(ctx, c.Live, s.csr)
}

// inTime denies what nobody waits for any more: a certificate that is approved now would be nobody's, and so would the Cluster.
func (c *Controller) inTime(_ context.Context, s *state) error {
	if until := s.petition.Until; !until.IsZero() && c.Clock.Now().After(until) {
		return deniedf(bootstrap.ReasonTooLate, "whoever asked has waited for an answer until %s: ask again, and see that the clocks of cluster and hub agree",
			until.Format(time.RFC3339))
	}
	return nil
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

// bind makes the token one for this cluster: it is worth one registration.
func (c *Controller) bind(ctx context.Context, s *state) error {
	secret, found, err := c.tokenSecret(ctx, s)
	if err != nil {
		return err
	}
	if !found {
		return deniedf(bootstrap.ReasonToken, "the bootstrap token %s does not exist any more", s.petition.TokenID)
	}
	token, err := bootstrap.ReadToken(secret)
	if err != nil {
		return denied(bootstrap.ReasonToken, err)
	}
	if err := token.Useless(c.Clock.Now()); err != nil {
		return denied(bootstrap.ReasonToken, err)
	}
	marked := secret.DeepCopy()
	metav1.SetMetaDataAnnotation(&marked.ObjectMeta, kube.AnnotationRegistered, s.registered())
	switch registered, request := secret.Annotations[kube.AnnotationRegistered], secret.Annotations[requestAnnotation]; {
	case registered == "":
		metav1.SetMetaDataAnnotation(&marked.ObjectMeta, requestAnnotation, string(s.csr.UID))
	case registered != s.registered():
		return deniedf(bootstrap.ReasonSpent, "the bootstrap token %s has registered another cluster; use a new one", token.ID)
	case request == "" || request == string(s.csr.UID):
		return nil
	default:
		delete(marked.Annotations, requestAnnotation)
	}
	return c.mark(ctx, secret, marked)
}

// registered is what a token bears that was used for this.
func (s *state) registered() string { return s.petition.Cluster + "/" + s.petition.ID }

// tokenSecret reads the Secret of the token that came with the request.
func (c *Controller) tokenSecret(ctx context.Context, s *state) (secret *corev1.Secret, found bool, err error) {
	secret = &corev1.Secret{}
	err = c.Live.Get(ctx, bootstrap.TokenSecret(s.petition.TokenID), secret)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read bootstrap token %s: %w", s.petition.TokenID, err)
	}
	return secret, err == nil && secret.DeletionTimestamp.IsZero(), nil
}

// mark writes onto the token what it was used for, and fails if somebody else has written since it was read.
func (c *Controller) mark(ctx context.Context, secret, marked *corev1.Secret) error {
	patch := client.MergeFromWithOptions(secret, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, marked, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write on Secret %s what its token is for: %w", client.ObjectKeyFromObject(secret), err)
	}
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

// deny takes back what was made for this request and says why.
func (c *Controller) deny(ctx context.Context, s *state, denial *bootstrap.Denied) error {
	if err := c.takeBack(ctx, s); err != nil {
		return err
	}
	if err := c.answer(ctx, s, certificatesv1.CertificateDenied, denial); err != nil {
		return err
	}
	c.Events.Eventf(s.csr, nil, corev1.EventTypeWarning, denial.Reason, "Deny", "%s", denial.Message)
	return nil
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
