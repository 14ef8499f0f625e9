package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

func TestRoleStateOf(t *testing.T) {
	t.Parallel()
	const rules, rule = `{"f:rules":{}}`, `{"f:aggregationRule":{".":{},"f:clusterRoleSelectors":{}}}`
	writers := func(pairs ...string) *metav1.PartialObjectMetadata {
		role := &metav1.PartialObjectMetadata{}
		for i := 0; i < len(pairs); i += 2 {
			role.ManagedFields = append(role.ManagedFields, metav1.ManagedFieldsEntry{
				Manager: pairs[i], Operation: metav1.ManagedFieldsOperationApply, FieldsV1: metav1.NewFieldsV1(pairs[i+1]),
			})
		}
		return role
	}
	labelled := func(role *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
		role.Labels = map[string]string{"a": "b"}
		return role
	}
	annotated := func(role *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
		role.Annotations = map[string]string{"a": "b"}
		return role
	}
	for name, test := range map[string]struct {
		role *metav1.PartialObjectMetadata
		want roleState
	}{
		"created by the controller":              {writers(aggregationManager, rules), roleRecreated},
		"with a label":                           {labelled(writers(aggregationManager, rules)), roleOrdinary},
		"with an annotation":                     {annotated(writers(aggregationManager, rules)), roleOrdinary},
		"with metadata of another manager":       {writers(aggregationManager, rules, "x", `{"f:metadata":{}}`), roleOrdinary},
		"with more than rules by the controller": {writers(aggregationManager, `{"f:rules":{},"f:metadata":{}}`), roleOrdinary},
		"with no fields of the controller":       {writers(aggregationManager, `{}`), roleOrdinary},
		"with rules of another manager":          {writers("x", rules), roleOrdinary},
		"ours, without an aggregation rule":      {writers("towline", rules), roleOrdinary},
		"ours, aggregating":                      {writers("towline", rule), roleAggregating},
		"ours, aggregated":                       {writers(aggregationManager, rules, "towline", rule), roleAggregating},
		"of another manager, aggregating":        {labelled(writers("x", rule)), roleAggregating},
		"with unreadable fields":                 {writers(aggregationManager, `[]`), roleOrdinary},
		"without field lists":                    {writers(), roleUnknown},
		"without field lists, with a label":      {labelled(writers()), roleOrdinary},
		"without field lists, annotated":         {annotated(writers()), roleOrdinary},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := roleStateOf(test.role); got != test.want {
				t.Errorf("got %d, want %d", got, test.want)
			}
		})
	}
}

func TestSplitRoles(t *testing.T) {
	t.Parallel()
	names := func(group []inventory.Entry) string {
		text := ""
		for _, item := range group {
			text += item.Ref.Name
		}
		return text
	}
	group := func(kind string, names ...string) []inventory.Entry {
		var items []inventory.Entry
		for _, name := range names {
			ref := kube.Ref{Group: groupRBAC, Version: "v1", Kind: kind, Name: name}
			items = append(items, inventory.Entry{Ref: ref, UID: types.UID(name)})
		}
		return items
	}
	type states map[string]roleState // states of the existing roles
	for name, test := range map[string]struct {
		roles  []inventory.Entry
		states states
		want   []string
	}{
		"aggregating and others": {
			group("ClusterRole", "a", "b", "c"), states{"a": roleOrdinary, "b": roleAggregating, "c": roleOrdinary},
			[]string{"x", "b", "ac", "z", "abc"},
		},
		"created again": {
			group("ClusterRole", "a", "b"), states{"a": roleOrdinary, "b": roleRecreated}, []string{"x", "b", "a", "z", "ab"},
		},
		"deleted before": {group("ClusterRole", "a", "b"), states{"b": roleOrdinary}, []string{"x", "ab", "z", "ab"}},
		"all aggregate":  {group("ClusterRole", "a"), states{"a": roleAggregating}, []string{"x", "a", "z", "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := map[kube.Ref]*live{}
			for _, item := range test.roles {
				if state, ok := test.states[item.Ref.Name]; ok {
					found[item.Ref.Key()] = &live{role: state}
				}
			}
			var got []string
			for _, group := range splitRoles([][]inventory.Entry{group("Role", "x"), test.roles, group("Secret", "z")}, 1, found) {
				got = append(got, names(group))
			}
			if diff := cmp.Diff(got, test.want); diff != "" {
				t.Errorf("groups (-got +want):\n%s", diff)
			}
		})
	}
}
