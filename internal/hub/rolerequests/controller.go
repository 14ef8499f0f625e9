package rolerequests

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// Controller generates the ClusterProfiles of RoleRequests.
type Controller struct {
	// Hub reads RoleRequests and ClusterProfiles from a cache, and Secrets from the API server.
	Hub client.Client
	// Contents reads the ConfigMaps and Secrets of roleRefs.
	Contents *source.Contents
}

// Setup adds the controller to mgr.
func (c *Controller) Setup(mgr ctrl.Manager) error {
	configMaps, secrets := &metav1.PartialObjectMetadata{}, &metav1.PartialObjectMetadata{}
	configMaps.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	secrets.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	return ctrl.NewControllerManagedBy(mgr).
		Named("rolerequests").
		For(&libv1beta1.RoleRequest{}).
		Owns(&configv1beta1.ClusterProfile{}).
		WatchesMetadata(configMaps, handler.EnqueueRequestsFromMapFunc(c.requestsReferring(configMaps.Kind))).
		WatchesMetadata(secrets, handler.EnqueueRequestsFromMapFunc(c.requestsReferring(secrets.Kind))).
		Complete(c)
}

// requestsReferring returns a function that maps an object of kind to the RoleRequests that refer to it, or for which
// it was generated.
func (c *Controller) requestsReferring(kind string) handler.MapFunc {
	return func(ctx context.Context, obj client.Object) []reconcile.Request {
		var list libv1beta1.RoleRequestList
		if err := c.Hub.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			log.FromContext(ctx).Error(err, "list RoleRequests")
			return nil
		}
		ref := libv1beta1.RoleRef{Kind: kind, Namespace: obj.GetNamespace(), Name: obj.GetName()}
		var requests []reconcile.Request
		for _, request := range list.Items {
			if slices.Contains(request.Spec.RoleRefs, ref) || isGeneratedFor(obj, &request) {
				requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: request.Name}})
			}
		}
		return requests
	}
}

// isGeneratedFor returns whether obj was generated for a RoleRequest with the name of request. The UID may differ,
// since it changes in a restore of the hub.
func isGeneratedFor(obj client.Object, request *libv1beta1.RoleRequest) bool {
	owner := metav1.GetControllerOf(obj)
	return owner != nil && owner.APIVersion == libv1beta1.GroupVersion.String() && owner.Kind == libv1beta1.RoleRequestKind && owner.Name == request.Name
}

// state is shared by the steps of one reconcile.
type state struct {
	request *libv1beta1.RoleRequest
	// manifest has the Roles and bindings.
	manifest []byte
	// profile is the generated ClusterProfile, nil before the step that reads it, or if it does not exist.
	profile *configv1beta1.ClusterProfile
}

// Reconcile deploys the Roles of a RoleRequest, or withdraws the Roles of a deleted one.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	request := &libv1beta1.RoleRequest{}
	if err := c.Hub.Get(ctx, req.NamespacedName, request); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	s := &state{request: request}
	steps := []phase.Step[*state]{
		{Name: "ensure finalizer", Run: c.ensureFinalizer},
		{Name: "compile", Run: c.compile},
		{Name: "write content", Run: c.writeContent},
		{Name: "write profile", Run: c.writeProfile},
	}
	if !request.DeletionTimestamp.IsZero() {
		steps = []phase.Step[*state]{
			{Name: "delete profile", Run: c.deleteProfile},
			{Name: "delete content", Run: c.deleteContent},
			{Name: "remove finalizer", Run: c.removeFinalizer},
		}
	}
	outcome := phase.Run(ctx, s, steps)
	err := c.report(ctx, s, outcome)
	if outcome.Kind == phase.Retriable {
		err = fmt.Errorf("RoleRequest %s: %w", req.Name, outcome.Err)
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// The cache is stale.
		return reconcile.Result{RequeueAfter: staleDelay}, nil
	}
	return reconcile.Result{RequeueAfter: outcome.After}, err
}
