package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
)

// ErrNoAdmissionPolicies is returned for a management cluster without ValidatingAdmissionPolicies, which Kubernetes has
// since 1.30. They limit what agents and the authors of ClusterSummaries may do: without them, no hub starts and no
// agent is registered.
var ErrNoAdmissionPolicies = errors.New("the management cluster has no ValidatingAdmissionPolicies, which limit what agents and tenants may do: it needs Kubernetes 1.30 or later")

// CheckAdmissionPolicies returns ErrNoAdmissionPolicies if the hub has none.
func CheckAdmissionPolicies(ctx context.Context, hub client.Client) error {
	if err := ctx.Err(); err != nil {
		return err // the discovery takes no context
	}
	_, err := hub.RESTMapper().RESTMapping(schema.GroupKind{Group: admissionv1.GroupName, Kind: "ValidatingAdmissionPolicy"}, "v1")
	if meta.IsNoMatchError(err) {
		return ErrNoAdmissionPolicies
	}
	if err != nil {
		return fmt.Errorf("discover ValidatingAdmissionPolicies: %w", err)
	}
	return nil
}

// PolicySpec is the spec of a ValidatingAdmissionPolicy.
type PolicySpec = admissionv1.ValidatingAdmissionPolicySpec

// PolicyDelay is the time that the API server needs to enforce a new ValidatingAdmissionPolicy.
const PolicyDelay = 2 * time.Second

// EnsureAdmissionPolicy creates or restores a ValidatingAdmissionPolicy and the binding with the same name. specOf gets
// the live spec, which is empty if there is no policy, and returns the desired one, which must be from
// AdmissionPolicySpec. isNew is true if the policy or the binding was written, by this call or by another client, less
// than PolicyDelay ago: the API server may not enforce the policy yet. For a hub without ValidatingAdmissionPolicies,
// EnsureAdmissionPolicy returns ErrNoAdmissionPolicies. hub must read from the API server. No write request is sent if
// nothing has to change.
func EnsureAdmissionPolicy(ctx context.Context, hub client.Client, name string, specOf func(live PolicySpec) (PolicySpec, error)) (isNew bool, err error) {
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	isPolicyNew, err := ensurePolicyObject(ctx, hub, policy, func() error {
		policy.Spec, err = specOf(policy.Spec)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("ensure ValidatingAdmissionPolicy %s: %w", name, err)
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}}
	isBindingNew, err := ensurePolicyObject(ctx, hub, binding, func() error {
		binding.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("ensure ValidatingAdmissionPolicyBinding %s: %w", name, err)
	}
	return isPolicyNew || isBindingNew, nil
}

// FixedSpec returns a function for EnsureAdmissionPolicy that returns spec.
func FixedSpec(spec PolicySpec) func(PolicySpec) (PolicySpec, error) {
	return func(PolicySpec) (PolicySpec, error) { return spec, nil }
}

// ensurePolicyObject creates or restores a policy or a binding, and returns whether it was written less than
// PolicyDelay ago. Several registrations can restore it at the same time.
func ensurePolicyObject(ctx context.Context, hub client.Client, obj client.Object, setSpec func() error) (isNew bool, err error) {
	var result controllerutil.OperationResult
	err = RetryOn(ctx, IsStaleWrite, func() error {
		obj.SetResourceVersion("") // of an earlier attempt, if the object has been deleted since
		result, err = controllerutil.CreateOrUpdate(ctx, client.WithFieldOwner(hub, FieldManager), obj, func() error {
			obj.SetLabels(map[string]string{"app.kubernetes.io/name": "towline"})
			return setSpec()
		})
		return err
	})
	switch {
	case meta.IsNoMatchError(err):
		return false, fmt.Errorf("%w: %w", ErrNoAdmissionPolicies, err)
	case apierrors.IsForbidden(err):
		return false, fmt.Errorf("%w; a hub needs the permissions in config/hub.yaml or in the chart of this version, "+
			"and a user who registers a cluster in pull mode those for this object", err)
	}
	return result != controllerutil.OperationResultNone || isRecent(obj), err
}

// isRecent returns whether an object was written less than PolicyDelay ago. A time in the future only shows that the
// clocks differ: such an object is not recent.
func isRecent(obj client.Object) bool {
	written := obj.GetCreationTimestamp().Time
	for _, entry := range obj.GetManagedFields() {
		if entry.Time != nil && entry.Time.After(written) {
			written = entry.Time.Time
		}
	}
	age := time.Since(written)
	return age >= 0 && age < PolicyDelay+time.Second // the times of objects are in whole seconds
}

// AwaitPolicy waits until the API server enforces a policy that EnsureAdmissionPolicy has just written.
func AwaitPolicy(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(PolicyDelay):
		return nil
	}
}

// AdmissionPolicySpec returns the spec of a policy for requests to the resources for which all conditions are true. The
// policy denies a request for which a validation is false. The spec has the defaults of the API server, so that it can
// be compared with a live one.
func AdmissionPolicySpec(resources []admissionv1.RuleWithOperations, conditions []admissionv1.MatchCondition, validations ...admissionv1.Validation) PolicySpec {
	constraints := &admissionv1.MatchResources{
		NamespaceSelector: &metav1.LabelSelector{}, ObjectSelector: &metav1.LabelSelector{}, MatchPolicy: ptr.To(admissionv1.Equivalent),
	}
	for _, rule := range resources {
		rule.Scope = ptr.To(admissionv1.AllScopes)
		constraints.ResourceRules = append(constraints.ResourceRules, admissionv1.NamedRuleWithOperations{RuleWithOperations: rule})
	}
	for i := range validations {
		validations[i].Reason = ptr.To(metav1.StatusReasonForbidden)
	}
	return PolicySpec{
		FailurePolicy: ptr.To(admissionv1.Fail), MatchConstraints: constraints, MatchConditions: conditions, Validations: validations,
	}
}

// AdmissionRule selects the requests to a resource with one of the operations.
func AdmissionRule(gv schema.GroupVersion, resource string, operations ...admissionv1.OperationType) admissionv1.RuleWithOperations {
	return admissionv1.RuleWithOperations{
		Operations: operations,
		Rule:       admissionv1.Rule{APIGroups: []string{gv.Group}, APIVersions: []string{gv.Version}, Resources: []string{resource}},
	}
}
