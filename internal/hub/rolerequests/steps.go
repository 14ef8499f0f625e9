package rolerequests

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

const (
	// staleDelay is the delay before a reconcile with a stale cache is retried.
	staleDelay = 200 * time.Millisecond
	// foreignDelay is the delay of the retry if another object has the generated name.
	foreignDelay = time.Minute
	// contentKey is the key of the manifest in the generated Secret.
	contentKey = "roles.yaml"
)

// generatedName returns the name of the ClusterProfile and the Secret that are generated for a RoleRequest.
func generatedName(request *libv1beta1.RoleRequest) string { return "role-request-" + request.Name }

// ensureFinalizer sets the finalizer before the Roles are deployed.
func (c *Controller) ensureFinalizer(ctx context.Context, s *state) error {
	changed := s.request.DeepCopy()
	if !controllerutil.AddFinalizer(changed, libv1beta1.RoleRequestFinalizer) {
		return nil
	}
	if err := c.patch(ctx, s.request, changed); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.request = changed
	return nil
}

func (c *Controller) patch(ctx context.Context, from, to *libv1beta1.RoleRequest) error {
	return c.Hub.Patch(ctx, to, client.MergeFromWithOptions(from, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
}

// compile reads the roleRefs and sets the manifest.
func (c *Controller) compile(ctx context.Context, s *state) error {
	var contents []source.Content
	for _, ref := range s.request.Spec.RoleRefs {
		content, err := c.Contents.Manifests(ctx, libv1beta1.PolicyRef{Kind: libv1beta1.SourceKind(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, source.TemplateContext{})
		if errors.Is(err, source.ErrNotFound) {
			return phase.Wait{Reason: err.Error()}
		}
		if err != nil {
			return err
		}
		contents = append(contents, content)
	}
	var err error
	s.manifest, err = Compile(s.request, contents)
	return err
}

// writeContent writes the generated Secret.
func (c *Controller) writeContent(ctx context.Context, s *state) error {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: generatedName(s.request)}}
	return c.write(ctx, s, secret, func() {
		secret.Type = libv1beta1.ProfileSecretType
		secret.Data = map[string][]byte{contentKey: s.manifest}
	})
}

// writeProfile writes the generated ClusterProfile. Fields that it does not set stay as they are.
func (c *Controller) writeProfile(ctx context.Context, s *state) error {
	profile := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: generatedName(s.request)}}
	err := c.write(ctx, s, profile, func() {
		profile.Spec.ClusterSelector = s.request.Spec.ClusterSelector
		profile.Spec.SyncMode = configv1beta1.SyncModeContinuousWithDriftDetection
		profile.Spec.PolicyRefs = []libv1beta1.PolicyRef{{
			Kind: libv1beta1.SourceSecret, Namespace: kube.AgentNamespace, Name: generatedName(s.request),
			DeploymentType: libv1beta1.DeploymentTypeRemote, Tier: bundle.DefaultTier,
		}}
	})
	if err == nil {
		s.profile = profile
	}
	return err
}

// write creates or patches a generated object; set sets its fields. If an object of others has the name, it returns a
// phase.Wait with a delay, since events of that object trigger no reconcile.
func (c *Controller) write(ctx context.Context, s *state, obj client.Object, set func()) error {
	_, err := controllerutil.CreateOrPatch(ctx, client.WithFieldOwner(c.Hub, kube.FieldManager), obj, func() error {
		if obj.GetUID() != "" && !isGeneratedFor(obj, s.request) {
			return phase.Wait{After: foreignDelay, Reason: fmt.Sprintf("%s exists and does not belong to the RoleRequest", kube.RefIn(c.Hub.Scheme(), obj))}
		}
		obj.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(s.request, libv1beta1.GroupVersion.WithKind(libv1beta1.RoleRequestKind))})
		set()
		return nil
	})
	if err != nil {
		return fmt.Errorf("write %s: %w", generatedName(s.request), err)
	}
	return nil
}

// deleteProfile deletes the generated ClusterProfile, and waits until it has withdrawn the Roles.
func (c *Controller) deleteProfile(ctx context.Context, s *state) error {
	profile := &configv1beta1.ClusterProfile{}
	isDeleted, err := c.deleteGenerated(ctx, s, client.ObjectKey{Name: generatedName(s.request)}, profile)
	if isDeleted || err != nil {
		return err
	}
	s.profile = profile
	return phase.Wait{Reason: "the Roles are being withdrawn"}
}

// deleteContent deletes the generated Secret.
func (c *Controller) deleteContent(ctx context.Context, s *state) error {
	_, err := c.deleteGenerated(ctx, s, client.ObjectKey{Namespace: kube.AgentNamespace, Name: generatedName(s.request)}, &corev1.Secret{})
	return err
}

// deleteGenerated reads an object into obj and deletes it if it was generated for the RoleRequest. isDeleted is true
// when there is no such object.
func (c *Controller) deleteGenerated(ctx context.Context, s *state, key client.ObjectKey, obj client.Object) (isDeleted bool, err error) {
	err = c.Hub.Get(ctx, key, obj)
	if apierrors.IsNotFound(err) || err == nil && !isGeneratedFor(obj, s.request) {
		return true, nil
	}
	if err == nil && obj.GetDeletionTimestamp().IsZero() {
		err = client.IgnoreNotFound(c.Hub.Delete(ctx, obj, client.Preconditions{UID: ptr.To(obj.GetUID())}))
	}
	if err != nil {
		return false, fmt.Errorf("delete %s: %w", key.Name, err)
	}
	return false, nil
}

// removeFinalizer removes the finalizer of a deleted RoleRequest.
func (c *Controller) removeFinalizer(ctx context.Context, s *state) error {
	changed := s.request.DeepCopy()
	if !controllerutil.RemoveFinalizer(changed, libv1beta1.RoleRequestFinalizer) {
		return nil
	}
	if err := c.patch(ctx, s.request, changed); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	return nil
}

// report patches the status of the RoleRequest if it differs. If s.profile is nil, the matching clusters stay.
func (c *Controller) report(ctx context.Context, s *state, outcome phase.Outcome) error {
	changed := s.request.DeepCopy()
	switch {
	case outcome.Kind == phase.Waiting || outcome.Kind == phase.Terminal:
		changed.Status.FailureMessage = ptr.To(outcome.Message())
	case s.profile != nil:
		changed.Status.FailureMessage = nil
		if reason := s.profile.Status.SuspensionReason; reason != "" {
			changed.Status.FailureMessage = &reason
		}
	}
	if s.profile != nil {
		changed.Status.MatchingClusterRefs = s.profile.Status.MatchingClusters
	}
	if equality.Semantic.DeepEqual(s.request.Status, changed.Status) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.request, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Status().Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("report on RoleRequest %s: %w", s.request.Name, err))
	}
	return nil
}
