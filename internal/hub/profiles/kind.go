package profiles

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/match"
)

// kind describes one of the two kinds of profile.
type kind struct {
	name      string
	finalizer string
	// label is the label on a ClusterSummary with the name of its profile.
	label     string
	newObject func() client.Object
	newList   func() client.ObjectList
	// specAndStatus returns the spec and the status of a profile of the kind.
	specAndStatus func(client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus)
}

// kinds returns both kinds.
func kinds() []kind {
	return []kind{
		{
			name:      configv1beta1.ClusterProfileKind,
			finalizer: configv1beta1.ClusterProfileFinalizer,
			label:     configv1beta1.ClusterProfileNameLabel,
			newObject: func() client.Object { return &configv1beta1.ClusterProfile{} },
			newList:   func() client.ObjectList { return &configv1beta1.ClusterProfileList{} },
			specAndStatus: func(obj client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus) {
				profile := obj.(*configv1beta1.ClusterProfile)
				return &profile.Spec, &profile.Status
			},
		},
		{
			name:      configv1beta1.ProfileKind,
			finalizer: configv1beta1.ProfileFinalizer,
			label:     configv1beta1.ProfileNameLabel,
			newObject: func() client.Object { return &configv1beta1.Profile{} },
			newList:   func() client.ObjectList { return &configv1beta1.ProfileList{} },
			specAndStatus: func(obj client.Object) (*configv1beta1.ProfileSpec, *configv1beta1.ProfileStatus) {
				profile := obj.(*configv1beta1.Profile)
				return &profile.Spec, &profile.Status
			},
		},
	}
}

// ownerReference returns the owner reference to profile for its summaries.
func (k kind) ownerReference(profile client.Object) metav1.OwnerReference {
	return *metav1.NewControllerRef(profile, configv1beta1.GroupVersion.WithKind(k.name))
}

// isCreatedFor returns whether summary was created for a profile of the kind with this name and any UID. If the owner
// reference was lost in a restore, it checks the label.
func (k kind) isCreatedFor(summary *configv1beta1.ClusterSummary, profile string) bool {
	if metav1.GetControllerOf(summary) != nil {
		return k.isOwnedByName(summary, profile)
	}
	return summary.Labels[k.label] == match.LabelValue(profile)
}

// isOwnedByName returns whether the controller of summary is a profile of the kind with this name and any UID. Users
// can set the owner reference, so the result does not prove that Towline created the summary (summaries.ProfileOf).
func (k kind) isOwnedByName(summary *configv1beta1.ClusterSummary, profile string) bool {
	owner := summaries.ProfileOf(summary)
	return owner != nil && owner.Kind == k.name && owner.Name == profile
}

// reference returns the reference to a profile for events and status.
func (k kind) reference(obj client.Object) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: configv1beta1.GroupVersion.String(), Kind: k.name, Namespace: obj.GetNamespace(), Name: obj.GetName(), UID: obj.GetUID(),
	}
}
