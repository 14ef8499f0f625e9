package kube

import (
	"context"
	"errors"
	"fmt"

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

// EnsureAdmissionPolicy creates or restores a ValidatingAdmissionPolicy and the binding with the same name, and returns
// whether it has changed one of them. spec is from AdmissionPolicySpec. It returns ErrNoAdmissionPolicies for a hub
// without ValidatingAdmissionPolicies. hub must read from the API server.
func EnsureAdmissionPolicy(ctx context.Context, hub client.Client, name string, spec admissionv1.ValidatingAdmissionPolicySpec) (changed bool, err error) {
	hub, labels := client.WithFieldOwner(hub, FieldManager), map[string]string{"app.kubernetes.io/name": "towline"}
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	policyResult, err := controllerutil.CreateOrUpdate(ctx, hub, policy, func() error {
		policy.Labels, policy.Spec = labels, spec
		return nil
	})
	switch {
	case meta.IsNoMatchError(err):
		return false, fmt.Errorf("%w: %w", ErrNoAdmissionPolicies, err)
	case apierrors.IsForbidden(err):
		err = fmt.Errorf("%w; the permissions of the hub are those of an earlier version: apply config/hub.yaml of this version, or upgrade the chart", err)
		fallthrough
	case err != nil:
		return false, fmt.Errorf("write ValidatingAdmissionPolicy %s: %w", name, err)
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}}
	bindingResult, err := controllerutil.CreateOrUpdate(ctx, hub, binding, func() error {
		binding.Labels = labels
		binding.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("write ValidatingAdmissionPolicyBinding %s: %w", name, err)
	}
	return policyResult != controllerutil.OperationResultNone || bindingResult != controllerutil.OperationResultNone, nil
}

// AdmissionPolicySpec returns a policy for requests to the resources for which all conditions are true. It denies those
// for which a validation is false. It has the defaults of the API server, so that it can be compared with a live one.
func AdmissionPolicySpec(resources []admissionv1.RuleWithOperations, conditions []admissionv1.MatchCondition, validations ...admissionv1.Validation) admissionv1.ValidatingAdmissionPolicySpec {
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
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: ptr.To(admissionv1.Fail), MatchConstraints: constraints, MatchConditions: conditions, Validations: validations,
	}
}

// AdmissionRule selects requests of one kind to a resource.
func AdmissionRule(gv schema.GroupVersion, resource string, operations ...admissionv1.OperationType) admissionv1.RuleWithOperations {
	return admissionv1.RuleWithOperations{
		Operations: operations,
		Rule:       admissionv1.Rule{APIGroups: []string{gv.Group}, APIVersions: []string{gv.Version}, Resources: []string{resource}},
	}
}
