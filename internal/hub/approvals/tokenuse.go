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
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

const (
	// requestsAnnotation, on a Cluster and on the Secret of a bootstrap token, lists the UIDs of the
	// CertificateSigningRequests that created or used the object and are not denied. When the last of them is denied, the
	// Cluster is deleted and the token is marked as unused.
	requestsAnnotation = "towline.dev/certificate-requests"
	// clusterUIDAnnotation, on the Secret of a restricted bootstrap token, is the UID of the only Cluster for which the
	// token is valid. A later Cluster with the same name needs another token.
	clusterUIDAnnotation = "towline.dev/registered-uid"
)

// reserveToken reserves the token for this cluster. The token is then valid for one registration, which can be retried
// until it is complete or RegistrationTimeout has passed.
func (c *Controller) reserveToken(ctx context.Context, s *state) error {
	secret, found, err := c.getTokenSecret(ctx, s.parsed.TokenID)
	if err != nil {
		return err
	}
	if !found {
		return deniedf(bootstrap.ReasonInvalidToken, "bootstrap token %s does not exist", s.parsed.TokenID)
	}
	token, err := bootstrap.ReadToken(secret)
	if err != nil {
		return denied(bootstrap.ReasonInvalidToken, err)
	}
	if err := token.CheckUsable(c.Clock.Now()); err != nil {
		return denied(bootstrap.ReasonInvalidToken, err)
	}
	s.restrictedTo = types.UID(secret.Annotations[clusterUIDAnnotation])
	s.firstUse = secret.Annotations[kube.AnnotationFirstUse]
	patched := secret.DeepCopy()
	switch usedFor := secret.Annotations[kube.AnnotationRegistered]; {
	case usedFor == "":
		metav1.SetMetaDataAnnotation(&patched.ObjectMeta, kube.AnnotationRegistered, s.registrationKey())
		s.firstUse = c.Clock.Now().UTC().Format(time.RFC3339)
		metav1.SetMetaDataAnnotation(&patched.ObjectMeta, kube.AnnotationFirstUse, s.firstUse)
	case usedFor != s.registrationKey():
		return deniedf(bootstrap.ReasonTokenSpent, "bootstrap token %s has registered another cluster; use a new one", token.ID)
	case c.isRetryExpired(secret):
		return deniedf(bootstrap.ReasonTokenSpent, "bootstrap token %s was used for cluster %s more than %s ago; use a new one",
			token.ID, s.parsed.Cluster, executionnamespaces.RegistrationTimeout)
	case hasRequest(secret, s.csr.UID):
		return nil
	}
	addRequest(patched, s.csr.UID)
	return c.patchToken(ctx, secret, patched)
}

// isRetryExpired returns whether the registration of a token can no longer be retried, or whether the Secret has no
// valid time of the first use.
func (c *Controller) isRetryExpired(secret *corev1.Secret) bool {
	since, err := time.Parse(time.RFC3339, secret.Annotations[kube.AnnotationFirstUse])
	return err != nil || c.Clock.Since(since) > executionnamespaces.RegistrationTimeout
}

// checkNotRemoved denies the request if the token is restricted to a Cluster that is deleted or being deleted: to
// register the cluster again, a user must create another token.
func (s *state) checkNotRemoved(existing *clusterv1alpha1.Cluster, found bool) error {
	if s.restrictedTo == "" || found && existing.UID == s.restrictedTo && existing.DeletionTimestamp.IsZero() {
		return nil
	}
	return deniedf(bootstrap.ReasonTokenSpent, "bootstrap token %s was for a cluster %s that was removed; use a new one",
		s.parsed.TokenID, s.parsed.Cluster)
}

// restrictToken makes a token valid for cluster only. It does nothing unless the token is reserved for cluster and not
// restricted yet.
func (c *Controller) restrictToken(ctx context.Context, tokenID string, cluster *clusterv1alpha1.Cluster) error {
	secret, found, err := c.getTokenSecret(ctx, tokenID)
	if err != nil || !found || secret.Annotations[kube.AnnotationRegistered] != registrationKey(cluster.Name, cluster.Spec.ID) || secret.Annotations[clusterUIDAnnotation] != "" {
		return err
	}
	patched := secret.DeepCopy()
	metav1.SetMetaDataAnnotation(&patched.ObjectMeta, clusterUIDAnnotation, string(cluster.UID))
	return c.patchToken(ctx, secret, patched)
}

// registrationKey returns the value of kube.AnnotationRegistered for a cluster.
func registrationKey(name, id string) string { return name + "/" + id }

func (s *state) registrationKey() string { return registrationKey(s.parsed.Cluster, s.parsed.ID) }

// getTokenSecret reads the Secret of a token from the API server. found is false if it does not exist or is being
// deleted.
func (c *Controller) getTokenSecret(ctx context.Context, id string) (secret *corev1.Secret, found bool, err error) {
	secret = &corev1.Secret{}
	err = c.Live.Get(ctx, bootstrap.TokenSecret(id), secret)
	if client.IgnoreNotFound(err) != nil {
		return nil, false, fmt.Errorf("read bootstrap token %s: %w", id, err)
	}
	return secret, err == nil && secret.DeletionTimestamp.IsZero(), nil
}

// patchToken writes patched, a changed copy of the token's Secret. It returns a conflict if the Secret has changed
// since it was read.
func (c *Controller) patchToken(ctx context.Context, secret, patched *corev1.Secret) error {
	patch := client.MergeFromWithOptions(secret, client.MergeFromWithOptimisticLock{})
	if err := c.Live.Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}

// requestUIDs returns the UIDs of the requests that created or used obj.
func requestUIDs(obj client.Object) []string {
	return strings.Fields(obj.GetAnnotations()[requestsAnnotation])
}

// hasRequest returns whether the request created or used obj.
func hasRequest(obj client.Object, uid types.UID) bool {
	return slices.Contains(requestUIDs(obj), string(uid))
}

// addRequest adds the request to obj.
func addRequest(obj client.Object, uid types.UID) {
	setRequests(obj, append(requestUIDs(obj), string(uid)))
}

// removeRequest removes the request from obj and returns whether it was the last one.
func removeRequest(obj client.Object, uid types.UID) (last bool) {
	remaining := slices.DeleteFunc(requestUIDs(obj), func(other string) bool { return other == string(uid) })
	setRequests(obj, remaining)
	return len(remaining) == 0
}

func setRequests(obj client.Object, uids []string) {
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[requestsAnnotation] = strings.Join(uids, " ")
	obj.SetAnnotations(annotations)
}
