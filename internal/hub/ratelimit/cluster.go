package ratelimit

import (
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// ByAgent is a key function for Limiter.Handler, for objects that only an agent writes: all updates of an object share
// a limit.
func ByAgent(_, after client.Object) string { return client.ObjectKeyFromObject(after).String() }

// ByAgentOfCluster is a key function for the objects that declare members. It returns "" for updates that the member's
// agent cannot have written: changes of push members, of metadata, and of the spec of a SveltosCluster.
func ByAgentOfCluster(before, after client.Object) string {
	member := fleet.FromObject(after)
	isByOthers := member.Mode != fleet.Pull || before.GetGeneration() != after.GetGeneration() && member.Type == fleet.TypeSveltos ||
		!maps.Equal(before.GetLabels(), after.GetLabels()) || !maps.Equal(before.GetAnnotations(), after.GetAnnotations()) ||
		!slices.Equal(before.GetFinalizers(), after.GetFinalizers()) ||
		before.GetDeletionTimestamp().IsZero() != after.GetDeletionTimestamp().IsZero()
	if isByOthers {
		return ""
	}
	return member.ID().String()
}

// deliveryNamespaceOf returns the delivery namespace of a cluster object or of a group.
func deliveryNamespaceOf(obj client.Object) string {
	if _, isGroup := obj.(*libv1beta1.ConfigurationGroup); isGroup {
		return obj.GetNamespace()
	}
	return fleet.FromObject(obj).DeliveryNamespace
}

// ByAgentOfGroup is a key function for ConfigurationGroups. It returns "" for updates of the spec, which the hub
// writes.
func ByAgentOfGroup(before, after client.Object) string {
	if before.GetGeneration() != after.GetGeneration() {
		return ""
	}
	return ByAgent(before, after)
}
