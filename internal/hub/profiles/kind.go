package profiles

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/match"
)

// kind is what ClusterProfile and Profile differ in.
type kind struct {
	name      string
	finalizer string
	// label on a ClusterSummary names its profile.
	label string
	blank func() client.Object
	list  func() client.ObjectList
	// parts returns the spec and the status inside a profile of the kind.
	parts func(client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus)
}

// kinds lists both kinds.
func kinds() []kind {
	return []kind{
		{
			name:      configv1beta1.ClusterProfileKind,
			finalizer: configv1beta1.ClusterProfileFinalizer,
			label:     configv1beta1.ClusterProfileNameLabel,
			blank:     func() client.Object { return &configv1beta1.ClusterProfile{} },
			list:      func() client.ObjectList { return &configv1beta1.ClusterProfileList{} },
			parts: func(obj client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus) {
				profile := obj.(*configv1beta1.ClusterProfile)
				return &profile.Spec, &profile.Status
			},
		},
		{
			name:      configv1beta1.ProfileKind,
			finalizer: configv1beta1.ProfileFinalizer,
			label:     configv1beta1.ProfileNameLabel,
			blank:     func() client.Object { return &configv1beta1.Profile{} },
			list:      func() client.ObjectList { return &configv1beta1.ProfileList{} },
			parts: func(obj client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus) {
				profile := obj.(*configv1beta1.Profile)
				return &profile.Spec, &profile.Status
			},
		},
	}
}

// made says whether summary was made for a profile of the kind and of this name, whatever its uid. A restore can drop the reference to the owner.
func (k kind) made(summary *configv1beta1.ClusterSummary, profile string) bool {
	if owner := metav1.GetControllerOf(summary); owner != nil {
		return owner.Kind == k.name && owner.Name == profile
	}
	return summary.Labels[k.label] == match.LabelValue(profile)
}

// reference is how events and status name a profile.
func (k kind) reference(obj client.Object) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: configv1beta1.GroupVersion.String(), Kind: k.name, Namespace: obj.GetNamespace(), Name: obj.GetName(), UID: obj.GetUID(),
	}
}
