package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// policyName names the policy and its binding.
const policyName = "towline-karmada-agents"

// EnsureAgentPolicy creates or updates the ValidatingAdmissionPolicy that limits the fields that agents may change,
// since RBAC rules cannot limit fields. An agent must not change the labels of its Cluster, by which profiles match it,
// and the id, credentials and finalizers of the Cluster. Of a Work it may change only the status and its own finalizer.
// It can be repeated, and returns whether it has changed the policy. It returns join.ErrNoAdmissionPolicies for a hub
// without ValidatingAdmissionPolicies. hub must read from the API server.
func EnsureAgentPolicy(ctx context.Context, hub client.Client) (changed bool, err error) {
	hub = client.WithFieldOwner(hub, kube.FieldManager)
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: named("", policyName)}
	policyResult, policyErr := controllerutil.CreateOrUpdate(ctx, hub, policy, func() error {
		policy.Labels, policy.Spec = policyLabels(), agentPolicy()
		return nil
	})
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: named("", policyName)}
	bindingResult, bindingErr := controllerutil.CreateOrUpdate(ctx, hub, binding, func() error {
		binding.Labels = policyLabels()
		binding.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: policyName, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}
		return nil
	})
	err = errors.Join(policyErr, bindingErr)
	switch {
	case meta.IsNoMatchError(policyErr):
		err = fmt.Errorf("%w: %w", join.ErrNoAdmissionPolicies, err)
	case err != nil:
		err = fmt.Errorf("write the admission policy for agents: %w", err)
	}
	return policyResult != controllerutil.OperationResultNone || bindingResult != controllerutil.OperationResultNone, err
}

func policyLabels() map[string]string { return map[string]string{"app.kubernetes.io/name": "towline"} }

// agentPolicy returns the desired policy. It includes the defaults of the API server, so that EnsureAgentPolicy can
// compare it with the live policy.
func agentPolicy() admissionv1.ValidatingAdmissionPolicySpec {
	rule := func(group, version, resource string) admissionv1.NamedRuleWithOperations {
		return admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Update},
			Rule: admissionv1.Rule{
				APIGroups: []string{group}, APIVersions: []string{version}, Resources: []string{resource}, Scope: ptr.To(admissionv1.AllScopes),
			},
		}}
	}
	clusters, works := clusterv1alpha1.GroupVersion, workv1alpha1.GroupVersion
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: ptr.To(admissionv1.Fail),
		MatchConstraints: &admissionv1.MatchResources{
			NamespaceSelector: &metav1.LabelSelector{}, ObjectSelector: &metav1.LabelSelector{}, MatchPolicy: ptr.To(admissionv1.Equivalent),
			ResourceRules: []admissionv1.NamedRuleWithOperations{
				rule(clusters.Group, clusters.Version, "clusters"),
				rule(works.Group, works.Version, "works"),
				rule("coordination.k8s.io", "v1", "leases"),
			},
		},
		MatchConditions: []admissionv1.MatchCondition{{Name: "by-an-agent", Expression: "'" + AgentsGroup + "' in request.userInfo.groups"}},
		Validations: []admissionv1.Validation{
			validation("clusters", unchanged("object.metadata", "labels", "annotations", "finalizers", "ownerReferences"),
				"an agent may not change the metadata of its Cluster"),
			validation("clusters", unchanged("object.spec", "id", "syncMode", "secretRef", "impersonatorSecretRef", "insecureSkipTLSVerification",
				"proxyHeader", "taints", "resourceModels")+" && (!has(object.spec.zone) || object.spec.?zone == oldObject.spec.?zone)",
				"an agent may change only apiEndpoint, proxyURL, provider, region and zones of its Cluster, and take zone off, which zones replaces"),
			validation("works", unchanged("object.metadata", "labels", "annotations", "ownerReferences")+" && "+removesOnlyFinalizer(workv1alpha1.ExecutionFinalizer)+
				" && object.spec == oldObject.spec", "an agent may change nothing of a Work but its status and take its finalizer "+workv1alpha1.ExecutionFinalizer+" off"),
			validation("leases", unchanged("object.metadata", "labels", "finalizers", "ownerReferences"),
				"an agent may not change labels, finalizers and owners of its Lease"),
		},
	}
}

func validation(resource, expression, message string) admissionv1.Validation {
	return admissionv1.Validation{
		Expression: "request.resource.resource != '" + resource + "' || (" + expression + ")",
		Message:    message,
		Reason:     ptr.To(metav1.StatusReasonForbidden),
	}
}

// unchanged returns the expression that is true if none of the fields of parent has changed.
func unchanged(parent string, fields ...string) string {
	var same []string
	for _, field := range fields {
		same = append(same, fmt.Sprintf("%s.?%s == oldO%s.?%s", parent, field, strings.TrimPrefix(parent, "o"), field))
	}
	return strings.Join(same, " && ")
}

// removesOnlyFinalizer returns the expression that is true if no finalizer was added, and only this one was removed.
func removesOnlyFinalizer(finalizer string) string {
	return fmt.Sprintf("(object.metadata.?finalizers == oldObject.metadata.?finalizers || "+
		"object.metadata.?finalizers.orValue([]) == oldObject.metadata.?finalizers.orValue([]).filter(f, f != '%s'))", finalizer)
}
