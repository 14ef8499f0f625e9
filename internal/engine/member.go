package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// maxConcurrent is the maximum number of concurrent requests of one run.
	maxConcurrent = 8
	// recreateTimeout is the timeout for the deletion of an object that is then created again.
	recreateTimeout = 60 * time.Second
	// pollInterval is the pause between two reads where a watch would cost more.
	pollInterval = 50 * time.Millisecond
)

// memberClient is a client of one cluster. Nearly all responses have only metadata, also those of write requests.
type memberClient struct {
	metadataClient  metadata.Interface
	dynamicClient   dynamic.Interface // for the health of objects, and for hooks
	core            corev1client.CoreV1Interface
	namespaces      corev1client.NamespaceInterface
	restClient      rest.Interface // for CustomResourceDefinitions and the resources of single API versions
	discoveryClient *kube.Discovery
	mapper          *kube.Mapper
}

func (m *memberClient) metadataAt(resource kube.Resource, namespace string) metadata.ResourceInterface {
	if resource.Namespaced {
		return m.metadataClient.Resource(resource.GVR).Namespace(namespace)
	}
	return m.metadataClient.Resource(resource.GVR)
}

// apply sends the server-side apply request of an object, or of its subresource. With a uid, which the body must have
// too, it changes the object with this UID, and takes fields over from other managers. It returns a conflict if no
// object has this UID. Without a uid, it creates the object. It returns a conflict if another client has created it
// meanwhile, with other values: some of these may be excluded fields, which must not be overwritten.
func (m *memberClient) apply(ctx context.Context, t *target, body []byte, uid types.UID, subresources ...string) (*live, error) {
	force := uid != ""
	obj, err := m.metadataAt(t.resource, t.ref.Namespace).Patch(ctx, t.ref.Name, types.ApplyPatchType, body,
		metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force}, subresources...)
	if isOtherUID(err) {
		return nil, apierrors.NewConflict(t.resource.GVR.GroupResource(), t.ref.Name, errReplaced)
	}
	if err != nil {
		return nil, err
	}
	return liveOf(obj), nil
}

// isOtherUID returns whether the API server has refused a request because the object has another UID than the body.
func isOtherUID(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(cause metav1.StatusCause) bool { return cause.Field == "metadata.uid" })
}

// delete deletes the object with this UID, and its dependents in the background. It returns nil if the object does not
// exist.
func (m *memberClient) delete(ctx context.Context, location objectLocation, uid types.UID) error {
	return m.deleteWith(ctx, location, uid, metav1.DeletePropagationBackground)
}

// deleteWith is delete with another propagation policy.
func (m *memberClient) deleteWith(ctx context.Context, location objectLocation, uid types.UID, propagation metav1.DeletionPropagation) error {
	err := m.metadataAt(location.resource, location.key.Namespace).Delete(ctx, location.key.Name,
		metav1.DeleteOptions{Preconditions: uidPrecondition(uid), PropagationPolicy: &propagation})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// removeMarks deletes our ownership labels and annotations from the object with the UID of existing, and the labels and
// annotations of its Work.
func (m *memberClient) removeMarks(ctx context.Context, location objectLocation, existing *live) error {
	labels, annotations := map[string]any{kube.LabelReason: nil}, map[string]any{}
	for _, name := range ownershipAnnotations() {
		annotations[name] = nil
	}
	if existing.Annotations[workv1alpha1.WorkNameAnnotation] != "" {
		labels[workv1alpha1.ManagedLabel] = nil
		for name := range existing.Labels {
			if strings.HasPrefix(name, workv1alpha1.GroupName+"/") {
				labels[name] = nil
			}
		}
		for name := range existing.Annotations {
			if strings.HasPrefix(name, workv1alpha1.GroupName+"/") {
				annotations[name] = nil
			}
		}
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": existing.UID, "labels": labels, "annotations": annotations,
	}})
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	_, err = m.metadataAt(location.resource, location.key.Namespace).Patch(ctx, location.key.Name, types.MergePatchType, body,
		metav1.PatchOptions{FieldManager: kube.FieldManager})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// awaitDeleted waits until the object with this UID no longer exists.
func (m *memberClient) awaitDeleted(ctx context.Context, location objectLocation, uid types.UID) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, recreateTimeout, true, func(ctx context.Context) (bool, error) {
		obj, err := m.metadataAt(location.resource, location.key.Namespace).Get(ctx, location.key.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return err == nil && obj.UID != uid, err
	})
	if err != nil {
		return fmt.Errorf("wait until the old object is deleted: %w", err)
	}
	return nil
}

// ensureNamespace creates a namespace if it does not exist. It has no ownership labels, so it is never pruned.
func (m *memberClient) ensureNamespace(ctx context.Context, name string) error {
	_, err := m.namespaces.Get(ctx, name, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err = m.namespaces.Create(ctx, namespace, metav1.CreateOptions{FieldManager: kube.FieldManager})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// resolveKinds returns the resources of the given kinds. Kinds that are unknown after another discovery are not in the
// result.
func (m *memberClient) resolveKinds(gvks map[schema.GroupVersionKind]bool) (kinds, error) {
	known, unknown, err := m.lookUpKinds(gvks)
	if err != nil || !unknown {
		return known, err
	}
	m.mapper.Reset()
	known, _, err = m.lookUpKinds(gvks)
	return known, err
}

func (m *memberClient) lookUpKinds(gvks map[schema.GroupVersionKind]bool) (known kinds, unknown bool, err error) {
	known = kinds{exact: map[schema.GroupVersionKind]kube.Resource{}, any: map[schema.GroupVersionKind]kube.Resource{}}
	for gvk := range gvks {
		exact, err := m.mapper.Resource(gvk)
		if err == nil {
			known.exact[gvk], known.any[gvk] = exact, exact
			continue
		}
		if !meta.IsNoMatchError(err) {
			return known, false, err
		}
		unknown = true
		other, err := m.mapper.ResourceInAnyVersion(gvk)
		if err == nil {
			known.any[gvk] = other
		} else if !meta.IsNoMatchError(err) {
			return known, false, err
		}
	}
	return known, unknown, nil
}

// uidPrecondition returns the precondition that an object has this UID.
func uidPrecondition(uid types.UID) *metav1.Preconditions { return &metav1.Preconditions{UID: &uid} }
