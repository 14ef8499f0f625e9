package bootstrap_test

import (
	"context"
	"errors"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

func TestEnsureAgentPolicyRestoresAllFields(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	live := clientOf(t, plane.Config)
	type policy = admissionv1.ValidatingAdmissionPolicy
	type binding = admissionv1.ValidatingAdmissionPolicyBinding
	labels := &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	for name, tc := range map[string]struct {
		change any
		want   bool
	}{
		"as written":      {func(*policy) {}, false},
		"only an audit":   {func(b *binding) { b.Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit} }, true},
		"bound for some":  {func(b *binding) { b.Spec.MatchResources = &admissionv1.MatchResources{NamespaceSelector: labels} }, true},
		"another policy":  {func(b *binding) { b.Spec.PolicyName = "another" }, true},
		"ignored failure": {func(p *policy) { p.Spec.FailurePolicy = ptr.To(admissionv1.Ignore) }, true},
		"a new condition": {func(p *policy) { p.Spec.MatchConditions[0].Expression = "false" }, true},
		"fewer rules":     {func(p *policy) { p.Spec.Validations = nil }, true},
		"an exception":    {func(p *policy) { p.Spec.MatchConstraints.ExcludeResourceRules = p.Spec.MatchConstraints.ResourceRules }, true},
		"some objects":    {func(p *policy) { p.Spec.MatchConstraints.ObjectSelector = labels }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			written := false
			changing := interceptor.NewClient(live, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, o ...client.GetOption) error {
					err := c.Get(ctx, key, obj, o...)
					switch change := tc.change.(type) {
					case func(*policy):
						if p, ok := obj.(*policy); ok {
							change(p)
						}
					case func(*binding):
						if b, ok := obj.(*binding); ok {
							change(b)
						}
					}
					return err
				},
				Update: func(ctx context.Context, c client.WithWatch, obj client.Object, o ...client.UpdateOption) error {
					written = true
					return c.Update(ctx, obj, o...)
				},
			})
			isNew, err := bootstrap.EnsureAgentPolicy(t.Context(), changing)
			// The policy of a hub that has just started is new, too.
			if err != nil || tc.want && !isNew || written != tc.want {
				t.Errorf("new: %v, written: %v, error %v", isNew, written, err)
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
			if _, err := bootstrap.EnsureAgentPolicy(t.Context(), fails); err == nil || errors.Is(err, kube.ErrNoAdmissionPolicies) != tc.want {
				t.Errorf("error %v", err)
			}
		})
	}
}
