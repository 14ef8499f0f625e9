package approvals

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/hub/spaces"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

const (
	// requestsAnnotation on a Cluster, and on the Secret of a bootstrap token, lists the uids of the CertificateSigningRequests that made, or used,
	// it and have not been denied. With the last one that is denied goes what they made, and the token is worth as much as before.
	requestsAnnotation = "towline.dev/certificate-requests"
	// sinceAnnotation on the Secret of a bootstrap token is when (RFC 3339) the token was first used for what it registered.
	sinceAnnotation = "towline.dev/registered-since"
	// onlyAnnotation on the Secret of a bootstrap token is the uid of the one Cluster that it is still worth anything for: the one that it has
	// brought into the fleet, or that was there before. A later Cluster of the same name takes another token.
	onlyAnnotation = "towline.dev/registered-uid"
)

// bind makes the token one for this cluster: it is worth one registration, which may be tried again until it is through or its time is over.
func (c *Controller) bind(ctx context.Context, s *state) error {
	secret, found, err := c.tokenSecret(ctx, s.petition.TokenID)
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
	s.only = types.UID(secret.Annotations[onlyAnnotation])
	marked := secret.DeepCopy()
	switch registered := secret.Annotations[kube.AnnotationRegistered]; {
	case registered == "":
		metav1.SetMetaDataAnnotation(&marked.ObjectMeta, kube.AnnotationRegistered, s.registered())
		metav1.SetMetaDataAnnotation(&marked.ObjectMeta, sinceAnnotation, c.now())
	case registered != s.registered():
		return deniedf(bootstrap.ReasonSpent, "the bootstrap token %s has registered another cluster; use a new one", token.ID)
	case requested(secret, s.csr.UID):
		return nil
	case c.over(secret):
		return deniedf(bootstrap.ReasonSpent, "the bootstrap token %s was used for cluster %s more than %s ago; use a new one",
			token.ID, s.petition.Cluster, spaces.RegistrationTimeout)
	}
	request(marked, s.csr.UID)
	return c.mark(ctx, secret, marked)
}

// over says whether the time is over in which what a token was used for may be tried again. Without the time of its first use it is.
func (c *Controller) over(secret *corev1.Secret) bool {
	since, err := time.Parse(time.RFC3339, secret.Annotations[sinceAnnotation])
	return err != nil || c.Clock.Since(since) > spaces.RegistrationTimeout
}

// spent denies a token whose Cluster is gone, or going: whoever took it out of the fleet wants no other one in its place.
func (s *state) spent(live *clusterv1alpha1.Cluster, found bool) error {
	if s.only == "" || found && live.UID == s.only && live.DeletionTimestamp.IsZero() {
		return nil
	}
	return deniedf(bootstrap.ReasonSpent, "the bootstrap token %s was for a cluster %s that was taken out of the fleet; use a new one",
		s.petition.TokenID, s.petition.Cluster)
}

// restrict makes the token of the request one for cluster alone.
func (c *Controller) restrict(ctx context.Context, tokenID string, cluster *clusterv1alpha1.Cluster) error {
	secret, found, err := c.tokenSecret(ctx, tokenID)
	if err != nil || !found || secret.Annotations[kube.AnnotationRegistered] != registered(cluster.Name, cluster.Spec.ID) || secret.Annotations[onlyAnnotation] != "" {
		return err
	}
	marked := secret.DeepCopy()
	metav1.SetMetaDataAnnotation(&marked.ObjectMeta, onlyAnnotation, string(cluster.UID))
	return c.mark(ctx, secret, marked)
}

// registered is what a token bears that was used for a cluster.
func registered(name, id string) string { return name + "/" + id }

func (s *state) registered() string { return registered(s.petition.Cluster, s.petition.ID) }

// tokenSecret reads the Secret of a token.
func (c *Controller) tokenSecret(ctx context.Context, id string) (secret *corev1.Secret, found bool, err error) {
	secret = &corev1.Secret{}
	err = c.Live.Get(ctx, bootstrap.TokenSecret(id), secret)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read bootstrap token %s: %w", id, err)
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

// requests returns the uids of the requests that obj was made or used by.
func requests(obj client.Object) []string {
	return strings.Fields(obj.GetAnnotations()[requestsAnnotation])
}

// requested says whether obj was made or used by the request.
func requested(obj client.Object, uid types.UID) bool {
	return slices.Contains(requests(obj), string(uid))
}

// request notes on obj that the request uses it.
func request(obj client.Object, uid types.UID) { setRequests(obj, append(requests(obj), string(uid))) }

// forget notes on obj that the request does not use it, and says whether no other one does.
func forget(obj client.Object, uid types.UID) (last bool) {
	left := slices.DeleteFunc(requests(obj), func(other string) bool { return other == string(uid) })
	setRequests(obj, left)
	return len(left) == 0
}

func setRequests(obj client.Object, uids []string) {
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[requestsAnnotation] = strings.Join(uids, " ")
	obj.SetAnnotations(annotations)
}
