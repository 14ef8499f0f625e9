package bootstrap_test

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/towline/towline/internal/join/bootstrap"
)

// newModifyingClient returns a client that passes objects of kind through change before it returns them. If change
// returns false, the client returns NotFound.
func newModifyingClient(hub client.WithWatch, kind string, change func(content map[string]any) bool) client.Client {
	return interceptor.NewClient(hub, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, o ...client.GetOption) error {
			if err := c.Get(ctx, key, obj, o...); err != nil || obj.GetObjectKind().GroupVersionKind().Kind != kind {
				return err
			}
			if live, ok := obj.(*unstructured.Unstructured); !ok || !change(live.Object) {
				return apierrors.NewNotFound(schema.GroupResource{Resource: kind}, key.Name)
			}
			return nil
		},
	})
}

func TestHasAgentPolicyComparesAllFields(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	live := clientOf(t, plane.Config)
	const policy, binding = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
	set := func(value any, path ...string) func(map[string]any) bool {
		return func(content map[string]any) bool {
			return unstructured.SetNestedField(content, value, append([]string{"spec"}, path...)...) == nil
		}
	}
	gone := func(map[string]any) bool { return false }
	never := []any{map[string]any{"name": "by-an-agent", "expression": "false"}}
	for name, tc := range map[string]struct {
		kind   string
		change func(map[string]any) bool
		want   bool
	}{
		"as written":              {policy, func(map[string]any) bool { return true }, true},
		"no policy":               {policy, gone, false},
		"no binding":              {binding, gone, false},
		"only an audit":           {binding, set([]any{"Audit"}, "validationActions"), false},
		"bound for some":          {binding, set(map[string]any{"a": "b"}, "matchResources", "namespaceSelector", "matchLabels"), false},
		"another policy":          {binding, set("another", "policyName"), false},
		"ignored when it fails":   {policy, set("Ignore", "failurePolicy"), false},
		"a condition that is new": {policy, set(never, "matchConditions"), false},
		"fewer rules":             {policy, set([]any{}, "validations"), false},
		"for some objects":        {policy, set(map[string]any{"a": "b"}, "matchConstraints", "objectSelector", "matchLabels"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := bootstrap.HasAgentPolicy(t.Context(), newModifyingClient(live, tc.kind, tc.change))
			if err != nil || got != tc.want {
				t.Errorf("guarded: %v, error %v", got, err)
			}
		})
	}
}

func TestEnsureAgentPolicyReturnsErrNoAdmissionPolicies(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	live := clientOf(t, plane.Config)
	group := schema.GroupKind{Group: "admissionregistration.k8s.io", Kind: "ValidatingAdmissionPolicy"}
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"no such kind":   {&meta.NoKindMatchError{GroupKind: group}, true},
		"something else": {apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "kube-public"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fails := interceptor.NewClient(live, interceptor.Funcs{
				Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
					return tc.err
				},
				Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
					return tc.err
				},
			})
			if err := bootstrap.EnsureAgentPolicy(t.Context(), fails); err == nil || errors.Is(err, bootstrap.ErrNoAdmissionPolicies) != tc.want {
				t.Errorf("error %v", err)
			}
		})
	}
}
