package karmada

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
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
