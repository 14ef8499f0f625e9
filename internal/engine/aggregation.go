package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// aggregationManager is the field manager of Kubernetes' clusterrole-aggregation controller. It applies the rules
// of each ClusterRole with an aggregationRule that is in its cache. If that role was deleted just before, the
// request creates it again, with nothing but rules.
const aggregationManager = "clusterrole-aggregation-controller"

// errAggregating is the error of a pruned ClusterRole with an aggregationRule that still exists.
var errAggregating = errors.New("it is not deleted yet; the ClusterRoles that it aggregates are deleted after it")

// roleState describes who has written a ClusterRole.
type roleState int

const (
	roleOrdinary    roleState = iota // a user or a program; also any object that is no ClusterRole
	roleAggregating                  // a user or a program, with an aggregationRule
	roleRecreated                    // only the aggregation controller: it created a deleted role again
	roleUnknown                      // the metadata has no field managers; resolveRoleState decides
)

func isClusterRole(ref kube.Ref) bool { return ref.Group == groupRBAC && ref.Kind == "ClusterRole" }

// roleStateOf returns the state of a ClusterRole according to its metadata.
func roleStateOf(role *metav1.PartialObjectMetadata) roleState {
	bare := len(role.Labels) == 0 && len(role.Annotations) == 0
	if bare && len(role.ManagedFields) == 0 {
		// An apply request without rules creates a role without managed fields.
		return roleUnknown
	}
	recreated := bare
	for _, entry := range role.ManagedFields {
		var fields map[string]json.RawMessage
		if entry.FieldsV1 == nil || len(entry.FieldsV1.GetRawBytes()) > maxManagedFields || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
			return roleOrdinary
		}
		if _, ok := fields["f:aggregationRule"]; ok {
			return roleAggregating
		}
		_, rules := fields["f:rules"]
		recreated = recreated && entry.Manager == aggregationManager && len(fields) == 1 && rules
	}
	if recreated {
		return roleRecreated
	}
	return roleOrdinary
}

// resolveRoleState reads a ClusterRole with roleUnknown, and sets its state. A role with neither rules nor an
// aggregationRule counts as recreated: the controller creates such a role if the roles that it would aggregate are
// deleted, too.
func (m *memberClient) resolveRoleState(ctx context.Context, location objectLocation, existing *live) error {
	role, err := m.dynamicClient.Resource(location.resource.GVR).Get(ctx, location.key.Name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read %s: %w", location.key, err)
	}
	existing.role = roleOrdinary
	if err == nil && role.GetUID() == existing.UID && role.Object["rules"] == nil && role.Object["aggregationRule"] == nil {
		existing.role = roleRecreated
	}
	return nil
}

// orderRoles splits the group of ClusterRoles in the groups of toPrune. The roles that aggregate others come before the
// others, so that their controller has no reason to write to them when the others are deleted. A last group has all
// ClusterRoles again, for those that the controller has recreated meanwhile. Without ClusterRoles it sends no request.
func (e *Engine) orderRoles(ctx context.Context, groups [][]inventory.Entry) ([][]inventory.Entry, error) {
	at := slices.IndexFunc(groups, func(entries []inventory.Entry) bool { return isClusterRole(entries[0].Ref) })
	if at < 0 {
		return groups, nil
	}
	_, found, err := e.readEntries(ctx, groups[at])
	if err != nil {
		return nil, err
	}
	return splitRoles(groups, at, found), nil
}

// splitRoles implements orderRoles. The group at index at has the ClusterRoles; found has the existing ones.
func splitRoles(groups [][]inventory.Entry, at int, found map[kube.Ref]*live) [][]inventory.Entry {
	var aggregating, others []inventory.Entry
	for _, entry := range groups[at] {
		if existing := found[entry.Ref.Key()]; existing.isAggregated() {
			aggregating = append(aggregating, entry)
		} else {
			others = append(others, entry)
		}
	}
	ordered := slices.Concat(groups[:at], [][]inventory.Entry{aggregating, others}, groups[at+1:], groups[at:at+1])
	return slices.DeleteFunc(ordered, func(entries []inventory.Entry) bool { return len(entries) == 0 })
}

// isAggregated returns whether an object is a ClusterRole whose rules the aggregation controller writes. The object is
// nil if it does not exist.
func (l *live) isAggregated() bool {
	return l != nil && (l.role == roleAggregating || l.role == roleRecreated)
}
