package kube

import (
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
)

// Scheme returns the scheme with every kind that Towline reads or writes as a typed object. All callers have the same
// one, since it takes milliseconds to build; they must not change it.
func Scheme() *runtime.Scheme { return sharedScheme() }

// sharedScheme panics if two types have the same kind, which is a programming error.
//
//nolint:gochecknoglobals // it never changes
var sharedScheme = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme,
		admissionv1.AddToScheme,
		appsv1.AddToScheme,
		rbacv1.AddToScheme,
		coordinationv1.AddToScheme,
		eventsv1.AddToScheme,
		authenticationv1.AddToScheme,
		apiextensionsv1.AddToScheme,
		libv1beta1.AddToScheme,
		configv1beta1.AddToScheme,
		clusterv1alpha1.AddToScheme,
		workv1alpha1.AddToScheme,
		certificatesv1.AddToScheme,
		authorizationv1.AddToScheme,
	} {
		utilruntime.Must(add(s))
	}
	return s
})
