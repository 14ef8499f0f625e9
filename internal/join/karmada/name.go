package karmada

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join"
)

// reservedName is rejected, because agents of Karmada had an identity with this name that had all permissions.
const reservedName = "rbac-generator"

// ValidateName returns an error for an invalid cluster name, with Karmada's error text.
func ValidateName(name string) error {
	var reasons []string
	switch {
	case name == "":
		reasons = []string{"must be not empty"}
	case len(name) > clusterv1alpha1.MaxClusterName:
		reasons = []string{fmt.Sprintf("must be no more than %d characters", clusterv1alpha1.MaxClusterName)}
	case name == reservedName:
		reasons = []string{"is reserved"}
	default:
		reasons = validation.IsDNS1123Label(name)
	}
	if len(reasons) > 0 {
		return fmt.Errorf("invalid cluster name(%s): %s", name, strings.Join(reasons, ";"))
	}
	return nil
}

// HubID returns the ID of a hub: the UID of its kube-system namespace.
func HubID(ctx context.Context, hub client.Reader) (string, error) { return join.HubUID(ctx, hub) }

// memberID returns the ID of a cluster: the UID of its kube-system namespace.
func memberID(ctx context.Context, member client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := member.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}
