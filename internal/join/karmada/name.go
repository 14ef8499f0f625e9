package karmada

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join"
)

// reservedName is no cluster's: agents of the Karmada surface had an identity of that name which could do everything.
const reservedName = "rbac-generator"

// ValidateName says what is wrong with the name of a cluster, in the words of the Karmada surface.
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

// HubID returns what tells a hub from every other: the uid of its kube-system namespace.
func HubID(ctx context.Context, hub client.Reader) (string, error) { return join.HubUID(ctx, hub) }
