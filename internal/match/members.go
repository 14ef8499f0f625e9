package match

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Selection is the parsed clusterSelector and clusterRefs of a profile. The zero value selects nothing.
type Selection struct {
	// namespace is the namespace of a Profile, which selects only members in it, and "" for a ClusterProfile.
	namespace   string
	selector    labels.Selector
	clusterRefs map[fleet.ID]bool
}

// NewSelection returns the Selection of spec. namespace is the namespace of a Profile, and "" for a ClusterProfile. It
// fails only if the selector is invalid.
func NewSelection(spec *configv1beta1.ProfileSpec, namespace string) (Selection, error) {
	selector, err := selectorOf(spec.ClusterSelector)
	if err != nil {
		return Selection{}, err
	}
	clusterRefs := make(map[fleet.ID]bool, len(spec.ClusterRefs))
	for _, ref := range spec.ClusterRefs {
		ref.Namespace = cmp.Or(ref.Namespace, namespace)
		if id, ok := fleet.IDFromReference(ref); ok {
			clusterRefs[id] = true
		}
	}
	return Selection{namespace: namespace, selector: selector, clusterRefs: clusterRefs}, nil
}

// Selects returns whether the labels or clusterRefs select m, ready or not. A member that is being deleted is never
// selected.
func (s Selection) Selects(m fleet.Member) bool {
	if m.Deleting || s.namespace != "" && m.Namespace != s.namespace {
		return false
	}
	return s.clusterRefs[m.ID()] || s.selector != nil && s.selector.Matches(labels.Set(m.Labels))
}

// Members returns the selected members that need a summary, sorted by namespace and name. A member must be ready, or in
// clusterRefs, or already have a summary of the profile (hasSummary): the status of a cluster can be lost, for example
// in a restore of the hub, and then nothing must be withdrawn.
func (s Selection) Members(members []fleet.Member, hasSummary map[fleet.ID]bool) []fleet.Member {
	var matching []fleet.Member
	for _, m := range members {
		if s.Selects(m) && (m.Ready || s.clusterRefs[m.ID()] || hasSummary[m.ID()]) {
			matching = append(matching, m)
		}
	}
	slices.SortFunc(matching, func(a, b fleet.Member) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Type, b.Type))
	})
	return matching
}

func selectorOf(selector metav1.LabelSelector) (labels.Selector, error) {
	// An empty LabelSelector matches every object, but an empty clusterSelector matches no cluster.
	if len(selector.MatchLabels) == 0 && len(selector.MatchExpressions) == 0 {
		return labels.Nothing(), nil
	}
	parsed, err := metav1.LabelSelectorAsSelector(&selector)
	if err != nil {
		return nil, fmt.Errorf("spec.clusterSelector: %s", kube.OneLine(err.Error())) // it contains keys of the user
	}
	return parsed, nil
}

// Refs returns references to members, for the status of a profile.
func Refs(members []fleet.Member) []corev1.ObjectReference {
	refs := make([]corev1.ObjectReference, 0, len(members))
	for _, m := range members {
		refs = append(refs, fleet.Reference(m))
	}
	return refs
}

// UnsupportedRefs returns the field paths of the clusterRefs with an unknown kind or API group.
func UnsupportedRefs(spec configv1beta1.ProfileSpec) []string {
	var fields []string
	for i, ref := range spec.ClusterRefs {
		if _, ok := fleet.IDFromReference(ref); !ok {
			fields = append(fields, fmt.Sprintf("spec.clusterRefs[%d].kind", i))
		}
	}
	return fields
}

// MemberID returns the ID of the summary's member, which is in the namespace of the summary. It ignores
// spec.clusterNamespace: a user who may write summaries in one namespace must not deploy to clusters of other
// namespaces.
func MemberID(summary *configv1beta1.ClusterSummary) fleet.ID {
	return fleet.ID{Type: fleet.Type(summary.Spec.ClusterType), Namespace: summary.Namespace, Name: summary.Spec.ClusterName}
}
